"""An engine's forward and backward as two custom operators, so that a compiled graph holds a call as one node.

They take a call as `packing.pack` makes it. The backward has no gradient of its own: a second derivative raises.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from relpos.core import at_least_float32
from relpos.core.checks import without_autocast
from relpos.core.private import inside_forward_mode, inside_transform
from relpos.engines.call import Call
from relpos.engines.packing import Packed, pack, unpack


class Gradients:
    """The gradients of some of a call's tensors, as a list in the order of the tensors; each tensor occurs once.

    Args:
        tensors: those whose gradients are wanted. A tensor is known by its identity.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.sums: list[Tensor | None] = [None] * len(tensors)

    def _place(self, x: Tensor | None) -> int | None:
        return next((place for place, known in enumerate(self.tensors) if known is x), None)

    def wants(self, x: Tensor | None) -> bool:
        """Whether a tensor is among them."""
        return self._place(x) is not None

    def add(self, x: Tensor | None, gradient: Tensor | None) -> None:
        """Add to the gradient of a tensor, which may serve in several parts of a call; nothing where none is wanted."""
        place = self._place(x)
        if place is not None and gradient is not None:
            known = self.sums[place]
            self.sums[place] = gradient if known is None else known + gradient

    def buffer(self, x: Tensor) -> Tensor:
        """What to add to in place: zeros at first, in float32 or wider."""
        place = self._place(x)
        assert place is not None
        known = self.sums[place]
        if known is None:
            known = self.sums[place] = torch.zeros_like(at_least_float32(x))
        return known

    def of(self, x: Tensor) -> Tensor | None:
        """The gradient of a tensor so far; None means zeros."""
        place = self._place(x)
        return None if place is None else self.sums[place]

    def finished(self) -> list[Tensor]:
        """All of them, each in its tensor's dtype."""
        found = (torch.zeros_like(x) if sums is None else sums for x, sums in zip(self.tensors, self.sums, strict=True))
        return [gradient.to(x.dtype).contiguous() for gradient, x in zip(found, self.tensors, strict=True)]


RunForward = Callable[[Call], tuple[Tensor, Tensor]]
"""Output and log-sum-exp of a call."""
RunBackward = Callable[[Call, Tensor, Tensor, Tensor, Tensor, Gradients], None]
"""Of a call, its output and log-sum-exp and their gradients: adds to the gradients that are wanted."""

FORWARD_MODE = "forward-mode derivatives"


def lacks_transform() -> str | None:
    """The transform of functions that the call is made under, which no custom operator goes through."""
    if torch.compiler.is_compiling():
        return None
    if inside_forward_mode():
        return FORWARD_MODE
    return "torch.func (vmap, grad, ...)" if inside_transform() else None


def _apart(tensors: list[Tensor]) -> list[Tensor]:
    """The tensors, each with an identity of its own: a compiler may find that two hold the same."""
    return [x.detach() if any(x is y for y in tensors[:place]) else x for place, x in enumerate(tensors)]


def make_operator(engine: str, forward: RunForward, backward: RunBackward) -> RunForward:
    """A function that computes a call by `relpos::<engine>`, which takes it packed, with its gradient registered.

    The forward is called with autocast off, as `relpos.attention` runs engines; the backward, which autograd calls
    whenever it comes to it, switches it off itself.
    """

    @torch.library.custom_op(
        f"relpos::{engine}",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure) -> (Tensor, Tensor)",
    )
    def attend(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        return forward(unpack(tensors, numbers, structure))

    @attend.register_fake
    def _(tensors: list[Tensor], numbers: list[int], structure: str) -> tuple[Tensor, Tensor]:
        call = unpack(tensors, numbers, structure)
        shape = call.q.shape[:3]
        wide = torch.promote_types(call.q.dtype, torch.float32)
        return call.q.new_empty(*shape, call.v.shape[3]), call.q.new_empty(shape, dtype=wide)

    @torch.library.custom_op(
        f"relpos::{engine}_backward",
        mutates_args=(),
        schema="(Tensor[] tensors, SymInt[] numbers, str structure, Tensor out, Tensor lse, Tensor d_out, "
        "Tensor d_lse, int[] needed) -> Tensor[]",
    )
    def attend_backward(tensors: list[Tensor], numbers: list[int], structure: str, *rest: Any) -> list[Tensor]:
        out, lse, d_out, d_lse, needed = rest
        tensors = _apart(tensors)
        gradients = Gradients([tensors[place] for place in needed])
        with without_autocast(out.device):
            backward(unpack(tensors, numbers, structure), out, lse, d_out, d_lse, gradients)
        return gradients.finished()

    @attend_backward.register_fake
    def _(tensors: list[Tensor], numbers: list[int], structure: str, *rest: Any) -> list[Tensor]:
        return [torch.empty_like(tensors[place], memory_format=torch.contiguous_format) for place in rest[-1]]

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

    def run(call: Call) -> tuple[Tensor, Tensor]:
        out, lse = attend(*pack(call))
        return out, lse

    return run
