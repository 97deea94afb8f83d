"""Vectors on the line of a sequence, by matrix products alone.

In a strip of a sequence (see `strips`) row r and key j read entry r + j of a window, so vectors that meet queries are a
plain product with the window's vectors, of which row r's part begins r entries further to the right:

    whole[r, c] = <q[r], w[c]>          score[r, j] += whole[r, r + j]

That is a view: the content product is added to it in place, and the gradient of the scores, written into the same
layout with zeros around, meets w and q in two more products. Weights in that layout meet the vectors of the value side
likewise. For vectors that meet keys the roles change, a stretch of keys at a time:

    part[j, c] = <k[j], w[c]>           score[r, j] += part[j, r + j]

Rows of the vectors are read once into one row an entry of the line (by `lookup`, outside), so buckets cost nothing
here.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.streaming.operands import Part
from relpos.engines.streaming.strips import Block, Strips, Tile

_KEYS_AT_ONCE = 128
"""Keys of a stretch: more waste products outside the diagonal band, fewer make them short."""


class _Operand:
    """One term: a vector for each entry of the line, last entry first, and the gradient of that."""

    def __init__(self, term: LineVectors, call: Call, side: Strips, unit: float) -> None:
        assert term.lines.layout.query is not None
        assert term.lines.layout.key is not None
        self.term, self.side = term, term.side
        dtype = side.dtype
        self.factor = (call.scale if term.scaled else 1.0) * unit
        self.natural = call.scale if term.scaled else 1.0
        self.vectors = term.vectors.detach().to(dtype).flip(1)
        self.gradient: Tensor | None = None
        self.bias = None if term.bias is None else term.bias.detach().to(dtype)
        self.bias_gradient: Tensor | None = None
        self.lines = term.lines
        self.heads = side.heads
        self.key_start, self.last = term.lines.layout.key.start, term.lines.length - 1
        self.shift = term.lines.layout.query.start - side.query.start

    def own(self, x: Tensor, head: int) -> Tensor:
        """The part of a head, of what has one an query head or one for all."""
        return x[head % self.heads if x.shape[0] > 1 else 0]

    def window(self, x: Float[Tensor, "#H L D"], head: int, block: Block, tile: Tile) -> Tensor:
        """`[W, D]` of x, a view."""
        place = block.place + self.shift
        first = self.last - (place - (self.key_start + tile.keys.start) + self.lines.origin)
        return self.own(x, head)[first : first + tile.width]

    def meets(self, x: Float[Tensor, "n D"], head: int) -> Float[Tensor, "n D"]:
        """Queries or keys with the term's own bias."""
        return x if self.bias is None else x + self.own(self.bias, head)


class Vectors:
    """All vector terms of a call on a sequence."""

    def __init__(self, call: Call, side: Strips, unit: float) -> None:
        self.side = side
        self.operands = [_Operand(term, call, side, unit) for term in call.terms.of(LineVectors)]

    @staticmethod
    def serve(call: Call) -> bool:
        """Whether every vector term is on plain sequences and of one value per head or for all."""
        return all(term.lines.layout.kind == "affine" and term.index is None for term in call.terms.of(LineVectors))

    def of(self, side: str) -> list[_Operand]:
        """The terms of one side."""
        return [operand for operand in self.operands if operand.side == side]

    # forward

    def add_queries(self, whole: Float[Tensor, "n W"], part: Part, tile: Tile) -> None:
        """Vectors that meet queries, in the layout of `whole`."""
        head = part.which.start
        for operand in self.of("query"):
            window = operand.window(operand.vectors, head, part.block, tile)
            whole.addmm_(operand.meets(part.plain_q[0], head), window.mT, alpha=operand.factor)

    def add_keys(self, score: Float[Tensor, "n m"], part: Part, tile: Tile) -> None:
        """Vectors that meet keys."""
        n, m = score.shape
        head = part.which.start
        for operand in self.of("key"):
            window = operand.window(operand.vectors, head, part.block, tile)
            k = operand.meets(part.heads.plain_k[0, tile.keys], head)
            for start in range(0, m, _KEYS_AT_ONCE):
                some = k[start : start + _KEYS_AT_ONCE]
                count = some.shape[0]
                product = some @ window[start : start + count + n - 1].mT
                score[:, start : start + count].add_(_band(product, n).mT, alpha=operand.factor)

    def outputs(self, whole: Float[Tensor, "n W"], part: Part, tile: Tile, out: Tensor) -> None:
        """Add vectors under the weights, which stand in `whole` with zeros around, to the rows of the output."""
        for operand in self.of("value"):
            out.addmm_(whole, operand.window(operand.vectors, part.which.start, part.block, tile))

    # backward

    def expect(self) -> None:
        """Make room for gradients."""
        for operand in self.operands:
            operand.gradient = torch.zeros_like(operand.vectors)
            operand.bias_gradient = None if operand.bias is None else torch.zeros_like(operand.bias)

    def weights_backward(
        self, d: Float[Tensor, "n W"], whole: Float[Tensor, "n W"], upstream: Tensor, part: Part, tile: Tile
    ) -> None:
        """Add to `d` what the value side gives the weights; `whole` are these, as in `outputs`."""
        head = part.which.start
        for operand in self.of("value"):
            assert operand.gradient is not None
            d.addmm_(upstream, operand.window(operand.vectors, head, part.block, tile).mT)
            operand.window(operand.gradient, head, part.block, tile).addmm_(whole.mT, upstream)

    def collect(
        self,
        whole: Float[Tensor, "n W"],
        d: Float[Tensor, "n m"],
        part: Part,
        tile: Tile,
        d_q: Float[Tensor, "n D"],
        d_k: Float[Tensor, "m D"] | None,
    ) -> None:
        """The gradients of the score terms; `whole` is `d` in its layout, zeros around.

        Args:
            d_q, d_k: what to add those of the queries and keys to; None where it is not wanted.
        """
        n, m = d.shape
        head = part.which.start
        for operand in self.operands:
            if operand.side == "value":
                continue
            assert operand.gradient is not None
            window = operand.window(operand.vectors, head, part.block, tile)
            into = operand.window(operand.gradient, head, part.block, tile)
            if operand.side == "query":
                d_x = torch.mm(whole, window).mul_(operand.natural)
                into.addmm_(whole.mT, operand.meets(part.plain_q[0], head), alpha=operand.natural)
                d_q += d_x
                self._add_bias(operand, d_x, head)
                continue
            k = operand.meets(part.heads.plain_k[0, tile.keys], head)
            for start in range(0, m, _KEYS_AT_ONCE):
                some = k[start : start + _KEYS_AT_ONCE]
                count = some.shape[0]
                band = d.new_zeros(count, count + n - 1)
                _band(band, n).copy_(d[:, start : start + count].mT)
                stretch = slice(start, start + count + n - 1)
                d_x = torch.mm(band, window[stretch]).mul_(operand.natural)
                into[stretch].addmm_(band.mT, some, alpha=operand.natural)
                if d_k is not None:
                    d_k[start : start + count] += d_x
                self._add_bias(operand, d_x, head)

    @staticmethod
    def _add_bias(operand: _Operand, d_x: Float[Tensor, "n D"], head: int) -> None:
        if operand.bias_gradient is not None:
            own = operand.own(operand.bias_gradient, head)
            own += d_x.sum(dim=0)

    def gradients(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The terms' tensors with their gradients."""
        for operand in self.operands:
            assert operand.gradient is not None
            yield operand.term.vectors, operand.gradient.flip(1)
            if operand.term.bias is not None and operand.bias_gradient is not None:
                yield operand.term.bias, operand.bias_gradient


def _band(x: Float[Tensor, "s W"], n: int) -> Float[Tensor, "s n"]:
    """Row j from its entry j on: `x[j, j + r]`, a view."""
    return x.as_strided((x.shape[0], n), (x.stride(0) + 1, 1), x.storage_offset())
