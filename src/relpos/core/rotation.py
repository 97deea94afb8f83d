"""Rotation of queries and keys by angles, for every rotary mechanism and engine.

A pair (x, y) rotated by angle t is (x cos t - y sin t, x sin t + y cos t), times a magnitude. R rotated dimensions have
R / 2 angles; they are the first R, or R from `start` on, and the others are unchanged. The layout says which of the
rotated dimensions x form a pair:

    half          (x[p], x[p + R/2])      Hugging Face, GPT-NeoX
    interleaved   (x[2p], x[2p + 1])      RoFormer, Meta's Llama

Angles are in float32 or wider for any dtype of `x`; the result is computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from relpos.core.cache import may_cache
from relpos.core.checks import (
    broadcasts,
    fail,
    require_choice,
    require_device,
    require_floating,
    require_int,
    require_number,
    shape_of,
)
from relpos.core.gather import at_least_float32

RotationLayout = Literal["half", "interleaved"]


def require_layout(layout: object) -> None:
    """Raise unless it is the name of a layout. Weights fit only one layout, but load under either."""
    remedy = (
        "'half' pairs p with p + P (Hugging Face's Llama, GPT-NeoX), 'interleaved' 2p with 2p + 1 (RoFormer, Meta's "
        "Llama, timm): use the one that the weights were trained with."
    )
    require_choice(layout, "layout", ("half", "interleaved"), remedy)


def _fits(angles: Tensor, shape: tuple[int, int, int], most: int) -> bool:
    batch, heads, n = shape
    fits = broadcasts(angles.shape[0], batch) and broadcasts(angles.shape[1], heads)
    return fits and angles.shape[2] == n and angles.shape[3] <= most


def require_width(x: Tensor, width: int | None, name: str = "Rotation") -> None:
    """Raise ValueError unless the heads of `x` have the width that a term was built for; None for any."""
    if width is not None and x.shape[-1] != width:
        part = "; rotary_dim= rotates only a part" if name == "Rotation" else ""
        fail(f"heads {width} wide for this {name}", str(x.shape[-1]), f"Build it for the width of the heads{part}.")


def cosines(
    x: Float[Tensor, "B H N D"],
    angles: Float[Tensor, "#B #H N P"],
    *,
    layout: RotationLayout,
    magnitude: float | Float[Tensor, "#B #H N P"] = 1.0,
) -> tuple[Float[Tensor, "#B #H N P"], Float[Tensor, "#B #H N P"]]:
    """Cosines and sines times the magnitude, in x's dtype or float32; arguments and errors as in `rotate`."""
    require_layout(layout)
    require_floating(x, "x", dims=4)
    batch, heads, n, width = x.shape
    if not isinstance(angles, Tensor) or angles.dim() != 4 or not _fits(angles, (batch, heads, n), width // 2):
        fail(
            f"angles of shape [1 or {batch}, 1 or {heads}, {n}, at most {width // 2}]",
            shape_of(angles),
            "Give one angle per token and pair of dimensions.",
        )
    pairs = angles.shape[-1]
    require_device(angles, "angles", x.device, "Compute the angles on the device of x.")
    if isinstance(magnitude, Tensor):
        if magnitude.dim() != 4 or not _fits(magnitude, (batch, heads, n), pairs) or magnitude.shape[-1] != pairs:
            fail(
                f"a magnitude of shape [1 or {batch}, 1 or {heads}, {n}, {pairs}], or a number",
                shape_of(magnitude),
                "Give one magnitude per angle.",
            )
        require_device(magnitude, "the magnitude", x.device, "Compute it on the device of x.")
    else:
        require_number(magnitude, "magnitude", "above 0", "Leave it out for 1.")
    if angles.dtype not in (torch.float32, torch.float64):
        fail(
            "angles in float32 or float64",
            shape_of(angles),
            "Half precision rounds 1995 to 1992: compute them in float32.",
        )
    wide = torch.promote_types(x.dtype, torch.float32)
    return (angles.cos() * magnitude).to(wide), (angles.sin() * magnitude).to(wide)


def rotate(
    x: Float[Tensor, "B H N D"],
    angles: Float[Tensor, "#B #H N P"],
    *,
    layout: RotationLayout,
    magnitude: float | Float[Tensor, "#B #H N P"] = 1.0,
    width: int | None = None,
    start: int = 0,
) -> Float[Tensor, "B H N D"]:
    """Rotate `2 * P` dimensions of `x`, from `start`, by `angles` (radians).

    Args:
        x: queries or keys.
        angles: one per token and pair of dimensions, in float32 or float64.
        layout: `"half"` or `"interleaved"`.
        magnitude: factor on the rotated dimensions: a number (YaRN's attention factor), or one per angle (xPos).
        width: the head width that the angles were computed for (a mechanism's `head_dim`), or None for any.
        start: the first dimension that is rotated; D - 2 * P for the trailing ones (DeepSeek V4).

    Returns:
        `x` rotated, in its dtype.

    Raises:
        ValueError: the angles do not fit `x`, or are in half precision.

    Examples:
        >>> x = torch.tensor([1.0, 0.0]).expand(1, 1, 2, 2)  # two tokens
        >>> angles = torch.tensor([0.0, torch.pi / 3])[None, None, :, None]
        >>> relpos.rotate(x, angles, layout="half")[0, 0]
        tensor([[1.0000, 0.0000],
                [0.5000, 0.8660]])
    """
    if isinstance(x, Tensor):
        require_width(x, width)
    if start:
        require_int(start, "start", at_least=0)
        last = rotate(x[..., start:], angles, layout=layout, magnitude=magnitude)
        return torch.cat([x[..., :start], last], dim=-1)
    cos, sin = cosines(x, angles, layout=layout, magnitude=magnitude)
    if not may_cache(x.device) or (cos.requires_grad and torch.is_grad_enabled()):
        return _turn_by_nodes(x, cos, sin, layout)
    return turn(x, torch.complex(cos, sin), layout)


def turn(
    x: Float[Tensor, "B H N D"],
    by: Complex[Tensor, "#B #H N P"],
    layout: RotationLayout,
    into: RotationLayout | None = None,
) -> Float[Tensor, "B H N D"]:
    """`rotate` by cosine + i sine: pairs as complex numbers, in one product. It checks nothing, and does not support
    compilers, transforms or learned angles.

    Args:
        into: the layout of the result, by default that of `x`. If queries and keys share it, their products are the
            same in any layout; "interleaved" is a view of the complex numbers.
    """
    into = layout if into is None else into
    if x.requires_grad and torch.is_grad_enabled():
        turned: Tensor = _Turn.apply(x, by, layout, into)  # type: ignore[no-untyped-call]
        return turned
    return _turn(x, by, layout, into)


class _Turn(torch.autograd.Function):
    """One autograd node; its gradient rotates back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Tensor, layout: RotationLayout, into: RotationLayout) -> Tensor:
        ctx.save_for_backward(by)
        ctx.layouts = into, layout
        return _turn(x, by, layout, into)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (by,) = ctx.saved_tensors
        return turn(gradients[0], by.conj(), *ctx.layouts), None, None, None


def turn_each(
    x: Float[Tensor, "B H N D"],
    by: Sequence[Complex[Tensor, "#B #H N P"]],
    layout: RotationLayout,
    into: Sequence[RotationLayout],
) -> list[Float[Tensor, "B H N D"]]:
    """`turn` all of `x` by each of several, which it reads once, as one autograd node: P is half of D."""
    if x.requires_grad and torch.is_grad_enabled():
        return list(_TurnEach.apply(x, layout, into, *by))  # type: ignore[no-untyped-call]
    return _turn_each(x, by, layout, into)


class _TurnEach(torch.autograd.Function):
    """One autograd node; its gradient rotates all back, and sums."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, layout: RotationLayout, into: Sequence[RotationLayout], *by: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*by)
        ctx.layout, ctx.into = layout, into
        return tuple(_turn_each(x, by, layout, into))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # a second derivative
            each = zip(gradients, ctx.saved_tensors, ctx.into, strict=True)
            found = [turn(gradient, by.conj(), own, ctx.layout) for gradient, by, own in each]
            return sum(found[1:], found[0]), *(None,) * (2 + len(found))
        total = None
        for gradient, by, own in zip(gradients, ctx.saved_tensors, ctx.into, strict=True):
            pairs = _as_complex(at_least_float32(gradient), own)
            total = pairs * by.conj() if total is None else total.addcmul_(pairs, by.conj())
        assert total is not None
        return _as_real(total, ctx.layout).to(gradients[0].dtype), *(None,) * (2 + len(gradients))


def _turn_each(x: Tensor, by: Sequence[Tensor], layout: RotationLayout, into: Sequence[RotationLayout]) -> list[Tensor]:
    pairs = _as_complex(at_least_float32(x), layout)
    last = pairs.mul_ if layout == "half" else pairs.mul  # new pairs are multiplied in place
    turned = [*(pairs * one for one in by[:-1]), last(by[-1])]
    return [_as_real(one, own).to(x.dtype) for one, own in zip(turned, into, strict=True)]


def _turn(x: Tensor, by: Tensor, layout: RotationLayout, into: RotationLayout) -> Tensor:
    wide, width = at_least_float32(x), 2 * by.shape[-1]
    partial = width < x.shape[-1]
    first = wide[..., :width] if partial else wide  # a slice of all is an alias, for which the old vmap has no rule
    pairs = _as_complex(first, layout)
    turned = _as_real(pairs.mul_(by) if layout == "half" else pairs * by, into)
    if partial:
        turned = torch.cat([turned, wide[..., width:]], dim=-1)
    return turned.to(x.dtype)


def _as_complex(x: Float[Tensor, "*A D"], layout: RotationLayout) -> Complex[Tensor, "*A P"]:
    """The pairs as complex numbers: of the layout "half" new ones, else a view where strides allow it."""
    if layout == "half":
        return torch.complex(*x.chunk(2, dim=-1))
    fits = x.stride(-1) == 1 and not any(step % 2 for step in (*x.stride()[:-1], x.storage_offset()))
    x = x if fits else x.clone(memory_format=torch.contiguous_format)
    return torch.view_as_complex(x.view(*x.shape[:-1], x.shape[-1] // 2, 2))  # the old vmap has no unflatten


def _as_real(pairs: Complex[Tensor, "*A P"], layout: RotationLayout) -> Float[Tensor, "*A D"]:
    """The numbers of complex pairs; of the layout "interleaved" a view where strides allow it."""
    if layout == "half":
        return torch.cat([pairs.real, pairs.imag], dim=-1)
    return torch.view_as_real(pairs).reshape(*pairs.shape[:-1], 2 * pairs.shape[-1])


def _pairs(x: Tensor, pairs: int, layout: RotationLayout) -> tuple[Tensor, Tensor]:
    """The first and the second number of each pair."""
    if layout == "half":
        return x[..., :pairs], x[..., pairs : 2 * pairs]
    return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]


def _turn_by_nodes(x: Tensor, cos: Tensor, sin: Tensor, layout: RotationLayout) -> Tensor:
    """The same by basic operations, which autograd, compilers and transforms support."""
    wide, pairs = at_least_float32(x), cos.shape[-1]
    first, second = _pairs(wide, pairs, layout)
    both = [first * cos - second * sin, first * sin + second * cos]
    turned = torch.cat(both, dim=-1) if layout == "half" else torch.stack(both, dim=-1).flatten(-2)
    rest = wide[..., 2 * pairs :]
    return torch.cat([turned, rest.expand(*turned.shape[:-1], -1)], dim=-1).to(x.dtype)
