"""Vectors on offsets: products with every vector, which kernels read pair by pair, and their gradients.

A set of vectors has one row for each column c that an offset may read. The products are computed by PyTorch,

    of queries   U[i, c] = factor * <x[i] + bias, w[c]>         x: queries, keys, or content of its own
    of keys      W[j, c] = factor * <x[j] + bias, w[c]>
    of upstream  G[i, c] = <d_out[i], w[c]>                      of value vectors, in the backward

and a pair reads U[i, c(i, j)] + W[j, c(i, j)], [tokens, columns] numbers a head where all pairs are [tokens, tokens].
The gradient reverses this: a kernel writes the gradient of the scores for the pairs of a chunk, another sums each
token's by column, and products give the gradients of vectors and states. The output of value vectors is the sum of a
token's weights by column, times the vectors.

Products and pairs of a chunk fit into `WORKSPACE`: a chunk is as many elements of the batch as do, else heads of one
element, else rows of the heads that share one key head, 128 at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.terms.vectors import Side
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import spans, vector_kernels, vector_sets
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches, batch_stride, in_32_bits
from relpos.engines.triton.limits import cdiv
from relpos.engines.triton.vector_kernels import Others, Runs
from relpos.engines.triton.vector_reads import AHEAD, Products, VectorChunk
from relpos.engines.triton.vector_sets import MOST_SETS, Met, Set, number_bytes, starts_of


class Rectangle(NamedTuple):
    """The rectangle of a chunk."""

    batch: slice
    heads: slice
    rows: slice

    @property
    def shape(self) -> tuple[int, int]:
        """Elements of the batch, and heads of each."""
        return self.batch.stop - self.batch.start, self.heads.stop - self.heads.start

    @property
    def all_heads(self) -> int:
        """Heads of all of its elements."""
        return self.shape[0] * self.shape[1]

    def of(self, x: Tensor, rows: bool = False) -> Tensor:
        """This part of a tensor `[1 or B, 1 or H, ...]`; with `rows`, of its tokens too."""
        x = x if x.shape[0] == 1 else x[self.batch]
        x = x if x.shape[1] == 1 else x[:, self.heads]
        return x[:, :, self.rows] if rows else x

    def of_keys(self, x: Tensor, groups: int) -> Tensor:
        """The keys of its heads, of `[B, G, ...]`."""
        return x[self.batch, self.heads.start // groups : self.heads.stop // groups]

    def by_head(self, x: Tensor) -> Tensor:
        """This part of a tensor `[1 or H, ...]`."""
        return x if x.shape[0] == 1 else x[self.heads]


def _slices(count: int, size: int) -> list[slice]:
    """`count` numbers in slices of a size."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


def _even(count: int, most: int, multiple: int) -> int:
    """The size of equal parts of `count`, each a multiple and at most `most`."""
    return cdiv(cdiv(count, cdiv(count, most)), multiple) * multiple


@dataclass(frozen=True, eq=False)
class Piece:
    """What is launched at once: a part of a call.

    Attributes:
        arguments: what the kernels take.
        heads, rows: how many there are.
        part: the rectangle, with its vectors.
    """

    arguments: VectorChunk
    heads: int
    rows: int
    part: Rectangle
    vectors: CallVectors

    @cached_property
    def name(self) -> str:
        """Of the grid of its kernels."""
        return f" of {self.heads} x {self.rows}"

    @cached_property
    def varying(self) -> tuple[Any, ...]:
        """All that Triton looks at: the tensors are fresh, so 16 divides where they begin."""
        return (*self.arguments[:3], *map(_kinds, self.arguments[3:]))

    def pairs(self, side: Side, gradients: Gradients) -> Tensor | None:
        """Memory for a number for each pair, if vectors of a side need that for their gradients."""
        return self.vectors.pairs() if self.vectors.learns(gradients, side) else None

    def collect(self, side: Side, pairs: Tensor | None, gradients: Gradients) -> None:
        """Add the gradients that follow from those of all pairs."""
        if pairs is not None:
            self.vectors.add_gradients(side, self.part, pairs, gradients)


class CallVectors:
    """The vectors of a call, and the parts that it is computed in.

    Args:
        call: its rotation applied.
        sets: its vectors.
        launches: of calls like it.
        upstream: the gradient of the output, in the backward.
    """

    def __init__(self, call: Call, sets: list[Set], launches: Launches, upstream: Tensor | None = None) -> None:
        self.call, self.sets, self.launches, self.upstream = call, sets, launches, upstream
        self.columns = [one.columns() for one in sets]
        self.of_values = any("value" in one.met for one in sets)
        self.parts = self._parts()
        self._pairs: Tensor | None = None
        self._runs: dict[int, Runs] = {}

    def _parts(self) -> list[Rectangle]:
        launches, groups, n, m = self.launches, self.groups, self.launches.n, self.launches.m
        of_keys = sum(one.width for one in self.sets if "key" in one.met)
        of_rows = sum(one.width * len(one.met.keys() - {"key"}) for one in self.sets)
        backward = self.upstream is not None
        if backward or self.of_values:  # pairs, and their sums
            of_rows += m + max(one.width for one in self.sets)
        size = number_bytes(launches.dtype)
        fixed, of_row = size * m * of_keys * (2 if backward else 1), size * of_rows
        fit: int = vector_sets.WORKSPACE // (fixed + n * of_row)
        every, rows = slice(0, launches.heads), slice(0, n)
        if fit >= launches.heads:
            some = _slices(launches.batch, _even(launches.batch, fit // launches.heads, 1))
            return [Rectangle(one, every, rows) for one in some]
        singles = _slices(launches.batch, 1)
        if fit >= groups:
            some = _slices(launches.heads, _even(launches.heads, fit // groups * groups, groups))
            return [Rectangle(*one, rows) for one in product(singles, some)]
        fit = max(1, (vector_sets.WORKSPACE // groups - fixed) // of_row // spans.COARSE) * spans.COARSE
        own = _slices(n, _even(n, fit, spans.COARSE))
        return [Rectangle(*one) for one in product(singles, _slices(launches.heads, groups), own)]

    @property
    def groups(self) -> int:
        """Query heads that share a key head, before a rotation that turns keys differently in each head."""
        plain = self.call.plain_k
        return self.launches.heads // (self.launches.own_heads if plain is None else plain.shape[1])

    def pieces(self) -> Iterator[Piece]:
        """The parts, with their products, to which no reference is kept: the next take their memory."""
        for part in self.parts:
            yield self._piece(part)

    def _piece(self, part: Rectangle) -> Piece:
        made = [self._products(one, columns, part) for one, columns in zip(self.sets, self.columns, strict=True)]
        made += [_NO_PRODUCTS] * (MOST_SETS - len(made))
        rows = part.rows.stop - part.rows.start
        chunk = VectorChunk(self._first(part), part.rows.start, rows, *made)
        return Piece(chunk, part.all_heads, rows, part, self)

    def _first(self, part: Rectangle) -> int:
        first: int = part.batch.start * self.launches.heads + part.heads.start
        return first

    def _products(self, one: Set, columns: Tensor | None, part: Rectangle) -> Products:
        one = one.within(part.rows, self.launches.m)
        of_queries, of_keys = (self._product(one, side, part) for side in ("query", "key"))
        of_upstream = None if self.upstream is None else self._product(one, "value", part)
        lines, starts = one.lines, starts_of(one.lines)
        tables = of_queries, of_keys, of_upstream, one.width, max(2, one.count), columns
        if starts is not None:
            return Products(*tables, None, 0, None, 0, lines.origin + starts - one.first + AHEAD.value)
        query, key = map(_by_batch, in_32_bits(lines))
        return Products(*tables, *query, *key, lines.origin + AHEAD.value)

    def _product(self, one: Set, side: Side, part: Rectangle) -> Float[Tensor, "b h T width"] | None:
        """The products of one side; those of queries and keys are divided by the scale, which kernels multiply with."""
        total = None
        for met in one.met.get(side, ()):
            factor = 1.0 if side == "value" else met.factor / self.launches.scale
            made = self._x(met, side, part) @ self._vectors(one, met, part, factor).mT
            total = made if total is None else total + made
        return None if total is None else total.expand(*part.shape, -1, -1).contiguous()

    def _vectors(self, one: Set, met: Met, part: Rectangle, factor: float) -> Float[Tensor, "#h width D"]:
        """Vectors of these heads, followed by zeros, times a factor."""
        own = part.by_head(met.vectors.detach())[:, one.first : one.first + one.count].to(self.launches.wide) * factor
        return torch.nn.functional.pad(own, (0, 0, 0, one.width - one.count))

    def _x(self, met: Met, side: Side, part: Rectangle) -> Float[Tensor, "#b #h T D"]:
        """What the vectors are multiplied with, in this part."""
        x = self.upstream if met.x is None else met.x.detach()
        assert x is not None
        if side == "key" and self.groups > 1:
            x = part.of_keys(x, self.groups).repeat_interleave(self.groups, dim=1)
        else:
            x = part.of(x, rows=side != "key")
        x = x.to(self.launches.wide)
        return x if met.bias is None else x + part.by_head(met.bias.detach())[:, None, :].to(x.dtype)

    def learns(self, gradients: Gradients, side: Side) -> bool:
        """Whether vectors of a side need the gradients of pairs."""
        return any(met.is_wanted(gradients) for one in self.sets for met in one.met.get(side, ()))

    def pairs(self) -> Tensor:
        """Memory for a number for each pair of a part; zeros where there is a mask, under which tiles are skipped."""
        if self._pairs is None:
            most = max(part.all_heads * (part.rows.stop - part.rows.start) for part in self.parts)
            self._pairs = torch.empty(most * self.launches.m, dtype=self.launches.wide, device=self.launches.device)
        return self._pairs if self.call.mask is None else self._pairs.zero_()

    def _sums(self, one: Set, columns: Tensor | None, side: Side, part: Rectangle, pairs: Tensor) -> Tensor:
        """The sum of each token's pairs by the column that they read, `[b, h, T, width]`."""
        launches, by_key, rows = self.launches, side == "key", part.rows.stop - part.rows.start
        tokens, others = (launches.m, rows) if by_key else (rows, launches.m)
        out = pairs.new_empty((*part.shape, tokens, one.width))
        others_of = _others(one, part, by_key)
        runs = self._runs_of(one, columns)
        grid = (cdiv(tokens, _OWN) * cdiv(one.width, _COLUMNS) * part.all_heads,)
        sizes = one.count, one.width, tokens, others, others.bit_length(), self._first(part), launches.heads

        def made() -> Kernel:
            constants = {"SIGN": -1 if by_key else 1, "OWN": _OWN, "COLUMNS": _COLUMNS, "ACROSS": _ACROSS}
            return Kernel(vector_kernels.sum_by_column, grid, {**constants, "SUM": launches.constants["SUM"]})

        launches.once(f"sums {by_key} {grid[0]}", made).launch(
            (sizes, _kinds(others_of), _kinds(runs)), out, pairs, others_of, runs, *sizes
        )
        return out

    def _runs_of(self, one: Set, columns: Tensor | None) -> Runs:
        if columns is None:
            return _NO_RUNS
        if id(one) not in self._runs:
            self._runs[id(one)] = runs_of(columns, one.count)
        return self._runs[id(one)]

    def add_gradients(self, side: Side, part: Rectangle, pairs: Tensor, gradients: Gradients) -> None:
        """The gradients of vectors, states and biases.

        Args:
            pairs: the gradients of the scores of this part, by keys for side "key"; for values the weights.
        """
        for one, columns in zip(self.sets, self.columns, strict=True):
            wanted = [met for met in one.met.get(side, ()) if met.is_wanted(gradients)]
            if not wanted:
                continue
            one = one.within(part.rows, self.launches.m)
            sums = self._sums(one, columns, side, part, pairs)
            for met in wanted:
                if gradients.wants(met.vectors):
                    d_w = (sums.mT @ self._x(met, side, part)).sum(dim=0)[:, : one.count] * met.factor
                    _add_by_head(gradients.buffer(met.vectors)[:, one.first : one.first + one.count], d_w, part)
                if not (gradients.wants(met.x) or gradients.wants(met.bias)):
                    continue
                d_x = sums @ self._vectors(one, met, part, met.factor)
                if met.bias is not None and gradients.wants(met.bias):
                    _add_by_head(gradients.buffer(met.bias), d_x.sum(dim=(0, 2)), part)
                if met.x is not None and gradients.wants(met.x):
                    self._add_states(gradients.buffer(met.x), d_x, side, part)

    def _add_states(self, into: Tensor, d_x: Tensor, side: Side, part: Rectangle) -> None:
        if side == "key" and self.groups > 1:
            view = part.of_keys(into, self.groups)
            view += d_x.unflatten(1, (-1, self.groups)).sum(dim=2)
        else:
            view = part.of(into, rows=side != "key")
            view += d_x.sum_to_size(view.shape)

    def add_outputs(self, out: Tensor, piece: Piece, weights: Tensor) -> None:
        """Add what value vectors add to the output, from the weights of a part's pairs."""
        part = piece.part
        assert part is not None
        into = part.of(out, rows=True)
        for one, columns in zip(self.sets, self.columns, strict=True):
            if "value" in one.met:
                one = one.within(part.rows, self.launches.m)
                sums = self._sums(one, columns, "value", part, weights)
                for met in one.met["value"]:
                    into += sums @ self._vectors(one, met, part, 1.0)


_OWN, _COLUMNS, _ACROSS = 8, 16, 8
"""Tokens and columns of a program of `sum_by_column`, and pairs of each that it reads at once."""
_NO_PRODUCTS = Products(None, None, None, 0, 0, None, None, 0, None, 0, 0)
_NO_RUNS = Runs(None, None, None, None)
NO_CHUNK = VectorChunk(None, None, None, _NO_PRODUCTS, _NO_PRODUCTS, _NO_PRODUCTS)


def _by_batch(x: Tensor) -> tuple[Tensor, int]:
    """Coordinates with their stride of the batch, which is not 1 (see `Products`)."""
    x = torch.nn.functional.pad(x, (0, 1)) if batch_stride(x) == 1 else x
    return x, batch_stride(x)


def _others(one: Set, part: Rectangle, by_key: bool) -> Others:
    lines, starts = one.lines, starts_of(one.lines)
    if starts is not None:
        return Others(None, 0, None, 0, None, lines.origin + starts + part.rows.start - one.first)
    query, key = in_32_bits(lines)
    own, other = (key, query[..., part.rows]) if by_key else (query[..., part.rows], key)
    own = own.contiguous()
    other, order = torch.sort(other, dim=-1, stable=True)
    return Others(own, batch_stride(own), other, batch_stride(other), order.to(torch.int32), lines.origin)


def _kinds(x: tuple[Any, ...]) -> tuple[Any, ...]:
    """Numbers, and which tensors there are."""
    return tuple(part if not isinstance(part, Tensor) else part.dtype for part in x)


def runs_of(columns: Int[Tensor, " L"], count: int) -> Runs:
    """The entries of a line, sorted by the column that they read; see `Runs`."""
    device = columns.device
    ordered, order = torch.sort(columns, stable=True)
    begins = torch.searchsorted(ordered, torch.arange(count + 1, device=device, dtype=ordered.dtype))
    follows = (ordered[1:] == ordered[:-1]) & (order[1:] == order[:-1] + 1)
    number = torch.nn.functional.pad((~follows).cumsum(0), (1, 0))  # of each entry's run
    ahead = torch.searchsorted(number, number, right=True) - torch.arange(len(number), device=device)
    runs_before = torch.nn.functional.pad(number + 1, (1, 0))  # those that began before an entry; one more at the end
    first = runs_before[begins]  # of a column's first entry, the runs of lower columns
    return Runs(*(x.to(torch.int32) for x in (order, ahead, begins, first[1:] - first[:-1])))


def _add_by_head(into: Tensor, gradient: Tensor, part: Rectangle) -> None:
    view = part.by_head(into)
    view += gradient.sum_to_size(view.shape)
