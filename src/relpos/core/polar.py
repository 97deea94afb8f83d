"""The map of `Polar`: a number to a magnitude with an angle, `softplus(x) (cos(a - phase), sin(a - phase))`.

The cosines of a head's width come before its sines. All is computed in the dtype of `cos`, and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def widen(
    x: Float[Tensor, "B H N D"],
    cos: Float[Tensor, "#B #H N D"],
    sin: Float[Tensor, "#B #H N D"],
    phase: Float[Tensor, "#H D"] | None,
) -> Float[Tensor, "B H N 2*D"]:
    """`x`, twice as wide, by basic operations, which autograd, compilers and transforms support."""
    cos, sin = _turned_back(cos, sin, phase)
    size = F.softplus(x.to(cos.dtype))
    return torch.cat([size * cos, size * sin], dim=-1).to(x.dtype)


def widen_at_once(
    x: Float[Tensor, "B H N D"],
    cos: Float[Tensor, "#B #H N D"],
    sin: Float[Tensor, "#B #H N D"],
    phase: Float[Tensor, "#H D"] | None,
) -> Float[Tensor, "B H N 2*D"]:
    """The same as one autograd node, with a gradient for `x` and the phase. It does not support compilers and
    transforms."""
    if torch.is_grad_enabled() and (x.requires_grad or (phase is not None and phase.requires_grad)):
        widened: Tensor = _Widen.apply(x, cos, sin, phase)  # type: ignore[no-untyped-call]
        return widened
    return _widen(x, *_turned_back(cos, sin, phase))[0]


class _Widen(torch.autograd.Function):
    """With p for the phase: the derivative of (cos(a - p), sin(a - p)) by p is (sin(a - p), -cos(a - p))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, phase: Tensor | None) -> Tensor:
        own_cos, own_sin = _turned_back(cos, sin, phase)
        widened, size = _widen(x, own_cos, own_sin)
        ctx.save_for_backward(x, cos, sin, phase, own_cos, own_sin, size if ctx.needs_input_grad[3] else None)
        return widened

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, phase, own_cos, own_sin, size = ctx.saved_tensors
        wants_x, _, _, wants_phase = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative
            wanted = [one for one, wants in ((x, wants_x), (phase, wants_phase)) if wants]
            found = iter(torch.autograd.grad(widen(x, cos, sin, phase), wanted, gradients, create_graph=True))
            return next(found) if wants_x else None, None, None, next(found) if wants_phase else None
        by_cos, by_sin = gradients[0].to(cos.dtype).chunk(2, dim=-1)
        d_x = d_phase = None
        if wants_x:
            d_x = (by_cos * own_cos).addcmul_(by_sin, own_sin).mul_(x.to(cos.dtype).sigmoid()).to(x.dtype)
        if wants_phase:
            by_phase = (by_cos * own_sin).addcmul_(by_sin, own_cos, value=-1).mul_(size)
            d_phase = by_phase.sum(dim=(0, 2)).sum_to_size(phase.shape)
        return d_x, None, None, d_phase


def _turned_back(cos: Tensor, sin: Tensor, phase: Tensor | None) -> tuple[Tensor, Tensor]:
    """Cosines and sines of the angles less the phase."""
    if phase is None:
        return cos, sin
    by_cos, by_sin = phase.cos()[:, None], phase.sin()[:, None]
    return torch.addcmul(cos * by_cos, sin, by_sin), torch.addcmul(sin * by_cos, cos, by_sin, value=-1)


def _widen(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """`x`, twice as wide, in memory token by token, and its magnitudes."""
    size = F.softplus(x.to(cos.dtype))
    batch, heads, n, width = x.shape
    widened = x.new_empty(batch, n, heads, 2 * width).transpose(1, 2)
    for factor, half in zip((cos, sin), widened.chunk(2, dim=-1), strict=True):
        if x.dtype == cos.dtype:
            torch.mul(size, factor, out=half)
        else:
            half.copy_(size * factor)
    return widened, size
