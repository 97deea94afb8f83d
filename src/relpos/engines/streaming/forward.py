"""The forward: each pair is computed once.

The shift of a row is its maximum. In bfloat16, where the products leave little time to hide it in, it is a bound
(|q| |k| scale plus the largest bias), so that no pass over the scores looks for the maximum; where the weights then sum
to so little that digits are lost, the block is done again with the maximum itself.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.streaming import flash
from relpos.engines.streaming.general import General
from relpos.engines.streaming.loop import Loop
from relpos.engines.streaming.operands import Part, put
from relpos.engines.streaming.products import add_product
from relpos.engines.streaming.room import Room, clear_around
from relpos.engines.streaming.strips import Strips, Tile

_ENOUGH = 2.0**-26
"""Sum of a row's weights under a bound, below which the row is done again with its maximum: digits would be lost."""


class Forward(Loop):
    """A call's output."""

    def run(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """The output in q's dtype, and the natural log-sum-exp."""
        q = self.call.q
        out = q.new_empty(*q.shape[:3], self.call.v.shape[3])
        lse = torch.empty(q.shape[:3], dtype=self.dtype, device=q.device)
        flat_out, flat_lse = out.flatten(0, 1), lse.flatten(0, 1)[..., None]
        by_kernel = isinstance(self.side, Strips) and self.vectors is None and flash.serves(self.call)
        room = Room(self.dtype, q.device)
        for part in self.parts(prefix_only=by_kernel):
            own, total, shift = self._sums(room, part)
            blank = total == 0
            own_lse = torch.where(blank, -torch.inf, shift + total.log() * self.unit) / self.unit
            put(flat_out, part.which, part.block.numbers, own.div_(total.masked_fill_(blank, 1)))
            put(flat_lse, part.which, part.block.numbers, own_lse)
        if by_kernel:
            self._by_kernel(flat_out, flat_lse)
        return out, lse

    def _by_kernel(self, out: Float[Tensor, "BH N V"], lse: Float[Tensor, "BH N 1"]) -> None:
        """All rows behind the prefix by PyTorch's kernel; prefix keys and sinks are merged in by the log-sum-exp."""
        side, q, k, v = flash.strips(self.call), self.operands.q, self.operands.k, self.operands.v
        prefix, columns, groups = side.query.prefix, side.key.prefix, self.heads // self.call.k.shape[1]
        if groups > 1:
            k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        flash.attend(side, q, k, v, self.call.scale, out, lse)
        own, sums = out[:, prefix:], lse[:, prefix:]
        if columns:
            score = torch.bmm(q[:, prefix:], k[:, :columns].mT).mul_(self.call.scale)
            for block in side.blocks():
                column = side.bias(block, Tile(slice(0, columns), masked=False), slice(None)) if block.step else None
                if column is not None:
                    score[:, block.numbers - prefix] += column
            whole = torch.logaddexp(sums, score.logsumexp(dim=-1, keepdim=True))
            own *= torch.exp(sums - whole)
            own += torch.exp(score - whole) @ v[:, :columns]
            sums.copy_(whole)
        if self.sink is not None:
            whole = torch.logaddexp(sums, self.sink / self.unit)
            own *= torch.exp(sums - whole)
            sums.copy_(whole)

    def _sums(self, room: Room, part: Part) -> tuple[Tensor, Tensor, Tensor]:
        """A part's weighted sum of the values, `[g, n, V]`, the sum of its weights and their shift, `[g, n, 1]`."""
        for bounded in (True, False) if self.native else (False,):
            scores = None
            if bounded:
                shift = self._bound(part)
            else:
                shift, scores = self._largest(room, part)
            if self.sink is not None:
                shift = torch.maximum(shift, self.sink[part.which])
            out, total = self._added_up(room, part, shift, scores)
            if not bounded or float(total.amin()) >= _ENOUGH:
                break
        return out, total, shift

    def _added_up(self, room: Room, part: Part, shift: Tensor, scores: Tensor | None) -> tuple[Tensor, Tensor]:
        """A part's weights under a shift, times the values and alone, summed over its keys.

        Args:
            scores: of its only tile, not shifted yet, or None.
        """
        out = part.q.new_zeros(*part.q.shape[:2], self.call.v.shape[3])
        total = torch.zeros_like(shift)
        if self.sink is not None:
            total += self.exp(self.sink[part.which] - shift)
        for tile in part.tiles:
            score = self.scores(room, part, tile, shift) if scores is None else scores.sub_(shift)
            weights = self.exp(score)
            total += weights.sum(dim=-1, keepdim=True)
            kept = self.kept(part, tile)
            if kept is not None:
                weights.mul_(kept)
            used = room.rounded(weights) if self.native else weights
            add_product(out, used, (part.heads.low_v if self.native else part.heads.v)[:, tile.keys])
            if isinstance(self.side, General) and self.side.has_values:
                out += self.side.outputs(tile, weights)
            if self.vectors is not None and self.vectors.of("value"):
                assert room.whole is not None
                clear_around(room.whole[0], weights.shape[2])
                self.vectors.outputs(room.whole[0], part, tile, out[0])
        return out, total

    def _bound(self, part: Part) -> Float[Tensor, "g n 1"]:
        """No less than any score of the rows."""
        if self.cap is not None:
            bound = part.q.new_full((*part.q.shape[:2], 1), self.cap * self.unit)
        else:
            bound = part.q.norm(dim=-1, keepdim=True) * part.heads.longest * (self.call.scale * self.unit)
        if isinstance(self.side, Strips):
            return bound if self.side.highest is None else bound + self.side.highest[part.which]
        highest = [tile.bias.amax(dim=-1, keepdim=True) for tile in part.tiles if tile.bias is not None]
        return bound + torch.stack(highest).amax(dim=0) if highest else bound

    def _largest(self, room: Room, part: Part) -> tuple[Float[Tensor, "g n 1"], Tensor | None]:
        """Each row's largest score, 0 in a row that sees nothing; and the scores, where the block is one tile."""
        peak, score = part.q.new_full((*part.q.shape[:2], 1), -torch.inf), None
        for tile in part.tiles:
            score = self.scores(room, part, tile, None)
            peak = torch.maximum(peak, score.amax(dim=-1, keepdim=True))
        return torch.where(peak == -torch.inf, 0, peak), score if len(part.tiles) == 1 else None
