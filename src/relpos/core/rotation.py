"""Rotating vectors by angles: the arithmetic that every rotary mechanism and engine shares.

A pair of numbers (x, y) turned by angle t becomes (x cos t - y sin t, x sin t + y cos t), times a magnitude. With R
rotated dimensions there are R / 2 angles; dimensions beyond R pass through untouched. Which two numbers are a pair is
the layout, and is never guessed:

    half          (x[p], x[p + R/2])      Hugging Face, GPT-NeoX
    interleaved   (x[2p], x[2p + 1])      RoFormer, Meta's Llama

Angles are float32 or wider, whatever the dtype of `x`; the product is formed in float32 and rounded once.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.checks import fail, require_choice, shape_of
from relpos.core.lookup import at_least_float32

RotationLayout = Literal["half", "interleaved"]


def rotate(
    x: Float[Tensor, "B H N D"],
    angles: Float[Tensor, "#B #H N P"],
    *,
    layout: RotationLayout,
    magnitude: float | Float[Tensor, "#B #H N P"] = 1.0,
) -> Float[Tensor, "B H N D"]:
    """Turn the first `2 * P` dimensions of `x` by `angles` (radians).

    Args:
        x: queries or keys, also keys that go into a cache.
        angles: one an adjacent pair, in float32 or wider.
        layout: `"half"` or `"interleaved"`.
        magnitude: multiplies the rotated dimensions: a number (YaRN's attention factor) or one an angle (xPos).

    Raises:
        ValueError: the angles do not fit `x`, or are in a half precision.
    """
    require_choice(layout, "layout", ("half", "interleaved"))
    pairs = angles.shape[-1]
    if angles.dim() != 4 or angles.shape[-2] != x.shape[-2] or 2 * pairs > x.shape[-1]:
        fail(
            f"angles of shape [1 or B, 1 or H, {x.shape[-2]}, at most {x.shape[-1] // 2}]",
            shape_of(angles),
            "There is one angle a token and pair of dimensions.",
        )
    if angles.dtype not in (torch.float32, torch.float64):
        fail("angles in float32 or float64", shape_of(angles), "Half precision rounds a position of 1995 to 1992.")
    wide = at_least_float32(x)
    cos, sin = angles.cos() * magnitude, angles.sin() * magnitude
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    turned, rest = wide[..., : 2 * pairs], wide[..., 2 * pairs :]
    if layout == "half":
        first, second = turned[..., :pairs], turned[..., pairs:]
        turned = torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, first * sin + second * cos], dim=-1).flatten(-2)
    return torch.cat([turned, rest.expand(*turned.shape[:-1], -1)], dim=-1).to(x.dtype)
