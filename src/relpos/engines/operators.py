"""An engine's forward and backward as two custom operators, so that a compiled graph holds a call as one node.

They take a call as `work.pack` makes it. The backward has no gradient of its own: a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from relpos.engines.private import inside_forward_mode, inside_transform
from relpos.engines.work import Packed, Work, unpack

Forward = Callable[[Work], tuple[Tensor, Tensor]]
"""Output and log-sum-exp of a call."""
Gradients = dict[int, Tensor]
"""By the `id` of a tensor."""
Backward = Callable[[Work, Tensor, Tensor, Tensor, Tensor, list[Tensor]], Gradients]
"""Of a call, its output and log-sum-exp, their gradients and the tensors asked for: gradients by the `id` of a tensor;
of one that is not there it is zero."""


FORWARD_MODE = "forward-mode derivatives"


def lacks_transform() -> str | None:
    """The transform of functions that the call is made under, which no custom operator goes through."""
    if torch.compiler.is_compiling():
        return None
    if inside_forward_mode():
        return FORWARD_MODE
    return "torch.func (vmap, grad, ...)" if inside_transform() else None


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, each place with an identity of its own: a compiler may find that two places hold the same."""
    known: set[int] = set()
    apart = []
    for x in tensors:
        apart.append(x.detach() if id(x) in known else x)
        known.add(id(x))
    return apart


def make_operator(engine: str, forward: Forward, backward: Backward) -> Callable[[list[Tensor], list[int], str], Any]:
    """`relpos::<engine>`, which takes a packed call and gives output and log-sum-exp, with its gradient registered."""

    @torch.library.custom_op(
        f"relpos::{engine}",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure) -> (Tensor, Tensor)",
    )
    def attend(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return forward(unpack(tensors, numbers, structure))

    @attend.register_fake
    def _(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        work = unpack(tensors, numbers, structure)
        shape = work.q.shape[:3]
        wide = torch.promote_types(work.q.dtype, torch.float32)
        return work.q.new_empty(*shape, work.v.shape[3]), work.q.new_empty(shape, dtype=wide)

    @torch.library.custom_op(
        f"relpos::{engine}_backward",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure, Tensor out, Tensor lse, Tensor d_out, "
        "Tensor d_lse, int[] needed) -> Tensor[]",
    )
    def attend_backward(
        tensors: list[Tensor],
        numbers: list[int],
        structure: str,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        needed: list[int],
    ) -> list[Tensor]:
        tensors = _apart(tensors)
        wanted = [tensors[place] for place in needed]
        with torch.autocast(out.device.type, enabled=False):
            found = backward(unpack(tensors, numbers, structure), out, lse, d_out, d_lse, wanted)
        gradients = (found[id(x)] if id(x) in found else torch.zeros_like(x) for x in wanted)
        return [gradient.to(x.dtype).contiguous() for gradient, x in zip(gradients, wanted, strict=True)]

    @attend_backward.register_fake
    def _(
        tensors: list[Tensor],
        numbers: list[int],
        structure: str,
        out: Tensor,
        lse: Tensor,
        d_out: Tensor,
        d_lse: Tensor,
        needed: list[int],
    ) -> list[Tensor]:
        return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in needed]

    def keep(ctx: Any, inputs: Packed, output: tuple[Tensor, Tensor]) -> None:
        tensors, ctx.numbers, ctx.structure = inputs
        ctx.save_for_backward(*tensors, *output)

    def step_back(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[list[Tensor | None], None, None]:
        *tensors, out, lse = ctx.saved_tensors
        needed = [place for place, asked in enumerate(ctx.needs_input_grad[0]) if asked]
        found = attend_backward(tensors, ctx.numbers, ctx.structure, out, lse, d_out, d_lse, needed)
        gradients: list[Tensor | None] = [None] * len(tensors)
        for place, gradient in zip(needed, found, strict=True):
            gradients[place] = gradient
        return gradients, None, None

    def no_second_derivative(ctx: Any, *gradients: Any) -> Any:
        raise NotImplementedError(
            f"expected first derivatives only; got a second derivative of backend {engine!r}, which lacks it. "
            "Use backend='reference'."
        )

    attend.register_autograd(step_back, setup_context=keep)
    attend_backward.register_autograd(no_second_derivative, setup_context=lambda ctx, inputs, output: None)
    return attend
