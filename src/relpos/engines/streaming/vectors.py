"""Vectors on the line of a sequence (Shaw, Transformer-XL, DeBERTa), by matrix products alone.

In a block of a sequence (see `hankel`) row r and key j read entry r + j of a window, here a window of vectors `w`.
Vectors that are multiplied with queries need one matrix product with the whole window, of which the skewed tile in it
(see `workspace`) is what the scores need:

    whole = q @ w.T          score[r, j] += whole[r, r + j]

    row 0   s00 s01 s02  .   .        the products at the dots are wasted
    row 1    .  s10 s11 s12  .
    row 2    .   .  s20 s21 s22

The content product is added to that view in place. With zeros at the dots, a matrix product of the whole buffer with w
is what weights give with the vectors of the value side, and what the scores' gradient gives the queries. For vectors
that are multiplied with keys the roles change, for a few keys at a time:

    band = k @ w.T           score[r, j] += band[j, r + j]

Rows of the vectors are read once into one row for each entry of the line (by `lookup`, in `engine`), so buckets cost
nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.chunks import Chunk
from relpos.engines.streaming.tiles import Tile

_KEYS_AT_ONCE = 128
"""Keys of a band: more of them waste products beside the diagonals, fewer make the products small."""


class _VectorTerm:
    """One term: a vector for each entry of the line, last entry first, and the gradient of that."""

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float) -> None:
        layout = term.lines.layout
        assert layout.query is not None
        assert layout.key is not None
        self.term, self.heads = term, call.q.shape[1]
        self.natural = call.scale if term.scaled else 1.0
        self.factor = self.natural * unit
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.vectors = term.vectors.detach().to(dtype).flip(1)
        self.bias = None if term.bias is None else term.bias.detach().to(dtype)
        self.first = term.lines.length - 1 - (layout.query.start - start - layout.key.start + term.lines.origin)

    @cached_property
    def d_vectors(self) -> Float[Tensor, "_ L D"]:
        return torch.zeros_like(self.vectors)

    @cached_property
    def d_bias(self) -> Float[Tensor, "_ D"] | None:
        return None if self.bias is None else torch.zeros_like(self.bias)

    def of_head(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The chunk's only head, of a tensor for each query head or one for all."""
        return x[chunk.which.start % self.heads if x.shape[0] > 1 else 0]

    def window(self, x: Float[Tensor, "_ L D"], chunk: Chunk, tile: Tile) -> Float[Tensor, "W D"]:
        """The rows of the vectors, or of their gradient, that a tile reads: a view."""
        first = self.first - (chunk.block.line - tile.keys.start)
        return self.of_head(x, chunk)[first : first + tile.width]

    def with_bias(self, x: Float[Tensor, "n D"], chunk: Chunk) -> Float[Tensor, "n D"]:
        """Queries or keys with the term's own bias."""
        return x if self.bias is None else x + self.of_head(self.bias, chunk)

    def add_d_bias(self, d_x: Float[Tensor, "n D"], chunk: Chunk) -> None:
        """Add to the bias's gradient that of the queries or keys with it."""
        if self.d_bias is not None:
            own = self.of_head(self.d_bias, chunk)
            own += d_x.sum(dim=0)


class Vectors:
    """All vector terms of a call on a sequence whose queries begin at the line number `start`."""

    def __init__(self, call: Call, start: int, unit: float) -> None:
        self.terms = [_VectorTerm(term, call, start, unit) for term in call.terms.of(LineVectors)]

    def __len__(self) -> int:
        return len(self.terms)

    def of(self, side: str) -> list[_VectorTerm]:
        """The terms of one side."""
        return [own for own in self.terms if own.term.side == side]

    # forward

    def add_queries(self, around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with queries to the scores, with all that surrounds them."""
        for own in self.of("query"):
            window = own.window(own.vectors, chunk, tile)
            around.addmm_(own.with_bias(chunk.plain_q[0], chunk), window.mT, alpha=own.factor)

    def add_keys(self, score: Float[Tensor, "n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with keys."""
        n, m = score.shape
        for own in self.of("key"):
            window = own.window(own.vectors, chunk, tile)
            k = own.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
            for keys, entries in _bands(n, m):
                band = k[keys] @ window[entries].mT
                score[:, keys].add_(_diagonals(band, n).mT, alpha=own.factor)

    def add_outputs(self, out: Float[Tensor, "n V"], around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the vectors under the weights, which are zero around their tile, to the output."""
        for own in self.of("value"):
            out.addmm_(around, own.window(own.vectors, chunk, tile))

    # backward

    def outputs_backward(
        self, d: Float[Tensor, "n W"], weights: Float[Tensor, "n W"], upstream: Tensor, chunk: Chunk, tile: Tile
    ) -> None:
        """The backward of `add_outputs`, with all that surrounds the tiles; the weights are zero there."""
        for own in self.of("value"):
            d.addmm_(upstream, own.window(own.vectors, chunk, tile).mT)
            own.window(own.d_vectors, chunk, tile).addmm_(weights.mT, upstream)

    def collect(
        self,
        d: Float[Tensor, "n m"],
        around: Float[Tensor, "n W"],
        chunk: Chunk,
        tile: Tile,
        d_q: Float[Tensor, "n D"],
        d_k: Float[Tensor, "m D"] | None,
    ) -> None:
        """The backward of `add_queries` and `add_keys`; `around` is `d` with the zeros around it."""
        for own in self.of("query"):
            window, into = (own.window(x, chunk, tile) for x in (own.vectors, own.d_vectors))
            d_x = torch.mm(around, window).mul_(own.natural)
            into.addmm_(around.mT, own.with_bias(chunk.plain_q[0], chunk), alpha=own.natural)
            d_q += d_x
            own.add_d_bias(d_x, chunk)
        n, m = d.shape
        for own in self.of("key"):
            window, into = (own.window(x, chunk, tile) for x in (own.vectors, own.d_vectors))
            k = own.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
            for keys, entries in _bands(n, m):
                band = d.new_zeros(keys.stop - keys.start, entries.stop - entries.start)
                _diagonals(band, n).copy_(d[:, keys].mT)
                d_x = torch.mm(band, window[entries]).mul_(own.natural)
                into[entries].addmm_(band.mT, k[keys], alpha=own.natural)
                if d_k is not None:
                    d_k[keys] += d_x
                own.add_d_bias(d_x, chunk)

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call."""
        for own in self.terms:
            gradients.add(own.term.vectors, own.d_vectors.flip(1))
            gradients.add(own.term.bias, own.d_bias)


def _bands(n: int, m: int) -> Iterator[tuple[slice, slice]]:
    """A few keys at a time, and the entries of the window that all rows read for them."""
    for start in range(0, m, _KEYS_AT_ONCE):
        stop = min(start + _KEYS_AT_ONCE, m)
        yield slice(start, stop), slice(start, stop + n - 1)


def _diagonals(band: Float[Tensor, "s W"], n: int) -> Float[Tensor, "s n"]:
    """Row j from its entry j on: `band[j, j + r]`, a view."""
    return band.as_strided((band.shape[0], n), (band.stride(0) + 1, 1), band.storage_offset())
