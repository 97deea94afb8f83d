"""The backward: recomputes the scores tile by tile, and computes every gradient from them.

The shift of a row is its log-sum-exp. With delta = <output, d output> - d lse,

    d score = weight * (<d output, v> - delta)

One matrix product each gives the gradients of q, k and v; the plan computes the terms' gradients. In float64, and in
`DensePlan`, the weights of a block with one tile are divided by their own sum, which avoids the rounding error of the
log-sum-exp. Delta is then computed from these weights too, so that the two cancel exactly where they should. Half
precision does the same for delta, because the rounded output, times a peaked row's weight, would be most of the error.
A shard, whose keys are some of those that the log-sum-exp is of, does neither.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Sinks
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.cpu.head_threads import run_all, workers
from relpos.engines.streaming.cpu.matmul import add_matmul
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient, contiguous_rows
from relpos.engines.streaming.plan.tile_plan import TilePlan
from relpos.engines.streaming.plan.tiles import Tile
from relpos.engines.streaming.scores import Scores


class Backward:
    """Computes the gradients of a call by a plan.

    Args:
        out, lse: the results of the forward. d_out, d_lse: their gradients.
        gradients: collects the gradients, and knows which are wanted.
        kernel: PyTorch's, for tiles to whose scores nothing is added; None if the call is not for it (`cpu_kernel`).
        shard: whether the call's keys are some of those that the output and its log-sum-exp are of. Gradients of
            queries, keys and values are then added in place to the sums of earlier shards.
    """

    def __init__(
        self,
        call: Call,
        plan: TilePlan,
        out: Float[Tensor, "B H N V"],
        lse: Float[Tensor, "B H N"],
        d_out: Float[Tensor, "B H N V"],
        d_lse: Float[Tensor, "B H N"],
        gradients: Gradients,
        kernel: Callable[..., Any] | None = None,
        shard: bool = False,
    ) -> None:
        self.shard = shard
        self.call, self.plan, self.gradients, self.kernel = call, plan, gradients, kernel
        self.scores = Scores(call, plan)
        self.out, self.d_out = out.flatten(0, 1), d_out.flatten(0, 1)
        self.lse, self.d_lse = lse.flatten(0, 1)[..., None], d_lse.flatten(0, 1)[..., None]
        sink = self.scores.sink
        self.d_sink = None if sink is None else torch.zeros_like(sink)
        dtype, heads, head_by_head = self.scores.dtype, self.scores.heads, not plan.by_block
        self.d_q, self.d_plain_q = (
            None if x is None or not gradients.wants(x) else gradients.buffer(x) if shard else x.new_empty(x.shape)
            for x in (call.q, call.plain_q)
        )  # each row is written once
        self.d_k, self.d_v, self.d_plain_k = (
            None
            if x is None or not gradients.wants(x)
            else KeyGradient(x, heads, dtype, head_by_head, gradients.buffer(x) if shard else None)
            for x in (call.k, call.v, call.plain_k)
        )
        plan.expect(gradients)

    def run(self) -> None:
        """Add to the gradients."""
        run_all([share._run_chunks for share in self._shares()])
        self._finish()

    def _shares(self) -> list[Backward]:
        """The shares that threads compute in parallel, into the same gradients."""
        plans = self.plan.shares(workers(self.call, self.plan.share_count))
        if len(plans) == 1:
            return [self]
        shares = [copy.copy(self) for _ in plans]
        for share, plan in zip(shares, plans, strict=True):
            share.plan, share.scores = plan, self.scores.share(plan)
            share.d_k, share.d_v, share.d_plain_k = (
                None if sums is None else sums.share() for sums in (self.d_k, self.d_v, self.d_plain_k)
            )
        return shares

    def _run_chunks(self) -> None:
        for chunk in self.scores.chunks():
            self._run(chunk)
        for sums in (self.d_k, self.d_v, self.d_plain_k):
            if sums is not None:
                sums.settle()

    def _run(self, chunk: Chunk) -> None:
        """Add the contribution of one chunk."""
        scores, plan, scale, heads = self.scores, self.plan, self.call.scale, chunk.head_slice
        input_upstream = chunk.take(self.d_out)
        upstream = input_upstream.to(scores.dtype)
        out, lse, d_lse = (chunk.take(x).to(scores.dtype) for x in (self.out, self.lse, self.d_lse))
        delta = (upstream * out).sum(dim=-1, keepdim=True) - d_lse
        shift = lse * plan.unit
        shift = torch.where(shift == -torch.inf, torch.inf, shift)  # a row that sees nothing has no weights
        sink = scores.sink_of(chunk)
        if sink is not None and self.d_sink is not None:
            sink = scores.exp(sink - shift)
            if self.d_sink.shape[1] == 1:
                self.d_sink[heads] -= (sink * delta).sum(dim=(1, 2), keepdim=True)
            else:
                chunk.put(self.d_sink, -sink * delta)
        q, k = (chunk.input_q, chunk.heads.input_k) if plan.bfloat16 else (chunk.q, chunk.heads.k)
        d_q = torch.zeros_like(chunk.q)
        d_plain_q = d_q if self.call.plain_q is None else torch.zeros_like(chunk.plain_q)
        for tile in chunk.block.tiles:
            if self.kernel is not None and plan.is_bare(chunk.block, tile) and torch.get_num_threads() == 1:
                self._run_bare(chunk, tile, self.kernel, upstream, out, lse, d_q)
                continue
            weights = scores.exp(scores.compute(chunk, tile, shift))
            alone = len(chunk.block.tiles) == 1 and not (self.shard or self.call.is_part)
            if plan.renormalizes and alone:
                total = weights.sum(dim=-1, keepdim=True)
                total = total if sink is None else total + sink
                weights /= torch.where(total == 0, 1, total)

            kept = None if scores.dropout is None else scores.dropout.factors(chunk, tile)
            used = weights if kept is None else torch.mul(weights, kept, out=scores.workspace.used.like(weights))
            if self.d_v is not None:
                left, right = used, upstream
                if plan.bfloat16:
                    left, right = scores.workspace.rounded(used), input_upstream
                add_matmul(self.d_v.at(heads, tile.keys), left.mT, right)

            d = plan.gradient_buffer(scores.workspace, chunk, tile)
            add_matmul(d, upstream, chunk.heads.v[:, tile.keys].mT, rounded=plan.bfloat16, overwrite=True)
            plan.values_backward(d, used, upstream, chunk, tile)
            if kept is not None:
                d.mul_(kept)
            if alone and (plan.renormalizes or self.out.dtype != scores.dtype):
                product = torch.mul(d, weights, out=scores.workspace.product.rows(*d.shape))
                delta = product.sum(dim=-1, keepdim=True) - d_lse
            d.sub_(delta).mul_(weights)
            plan.collect(d, chunk, tile, d_plain_q, self.d_k if self.call.plain_k is None else self.d_plain_k)
            if scores.tanh is not None:
                d.mul_(1 - scores.tanh.square())

            d = scores.workspace.rounded(d) if plan.bfloat16 else d
            if self.d_q is not None:
                add_matmul(d_q, d, k[:, tile.keys], scale)
            if self.d_k is not None:
                add_matmul(self.d_k.at(heads, tile.keys), d.mT, q, scale)
        for whole, rows in ((self.d_q, d_q), (self.d_plain_q, d_plain_q)):
            if whole is not None:
                (chunk.add if self.shard else chunk.put)(whole.flatten(0, 1), rows)

    def _run_bare(self, chunk: Chunk, tile: Tile, kernel: Callable[..., Any], *rows: Tensor) -> None:
        """Add the contribution of a tile by the kernel, from rows of the output's gradient, the output, its log-sum-exp
        and, to add to, the gradient of the queries."""
        upstream, out, lse, d_q = rows
        k, v = (contiguous_rows(x[None, :, tile.keys]) for x in (chunk.heads.k, chunk.heads.v))
        saved = out[None], lse[None, ..., 0]
        found = kernel(upstream[None], chunk.q[None], k, v, *saved, 0.0, False, scale=self.call.scale)
        d_q += found[0][0]
        for sums, gradient in zip((self.d_k, self.d_v), found[1:], strict=True):
            if sums is not None:
                for into, own in zip(sums.at(chunk.head_slice, tile.keys), gradient[0], strict=True):
                    into += own

    def _finish(self) -> None:
        call, gradients = self.call, self.gradients
        self.plan.finish(gradients)
        if not self.shard:
            for x, d_x in ((call.q, self.d_q), (call.plain_q, self.d_plain_q)):
                gradients.add(x, d_x)
            for x, sums in ((call.k, self.d_k), (call.v, self.d_v), (call.plain_k, self.d_plain_k)):
                gradients.add(x, None if sums is None else sums.finished())
        sinks = call.terms.one(Sinks)
        if sinks is not None and self.d_sink is not None:
            d_sink = self.d_sink.view(self.scores.batch, self.scores.heads, -1)
            own = sinks.logits.shape if sinks.of_queries else (1, *sinks.logits.shape, 1)
            gradients.add(sinks.logits, d_sink.sum_to_size(own).view(sinks.logits.shape))
