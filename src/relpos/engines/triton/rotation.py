"""`core.rotate` as a kernel that reads and writes a tensor once; its gradient is the reverse rotation.

Learned angles and magnitudes are left to PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos import core
from relpos.core.rotation import RotationLayout
from relpos.engines.triton import kernels
from relpos.engines.triton.limits import cdiv, interpreting, power_of_2

_ROWS = 32


@torch.library.custom_op("relpos::rotate", mutates_args=())
def _rotate(x: Tensor, cos: Tensor, sin: Tensor, half: bool, back: bool) -> Tensor:
    batch, heads, n, width = x.shape
    x = x if x.stride(3) == 1 else x.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    pairs = cos.shape[3]
    out = x.new_empty(x.shape)
    rest = width - 2 * pairs
    with torch.cuda.device_of(x):
        kernels.turn[(cdiv(n, _ROWS) * batch * heads,)](
            out, x, *x.stride()[:3], cos, sin, *(cos.stride(axis) if cos.shape[axis] > 1 else 0 for axis in (0, 1)),
            heads, n, D=width, PAIRS=pairs, PAIRS_PAD=power_of_2(pairs),
            REST_PAD=power_of_2(rest) if rest else 0, ROWS=_ROWS, HALF=half, BACK=back,
            PRECISION="widened" if interpreting() else "ieee",
        )  # fmt: skip
    return out


@_rotate.register_fake
def _(x: Tensor, cos: Tensor, sin: Tensor, half: bool, back: bool) -> Tensor:
    return x.new_empty(x.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, cos, sin, ctx.half, ctx.back = inputs
    ctx.save_for_backward(cos, sin)


def _turn_back(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    return _rotate(gradient, *ctx.saved_tensors, ctx.half, not ctx.back), None, None, None, None


_rotate.register_autograd(_turn_back, setup_context=_keep)


def rotate(
    x: Float[Tensor, "B H N D"],
    angles: Float[Tensor, "#B #H N P"],
    *,
    layout: RotationLayout,
    magnitude: float | Float[Tensor, "#B #H N P"] = 1.0,
) -> Float[Tensor, "B H N D"]:
    """`core.rotate`, by the kernel if angles and magnitudes need no gradient."""
    learned = angles.requires_grad or (isinstance(magnitude, Tensor) and magnitude.requires_grad)
    if angles.shape[3] == 0 or (learned and torch.is_grad_enabled()):
        return core.rotate(x, angles, layout=layout, magnitude=magnitude)
    cos, sin = core.cosines(x, angles, layout=layout, magnitude=magnitude)
    rotated: Tensor = _rotate(x, cos, sin, layout == "half", False)
    return rotated
