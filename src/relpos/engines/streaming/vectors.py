"""Vectors on the line of a sequence (Shaw, Transformer-XL, DeBERTa), by matrix products alone.

In a block of a sequence (see `hankel`) row r and key j read entry r + j of a window, here a window of vectors `w`.
Vectors that are multiplied with queries take one matrix product with the whole window; the scores are the skewed tile
in it (see `workspace`), to which the content product is added in place:

    whole = q @ w.T          score[r, j] += whole[r, r + j]

    row 0   s00 s01 s02  .   .        the products at the dots are not used
    row 1    .  s10 s11 s12  .
    row 2    .   .  s20 s21 s22

With zeros at the dots, the product of the whole buffer and `w` is the weighted sum of the vectors on the value side, or
the gradient of the queries. For vectors that are multiplied with keys the roles change, a few keys at a time:

    band = k @ w.T           score[r, j] += band[j, r + j]

Buckets are resolved before, in `engine`: here the vectors have one row for each entry of the line.
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
"""Keys of a band: with more, more products beside the diagonals are wasted; with fewer, products are small."""


class _VectorTerm:
    """One term: a vector for each entry of the line, in reverse order, and their gradient."""

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float) -> None:
        layout = term.lines.layout
        assert layout.query is not None
        assert layout.key is not None
        self.term, self.heads = term, call.q.shape[1]
        self.scale = call.scale if term.scaled else 1.0
        self.factor = self.scale * unit
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.vectors = term.vectors.detach().to(dtype).flip(1)
        self.bias = None if term.bias is None else term.bias.detach().to(dtype)
        self.origin = term.lines.length - 1 - (layout.query.start - start - layout.key.start + term.lines.origin)

    @cached_property
    def d_vectors(self) -> Float[Tensor, "_ L D"]:
        return torch.zeros_like(self.vectors)

    @cached_property
    def d_bias(self) -> Float[Tensor, "_ D"] | None:
        return None if self.bias is None else torch.zeros_like(self.bias)

    def of_head(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The part of the chunk's only head in a tensor with all query heads, or with one for all of them."""
        return x[chunk.head_slice.start % self.heads if x.shape[0] > 1 else 0]

    def window(self, x: Float[Tensor, "_ L D"], chunk: Chunk, tile: Tile) -> Float[Tensor, "W D"]:
        """A view of the rows of the vectors, or of their gradient, that a tile reads."""
        start = self.origin - (chunk.block.first_coordinate - tile.keys.start)
        return self.of_head(x, chunk)[start : start + tile.window_length]

    def with_bias(self, x: Float[Tensor, "n D"], chunk: Chunk) -> Float[Tensor, "n D"]:
        """Queries or keys plus the term's bias."""
        return x if self.bias is None else x + self.of_head(self.bias, chunk)

    def add_d_bias(self, d_x: Float[Tensor, "n D"], chunk: Chunk) -> None:
        """Add to the gradient of the bias; `d_x` is that of `with_bias`."""
        if self.d_bias is not None:
            d_bias = self.of_head(self.d_bias, chunk)
            d_bias += d_x.sum(dim=0)


class Vectors:
    """All vector terms of a call on a sequence whose first query has the line coordinate `start`."""

    def __init__(self, call: Call, start: int, unit: float) -> None:
        self.terms = [_VectorTerm(term, call, start, unit) for term in call.terms.of(LineVectors)]

    def __len__(self) -> int:
        return len(self.terms)

    def of(self, side: str) -> list[_VectorTerm]:
        """The terms on one side: "query", "key" or "value"."""
        return [vectors for vectors in self.terms if vectors.term.side == side]

    # forward

    def add_queries(self, around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with queries to the whole buffer of the scores."""
        for vectors in self.of("query"):
            window = vectors.window(vectors.vectors, chunk, tile)
            around.addmm_(vectors.with_bias(chunk.plain_q[0], chunk), window.mT, alpha=vectors.factor)

    def add_keys(self, score: Float[Tensor, "n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with keys to the scores."""
        n, m = score.shape
        for vectors in self.of("key"):
            window = vectors.window(vectors.vectors, chunk, tile)
            k = vectors.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
            for keys, entries in _bands(n, m):
                band = k[keys] @ window[entries].mT
                score[:, keys].add_(_diagonals(band, n).mT, alpha=vectors.factor)

    def add_outputs(self, out: Float[Tensor, "n V"], around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the weighted sum of the vectors to the output; `around` holds the weights, and zeros around them."""
        for vectors in self.of("value"):
            out.addmm_(around, vectors.window(vectors.vectors, chunk, tile))

    # backward

    def outputs_backward(
        self, d: Float[Tensor, "n W"], weights: Float[Tensor, "n W"], upstream: Tensor, chunk: Chunk, tile: Tile
    ) -> None:
        """The backward of `add_outputs`, for whole buffers; the weights are 0 around their tile."""
        for vectors in self.of("value"):
            d.addmm_(upstream, vectors.window(vectors.vectors, chunk, tile).mT)
            vectors.window(vectors.d_vectors, chunk, tile).addmm_(weights.mT, upstream)

    def collect(
        self,
        d: Float[Tensor, "n m"],
        around: Float[Tensor, "n W"],
        chunk: Chunk,
        tile: Tile,
        d_q: Float[Tensor, "n D"],
        d_k: Float[Tensor, "m D"] | None,
    ) -> None:
        """The backward of `add_queries` and `add_keys`; `around` holds `d`, and zeros around it."""
        for vectors in self.of("query"):
            window, into = (vectors.window(x, chunk, tile) for x in (vectors.vectors, vectors.d_vectors))
            d_x = torch.mm(around, window).mul_(vectors.scale)
            into.addmm_(around.mT, vectors.with_bias(chunk.plain_q[0], chunk), alpha=vectors.scale)
            d_q += d_x
            vectors.add_d_bias(d_x, chunk)
        n, m = d.shape
        for vectors in self.of("key"):
            window, into = (vectors.window(x, chunk, tile) for x in (vectors.vectors, vectors.d_vectors))
            k = vectors.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
            for keys, entries in _bands(n, m):
                band = d.new_zeros(keys.stop - keys.start, entries.stop - entries.start)
                _diagonals(band, n).copy_(d[:, keys].mT)
                d_x = torch.mm(band, window[entries]).mul_(vectors.scale)
                into[entries].addmm_(band.mT, k[keys], alpha=vectors.scale)
                if d_k is not None:
                    d_k[keys] += d_x
                vectors.add_d_bias(d_x, chunk)

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call."""
        for vectors in self.terms:
            gradients.add(vectors.term.vectors, vectors.d_vectors.flip(1))
            gradients.add(vectors.term.bias, vectors.d_bias)


def _bands(n: int, m: int) -> Iterator[tuple[slice, slice]]:
    """A few keys at a time, and the entries of the window that the rows read for these."""
    for start in range(0, m, _KEYS_AT_ONCE):
        stop = min(start + _KEYS_AT_ONCE, m)
        yield slice(start, stop), slice(start, stop + n - 1)


def _diagonals(band: Float[Tensor, "s W"], n: int) -> Float[Tensor, "s n"]:
    """A view of `band[j, j + r]`: row j from its entry j on."""
    return band.as_strided((band.shape[0], n), (band.stride(0) + 1, 1), band.storage_offset())
