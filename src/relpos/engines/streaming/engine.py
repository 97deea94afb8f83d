"""The engine: computes a call whole, by groups of segments, or, with a row rule, by blocks of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.core import (
    AxisVectors,
    DenseBias,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Sinks,
    Softcap,
    after_content,
    at_least_float32,
)
from relpos.core.private import flash_kernel_backward
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.engine import Compute, Engine, Shards, Way
from relpos.engines.operators import (
    Gradients,
    Operator,
    RunBackward,
    RunForward,
    back_of_each,
    lacks_transform,
    of_each,
)
from relpos.engines.streaming.backward import Backward
from relpos.engines.streaming.cpu import cpu_kernel, masked_kernel
from relpos.engines.streaming.forward import Forward
from relpos.engines.streaming.plan.planning import make_plan
from relpos.engines.streaming.plan.regroup import by_segments, token_groups


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    groups = by_segments(call)
    if groups is None:
        return _forward_whole(call)
    out = call.q.new_empty(*call.q.shape[:3], call.v.shape[3])
    lse = at_least_float32(call.q).new_empty(call.q.shape[:3])
    for group in groups:
        for whole, part in zip((out, lse), _forward_whole(group.call), strict=True):
            group.put(whole, part)
    return out, lse


def _forward_whole(call: Call) -> tuple[Tensor, Tensor]:
    if masked_kernel.supports(call):
        return masked_kernel.forward(call)
    return cpu_kernel.forward(call) if cpu_kernel.supports(call) else Forward(call, make_plan(call)).run()


def _by_flash_kernel(call: Call) -> bool:
    """Whether PyTorch's kernel computes the forward of a call, once its rotation is applied."""
    rotation = call.terms.one(Rotation)
    same_width = rotation is None or rotation.widens == 1
    return same_width and cpu_kernel.supports(replace(call, terms=after_content(call.terms)))


def _backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients, shard: bool = False
) -> None:
    groups = by_segments(call)
    if groups is None:
        _backward_whole(call, out, lse, d_out, d_lse, gradients, shard=shard)
        return
    for group in groups:
        group_gradients = Gradients([part for x, part, _ in group.links if gradients.wants(x)])
        out_g, lse_g, d_out_g = (group.take(x) for x in (out, lse, d_out))
        d_lse_g = None if d_lse is None else group.take(d_lse)
        _backward_whole(group.call, out_g, lse_g, d_out_g, d_lse_g, group_gradients, shard=shard)
        for x, part, add in group.links:
            gradient = group_gradients.of(part)
            if gradient is not None:
                add(gradients.buffer(x), gradient)


def _flash_kernel(call: Call) -> tuple[RunForward, RunBackward]:
    return cpu_kernel.forward, partial(_backward_whole, natural=True)


def _backward_whole(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients,
    natural: bool | None = None, shard: bool = False,
) -> None:  # fmt: skip
    """The backward without groups. `natural`: whether a flash kernel computed the forward; scores are then in base e,
    as its log-sum-exp is. None: find out."""
    masked = masked_kernel.supports(call)
    if masked and _is_zero(d_lse):  # the kernel takes no gradient of the log-sum-exp
        masked_kernel.backward([call], out, lse, d_out, gradients)
        return
    natural = (masked or cpu_kernel.supports(call)) if natural is None else natural
    plan = make_plan(call, backward=True, natural=natural)
    kernel = flash_kernel_backward() if natural and not call.return_lse and call.terms.of(LineVectors) else None
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse
    Backward(call, plan, out, lse, d_out, d_lse, gradients, kernel, shard).run()


def _is_zero(gradient: Tensor | None) -> bool:
    return gradient is None or not gradient.any()


_each_forward, _each_backward = of_each(_forward), back_of_each(_backward)


def _forward_of_all(call: Call) -> tuple[Tensor, Tensor]:
    return masked_kernel.forward(*call.each()) if _all_by_masked_kernel(call) else _each_forward(call)


def _backward_of_all(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients
) -> None:
    if _all_by_masked_kernel(call) and _is_zero(d_lse):
        masked_kernel.backward(call.each(), out, lse, d_out, gradients)
    else:
        _each_backward(call, out, lse, d_out, d_lse, gradients)


def _all_by_masked_kernel(call: Call) -> bool:
    """Whether several calls under one softmax are computed at once."""
    calls = call.each()
    return len(calls) > 1 and all(masked_kernel.supports(one) and token_groups(one) is None for one in calls)


_attend = Operator("streaming", _forward_of_all, _backward_of_all)


def _planned(prepare: Callable[[Call], tuple[RunForward, RunBackward]] | None = None) -> Compute:
    planned = _attend.planned(prepare)
    return lambda call: planned(call.rotated())


def _by_rules(call: Call) -> tuple[Tensor, Tensor]:
    """A row rule may be any function, which no operator can hold. It gives each block of rows a dense bias, which the
    backward computes again, so that only one block's bias is in memory."""
    rules, n, m = call.terms.of(RowRule), call.q.shape[2], call.k.shape[2]
    wide_q = at_least_float32(call.q if call.plain_q is None else call.plain_q)
    wide_k = at_least_float32(call.k if call.plain_k is None else call.plain_k)
    wide_k = wide_k.repeat_interleave(wide_q.shape[1] // wide_k.shape[1], dim=1)
    call = replace(call, terms=call.terms.without(RowRule))
    if not any(term.meets_plain for term in call.terms):
        call = replace(call, plain_q=None, plain_k=None)
    count = max(1, dense.PAIRS_AT_ONCE // max(1, m))
    if call.mask is not None and call.mask.blocks is not None:
        count = -(-count // call.mask.blocks.size) * call.mask.blocks.size
    everything = slice(0, m)

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, stop)
        mask = None if call.mask is None else call.mask.narrow(rows, everything, call.q.device)
        seen = None if mask is None else mask.dense(stop - start, m, call.q.device)
        bias = sum(rule(wide_q[:, :, rows], wide_k, seen, rows) for rule in rules)
        assert isinstance(bias, Tensor)
        plain_q = None if call.plain_q is None else call.plain_q[:, :, rows]
        terms = call.terms.narrow(rows, everything) + DenseBias(bias)
        return _attend(replace(call, q=call.q[:, :, rows], plain_q=plain_q, terms=terms, mask=mask, first_row=start))

    blocks = [checkpoint(attend, start, min(start + count, n), use_reentrant=False) for start in range(0, n, count)]
    outs, lses = zip(*blocks, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)


def _run(call: Call) -> tuple[Tensor, Tensor]:
    call = call.rotated()
    return _by_rules(call) if call.terms.one(RowRule) is not None else _attend(call)


class Streaming(Engine):
    name = "streaming"
    shards = Shards(_forward, partial(_backward, shard=True))
    summary = "blocks of rows in O(N) memory, with an exact gradient; every term, any device; fastest on CPU"
    serves_any_size = True
    ways = (
        Way(
            "the forward by PyTorch's flash kernel, the gradients by blocks",
            _by_flash_kernel,
            lambda call: _planned(_flash_kernel),
        ),
        Way(
            "blocks of rows, whole or by groups of segments",
            lambda call: call.terms.one(RowRule) is None,
            lambda call: _planned(),
        ),
        Way("a row rule, for a block of rows at a time", lambda call: True, lambda call: _run),
    )
    served = (
        LineBias, LineVectors, AxisVectors, LowRank, DenseBias, IndexedBias, RowRule, Rotation, PairRotations,
        QueryBias, QueryScale, Softcap, Sinks,
    )  # fmt: skip

    def unsupported(self, call: Call) -> str | None:
        if call.mask is not None and call.mask.allowed is not None:
            return "a mask as a tensor"
        if call.terms.one(RowRule) is not None and call.terms.one(PairRotations) is not None:
            return "RowRule beside PairRotations"
        return self.unknown(call) or lacks_transform()

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        return _run(call)


STREAMING = Streaming()
