"""The block loop as two custom operators, forward and backward, so that a compiled graph holds a call as one node.

They take a call as `plan.pack` makes it. The backward has no gradient of its own: a second derivative raises.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.attention.streaming.backward import Backward
from relpos.attention.streaming.forward import Forward
from relpos.attention.streaming.plan import unpack


@torch.library.custom_op(
    "relpos::streaming", mutates_args=(), schema="(Tensor[] tensors, str structure) -> (Tensor, Tensor)"
)
def streaming(tensors: list[Tensor], structure: str) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of a packed call."""
    with torch.autocast(tensors[0].device.type, enabled=False):
        return Forward(unpack(tensors, structure)).run()


@streaming.register_fake
def _(tensors: list[Tensor], structure: str) -> tuple[Tensor, Tensor]:
    work = unpack(tensors, structure)
    shape = work.q.shape[:3]
    wide = torch.promote_types(work.q.dtype, torch.float32)
    return work.q.new_empty(*shape, work.v.shape[3]), work.q.new_empty(shape, dtype=wide)


@torch.library.custom_op(
    "relpos::streaming_backward",
    mutates_args=(),
    schema="(Tensor[] tensors, str structure, Tensor out, Tensor lse, Tensor d_out, Tensor d_lse, int[] needed) "
    "-> Tensor[]",
)
def streaming_backward(
    tensors: list[Tensor], structure: str, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needed: list[int]
) -> list[Tensor]:
    """The gradients of the tensors at the places `needed`."""
    wanted = [tensors[place] for place in needed]
    with torch.autocast(out.device.type, enabled=False):
        found = Backward(unpack(tensors, structure), out, lse, d_out, d_lse, wanted).run()
    gradients = (found[id(x)] if id(x) in found else torch.zeros_like(x) for x in wanted)
    return [gradient.to(x.dtype).contiguous() for gradient, x in zip(gradients, wanted, strict=True)]


@streaming_backward.register_fake
def _(
    tensors: list[Tensor], structure: str, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needed: list[int]
) -> list[Tensor]:
    return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in needed]


def _keep(ctx: Any, inputs: tuple[list[Tensor], str], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.structure = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[list[Tensor | None], None]:
    *tensors, out, lse = ctx.saved_tensors
    needed = [place for place, asked in enumerate(ctx.needs_input_grad[0]) if asked]
    found = streaming_backward(tensors, ctx.structure, out, lse, d_out, d_lse, needed)
    gradients: list[Tensor | None] = [None] * len(tensors)
    for place, gradient in zip(needed, found, strict=True):
        gradients[place] = gradient
    return gradients, None


streaming.register_autograd(_backward, setup_context=_keep)


def _no_second_derivative(ctx: Any, *gradients: Any) -> Any:
    raise NotImplementedError(
        "expected first derivatives only; got a second derivative of backend 'streaming', which lacks it. "
        "Use backend='reference'."
    )


streaming_backward.register_autograd(_no_second_derivative, setup_context=lambda ctx, inputs, output: None)
