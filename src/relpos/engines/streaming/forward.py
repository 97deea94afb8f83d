"""The forward: two passes over the tiles of a block, or one where a bound spares the first.

The shift of a row is its maximum, which takes a first pass over its scores; a block of one tile keeps them for the
second. In bfloat16, where the products leave little time to hide it in, it is a bound
(|q| |k| scale plus the largest bias), so that there is no first pass. Where the weights then sum
to so little that digits are lost, the block is computed once more with the maximum itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.streaming.chunks import Chunk
from relpos.engines.streaming.matmul import add_matmul
from relpos.engines.streaming.plan import Plan
from relpos.engines.streaming.scores import Scores

_ENOUGH = 2.0**-26
"""Sum of a row's weights under a bound, below which its block is computed once more with the maximum."""


class Forward:
    """The output of a call by a plan."""

    def __init__(self, call: Call, plan: Plan) -> None:
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
        flat_out, flat_lse, unit = out.flatten(0, 1), lse.flatten(0, 1)[..., None], self.plan.unit
        for chunk in self.scores.chunks():
            own, total, shift = self._sums(chunk)
            blank = total == 0
            chunk.put(flat_lse, torch.where(blank, -torch.inf, shift + total.log() * unit) / unit)
            chunk.put(flat_out, own.div_(total.masked_fill_(blank, 1)))

    def _sums(self, chunk: Chunk) -> tuple[Float[Tensor, "g n V"], Float[Tensor, "g n 1"], Float[Tensor, "g n 1"]]:
        """The weighted sum of a chunk's values, the sum of its weights, and their shift."""
        if self.plan.native:
            shift = self._with_sink(self._bound(chunk), chunk)
            out, total = self._add_up(chunk, shift, None)
            if float(total.amin()) >= _ENOUGH:
                return out, total, shift
        shift, scores = self._largest(chunk)
        shift = self._with_sink(shift, chunk)
        return *self._add_up(chunk, shift, scores), shift

    def _with_sink(self, shift: Tensor, chunk: Chunk) -> Tensor:
        sink = self.scores.sink
        return shift if sink is None else torch.maximum(shift, sink[chunk.which])

    def _add_up(
        self, chunk: Chunk, shift: Float[Tensor, "g n 1"], scores: Tensor | None
    ) -> tuple[Float[Tensor, "g n V"], Float[Tensor, "g n 1"]]:
        """A chunk's weights under a shift, times the values and alone, summed over its keys.

        Args:
            scores: of its only tile, not shifted yet, or None.
        """
        of, native = self.scores, self.plan.native
        out = chunk.q.new_zeros(*chunk.q.shape[:2], self.call.v.shape[3])
        total = torch.zeros_like(shift)
        if of.sink is not None:
            total += of.exp(of.sink[chunk.which] - shift)
        for tile in chunk.block.tiles:
            weights = of.exp(of.compute(chunk, tile, shift) if scores is None else scores.sub_(shift))
            total += weights.sum(dim=-1, keepdim=True)
            kept = of.dropout(chunk, tile)
            if kept is not None:
                weights.mul_(kept)
            used, v = (of.workspace.rounded(weights), chunk.heads.low_v) if native else (weights, chunk.heads.v)
            add_matmul(out, used, v[:, tile.keys])
            self.plan.add_values(out, weights, chunk, tile)
        return out, total

    def _bound(self, chunk: Chunk) -> Float[Tensor, "g n 1"]:
        """No less than any score of the rows."""
        cap, unit = self.scores.cap, self.plan.unit
        if cap is not None:
            bound = chunk.q.new_full((*chunk.q.shape[:2], 1), cap * unit)
        else:
            bound = chunk.q.norm(dim=-1, keepdim=True) * chunk.heads.longest * (self.call.scale * unit)
        highest = self.plan.highest_bias(chunk)
        return bound if highest is None else bound + highest

    def _largest(self, chunk: Chunk) -> tuple[Float[Tensor, "g n 1"], Tensor | None]:
        """Each row's largest score, 0 in a row that sees nothing; and the scores, where the block is one tile."""
        tiles = chunk.block.tiles
        peak, score = chunk.q.new_full((*chunk.q.shape[:2], 1), -torch.inf), None
        for tile in tiles:
            score = self.scores.compute(chunk, tile, None)
            peak = torch.maximum(peak, score.amax(dim=-1, keepdim=True))
        return torch.where(peak == -torch.inf, 0, peak), score if len(tiles) == 1 else None
