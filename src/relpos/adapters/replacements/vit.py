"""Vision transformers: timm's ViT and DeiT, transformers' ViT. Own position: one learned vector per token.

    patches -> class token and registers in front -> own embedding OFF, mechanism -> blocks, mechanism in attention

The grid is that of the model's image size. With timm's `dynamic_img_size=True`, or transformers'
`interpolate_pos_encoding=True`, mechanisms that are defined at any size take that of each image.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from relpos.adapters.replacements.hf import RepositionedInterfaceAttention
from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.core import Grid
from relpos.core.checks import fail
from relpos.position import Site


class RepositionedTimmAttention(Repositioned):
    """`Attention` of timm's layers."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention among tokens `[B, N, E]`."""
        module: Any = self
        gate = None if module.gate is None else module.gate(x).sigmoid()
        q, k, v = module.qkv(x).unflatten(-1, (3, module.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = module.q_norm(q), module.k_norm(k)
        if attn_mask is not None:
            attn_mask = attn_mask.expand(*(1,) * (4 - attn_mask.dim()), *attn_mask.shape)
        dropout = module.attn_drop.p if self.training else 0.0
        out = self.attend_repositioned(q, k, v, attn_mask, causal=is_causal, scale=module.scale, dropout=dropout)
        x = module.norm(out.transpose(1, 2).flatten(2))
        projected: Tensor = module.proj(x if gate is None else x * gate)
        dropped: Tensor = module.proj_drop(projected)
        return dropped


class RepositionedPatches(Repositioned):
    """timm's patch embedding, which checks the grid: another grid with the same number of patches would go
    unnoticed."""

    def forward(self, x: Tensor) -> Any:
        """The published forward."""
        grid_of = getattr(self, "dynamic_feat_size", None)  # a user's own may have none
        if grid_of is not None:
            grid = grid_of((x.shape[-2], x.shape[-1]))
            if getattr(self, "strict_img_size", True):
                self.layer_position.require_grid(grid)
            else:
                checkpoints = getattr(self.layer_position.holder(), "grad_checkpointing", False)
                self.layer_position.take_grid(grid, checkpoints=checkpoints)
        return super().forward(x)


class RepositionedVisionTransformer(Repositioned):
    """`VisionTransformer` of timm, and DeiT with its second token."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        """Tokens with the prefix in front and their position added."""
        module: Any = self
        if x.dim() == 4:  # dynamic_img_size
            x = x.flatten(1, 2)
        second = getattr(self, "dist_token", module.reg_token)
        prefix = [token.expand(x.shape[0], -1, -1) for token in (module.cls_token, second) if token is not None]
        dropped: Tensor = module.pos_drop(self.layer_position.embed(torch.cat([*prefix, x], dim=1)))
        return dropped


class RepositionedViTEmbeddings(Repositioned):
    """`ViTEmbeddings` of transformers."""

    @property
    def position_embeddings(self) -> Tensor:
        """The vectors added to tokens, `[1, N, E]`, instead of its own."""
        return self.added_for("position_embeddings")

    def interpolate_pos_encoding(self, embeddings: Tensor, height: int, width: int) -> Tensor:
        """Those of another size. Nothing is interpolated: the mechanisms must be defined there."""
        rows, columns = self.patch_embeddings.patch_size
        holder = self.layer_position.holder()
        checkpoints = holder is not None and any(getattr(one, "gradient_checkpointing", 0) for one in holder.modules())
        self.layer_position.take_grid((height // rows, width // columns), checkpoints=checkpoints)
        return self.added_for("position_embeddings", embeddings.shape[1])


def _timm(name: str, model: Any, given: Given) -> Iterator[Stack]:
    if not isinstance(model.patch_drop, nn.Identity):
        fail("a model that keeps all patches", f"patch_drop_rate={model.patch_drop.prob}", "Build it with 0.")
    attention = "timm.layers.attention.Attention"
    layers = tuple(require_class(getattr(block, "attn", block), attention) for block in model.blocks)
    grid = given.grid(Grid(*model.patch_embed.grid_size, prefix=model.num_prefix_tokens))
    own = () if model.pos_embed is None else (absolute("pos_embed", model.pos_embed),)
    first = layers[0]
    site = Site(first.num_heads, first.head_dim, model.embed_dim, grid)
    tokens = ((model, RepositionedVisionTransformer), (model.patch_embed, RepositionedPatches))
    yield Stack(name, model, site, layers, RepositionedTimmAttention, own, tokens)


def _transformers(name: str, model: Any, given: Given) -> Iterator[Stack]:
    embeddings = require_class(model.embeddings, f"{_VIT}.ViTEmbeddings")
    layers = tuple(require_class(layer.attention, f"{_VIT}.ViTAttention") for layer in model.layers)
    patches = embeddings.patch_embeddings
    sizes = (image // patch for image, patch in zip(patches.image_size, patches.patch_size, strict=True))
    own = (absolute("embeddings.position_embeddings", embeddings.position_embeddings),)
    first = layers[0]
    site = Site(first.num_attention_heads, first.head_dim, model.config.hidden_size, given.grid(Grid(*sizes, prefix=1)))
    yield Stack(
        name, model, site, layers, RepositionedInterfaceAttention, own, ((embeddings, RepositionedViTEmbeddings),)
    )


def absolute(name: str, vectors: Tensor) -> Own:
    """The description of an embedding `[1, N, E]` that a model adds to its tokens."""
    return Own(name, f"absolute embedding of {vectors.shape[1]} positions", (name,))


_VIT = "transformers.models.vit.modeling_vit"
STACKS = {
    "timm.models.vision_transformer.VisionTransformer": _timm,
    "timm.models.deit.VisionTransformerDistilled": _timm,
    f"{_VIT}.ViTModel": _transformers,
}
READS = {
    "timm.layers.attention.Attention": ("forward",),
    "timm.models.vision_transformer.VisionTransformer": ("_pos_embed", "forward_features"),
    "timm.models.deit.VisionTransformerDistilled": ("_pos_embed", "forward_features"),
    f"{_VIT}.ViTAttention": ("forward",),
    f"{_VIT}.ViTEmbeddings": ("forward",),
}
