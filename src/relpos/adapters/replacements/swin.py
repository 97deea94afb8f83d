"""timm's Swin. Own position: one table of offsets within a window per layer.

Each stage is a stack, since it has its own windows and heads. If the shift cuts windows, the model's mask of 0 and -100
is added as published. Nothing can be added to tokens: where a window is in the image is unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from relpos.adapters.replacements.beit import tables
from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Stack, require_class
from relpos.core import Coordinates, Grid
from relpos.position import Site


class RepositionedWindowAttention(Repositioned):
    """`WindowAttention` of timm's Swin."""

    def resized(self, tokens: Coordinates) -> Grid:
        """The window that timm gives the layer in an image of these patches."""
        super().resized(tokens)
        return Grid(*self.window_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention within windows `[B * windows, N, E]`; the mask is `[windows, N, N]`."""
        module: Any = self
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1)[:, None]
        dropout = module.attn_drop.p if self.training else 0.0
        out = self.attend_repositioned(q, k, v, mask, scale=module.scale, dropout=dropout)
        projected: Tensor = module.proj_drop(module.proj(out.transpose(1, 2).flatten(2)))
        return projected


def _stage(name: str, stage: Any, given: Given) -> Iterator[Stack]:
    layers = tuple(require_class(block.attn, _ATTENTION) for block in stage.blocks)
    first = layers[0]
    width = first.qkv.out_features // 3 // first.num_heads
    site = Site(first.num_heads, width, first.dim, given.grid(Grid(*first.window_size)))
    yield Stack(name, stage, site, layers, RepositionedWindowAttention, (tables("blocks.{}.attn", len(layers), first),))


_ATTENTION = "timm.models.swin_transformer.WindowAttention"
STACKS = {"timm.models.swin_transformer.SwinTransformerStage": _stage}
READS = {_ATTENTION: ("forward",)}
