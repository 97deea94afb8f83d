"""Attention within the windows of a feature map, which may be shifted: the part that has no position.

    x [B, sizes, C]  ->  padded, rolled  ->  windows [B * W, N, C]  ->  attention  ->  joined, rolled back, cut

A window that the shift cuts has segments: tokens that were not beside each other before the roll do not see each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.retrofitted import Retrofitted


def attend_shifted(
    module: Retrofitted,
    x: Tensor,
    window: tuple[int, ...],
    shift: tuple[int, ...],
    attend: Callable[[Tensor, Tensor | None], Tensor],
) -> Tensor:
    """Attention within the windows of a feature map `[B, sizes, C]`.

    Args:
        module: caches the segments.
        shift: cells by which the map is rolled; along an axis of one window it is not.
        attend: attention of windows `[B * W, N, C]`, given the segments of one image's windows, `[W, N]`, or None.
    """
    sizes, axes = tuple(x.shape[1:-1]), tuple(range(1, 1 + len(window)))
    padded = tuple(size + -size % side for size, side in zip(sizes, window, strict=True))
    steps = tuple(0 if side >= size else step for size, side, step in zip(padded, window, shift, strict=True))
    pads = [one for size, whole in zip(reversed(sizes), reversed(padded), strict=True) for one in (0, whole - size)]
    windows = _partitioned(torch.roll(F.pad(x, (0, 0, *pads)), tuple(-step for step in steps), axes), window)
    segments = None
    if any(steps):
        key = padded, window, steps
        segments = module.cached(key, x.device, lambda: _segments(*key, x.device), math.prod(padded))
    whole = torch.roll(_joined(attend(windows, segments), window, padded), steps, axes)
    return whole[(slice(None), *(slice(size) for size in sizes))].contiguous()


def _partitioned(x: Tensor, window: tuple[int, ...]) -> Tensor:
    """`[B, sizes, C]` as windows, `[B * W, N, C]`."""
    for axis, side in enumerate(window):
        x = x.unflatten(1 + 2 * axis, (-1, side))
    axes = range(len(window))
    order = (0, *(1 + 2 * axis for axis in axes), *(2 + 2 * axis for axis in axes), x.dim() - 1)
    return x.permute(order).reshape(-1, math.prod(window), x.shape[-1])


def _joined(x: Tensor, window: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Windows as `[B, sizes, C]`: undoes `_partitioned`."""
    axes = len(window)
    counts = [size // side for size, side in zip(sizes, window, strict=True)]
    order = (0, *(index for axis in range(axes) for index in (1 + axis, 1 + axes + axis)), 1 + 2 * axes)
    return x.reshape(-1, *counts, *window, x.shape[-1]).permute(order).reshape(-1, *sizes, x.shape[-1])


def _segments(sizes: tuple[int, ...], window: tuple[int, ...], shift: tuple[int, ...], device: torch.device) -> Tensor:
    """`[W, N]`: which tokens of a window were beside each other before the roll."""
    found = torch.zeros(sizes, dtype=torch.long, device=device)
    for axis, (size, side, step) in enumerate(zip(sizes, window, shift, strict=True)):
        if step:
            place = torch.arange(size, device=device).view(-1, *[1] * (len(sizes) - 1 - axis))
            found = 3 * found + (place >= size - side) + (place >= size - step)
    return _partitioned(found[None, ..., None], window)[..., 0]
