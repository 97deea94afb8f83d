"""The forward: each pair is computed once.

The shift of a row is its maximum. In bfloat16, where the products leave little time to hide it in, it is a bound
(|q| |k| scale plus the largest bias), so that no pass over the scores looks for the maximum; where the weights then sum
to so little that digits are lost, the block is done again with the maximum itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.attention.streaming import flash
from relpos.attention.streaming.general import General
from relpos.attention.streaming.loop import Loop
from relpos.attention.streaming.products import add_product
from relpos.attention.streaming.room import Room, clear_around
from relpos.attention.streaming.strips import Strips, Tile

_ENOUGH = 2.0**-26
"""Sum of a row's weights under a bound, below which the row is done again with its maximum: digits would be lost."""


class Forward(Loop):
    """A call's output."""

    def run(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """The output in q's dtype, and the natural log-sum-exp."""
        out = self.q.new_zeros(*self.q.shape[:2], self.v.shape[2])
        total, shift = self.q.new_zeros(2, *self.q.shape[:2], 1)
        reach = self._reach() if self.native else None
        by_kernel = isinstance(self.side, Strips) and self.vectors is None and flash.serves(self.work)
        room = Room(self.q)
        for block, tiles, heads in self.order(prefix_only=by_kernel):
            place = heads, block.rows
            for bounded in (True, False) if self.native else (False,):
                scores = None
                if bounded:
                    own = self._bound(block, tiles, heads, reach)
                else:
                    own, scores = self._largest(room, block, tiles, heads)
                if self.sink is not None:
                    own = torch.maximum(own, self.sink[heads, None])
                    total[place] = self.exp(self.sink[heads, None] - own)
                shift[place] = own
                self._add_up(room, block, tiles, heads, own, scores, out[place], total[place])
                if not bounded or float(total[place].amin()) >= _ENOUGH:
                    break
                out[place], total[place] = 0, 0
        blank = total == 0
        lse = torch.where(blank, -torch.inf, shift + total.log() * self.unit)
        out /= total.masked_fill_(blank, 1)
        if by_kernel:
            self._by_kernel(out, lse)
        return self.side.scatter(out).to(self.work.q.dtype), self.side.scatter(lse)[..., 0] / self.unit

    def _by_kernel(self, out: Tensor, lse: Tensor) -> None:
        """All rows behind the prefix by PyTorch's kernel; prefix keys and sinks are merged in by the log-sum-exp."""
        side = flash.strips(self.work)
        prefix, columns = side.query.prefix, side.key.prefix
        flash.attend(side, self.q, self.k, self.v, self.work.scale, out, lse)
        own, sums = out[:, prefix:], lse[:, prefix:]
        if columns:
            score = torch.bmm(self.q[:, prefix:], self.k[:, :columns].mT).mul_(self.work.scale)
            for block in side.blocks():
                column = side.bias(block, Tile(slice(0, columns), masked=False), slice(None)) if block.step else None
                if column is not None:
                    score[:, block.rows.start - prefix : block.rows.stop - prefix] += column
            whole = torch.logaddexp(sums, score.logsumexp(dim=-1, keepdim=True))
            own *= torch.exp(sums - whole)
            own += torch.exp(score - whole) @ self.v[:, :columns]
            sums.copy_(whole)
        if self.sink is not None:
            whole = torch.logaddexp(sums, self.sink[:, None] / self.unit)
            own *= torch.exp(sums - whole)
            sums.copy_(whole)
        sums *= self.unit

    def _add_up(
        self,
        room: Room,
        block: Any,
        tiles: Sequence[Any],
        heads: slice,
        shift: Tensor,
        scores: Tensor | None,
        out: Tensor,
        total: Tensor,
    ) -> None:
        """Add a block's weights, times the values and alone, to its rows of the output and of the total.

        Args:
            scores: of its only tile, not shifted yet, or None.
        """
        for tile in tiles:
            score = self.scores(room, block, tile, heads, shift) if scores is None else scores.sub_(shift)
            weights = self.exp(score)
            total += weights.sum(dim=-1, keepdim=True)
            kept = self.kept(block, tile)
            if kept is not None:
                weights.mul_(kept)
            used = room.rounded(weights) if self.native else weights
            add_product(out, used, self.low_v[heads, tile.keys])
            if isinstance(self.side, General) and self.side.has_values:
                out += self.side.outputs(tile, weights)
            if self.vectors is not None and self.vectors.of("value"):
                assert room.whole is not None
                clear_around(room.whole[0], weights.shape[2])
                self.vectors.outputs(room.whole[0], heads.start, block, tile, out[0])

    def _reach(self) -> Float[Tensor, "BH N 1"]:
        """At least the largest content score of each row."""
        if self.cap is not None:
            return self.q.new_full((self.q.shape[0], self.q.shape[1], 1), self.cap * self.unit)
        longest = self.k.norm(dim=-1).amax(dim=-1)[:, None, None]
        reach: Tensor = self.q.norm(dim=-1, keepdim=True) * longest * (self.work.scale * self.unit)
        return reach

    def _bound(self, block: Any, tiles: Sequence[Any], heads: slice, reach: Tensor | None) -> Tensor:
        """No less than any score of the rows."""
        assert reach is not None
        bound = reach[heads, block.rows]
        if isinstance(self.side, Strips):
            return bound if self.side.highest is None else bound + self.side.highest[heads]
        highest = [tile.bias.amax(dim=-1, keepdim=True) for tile in tiles if tile.bias is not None]
        return bound + torch.stack(highest).amax(dim=0) if highest else bound

    def _largest(
        self, room: Room, block: Any, tiles: Sequence[Any], heads: slice
    ) -> tuple[Float[Tensor, "g n 1"], Tensor | None]:
        """Each row's largest score, 0 in a row that sees nothing; and the scores, where the block is one tile."""
        n = block.rows.stop - block.rows.start
        peak, score = self.q.new_full((heads.stop - heads.start, n, 1), -torch.inf), None
        for tile in tiles:
            score = self.scores(room, block, tile, heads, None)
            peak = torch.maximum(peak, score.amax(dim=-1, keepdim=True))
        return torch.where(peak == -torch.inf, 0, peak), score if len(tiles) == 1 else None
