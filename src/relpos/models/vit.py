"""The vision transformer (Dosovitskiy et al. 2021) with any position mechanism.

    patches -> prefix tokens in front -> position on tokens -> blocks, position in attention -> norm -> pool -> head

One argument says what position is: a preset's name ("relative_2d"), several joined with "+" ("learned+relative_2d"), a
function from a `Site` to a mechanism, or None. What acts on tokens is applied once, from the first layer's mechanism;
what acts in attention is one table for all layers (`shared_position=True`, computed once per forward pass) or one per
layer.

Linear layers start as PyTorch starts them, with a spread of 1/sqrt(3 E): timm's 0.02 at width 768, and enough at small
widths, where 0.02 is not (docs/log.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Grid, Mask, Terms
from relpos.core.checks import fail, require_choice, require_flag, require_int, require_probability
from relpos.layers import PatchEmbedding, TransformerBlock
from relpos.layers.norms import HeadNormChoice, NormChoice, norm_layer
from relpos.layers.patch import pair
from relpos.models.attending import ATTENTIONS, AttentionChoice, kind_of, pattern
from relpos.models.positions import LayerPositions, PositionChoice
from relpos.position import Site, Sum
from relpos.position.mechanism import require_std


class VisionTransformer(nn.Module):
    """A ViT for classification. Arguments as timm names them.

    Args:
        img_size: the image size it is built for, one number or (rows, columns).
        patch_size, in_chans, embed_dim: see `PatchEmbedding`.
        num_classes: outputs of the head; 0 for none (pooled features).
        global_pool: "token" (the class token), "avg" or "max" over the patches.
        depth, num_heads, num_kv_heads, mlp_ratio, norm, qk_norm, qkv_bias: the blocks; see `TransformerBlock`.
        attention: "full", "local", "sparse", "linear" or "flash"; see `models/attending.py`. A pattern of pairs has
            no room for prefix tokens.
        class_token: whether there is one; reg_tokens: further prefix tokens without a position (registers).
        drop_rate, pos_drop_rate, proj_drop_rate, attn_drop_rate: dropout before the head, after the embedding, in
            the blocks, and of attention weights.
        position: absolute and relative positions, each on or off: a preset name, names joined with "+", a function from
            a `Site`, or None.
        shared_position: one table for all layers, or one per layer. A mechanism that acts on tokens and in attention is
            then built for each layer too, and only the first layer's acts on tokens.
        position_trainable: False freezes what the mechanisms own.
        position_init_std: standard deviation that learned positions start from.
        backend: an engine's name, or "auto".
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["token", "avg", "max"] = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        class_token: bool = True,
        reg_tokens: int = 0,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        position: PositionChoice = "learned",
        shared_position: bool = False,
        position_trainable: bool = True,
        position_init_std: float = 0.02,
        backend: str = "auto",
        *,
        attention: AttentionChoice = "full",
        num_kv_heads: int | None = None,
        norm: NormChoice = "layernorm",
        qk_norm: HeadNormChoice | None = None,
    ) -> None:
        super().__init__()
        require_choice(global_pool, "global_pool", ("token", "avg", "max"))
        require_int(depth, "depth", at_least=1)
        require_flag(class_token, "class_token")
        require_int(num_classes, "num_classes", at_least=0)
        require_int(reg_tokens, "reg_tokens", at_least=0)
        require_probability(drop_rate, "drop_rate")
        require_probability(pos_drop_rate, "pos_drop_rate")
        require_std(position_init_std, "position_init_std")
        if global_pool == "token" and not class_token:
            fail("a class token to pool", "class_token=False", 'Use global_pool="avg" or "max".')
        require_choice(attention, "attention", ATTENTIONS)
        if attention in ("local", "sparse") and (class_token or reg_tokens):
            came = f"attention={attention!r} and {int(class_token) + reg_tokens} of them"
            fail("no prefix tokens in a pattern of a grid", came, 'Pass class_token=False and global_pool="avg".')
        self.global_pool, self.shared_position = global_pool, shared_position
        self.attention: AttentionChoice = attention
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_chans, embed_dim)
        self.prefix = int(class_token) + reg_tokens
        self.prefix_tokens = nn.Parameter(torch.zeros(1, self.prefix, embed_dim)) if self.prefix else None
        self.pos_drop = nn.Dropout(pos_drop_rate)
        self.blocks = nn.ModuleList(
            TransformerBlock(
                embed_dim,
                num_heads,
                mlp_ratio,
                num_kv_heads=num_kv_heads,
                norm=norm,
                qk_norm=qk_norm,
                qkv_bias=qkv_bias,
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                kind=kind_of(attention),
                backend=backend,
            )
            for _ in range(depth)
        )
        self.norm = norm_layer(norm, embed_dim)
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        if self.prefix_tokens is not None:
            nn.init.normal_(self.prefix_tokens, std=1e-6)

        grid = self.patch_embed.grid(pair(img_size, "img_size"), self.prefix)
        site = Site(
            num_heads=num_heads,
            head_dim=embed_dim // num_heads,
            embed_dim=embed_dim,
            queries=grid,
            init_std=position_init_std,
        )
        self.positions = LayerPositions.for_layers(
            position, site, depth, shared=shared_position, trainable=position_trainable
        )

    @property
    def coordinates(self) -> Grid:
        """Where the tokens of the image size it was built for are, prefix included."""
        return Grid(*self.patch_embed.grid_size, prefix=self.prefix)

    @property
    def token_position(self) -> Sum:
        """The mechanisms that act on tokens."""
        return self.positions.on_tokens()

    @property
    def attention_position(self) -> list[Sum]:
        """The mechanisms that act in attention, one sum per layer or one for all."""
        return self.positions.in_attention()

    def _embed(
        self, images: Float[Tensor, "B C height width"]
    ) -> tuple[Float[Tensor, "B N E"], list[Terms], Mask | None]:
        """Tokens ready for the first block, the terms of each layer, and which pairs may attend."""
        # Under autocast the convolution gives half precision; what blocks add to and norms read is as wide as weights.
        x = self.patch_embed(images).to(self.patch_embed.proj.weight.dtype)
        coordinates = self.patch_embed.grid((images.shape[2], images.shape[3]), self.prefix)
        if self.prefix_tokens is not None:
            x = torch.cat([self.prefix_tokens.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        mask = pattern(self.attention, coordinates)
        mask = None if mask is None else mask.to(x.device)
        return self.pos_drop(self.positions.embed(x, coordinates)), self.positions.terms(coordinates), mask

    def forward_features(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N E"]:
        """Normed tokens after the last block, prefix first."""
        x, terms, mask = self._embed(images)
        for block, position in zip(self.blocks, terms, strict=True):
            x = block(x, position=position, mask=mask)
        features: Tensor = self.norm(x)
        return features

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """Class scores. Any image size that the patches divide, as far as the position mechanism goes along."""
        x = self.forward_features(images)
        if self.global_pool == "token":
            pooled = x[:, 0]
        else:
            patches = x[:, self.prefix :]
            pooled = patches.mean(dim=1) if self.global_pool == "avg" else patches.amax(dim=1)
        scores: Tensor = self.head(self.head_drop(pooled))
        return scores

    def attention_maps(self, images: Float[Tensor, "B C height width"]) -> Iterator[Float[Tensor, "B H N N"]]:
        """The attention weights of one layer after another, for pictures."""
        x, terms, mask = self._embed(images)
        for block, position in zip(self.blocks, terms, strict=True):
            assert isinstance(block, TransformerBlock)
            yield block.attn.weights(block.norm1(x), position=position, mask=mask)
            x = block(x, position=position, mask=mask)

    def position_parameters(self) -> list[nn.Parameter]:
        """The parameters that position mechanisms own."""
        return list(self.positions.parameters())

    def growth(self) -> tuple[str, ...]:
        """The rules by which its mechanisms extrapolate to another image size, as `Sum` has them."""
        return self.positions.growth()

    def grow(self, img_size: int | tuple[int, int], rule: str) -> VisionTransformer:
        """A copy for another image size, its mechanisms grown by `rule` (one of `growth()`)."""
        grid = self.patch_embed.grid(pair(img_size, "img_size"), self.prefix)
        model = copy.deepcopy(self)
        model.patch_embed.grid_size = grid.sizes
        model.patch_embed.num_patches = grid.count - grid.prefix
        model.positions = model.positions.grown(grid, rule)
        return model
