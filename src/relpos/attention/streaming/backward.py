"""The backward: each pair is computed once more, and every gradient comes from it.

The shift of a row is its log-sum-exp. With delta = <output, its gradient>, less the gradient of the log-sum-exp,

    d score = weight * (<d output, v> - delta)

gives the gradients of q, k and v by a matrix product each, and is handed to the terms for theirs. In float64, and
with terms that cost more anyway, a tile that holds its rows whole is taken at its word instead: its weights are summed
again, and so is delta, with which they may have to cancel.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.attention.streaming.general import General
from relpos.attention.streaming.loop import Loop
from relpos.attention.streaming.plan import Work
from relpos.attention.streaming.products import add_product
from relpos.attention.streaming.room import Room, clear_around
from relpos.attention.streaming.strips import Strips
from relpos.core import LineBias, Sinks


class Backward(Loop):
    """A call's gradients.

    Args:
        out, lse: what the forward gave. d_out, d_lse: their gradients.
        needed: the tensors whose gradients are wanted.
    """

    def __init__(
        self,
        work: Work,
        out: Float[Tensor, "B H N V"],
        lse: Float[Tensor, "B H N"],
        d_out: Float[Tensor, "B H N V"],
        d_lse: Float[Tensor, "B H N"],
        needed: list[Tensor],
    ) -> None:
        super().__init__(work)
        side = self.side
        self.needed = {id(x): x for x in needed}
        self.found: dict[int, Tensor] = {}
        wide = d_out.to(self.dtype)
        self.upstream = side.gather(wide)
        self.d_lse = side.gather(d_lse.to(self.dtype)[..., None])
        self.delta = side.gather((wide * out.to(self.dtype)).sum(dim=-1, keepdim=True)) - self.d_lse
        shift = side.gather(lse[..., None].to(self.dtype) * self.unit)
        self.shift = torch.where(shift == -torch.inf, torch.inf, shift)  # a row that sees nothing has no weights
        self.d_q, self.d_k, self.d_v = (
            torch.zeros_like(x) if id(own) in self.needed else None
            for x, own in ((self.q, work.q), (self.k, work.k), (self.v, work.v))
        )
        self.line = next(iter(work.terms.of(LineBias)), None)
        self.d_line: Tensor | None = None
        if isinstance(side, General):
            side.expect(self.needed.keys())
        elif self.line is not None and id(self.line.values) in self.needed:
            assert side.reversed is not None
            self.d_line = torch.zeros_like(side.reversed)
        if self.vectors is not None:
            self.vectors.expect()

    def run(self) -> dict[int, Tensor]:
        """The gradients by the `id` of their tensors; of one that is not there it is zero."""
        room, scale = Room(self.q), self.work.scale
        for block, tiles, heads in self.order():
            for tile in tiles:
                exact = len(tiles) == 1 and (self.dtype == torch.float64 or isinstance(self.side, General))
                d = self._of_scores(room, block, tile, heads, exact)
                if self.native:
                    d = room.rounded(d)
                if self.d_q is not None:
                    add_product(self.d_q[heads, block.rows], d, self.low_k[heads, tile.keys], scale)
                if self.d_k is not None:
                    add_product(self.d_k[heads, tile.keys], d.mT, self.low_q[heads, block.rows], scale)
        self._collect()
        return self.found

    # one tile

    def _of_scores(self, room: Room, block: Any, tile: Any, heads: slice, exact: bool) -> Float[Tensor, "g n m"]:
        """The gradient of a tile's content scores; those of v and of the terms are added to theirs."""
        side, rows = self.side, block.rows
        weights = self.exp(self.scores(room, block, tile, heads, self.shift[heads, rows]))
        if exact:
            total = weights.sum(dim=-1, keepdim=True)
            if self.sink is not None:
                total += self.exp(self.sink[heads, None] - self.shift[heads, rows])
            weights /= torch.where(total == 0, 1, total)
        kept = self.kept(block, tile)
        used = weights if kept is None else weights * kept
        if self.d_v is not None:
            upstream = self.upstream[heads, rows]
            left, right = (room.rounded(used), upstream.bfloat16()) if self.native else (used, upstream)
            add_product(self.d_v[heads, tile.keys], left.mT, right)
        d, whole = self._of_weights(room, block, tile, heads, used, kept)
        delta = self.delta[heads, rows]
        if exact:
            delta = (d * weights).sum(dim=-1, keepdim=True) - self.d_lse[heads, rows]
        d.sub_(delta).mul_(weights)
        if self.vectors is not None:
            if self.vectors.of("value"):
                clear_around(whole[0, 0], d.shape[2])
            self.vectors.collect(whole[0, 0], d[0], heads.start, block, tile)
        if isinstance(side, General):
            side.collect(block, tile, d)
        elif self.d_line is not None:
            side.collect(self.d_line, block, tile, heads, whole.sum(dim=2), d)
        if self.cap is not None:
            assert room.tanh is not None
            d.mul_(1 - room.tanh.square())
        return d

    def _of_weights(
        self, room: Room, block: Any, tile: Any, heads: slice, used: Float[Tensor, "g n m"], kept: Tensor | None
    ) -> tuple[Float[Tensor, "g n m"], Float[Tensor, "g s r W"]]:
        """The gradient of the weights, and all of the buffer that it lies in, zero around its rows."""
        side, upstream = self.side, self.upstream[heads, block.rows]
        g, n, m = used.shape
        step = side.skew(block, tile) if self.d_line is not None or self.vectors is not None else 0
        if step:
            d, whole = room.shifted.shifted(g, n, m, step, len(block.strips))
        else:
            d = room.other.rows(g, n, m)
            whole = d[:, None]
        with_vectors = self.vectors is not None and bool(self.vectors.of("value"))
        if self.vectors is not None and with_vectors:
            assert room.whole is not None
            clear_around(room.whole[0], m)
            whole.zero_()
            self.vectors.weights_backward(whole[0, 0], room.whole[0], upstream[0], heads.start, block, tile)
        add_product(d, upstream, self.v[heads, tile.keys].mT, rounded=self.native, anew=not with_vectors)
        if isinstance(side, General) and side.has_values:
            d += side.outputs_backward(block, tile, used, upstream)
        if kept is not None:
            d.mul_(kept)
        return d, whole

    # the whole

    def _add(self, x: Tensor, gradient: Tensor | None) -> None:
        """Add to the gradient of a tensor, which may serve in several places."""
        if gradient is not None and id(x) in self.needed:
            known = self.found.get(id(x))
            self.found[id(x)] = gradient if known is None else known + gradient

    def _collect(self) -> None:
        work, side = self.work, self.side
        if self.d_q is not None:
            self._add(work.q, side.scatter(self.d_q))
        for x, d_x in ((work.k, self.d_k), (work.v, self.d_v)):
            if d_x is not None:
                self._add(x, self._of_keys(d_x, x))
        sinks = work.terms.one(Sinks)
        if sinks is not None and self.sink is not None:
            share = -self.exp(self.sink[:, None] - self.shift) * self.delta
            self._add(sinks.logits, share.sum(dim=(1, 2)).view(self.batch, self.heads).sum(dim=0))
        if self.d_line is not None and self.line is not None:
            of_heads = self.d_line.flip(-1).view(self.batch, self.heads, -1).sum(dim=0)
            self._add(self.line.values, of_heads.sum_to_size(self.line.values.shape))
        if isinstance(side, General):
            leaves = zip(pytree.tree_leaves(work.terms), pytree.tree_leaves(side.gradients), strict=True)
            for x, gradient in {id(x): (x, gradient) for x, gradient in leaves if isinstance(x, Tensor)}.values():
                if sinks is None or x is not sinks.logits:
                    self._add(x, gradient)
            self._add_plain(side.into_q, side.into_k.flatten(0, 1))
        if self.vectors is not None and isinstance(side, Strips):
            for x, gradient in self.vectors.gradients():
                self._add(x, gradient)
            self._add_plain(side.scatter(self.vectors.d_q), self.vectors.d_k)

    def _add_plain(self, d_q: Float[Tensor, "B H N D"], d_k: Float[Tensor, "BH M D"]) -> None:
        """The gradients of the queries and keys that vectors meet."""
        work = self.work
        k = work.k if work.plain_k is None else work.plain_k
        self._add(work.q if work.plain_q is None else work.plain_q, d_q)
        self._add(k, self._of_keys(d_k, k))

    def _of_keys(self, x: Float[Tensor, "BH M D"], like: Float[Tensor, "B G M D"]) -> Float[Tensor, "B G M D"]:
        """The sum over the query heads that share a key head of `like`."""
        summed: Tensor = x.unflatten(0, (self.batch, like.shape[1], -1)).sum(dim=2)
        return summed
