"""relpos's own error for what PyTorch's fused attention kernels lack: a second derivative.

PyTorch's error names an operator that nobody called. A hook on the kernel's node, which only a training call has, puts
an identity behind each gradient that is to be differentiated; the backward of that identity raises.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from relpos.core.private import inside_transform, is_batched


def first_derivative_only(output: Tensor) -> Tensor:
    """The output of `scaled_dot_product_attention`; a second derivative through a fused kernel raises."""
    if not output.requires_grad or torch.compiler.is_compiling() or inside_transform():
        return output
    node = output.grad_fn
    # The operations of PyTorch's math path have all derivatives.
    if node is not None and node.name().startswith("ScaledDotProduct"):
        node.register_hook(_guarded)
    return output


def _guarded(gradients: tuple[Tensor | None, ...], _: object) -> tuple[Tensor | None, ...] | None:
    """Gradients that are to be differentiated, each behind an identity whose backward raises."""
    if not torch.is_grad_enabled() or any(x is not None and is_batched(x) for x in gradients):
        return None
    return tuple(None if x is None else _NotDifferentiable.apply(x) for x in gradients)  # type: ignore[no-untyped-call]


class _NotDifferentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> NoReturn:
        raise NotImplementedError(
            "expected first derivatives only; got a second derivative of backend 'sdpa', whose kernel lacks it. "
            "Use backend='reference'."
        )
