"""Vectors on the line of a sequence (Shaw, Transformer-XL, DeBERTa), by matrix products alone.

In a block of a sequence (see `hankel`) row r and key j read entry r + j of a window, here a window of vectors `w`.
Vectors that are multiplied with queries take one matrix product with the whole window; the scores are the skewed tile
in it (see `workspace`), to which the content product is added in place:

    whole = q @ w.T          score[r, j] += whole[r, r + j]

    row 0   s00 s01 s02  .   .        the products at the dots are not used
    row 1    .  s10 s11 s12  .
    row 2    .   .  s20 s21 s22

With zeros at the dots, the product of the whole buffer and `w` is the weighted sum of the vectors on the value side, or
the gradient of the queries. For vectors that are multiplied with keys, see `key_vectors`.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient
from relpos.engines.streaming.plan.tiles import Tile
from relpos.engines.streaming.terms.key_vectors import KeyBands, KeyProducts, KeyVectors
from relpos.engines.streaming.terms.vector_term import VectorTerm, add_sums

_MOST_VECTORS = 1024
"""Maximum vectors whose products with all keys of a head are stored: 16 times the memory of keys 64 wide."""


class Vectors:
    """All vector terms of a call on a sequence whose first query has the line coordinate `start`.

    Args:
        tiles: the tiles of a head, each with its number of pairs; empty if the plan goes block by block.
    """

    def __init__(self, call: Call, start: int, unit: float, tiles: Sequence[tuple[Tile, int]]) -> None:
        self.terms = [_made(term, call, start, unit, tiles) for term in call.terms.of(LineVectors)]

    def expect(self) -> None:
        """Allocate the gradients of all terms."""
        for vectors in self.terms:
            vectors.expect()

    def share(self, heads: Sequence[int]) -> Vectors:
        """The terms for some heads, for another thread."""
        share = copy.copy(self)
        share.terms = [vectors.share(heads) for vectors in self.terms]
        return share

    def __len__(self) -> int:
        return len(self.terms)

    def of(self, side: str) -> list[VectorTerm]:
        """The terms on one side: "query" or "value"."""
        return [vectors for vectors in self.terms if vectors.term.side == side]

    @property
    def on_keys(self) -> list[KeyVectors]:
        """The terms on the key side."""
        return [vectors for vectors in self.terms if isinstance(vectors, KeyVectors)]

    # forward

    def add_queries(self, around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with queries to the whole buffer of the scores."""
        for vectors in self.of("query"):
            own, q = vectors.of_head(vectors.vectors, chunk), vectors.queries(chunk)
            for queries, window, entries in vectors.strips(chunk, tile):
                _add_product(around[queries, window], q[queries], own[entries], vectors.factor)

    def write_queries(self, around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> bool:
        """Write what the mask says of a window, and the products in it of the only term. If these are not alone in
        their place, write nothing, and return False."""
        vectors, strips = self.terms[0], list(self.terms[0].strips(chunk, tile))
        wanted, starts = slice(tile.allowed_start, tile.allowed_stop), {queries.start for queries, _, _ in strips}
        alone = len(self.terms) == 1 and len(starts) == len(strips) == vectors.strip_count(chunk)
        if not alone or vectors.content is None or not all(_are_all(window, entries) for _, window, entries in strips):
            return False
        if any(window.start < wanted.start or window.stop > wanted.stop for _, window, _ in strips):
            return False
        own, x = vectors.of_head(vectors.vectors, chunk), vectors.queries(chunk)
        around[:, : wanted.start] = -torch.inf
        around[:, wanted.stop :] = -torch.inf
        for queries, window, entries in strips:
            around[queries, wanted.start : window.start] = 0
            around[queries, window.stop : wanted.stop] = 0
            around[queries, window].addmm_(x[queries], own[entries].mT, alpha=vectors.factor, beta=0)
        return True

    def add_keys(self, score: Float[Tensor, "n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with keys to the scores."""
        for vectors in self.on_keys:
            vectors.add_products(score, chunk, tile)

    def add_outputs(self, out: Float[Tensor, "n V"], around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the weighted sum of the vectors to the output; `around` holds the weights, and zeros around them."""
        for vectors in self.of("value"):
            own = vectors.of_head(vectors.vectors, chunk)
            for queries, window, entries in vectors.strips(chunk, tile):
                out[queries].addmm_(_summed(around[queries, window], entries), own[entries])

    # backward

    def outputs_backward(
        self, d: Float[Tensor, "n W"], weights: Float[Tensor, "n W"], upstream: Tensor, chunk: Chunk, tile: Tile
    ) -> None:
        """The backward of `add_outputs`, for whole buffers; the weights are 0 around their tile."""
        for vectors in self.of("value"):
            own, into = vectors.of_head(vectors.vectors, chunk), vectors.d_of_head(chunk)
            for queries, window, entries in vectors.strips(chunk, tile):
                _add_product(d[queries, window], upstream[queries], own[entries], 1.0)
                add_sums(into[entries], _summed(weights[queries, window], entries), upstream[queries])

    def collect(
        self,
        d: Float[Tensor, "n m"],
        around: Float[Tensor, "n W"],
        chunk: Chunk,
        tile: Tile,
        d_q: Float[Tensor, "n D"],
        d_k: KeyGradient | None,
    ) -> None:
        """The backward of `add_queries` and `add_keys`; `around` holds `d`, and zeros around it."""
        for vectors in self.of("query"):
            own, into = vectors.of_head(vectors.vectors, chunk), vectors.d_of_head(chunk)
            q = vectors.queries(chunk)
            d_x = torch.zeros_like(q)
            for queries, window, entries in vectors.strips(chunk, tile):
                sums = _summed(around[queries, window], entries)
                d_x[queries].addmm_(sums, own[entries], alpha=vectors.scale)
                add_sums(into[entries], sums, q[queries], vectors.scale)
            if vectors.d_content is not None:
                vectors.d_content[chunk.head_slice][0].index_add_(0, chunk.block.queries, d_x)
                continue
            d_q += d_x
            vectors.add_d_bias(d_x, chunk)
        for vectors in self.on_keys:
            vectors.collect(d, chunk, tile, d_k)

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call."""
        for vectors in self.terms:
            gradients.add(vectors.term.vectors, vectors.finished() if gradients.wants(vectors.term.vectors) else None)
            gradients.add(vectors.term.bias, None if vectors.d_bias is None else vectors.d_bias.total())
            if vectors.term.content is not None and vectors.d_content is not None:
                d_content = vectors.d_content.view(-1, vectors.heads, *vectors.d_content.shape[1:])
                gradients.add(vectors.term.content, d_content.sum_to_size(vectors.term.content.shape))


def _made(term: LineVectors, call: Call, start: int, unit: float, tiles: Sequence[tuple[Tile, int]]) -> VectorTerm:
    """The implementation for the term's side; on keys, the faster of two in O(N) memory."""
    if term.side != "key":
        return VectorTerm(term, call, start, unit)
    count, pairs = term.vectors.shape[1], sum(pairs for _, pairs in tiles)
    few = term.index is not None and count <= _MOST_VECTORS and count * call.k.shape[2] < pairs
    if few and call.q.device.type == "cpu":  # elsewhere sums by vector have no fixed order
        return KeyProducts(term, call, start, unit, last_tile=tiles[-1][0])
    return KeyBands(term, call, start, unit)


def _add_product(
    into: Float[Tensor, "n w"], x: Float[Tensor, "n D"], rows: Float[Tensor, "_ D"], factor: float
) -> None:
    """Add `x @ rows.T`; one row is broadcast to all columns."""
    if rows.shape[0] == into.shape[1]:
        into.addmm_(x, rows.mT, alpha=factor)
    else:
        into.add_(x @ rows.mT, alpha=factor)


def _are_all(window: slice, entries: slice) -> bool:
    """Whether each column of a window has an entry of its own."""
    return bool(entries.stop - entries.start == window.stop - window.start)


def _summed(x: Float[Tensor, "n w"], entries: slice) -> Float[Tensor, "n _"]:
    """x, or its row sums where all columns read one entry."""
    return x if _are_all(slice(0, x.shape[1]), entries) else x.sum(dim=1, keepdim=True)
