"""The forward: two passes over the tiles of a block, or one if a bound makes the first unnecessary.

Each row's scores are shifted by their maximum, which takes a first pass. A block with one tile keeps its scores for the
second. In bfloat16, matrix products are fast and a pass is not, so the shift is an upper bound instead: |q| |k| scale
plus the largest bias. If the weights of a row then sum to too little for full precision, the block is computed again
with the maximum.
"""

from __future__ import annotations

import copy
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.streaming.cpu.head_threads import run_all, workers
from relpos.engines.streaming.cpu.matmul import add_matmul
from relpos.engines.streaming.plan.chunks import Chunk
from relpos.engines.streaming.plan.tile_plan import TilePlan
from relpos.engines.streaming.scores import Scores

_ENOUGH = 2.0**-26
"""Minimum sum of a row's weights under a bound; below it, the block is computed again with the maximum."""


class Forward:
    """Computes the output of a call by a plan."""

    def __init__(self, call: Call, plan: TilePlan) -> None:
        self.call, self.plan = call, plan
        self.scores = Scores(call, plan)

    def run(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """The output in q's dtype, and the natural log-sum-exp."""
        q = self.call.q
        out = q.new_empty(*q.shape[:3], self.call.v.shape[3])
        lse = torch.empty(q.shape[:3], dtype=self.scores.dtype, device=q.device)
        self.write(out, lse)
        return out, lse

    def write(self, out: Float[Tensor, "B H N V"], lse: Float[Tensor, "B H N"]) -> None:
        """Write the rows of the plan's blocks."""
        plans = self.plan.shares(workers(self.call, self.plan.share_count))
        shares = [self] if len(plans) == 1 else [self._share(plan) for plan in plans]
        run_all([partial(share._write_chunks, out, lse) for share in shares])

    def _share(self, plan: TilePlan) -> Forward:
        share = copy.copy(self)
        share.plan, share.scores = plan, self.scores.share(plan)
        return share

    def _write_chunks(self, out: Float[Tensor, "B H N V"], lse: Float[Tensor, "B H N"]) -> None:
        flat_out, flat_lse, unit = out.flatten(0, 1), lse.flatten(0, 1)[..., None], self.plan.unit
        for chunk in self.scores.chunks():
            chunk_out, total, shift = self._sums(chunk)
            blank = total == 0
            chunk.put(flat_lse, torch.where(blank, -torch.inf, shift + total.log() * unit) / unit)
            chunk.put(flat_out, chunk_out.div_(total.masked_fill_(blank, 1)))

    def _sums(self, chunk: Chunk) -> tuple[Float[Tensor, "g n V"], Float[Tensor, "g n 1"], Float[Tensor, "g n 1"]]:
        """The weighted sum of values, the sum of weights, and the shift of the weights."""
        if self.plan.bfloat16:
            shift = self._with_sink(self._bound(chunk), chunk)
            out, total = self._add_up(chunk, shift, None)
            if float(total.amin()) >= _ENOUGH:
                return out, total, shift
        shift, score = self._maximum(chunk)
        shift = self._with_sink(shift, chunk)
        return *self._add_up(chunk, shift, score), shift

    def _with_sink(self, shift: Tensor, chunk: Chunk) -> Tensor:
        sink = self.scores.sink_of(chunk)
        return shift if sink is None else torch.maximum(shift, sink)

    def _add_up(
        self, chunk: Chunk, shift: Float[Tensor, "g n 1"], score: Tensor | None
    ) -> tuple[Float[Tensor, "g n V"], Float[Tensor, "g n 1"]]:
        """The weighted sum of values and the sum of weights, over all keys.

        Args:
            score: the unshifted scores of the only tile; None to compute the scores of each tile.
        """
        scores, bfloat16 = self.scores, self.plan.bfloat16
        out = chunk.q.new_zeros(*chunk.q.shape[:2], self.call.v.shape[3])
        total = torch.zeros_like(shift)
        sink = scores.sink_of(chunk)
        if sink is not None:
            total += scores.exp(sink - shift)
        for tile in chunk.block.tiles:
            weights = scores.exp(scores.compute(chunk, tile, shift) if score is None else score.sub_(shift))
            total += weights.sum(dim=-1, keepdim=True)
            if scores.dropout is not None:
                weights.mul_(scores.dropout.factors(chunk, tile))
            rounded, v = weights, chunk.heads.v
            if bfloat16:
                rounded, v = scores.workspace.rounded(weights), chunk.heads.input_v
            add_matmul(out, rounded, v[:, tile.keys])
            self.plan.add_values(out, weights, chunk, tile)
        return out, total

    def _bound(self, chunk: Chunk) -> Float[Tensor, "g n 1"]:
        """An upper bound of each row's scores."""
        cap, unit = self.scores.cap, self.plan.unit
        if cap is not None:
            bound = chunk.q.new_full((*chunk.q.shape[:2], 1), cap * unit)
        else:
            bound = chunk.q.norm(dim=-1, keepdim=True) * chunk.heads.longest_key * (self.call.scale * unit)
        highest = self.plan.highest_bias(chunk)
        return bound if highest is None else bound + highest

    def _maximum(self, chunk: Chunk) -> tuple[Float[Tensor, "g n 1"], Tensor | None]:
        """Each row's maximum (0 if it sees no key), and the scores if the block has one tile."""
        tiles = chunk.block.tiles
        peak, score = chunk.q.new_full((*chunk.q.shape[:2], 1), -torch.inf), None
        for tile in tiles:
            score = self.scores.compute(chunk, tile, None)
            peak = torch.maximum(peak, score.amax(dim=-1, keepdim=True))
        return torch.where(peak == -torch.inf, 0, peak), score if len(tiles) == 1 else None
