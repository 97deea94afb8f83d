"""Layers that shift and partition the feature map themselves: torchvision's Swin, Swin V2 and Swin3D, MONAI's Swin.

    x [B, sizes, C]  ->  padded, rolled  ->  windows [B * W, N, C]  ->  attention  ->  back

The published layers write out the bias and the mask of cut windows, W x N x N numbers of 0 and -100. Here the table is
read on the lines of a window, of two axes or three, and a cut window has segments: tokens see their own alone. Swin
V2's table comes from a network (see `windows.py`). An input smaller than a window of three axes, or than any of
MONAI's, runs as published: the published layer makes the window smaller, and reads the numbers of the first cells of
the whole one.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.grids import terms_of_table
from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted, published_class
from relpos.adapters.common.shifting import attend_shifted
from relpos.adapters.retrofits.windows import TimmWindow, Window, cosine
from relpos.core import Mask, Terms


class MapOfWindows(Retrofitted):
    """What torchvision's layers do beside their position, retrofitted or replaced."""

    def attend_map(self, x: Tensor) -> Tensor:
        """Attention within the windows of a feature map `[B, sizes, C]`."""
        return attend_shifted(self, x, tuple(self.window_size), tuple(self.shift_size), self.attend_windows)

    def attend_windows(self, x: Tensor, segments: Tensor | None) -> Tensor:
        """Attention of windows `[B * W, N, C]`, with the segments of an image's, `[W, N]`."""
        projected = F.linear(x, self.qkv.weight, self.projection_bias()).unflatten(-1, (3, self.num_heads, -1))
        q, k, scale = self.content(*projected[:, :, :2].permute(2, 0, 3, 1, 4).unbind(0))
        v = projected[:, :, 2].transpose(1, 2)
        dropout = self.attention_dropout if self.training else 0.0
        out = self.attend_heads(q, k, v, packed(segments, len(x)), scale=scale, dropout=dropout)
        out = F.linear(out.transpose(1, 2).flatten(2), self.proj.weight, self.proj.bias)
        return F.dropout(out, self.dropout, self.training)

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, scale: float, dropout: float
    ) -> Tensor:
        """Attention with position, `[B * W, H, N, D]`."""
        raise NotImplementedError

    def projection_bias(self) -> Tensor | None:
        """The bias of queries, keys and values."""
        bias: Tensor | None = self.qkv.bias
        return bias

    def content(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, float]:
        """Queries and keys whose product, scaled, is the score."""
        return q, k, q.shape[-1] ** -0.5


class CosineMapOfWindows(MapOfWindows):
    """Swin V2's."""

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


class ShiftedWindow(MapOfWindows, Window):
    """`ShiftedWindowAttention`, of two axes and of three."""

    def forward(self, x: Tensor) -> Any:
        """Attention within the windows of a feature map `[B, sizes, C]`."""
        count = math.prod(self.window_size)
        smaller = len(self.window_size) == 3 and is_smaller(x, self.window_size)
        if smaller or not self.takes(count, count):
            return super().forward(x)
        return self.attend_map(x)

    def attend_heads(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Mask | None, *, scale: float, dropout: float
    ) -> Tensor:
        """Attention with the module's own position."""
        return self.attend(q, k, v, position=self.terms(), mask=mask, scale=scale, dropout=dropout)

    def terms(self) -> Terms:
        """The position of one window."""
        return terms_of_table(self, self.relative_position_bias_table, self.window_size)


class CosineShiftedWindow(CosineMapOfWindows, ShiftedWindow):
    """`ShiftedWindowAttentionV2`."""

    training_border = 256

    def terms(self) -> Terms:
        """The position of one window."""
        made = self.cpb_mlp(self.relative_coords_table).flatten(0, -2)
        return terms_of_table(self, 16 * made.sigmoid(), self.window_size)


class MonaiBlock(Window):
    """`SwinTransformerBlock` of MONAI: it hands segments on to its attention in place of a mask."""

    def forward_part1(self, x: Tensor, mask_matrix: Tensor | None) -> Any:
        """Attention within the windows of a feature map `[B, sizes, C]`, normalized first."""
        window = tuple(self.window_size)
        count = math.prod(window)
        if is_smaller(x, window) or not self.takes(count, count):
            return super().forward_part1(x, mask_matrix)  # type: ignore[misc]
        return attend_shifted(self, self.norm1(x), window, tuple(self.shift_size), self.attn)


class MonaiWindow(TimmWindow):
    """`WindowAttention` of MONAI, which has timm's weights."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        """Attention within windows `[B * W, N, C]`; the mask is one of an image's windows, `[W, N, N]`, or their
        segments, `[W, N]`."""
        if mask is None or mask.dim() == 3:
            return super().forward(x, mask)
        if not self.takes_window(x.shape[1], self.window_size):
            return super().forward(x, -100.0 * (mask[:, None] != mask[:, :, None]).to(x.dtype))
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.attn_drop.p if self.training else 0.0
        out = self.attend(q, k, v, position=self.terms(), mask=packed(mask, len(x)), scale=self.scale, dropout=dropout)
        return self.proj_drop(self.proj(out.transpose(1, 2).flatten(2)))


def packed(segments: Tensor | None, windows: int) -> Mask | None:
    """The mask of all images' windows from the segments of one's, `[W, N]`."""
    return None if segments is None else Mask.packed(segments.repeat(windows // len(segments), 1))


def is_smaller(x: Tensor, window: Sequence[int]) -> bool:
    """Whether a feature map is smaller than a window along some axis."""
    return any(size < side for size, side in zip(x.shape[1:-1], window, strict=True))


def _tokens(module: Any) -> int:
    return math.prod(module.window_size)


def _maps(window: tuple[int, ...], batch: int) -> list[tuple[tuple[int, ...], tuple[int, ...], int]]:
    """Sizes, shifts and images of padded maps: of one axis after the other if there are three, since published code
    writes out the scores of their many tokens."""
    still, half = (0,) * len(window), tuple(side // 2 for side in window)
    whole = tuple(2 * side - 1 for side in window)
    if len(window) < 3:
        return [(whole, still, batch), (whole, half, batch)]
    along = [(*window[:axis], whole[axis], *window[axis + 1 :]) for axis in range(len(window))]
    return [(window, still, 1), *((sizes, half, 1 if axis else batch) for axis, sizes in enumerate(along))]


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Padded feature maps, as they are and shifted; on a copy."""
    outputs = []
    for sizes, shift, batch in _maps(tuple(module.window_size), draws.batch):
        module.shift_size = list(shift)
        outputs.append(module(draws.normal(batch, *sizes, module.qkv.in_features)))
    return tuple(outputs)


def _run_block(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """The same, with the library's mask."""
    library, outputs = sys.modules[published_class(module).__module__], []
    window = tuple(module.window_size)
    for sizes, shift, batch in _maps(window, draws.batch):
        module.shift_size = shift
        padded = [size + -size % side for size, side in zip(sizes, window, strict=True)]
        x = draws.normal(batch, *sizes, module.dim)
        mask = library.compute_mask(padded, *library.get_window_size(sizes, window, shift), x.device)
        outputs.append(module(x, mask))
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
_MONAI = "monai.networks.nets.swin_unetr."
_BLOCK, _ATTENTION = _MONAI + "SwinTransformerBlock", _MONAI + "WindowAttention"
_OF_BLOCK = ("forward_part1", "forward", "window_partition", "window_reverse", "get_window_size", "compute_mask")

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
    PositionKind(
        name="shifted windows",
        library="monai",
        replaced=(
            Replaced("swin_unetr", _BLOCK, MonaiBlock, _OF_BLOCK, tokens=_tokens),
            Replaced("swin_unetr", _ATTENTION, MonaiWindow, ("forward", "__init__"), tokens=_tokens),
        ),
        verified=(Verified(_BLOCK, _run_block, tables=_TABLES),),
    ),
)
