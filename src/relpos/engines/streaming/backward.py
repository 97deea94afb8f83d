"""The backward: each pair is computed once more, and every gradient comes from it.

The shift of a row is its log-sum-exp. With delta = <output, its gradient>, less the gradient of the log-sum-exp,

    d score = weight * (<d output, v> - delta)

gives the gradients of q, k and v by a matrix product each, and is handed to the terms for theirs. In float64, and
with terms that cost more anyway, a tile that holds its rows whole is taken at its word instead: its weights are summed
again, and so is delta, with which they may have to cancel.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import LineBias, Sinks
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.general import General
from relpos.engines.streaming.loop import Loop
from relpos.engines.streaming.operands import KeyGradient, Part, put, take
from relpos.engines.streaming.products import add_product
from relpos.engines.streaming.room import Room, clear_around


@dataclass(eq=False)
class Rows:
    """What the backward knows of a part's rows.

    Attributes:
        low: the output's gradient as it came; upstream: in the dtype of the sums, `[g, n, V]`.
        delta: <output, its gradient> - d_lse; d_lse: the gradient of the log-sum-exp; shift: that itself, `[g, n, 1]`.
        d_q, d_plain_q: the gradients of the queries, and of those that vectors meet, which may be one.
    """

    low: Float[Tensor, "g n V"]
    upstream: Float[Tensor, "g n V"]
    delta: Float[Tensor, "g n 1"]
    d_lse: Float[Tensor, "g n 1"]
    shift: Float[Tensor, "g n 1"]
    d_q: Float[Tensor, "g n D"]
    d_plain_q: Float[Tensor, "g n D"]


class Backward(Loop):
    """A call's gradients.

    Args:
        out, lse: what the forward gave. d_out, d_lse: their gradients.
        gradients: of the tensors whose gradients are wanted; they are added to it.
    """

    def __init__(
        self,
        call: Call,
        out: Float[Tensor, "B H N V"],
        lse: Float[Tensor, "B H N"],
        d_out: Float[Tensor, "B H N V"],
        d_lse: Float[Tensor, "B H N"],
        gradients: Gradients,
    ) -> None:
        super().__init__(call)
        side = self.side
        self.gradients = gradients
        self.out, self.d_out = out.flatten(0, 1), d_out.flatten(0, 1)
        self.lse, self.d_lse = lse.flatten(0, 1)[..., None], d_lse.flatten(0, 1)[..., None]
        self.line = next(iter(call.terms.of(LineBias)), None)
        self.d_line: Tensor | None = None
        if isinstance(side, General):
            side.expect(gradients)
        elif self.line is not None and gradients.wants(self.line.values):
            assert side.reversed is not None
            self.d_line = torch.zeros_like(side.reversed)
        if self.vectors is not None:
            self.vectors.expect()
        self.d_sink = None if self.sink is None else torch.zeros_like(self.sink[:, 0, 0])
        self.d_q, self.d_plain_q = self._of_queries(call.q), self._of_queries(call.plain_q)
        self.d_k, self.d_v, self.d_plain_k = (self._of_keys(x) for x in (call.k, call.v, call.plain_k))

    def _of_queries(self, x: Tensor | None) -> Float[Tensor, "BH N D"] | None:
        """Room for a gradient that is written once, where it is wanted."""
        if x is None or not self.gradients.wants(x):
            return None
        dtype = self.dtype if isinstance(self.side, General) else x.dtype
        return torch.zeros(x.shape, dtype=dtype, device=x.device).flatten(0, 1)

    def _of_keys(self, x: Tensor | None) -> KeyGradient | None:
        """Room for a gradient that is summed over blocks, where it is wanted."""
        if x is None or not self.gradients.wants(x):
            return None
        return KeyGradient(x, self.heads, self.dtype, in_turn=bool(self.planned) and not self.by_pairs)

    def run(self) -> None:
        """Add to the gradients that are wanted."""
        room = Room(self.dtype, self.call.q.device)
        for part in self.parts():
            rows = self._rows(part)
            for tile in part.tiles:
                exact = len(part.tiles) == 1 and (self.dtype == torch.float64 or isinstance(self.side, General))
                d = self._of_scores(room, part, rows, tile, exact)
                if self.native:
                    d = room.rounded(d)
                k, q = (part.heads.low_k, part.low_q) if self.native else (part.heads.k, part.q)
                if self.d_q is not None:
                    add_product(rows.d_q, d, k[:, tile.keys], self.call.scale)
                if self.d_k is not None:
                    add_product(self.d_k.at(part.which, tile.keys), d.mT, q, self.call.scale)
            for into, found in ((self.d_q, rows.d_q), (self.d_plain_q, rows.d_plain_q)):
                if into is not None:
                    put(into, part.which, part.block.numbers, found)
        self._collect()

    def _rows(self, part: Part) -> Rows:
        low, out, lse, d_lse = (
            take(x, part.which, part.block.numbers) for x in (self.d_out, self.out, self.lse, self.d_lse)
        )
        upstream, d_lse = low.to(self.dtype), d_lse.to(self.dtype)
        delta = (upstream * out.to(self.dtype)).sum(dim=-1, keepdim=True) - d_lse
        shift = lse.to(self.dtype) * self.unit
        shift = torch.where(shift == -torch.inf, torch.inf, shift)  # a row that sees nothing has no weights
        if self.sink is not None and self.d_sink is not None:
            self.d_sink[part.which] -= (self.exp(self.sink[part.which] - shift) * delta).sum(dim=(1, 2))
        d_q = torch.zeros_like(part.q)
        d_plain_q = d_q if self.call.plain_q is None else torch.zeros_like(part.plain_q)
        return Rows(low, upstream, delta, d_lse, shift, d_q, d_plain_q)

    # one tile

    def _of_scores(self, room: Room, part: Part, rows: Rows, tile: Any, exact: bool) -> Float[Tensor, "g n m"]:
        """The gradient of a tile's content scores; those of v and of the terms are added to theirs."""
        side = self.side
        weights = self.exp(self.scores(room, part, tile, rows.shift))
        if exact:
            total = weights.sum(dim=-1, keepdim=True)
            if self.sink is not None:
                total += self.exp(self.sink[part.which] - rows.shift)
            weights /= torch.where(total == 0, 1, total)
        kept = self.kept(part, tile)
        used = weights if kept is None else weights * kept
        if self.d_v is not None:
            left, right = (room.rounded(used), rows.low) if self.native else (used, rows.upstream)
            add_product(self.d_v.at(part.which, tile.keys), left.mT, right)
        d, whole = self._of_weights(room, part, rows, tile, used, kept)
        delta = (d * weights).sum(dim=-1, keepdim=True) - rows.d_lse if exact else rows.delta
        d.sub_(delta).mul_(weights)
        if self.vectors is not None:
            if self.vectors.of("value"):
                clear_around(whole[0, 0], d.shape[2])
            of_keys = self.d_k if self.call.plain_k is None else self.d_plain_k
            d_k = None if of_keys is None else of_keys.at(part.which, tile.keys)[0]
            self.vectors.collect(whole[0, 0], d[0], part, tile, rows.d_plain_q[0], d_k)
        if isinstance(side, General):
            side.collect(part.block, tile, d)
        elif self.d_line is not None:
            side.collect(self.d_line, part.block, tile, part.which, whole.sum(dim=2), d)
        if self.cap is not None:
            assert room.tanh is not None
            d.mul_(1 - room.tanh.square())
        return d

    def _of_weights(
        self, room: Room, part: Part, rows: Rows, tile: Any, used: Float[Tensor, "g n m"], kept: Tensor | None
    ) -> tuple[Float[Tensor, "g n m"], Float[Tensor, "g s r W"]]:
        """The gradient of the weights, and all of the buffer that it lies in, zero around its rows."""
        side = self.side
        g, n, m = used.shape
        step = side.skew(part.block, tile) if self.d_line is not None or self.vectors is not None else 0
        if step:
            d, whole = room.shifted.shifted(g, n, m, step, len(part.block.strips))
        else:
            d = room.other.rows(g, n, m)
            whole = d[:, None]
        with_vectors = self.vectors is not None and bool(self.vectors.of("value"))
        if self.vectors is not None and with_vectors:
            assert room.whole is not None
            clear_around(room.whole[0], m)
            whole.zero_()
            self.vectors.weights_backward(whole[0, 0], room.whole[0], rows.upstream[0], part, tile)
        add_product(d, rows.upstream, part.heads.v[:, tile.keys].mT, rounded=self.native, anew=not with_vectors)
        if isinstance(side, General) and side.has_values:
            d += side.outputs_backward(part.block, tile, used, rows.upstream)
        if kept is not None:
            d.mul_(kept)
        return d, whole

    # the whole

    def _collect(self) -> None:
        call, side, gradients = self.call, self.side, self.gradients
        for x, d_x in ((call.q, self.d_q), (call.plain_q, self.d_plain_q)):
            if x is not None and d_x is not None:
                gradients.add(x, d_x.view(x.shape))
        for x, sums in ((call.k, self.d_k), (call.v, self.d_v), (call.plain_k, self.d_plain_k)):
            if x is not None and sums is not None:
                gradients.add(x, sums.finished())
        sinks = call.terms.one(Sinks)
        if sinks is not None and self.d_sink is not None:
            gradients.add(sinks.logits, self.d_sink.view(self.batch, self.heads).sum(dim=0))
        if self.d_line is not None and self.line is not None:
            of_heads = self.d_line.flip(-1).view(self.batch, self.heads, -1).sum(dim=0)
            gradients.add(self.line.values, of_heads.sum_to_size(self.line.values.shape))
        if isinstance(side, General):
            leaves = zip(pytree.tree_leaves(call.terms), pytree.tree_leaves(side.gradients), strict=True)
            for x, found in {id(x): (x, found) for x, found in leaves if isinstance(x, Tensor)}.values():
                if sinks is None or x is not sinks.logits:
                    gradients.add(x, found)
            k = call.k if call.plain_k is None else call.plain_k
            gradients.add(call.q if call.plain_q is None else call.plain_q, side.into_q)
            gradients.add(k, side.into_k.unflatten(1, (k.shape[1], -1)).sum(dim=2))
        if self.vectors is not None:
            for x, found in self.vectors.gradients():
                gradients.add(x, found)
