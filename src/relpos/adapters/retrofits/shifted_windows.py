"""torchvision's Swin, Swin V2 and Swin3D: a layer that shifts and partitions the feature map itself.

    x [B, sizes, C]  ->  padded, rolled  ->  windows [B * W, N, C]  ->  attention  ->  back

The published layer writes out the bias and the mask of cut windows, W x N x N numbers of 0 and -100. Here the table is
read on the lines of a window, of two axes or three, and a cut window has segments: tokens see their own alone. Swin
V2's table comes from a network (see `windows.py`). An input smaller than a window of three axes runs as published: the
published layer makes the window smaller, and reads the numbers of the first cells of the whole one.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.grids import terms_of_table
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.retrofits.windows import Window, cosine
from relpos.core import Mask, Terms


class ShiftedWindow(Window):
    """`ShiftedWindowAttention`, of two axes and of three."""

    def forward(self, x: Tensor) -> Any:
        """Attention within the windows of a feature map `[B, sizes, C]`."""
        module: Any = self
        window, sizes = tuple(module.window_size), tuple(x.shape[1:-1])
        count, axes = math.prod(window), tuple(range(1, 1 + len(window)))
        smaller = len(window) == 3 and any(size < side for size, side in zip(sizes, window, strict=True))
        if smaller or not self.takes(count, count):
            return super().forward(x)
        padded = tuple(size + -size % side for size, side in zip(sizes, window, strict=True))
        shift = tuple(
            0 if side >= size else step for size, side, step in zip(padded, window, module.shift_size, strict=True)
        )
        pads = [one for size, whole in zip(reversed(sizes), reversed(padded), strict=True) for one in (0, whole - size)]
        rolled = torch.roll(F.pad(x, (0, 0, *pads)), tuple(-step for step in shift), axes)
        windows = _partitioned(rolled, window)
        q, k, v = (
            F.linear(windows, module.qkv.weight, self.projection_bias())
            .unflatten(-1, (3, module.num_heads, -1))
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        q, k, scale = self.content(q, k)
        mask = None
        if any(shift):
            key = padded, window, shift
            segments = self.cached(key, x.device, lambda: _segments(*key, x.device), math.prod(padded))
            mask = Mask.packed(segments.repeat(x.shape[0], 1))
        dropout = module.attention_dropout if self.training else 0.0
        out = self.attend(q, k, v, position=self.terms(), mask=mask, scale=scale, dropout=dropout)
        out = F.linear(out.transpose(1, 2).flatten(2), module.proj.weight, module.proj.bias)
        out = F.dropout(out, module.dropout, self.training)
        whole = torch.roll(_joined(out, window, padded), shift, axes)
        return whole[(slice(None), *(slice(size) for size in sizes))].contiguous()

    def projection_bias(self) -> Tensor | None:
        """The bias of queries, keys and values."""
        bias: Tensor | None = self.qkv.bias
        return bias

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys whose product, scaled, is the score."""
        return q, k, q.shape[-1] ** -0.5

    def terms(self) -> Terms:
        """The position of one window."""
        return terms_of_table(self, self.relative_position_bias_table, self.window_size)


class CosineShiftedWindow(ShiftedWindow):
    """`ShiftedWindowAttentionV2`."""

    training_border = 256

    def projection_bias(self) -> Tensor | None:
        """That of keys is always 0."""
        bias: Tensor | None = self.qkv.bias
        if bias is None:
            return None
        queries, keys, own = bias.chunk(3)
        return torch.cat([queries, torch.zeros_like(keys), own])

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys of length 1, the learned scale of a head on the queries."""
        return *cosine(q, k, self.logit_scale), 1.0

    def terms(self) -> Terms:
        """The position of one window."""
        made = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return terms_of_table(self, 16 * made.sigmoid(), self.window_size)


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


def _tokens(module: Any) -> int:
    return math.prod(module.window_size)


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """A padded feature map, as it is and shifted; on a copy."""
    window, outputs = tuple(module.window_size), []
    for shift in ([0] * len(window), [side // 2 for side in window]):
        module.shift_size = shift
        sizes = [max(1, 2 * side - 1) for side in window]
        outputs.append(module(draws.normal(draws.batch, *sizes, module.qkv.in_features)))
    return tuple(outputs)


_IMAGES, _VIDEO = "torchvision.models.swin_transformer.", "torchvision.models.video.swin_transformer."
_SWIN, _V2 = _IMAGES + "ShiftedWindowAttention", _IMAGES + "ShiftedWindowAttentionV2"
_3D = _VIDEO + "ShiftedWindowAttention3d"
_READS = ("forward", "get_relative_position_bias", "_get_relative_position_bias", "define_relative_position_index")
_OF_IMAGES = (*_READS, "shifted_window_attention")
_OF_V2 = (*_OF_IMAGES, "define_relative_position_bias_table")
_OF_VIDEO = (
    *_READS,
    "shifted_window_attention_3d",
    "_get_window_and_shift_size",
    "_compute_pad_size_3d",
    "_compute_attention_mask_3d",
)

_TABLES = ("relative_position_bias_table", "cpb_mlp.2.weight")

KINDS = (
    PositionKind(
        name="shifted windows",
        library="torchvision",
        replaced=(
            Replaced("swin", _SWIN, ShiftedWindow, _OF_IMAGES, tokens=_tokens),
            Replaced("swin_v2", _V2, CosineShiftedWindow, _OF_V2, tokens=_tokens),
            Replaced("swin3d", _3D, ShiftedWindow, _OF_VIDEO, tokens=_tokens),
        ),
        verified=tuple(Verified(path, _run, tables=_TABLES) for path in (_SWIN, _V2, _3D)),
    ),
)
