"""The plan for all other terms: their dense scores on one tile at a time, and the backward of these.

A block holds all heads and, to bound its memory, few rows. The terms are narrowed to a tile. The buffers of their
gradients form a tree of the same structure and are narrowed too, so each narrowed term comes with the narrowed buffer
of its gradient. Nothing of size N x M outlives its block.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import (
    AxisVectors,
    DenseBias,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    QueryScale,
    Sinks,
    Softcap,
    Term,
    Terms,
    contract,
)
from relpos.core.pair_table import sum_pairs
from relpos.core.terms.vectors import meet, sum_rows
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.plan import masks
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient
from relpos.engines.streaming.plan.tile_plan import TilePlan
from relpos.engines.streaming.plan.tiles import Block, Tile, count_of
from relpos.engines.streaming.workspace import Workspace, fill

MOST_ROWS = 256
"""Maximum rows of a block under a mask."""


class DensePlan(TilePlan):
    """A plan for any call.

    Args:
        pairs: the most scores of a block, over all heads; a block of one row may have more.
        unit, bfloat16: see `TilePlan`.
    """

    renormalizes = True
    by_block = True
    share_count = 1

    def __init__(self, call: Call, pairs: int, *, unit: float, bfloat16: bool) -> None:
        batch, heads, self.queries, _ = call.q.shape
        self.call, self.device = call, call.q.device
        self.shape, self.keys = (batch, heads), call.k.shape[2]
        self.pairs, self.unit, self.bfloat16 = pairs, unit, bfloat16
        self.rows = max(1, min(self.queries, pairs // max(1, batch * heads * self.keys)))
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.has_values = any(term.side == "value" for term in call.terms.of(LineVectors))
        self.gradients = call.terms

    def shares(self, count: int) -> list[DensePlan]:
        return [self]

    def head_slices(self) -> list[slice]:
        return [slice(0, math.prod(self.shape))]

    def blocks(self) -> Iterator[Block]:
        borders = [0, *masks.cuts(self.call.mask, self.queries, self.device), self.queries]
        for start, stop in itertools.pairwise(borders):
            while start < stop:
                queries = self._queries(start, stop)
                yield Block(queries, start, tiles=[Tile(keys, self.call.mask) for keys in self._spans(queries)])
                start += len(queries)

    def _queries(self, start: int, stop: int) -> Int[Tensor, " n"]:
        """The queries of the next block: more of them under a mask that lets them see few keys."""
        count = min(self.rows, stop - start)
        rest = torch.arange(start, stop, device=self.device)
        while self.call.mask is not None and count < min(stop - start, MOST_ROWS):
            doubled = min(2 * count, stop - start)
            seen = sum(count_of(keys) for keys in self._spans(rest[:doubled]))
            if doubled * seen * math.prod(self.shape) > self.pairs:
                break
            count = doubled
        return rest[:count]

    def _spans(self, rows: Int[Tensor, " n"]) -> list[slice]:
        return masks.spans(self.call.mask, rows, self.keys, strided=True)

    # scores

    def _qk(self, chunk: Chunk, tile: Tile) -> tuple[Float[Tensor, "B H n D"], Float[Tensor, "B H m D"]]:
        """The queries and keys that vectors are multiplied with."""
        return chunk.plain_q.unflatten(0, self.shape), chunk.heads.plain_k[:, tile.keys].unflatten(0, self.shape)

    def _bias(self, chunk: Chunk, tile: Tile) -> Float[Tensor, "BH _ _"] | None:
        """The terms' scores, cached in the tile; an axis has size 1 if all its rows or keys are alike."""
        if tile.bias is None:
            natural = dense.scores(self._narrow(chunk, tile), *self._qk(chunk, tile), self.call.scale, None)
            if natural is not None:
                tile.bias = (natural * self.unit).expand(*self.shape, -1, -1).flatten(0, 1)
        return tile.bias

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "BH _ 1"] | None:
        biases = (self._bias(chunk, tile) for tile in chunk.block.tiles)
        highest = [bias.amax(dim=-1, keepdim=True) for bias in biases if bias is not None]
        return torch.stack(highest).amax(dim=0) if highest else None

    def start_scores(self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Tensor | None) -> Tensor:
        g, n, _ = chunk.q.shape
        score = workspace.scores.rows(g, n, tile.count)
        fill(score, self._bias(chunk, tile), shift)
        return score

    def add_values(self, out: Tensor, weights: Float[Tensor, "BH n m"], chunk: Chunk, tile: Tile) -> None:
        if self.has_values:
            terms, weights = self._narrow(chunk, tile), weights.unflatten(0, self.shape)
            added = [term.outputs(weights) for term in terms.of(LineVectors) if term.side == "value"]
            out += torch.stack(added).sum(dim=0).flatten(0, 1)

    # gradients

    def expect(self, gradients: Gradients) -> None:
        """Make a tree like the terms: buffers of the gradients that are wanted, and meta tensors elsewhere."""

        def buffer(x: Tensor) -> Tensor:
            if gradients.wants(x):
                return gradients.buffer(x)
            return torch.empty(x.shape, dtype=x.dtype, device="meta") if x.is_floating_point() else x

        self.gradients = pytree.tree_map_only(Tensor, buffer, self.call.terms)

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "BH n m"]:
        g, n, _ = chunk.q.shape
        return workspace.gradient.rows(g, n, tile.count)

    def _narrow(self, chunk: Chunk, tile: Tile, terms: Terms | None = None) -> Terms:
        """The terms, or the tree of their gradients, narrowed to a tile."""
        start = chunk.block.first_query
        return (terms or self.call.terms).narrow(slice(start, start + chunk.block.count), tile.keys)

    def _with_gradients(self, chunk: Chunk, tile: Tile) -> Iterator[tuple[Term, Term]]:
        """Each term of a tile, with the buffers of its gradient."""
        return zip(self._narrow(chunk, tile), self._narrow(chunk, tile, self.gradients), strict=True)

    def values_backward(
        self, d: Tensor, weights: Float[Tensor, "BH n m"], upstream: Float[Tensor, "BH n V"], chunk: Chunk, tile: Tile
    ) -> None:
        if not self.has_values:
            return
        weights, upstream = weights.unflatten(0, self.shape), upstream.unflatten(0, self.shape)
        for pair in self._with_gradients(chunk, tile):
            match pair:
                case LineVectors(side="value") as term, LineVectors(vectors=into):
                    rows = term.rows()
                    d += meet(upstream, None, term.vectors, rows).flatten(0, 1)
                    _add(into, self._sum_rows(weights, rows, term.vectors).mT @ upstream)

    def collect(
        self,
        d: Float[Tensor, "BH n m"],
        chunk: Chunk,
        tile: Tile,
        d_q: Float[Tensor, "BH n D"],
        d_k: KeyGradient | None,
    ) -> None:
        score, (q, k) = self._d_added(d.unflatten(0, self.shape), chunk, tile), self._qk(chunk, tile)
        for pair in self._with_gradients(chunk, tile):
            match pair:
                case LineBias(lines=line), LineBias(values=into):
                    if not into.is_meta:
                        _add(into, contract(score, line))
                case LineVectors(side="query" | "key") as term, LineVectors(
                    vectors=into, bias=d_bias, content=d_content
                ):
                    scaled = score * self.call.scale if term.scaled else score
                    if term.content is not None and d_content is not None:
                        x = term.content.to(self.dtype).expand(*self.shape, -1, -1)
                        d_x = self._meet_backward(scaled, term.rows(), x, term.vectors, into, None, None)
                        _add(d_content, d_x.unflatten(0, self.shape))
                        continue
                    if term.side == "query":
                        d_q += self._meet_backward(scaled, term.rows(), q, term.vectors, into, term.bias, d_bias)
                        continue
                    d_x = self._meet_backward(scaled.mT, term.rows().mT, k, term.vectors, into, term.bias, d_bias)
                    for d_head, x in zip(
                        d_k.at(chunk.head_slice, tile.keys) if d_k is not None else (), d_x, strict=False
                    ):
                        d_head += x
                case AxisVectors(vectors=axes) as term, AxisVectors(vectors=into_axes):
                    for vectors, rows, into in zip(axes, term.rows(), into_axes, strict=True):
                        d_q += self._meet_backward(score, rows, q, vectors, into, None, None)
                case LowRank(query=query, key=key), LowRank(query=d_query, key=d_key):
                    if not d_query.is_meta:
                        _add(d_query, score @ key.to(self.dtype))
                    if not d_key.is_meta:
                        _add(d_key, score.mT @ query.to(self.dtype))
                case DenseBias(), DenseBias(bias=into):
                    _add(into, score)
                case IndexedBias(index=index), IndexedBias(values=into):
                    if not into.is_meta:
                        _add(into, sum_pairs(score, index, into.shape[1]))
                case ((LineVectors() | Sinks() | Softcap() | QueryScale()), _):
                    pass  # their gradients are computed elsewhere
                case term, _:
                    raise NotImplementedError(f"DensePlan.collect has no gradient for {type(term).__name__}")

    def _d_added(self, d: Float[Tensor, "B H n m"], chunk: Chunk, tile: Tile) -> Float[Tensor, "B H n m"]:
        """The gradient of what the terms add, from that of the scores; adds to the gradient of a factor on both."""
        temperature = self.call.terms.one(QueryScale)
        if temperature is None:
            return d
        own, into = self._narrow(chunk, tile), self._narrow(chunk, tile, self.gradients).one(QueryScale)
        if into is not None and not into.factor.is_meta:
            added = dense.scores(own.without(QueryScale), *self._qk(chunk, tile), self.call.scale, None)
            if added is not None:
                if own.one(DenseBias) is not None:  # it may hold NaN at forbidden pairs
                    added = added.masked_fill(d == 0, 0)
                _add(into.factor, (d * added).sum(dim=-1))
        temperature = own.one(QueryScale)
        assert temperature is not None
        return temperature.of_rows(d)

    def _meet_backward(
        self,
        score: Float[Tensor, "B H n m"],
        rows: Int[Tensor, "*B n m"],
        x: Float[Tensor, "B H n D"],
        vectors: Float[Tensor, "#H R D"],
        into: Tensor,
        bias: Tensor | None,
        d_bias: Tensor | None,
    ) -> Float[Tensor, "BH n D"]:
        """The backward of `meet`: returns the gradient of x, and adds those of the vectors (`into`) and the bias."""
        if bias is not None:
            x = x + bias[:, None, :].to(x.dtype)
        sums = self._sum_rows(score, rows, vectors)
        d_x = sums @ vectors.to(x.dtype)
        _add(into, sums.mT @ x)
        if d_bias is not None:
            _add(d_bias, d_x.sum(dim=2))
        return d_x.flatten(0, 1)

    def _sum_rows(self, x: Float[Tensor, "B H n m"], rows: Int[Tensor, "*B n m"], vectors: Tensor) -> Tensor:
        """`[B, H, n, R]`: for each query and row of the vectors, the sum over the pairs that read it."""
        count = vectors.shape[1]
        return sum_rows(x, rows, count + 1)[..., :count]


def _add(into: Tensor, gradient: Tensor) -> None:
    """`into += gradient`, summed over broadcast axes; does nothing if `into` is a meta tensor."""
    if not into.is_meta:
        into += gradient.sum_to_size(into.shape)
