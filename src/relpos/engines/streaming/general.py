"""Every other term, block by block: its dense meaning on a block of rows, and the adjoint of that.

A block holds all heads, so that few rows are looked at together and their scores stay within bounds. The terms are cut
to the block, and so are the buffers of their gradients: the same trees, so that a cut term and the cut of its gradient
stand side by side. Nothing of size N x M outlives its block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import (
    AxisVectors,
    DenseBias,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    Term,
    Terms,
    at_least_float32,
    contract,
)
from relpos.core.terms.vectors import meet, sum_rows
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming import masks
from relpos.engines.streaming.strips import Block, count_of, log_base

MOST_ROWS = 256
"""Of a block under a mask."""


@dataclass(eq=False)
class Cut:
    """The terms on one block.

    Attributes:
        keys: which ones. masked, mask, pairs: as of a tile of `Strips`.
        bias: what is added, in the units of `log_base`, `[BH, n, m]`, or None.
        terms: cut. q, k: the block's unrotated queries and keys, which vectors meet.
    """

    keys: slice
    bias: Tensor | None
    masked: bool
    terms: Terms
    q: Float[Tensor, "B H n D"]
    k: Float[Tensor, "B H m D"]
    mask: Mask | None
    pairs: Tensor | None = None

    @property
    def count(self) -> int:
        """How many keys."""
        return count_of(self.keys)


class General:
    """Rows and tiles of any call."""

    def __init__(self, call: Call, pairs: int) -> None:
        batch, heads, self.queries, _ = call.q.shape
        self.call, self.device = call, call.q.device
        self.shape = (batch, heads)
        self.keys = call.k.shape[2]
        self.pairs = pairs
        self.rows = max(1, min(self.queries, pairs // max(1, batch * heads * self.keys)))
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.unit = log_base(self.dtype)
        q = call.q if call.plain_q is None else call.plain_q
        k = call.k if call.plain_k is None else call.plain_k
        self.plain_q = q.detach().to(self.dtype)
        self.plain_k = k.detach().to(self.dtype).repeat_interleave(heads // k.shape[1], dim=1)
        self.values = call.terms.of(LineVectors)
        self.gradients: Terms | None = None
        self.wanted: Gradients | None = None

    def blocks(self) -> Iterator[Block]:
        """All rows once."""
        borders = [0, *masks.cuts(self.call.mask, self.queries, self.device), self.queries]
        for low, high in itertools.pairwise(borders):
            start = low
            while start < high:
                numbers = self._numbers(start, high)
                stop = start + len(numbers)
                yield Block(slice(start, stop), numbers, start)
                start = stop

    def _numbers(self, start: int, most: int) -> Int[Tensor, " n"]:
        """The rows of a block: more of them where a mask lets them see little."""
        count = min(self.rows, most - start)
        wide = torch.arange(start, most, device=self.device)
        while self.call.mask is not None and count < min(most - start, MOST_ROWS):
            twice = min(2 * count, most - start)
            seen = sum(count_of(keys) for keys in self._spans(wide[:twice]))
            if twice * seen * math.prod(self.shape) > self.pairs:
                break
            count = twice
        return wide[:count]

    def _spans(self, rows: Int[Tensor, " n"]) -> list[slice]:
        return masks.spans(self.call.mask, rows, self.keys, stepped=True)

    def expect(self, wanted: Gradients) -> None:
        """Make room for the gradients that are wanted of the terms."""
        self.wanted = wanted
        self.into_q = torch.zeros_like(self.plain_q)
        self.into_k = torch.zeros_like(self.plain_k)

        rooms: dict[int, Tensor] = {}

        def room(x: Tensor) -> Tensor:  # one for a tensor that several terms share
            if id(x) not in rooms:
                wide = at_least_float32(x) if x.is_floating_point() else x
                if wanted.wants(x):
                    rooms[id(x)] = torch.zeros(x.shape, dtype=wide.dtype, device=x.device)
                else:
                    rooms[id(x)] = wide.new_zeros(()).expand(x.shape)
            return rooms[id(x)]

        self.gradients = pytree.tree_map_only(Tensor, room, self.call.terms)

    def tiles(self, block: Block) -> Iterator[Cut]:
        """What the rows may see, stretch by stretch."""
        rows = block.rows
        for keys in self._spans(block.numbers):
            terms = self.call.terms.narrow(rows, keys)
            q, k = self.plain_q[:, :, rows], self.plain_k[:, :, keys]
            natural = dense.scores(terms, q, k, self.call.scale, None)
            bias = None
            if natural is not None:
                wide = (natural * self.unit).expand(*self.shape, -1, -1)
                bias = wide.reshape(-1, *wide.shape[2:])
            yield Cut(keys, bias, self.call.mask is not None, terms, q, k, self.call.mask)

    def bias(self, block: Block, tile: Cut, heads: slice) -> Tensor | None:
        """What is added to the scores, of all heads."""
        return tile.bias

    # gradients

    def _wants(self, x: Tensor) -> bool:
        return self.wanted is not None and self.wanted.wants(x)

    def skew(self, block: Block, tile: Cut) -> int:
        """Rows of the gradient's buffer are not shifted."""
        return 0

    def _cut_gradients(self, block: Block, tile: Cut) -> Iterator[tuple[Any, Term, Any]]:
        """Each term: whole, cut to the tile, and the cut of its gradient."""
        assert self.gradients is not None
        into = self.gradients.narrow(block.rows, tile.keys)
        return zip(self.call.terms, tile.terms, into, strict=True)

    def collect(self, block: Block, tile: Cut, d: Float[Tensor, "BH n m"]) -> None:
        """Add to the gradients of all terms, and of the queries and keys that vectors meet."""
        score = d.unflatten(0, self.shape)
        into_q, into_k = self.into_q[:, :, block.rows], self.into_k[:, :, tile.keys]
        for whole, term, into in self._cut_gradients(block, tile):
            match term:
                case LineBias():
                    if self._wants(whole.values):
                        into.values.add_(contract(score, term.lines).sum_to_size(into.values.shape))
                case LineVectors(side="query" | "key"):
                    on_keys = term.side == "key"
                    own = score * self.call.scale if term.scaled else score
                    rows = term.rows()
                    x, place = (tile.k, into_k) if on_keys else (tile.q, into_q)
                    if on_keys:
                        own, rows = own.mT, rows.mT
                    self._meet_backward(own, rows, x, place, term.vectors, into.vectors, term.bias, into.bias)
                case AxisVectors():
                    for vectors, rows, place in zip(term.vectors, term.rows(), into.vectors, strict=True):
                        self._meet_backward(score, rows, tile.q, into_q, vectors, place, None, None)
                case LowRank():
                    query, key = term.query.to(self.dtype), term.key.to(self.dtype)
                    _add(into.query, score @ key)
                    _add(into.key, score.mT @ query)
                case DenseBias():
                    if self._wants(whole.bias):
                        _add(into.bias, score)
                case _:
                    pass

    def _meet_backward(
        self,
        score: Float[Tensor, "B H n m"],
        rows: Tensor,
        x: Float[Tensor, "B H n D"],
        into_x: Tensor,
        vectors: Float[Tensor, "#H R D"],
        into_vectors: Tensor,
        bias: Tensor | None,
        into_bias: Tensor | None,
    ) -> None:
        """The adjoint of `meet`."""
        count = vectors.shape[1]
        if bias is not None:
            x = x + bias[:, None, :].to(x.dtype)
        if rows.dim() == 3:
            rows = rows.expand(x.shape[0], -1, -1)
        sums = sum_rows(score, rows, count + 1)[..., :count]
        d_x = sums @ vectors.to(x.dtype)
        into_x += d_x
        _add(into_vectors, sums.mT @ x)
        if into_bias is not None:
            _add(into_bias, d_x.sum(dim=2))

    @property
    def has_values(self) -> bool:
        """Whether vectors are added to v."""
        return any(term.side == "value" for term in self.values)

    def outputs(self, tile: Cut, weights: Float[Tensor, "BH n m"]) -> Float[Tensor, "BH n V"]:
        """What vectors on the value side add to the output."""
        wide = weights.unflatten(0, self.shape)
        parts = [term.outputs(wide) for term in tile.terms.of(LineVectors) if term.side == "value"]
        return torch.stack(parts).sum(dim=0).flatten(0, 1)

    def outputs_backward(
        self, block: Block, tile: Cut, weights: Float[Tensor, "BH n m"], upstream: Float[Tensor, "BH n V"]
    ) -> Float[Tensor, "BH n m"]:
        """The gradient of the weights by those vectors; the vectors' own is added to theirs."""
        wide, above = weights.unflatten(0, self.shape), upstream.unflatten(0, self.shape)
        total = torch.zeros_like(wide)
        for _, term, into in self._cut_gradients(block, tile):
            if isinstance(term, LineVectors) and term.side == "value":
                assert isinstance(into, LineVectors)
                rows, count = term.rows(), term.vectors.shape[1]
                total += meet(above, None, term.vectors, rows)
                whole = rows.expand(wide.shape[0], -1, -1) if rows.dim() == 3 else rows
                _add(into.vectors, sum_rows(wide, whole, count + 1)[..., :count].mT @ above)
        return total.flatten(0, 1)


def _add(into: Tensor, gradient: Tensor) -> None:
    """`into += gradient`, summed over what `into` has one of; nothing where its gradient is not wanted."""
    if 0 in into.stride() and into.numel() > 1:
        return
    into += gradient.sum_to_size(into.shape)
