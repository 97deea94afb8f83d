"""The vision transformer (Dosovitskiy et al. 2021) with any position mechanism.

    patches -> prefix tokens in front -> position on tokens -> blocks, position in attention -> norm -> pool -> head

Linear layers have PyTorch's initialization, with standard deviation 1/sqrt(3 E): timm's 0.02 at width 768. At small
widths 0.02 is too small (docs/log.md).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Grid, Mask, Terms
from relpos.core.checks import NO_OTHER, fail, require_choice, require_flag, require_int
from relpos.layers import PatchEmbedding
from relpos.layers.block import BlockConfig
from relpos.layers.norms import HeadNormChoice, NormChoice, norm_layer
from relpos.layers.patch import pair
from relpos.models.attention_choice import AttentionChoice, kind_of, pattern
from relpos.models.config import VisionConfig
from relpos.models.positions import PositionChoice, canonical, in_use
from relpos.models.transformer import Transformer


class VisionTransformer(Transformer):
    """A ViT for classification. Arguments are named as in timm.

    `patch_size`, `in_chans` and `embed_dim` are as in `PatchEmbedding`; `depth` is the number of blocks, and
    `num_heads`, `num_kv_heads`, `mlp_ratio`, `norm`, `norm_eps`, `qk_norm` and `qkv_bias` are as in `TransformerBlock`.

    Args:
        img_size: the image size it is built for, one number or (rows, columns).
        num_classes: outputs of the head; 0 for none (pooled features).
        global_pool: "token" (the class token), "avg" or "max" over the patches.
        fc_norm: True applies the last norm after pooling, as timm does for "avg"; False to every token.
        init_values: initial value of the blocks' `LayerScale`, as in DeiT III; None for no `LayerScale`.
        attention: "full", "local", "sparse", "linear" or "flash"; see `models/attention_choice.py`. "local" and
            "sparse" do not allow prefix tokens.
        class_token: whether to add a class token.
        reg_tokens: further prefix tokens without a position (registers).
        distilled: whether to add a distillation token with its own head after the class token, as in DeiT; the scores
            are the mean of both heads'.
        drop_rate: dropout before the head.
        pos_drop_rate: dropout after the embedding.
        proj_drop_rate: dropout in the blocks.
        attn_drop_rate: dropout of attention weights.
        position: absolute and relative positions, each on or off: a preset name, names joined with "+", a function from
            a `Site`, or None. Names joined with "~", or a tuple of these, are a schedule: layer i has entry i modulo
            their number.
        shared_position: True for one mechanism for all layers (in a schedule, of an entry), False for one per layer. A
            mechanism that acts on tokens and in attention is then built per layer too, and only the first layer's acts
            on tokens.
        position_trainable: False freezes the mechanisms' parameters.
        position_init_std: initial standard deviation of learned positions.
        backend: an engine's name, or "auto".

    Raises:
        ValueError: arguments contradict each other, or the position does not apply to grids.

    Examples:
        >>> small = {"patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4, "num_classes": 10}
        >>> model = relpos.VisionTransformer(img_size=32, **small, position="learned+relative_2d")
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
        >>> model.growth()
        ('interpolated', 'clipped')
        >>> model.grow(48, "interpolated")(torch.randn(2, 3, 48, 48)).shape
        torch.Size([2, 10])
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
        norm_eps: float | None = None,
        init_values: float | None = None,
        fc_norm: bool = False,
        distilled: bool = False,
    ) -> None:
        position = canonical(position, axes=2)
        config = VisionConfig(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depth=depth,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            class_token=class_token,
            reg_tokens=reg_tokens,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            position=position,
            shared_position=shared_position,
            position_trainable=position_trainable,
            position_init_std=position_init_std,
            backend=backend,
            attention=attention,
            num_kv_heads=num_kv_heads,
            norm=norm,
            qk_norm=qk_norm,
            norm_eps=norm_eps,
            init_values=init_values,
            fc_norm=fc_norm,
            distilled=distilled,
        )
        block = BlockConfig(
            dim=embed_dim,
            num_heads=num_heads,
            mlp_ratio=mlp_ratio,
            num_kv_heads=num_kv_heads,
            norm=norm,
            qkv_bias=qkv_bias,
            qk_norm=qk_norm,
            attn_drop=attn_drop_rate,
            proj_drop=proj_drop_rate,
            kind=kind_of(attention),
            backend=backend,
            norm_eps=norm_eps,
            layer_scale=init_values,
        )
        super().__init__(config, block)
        require_choice(global_pool, "global_pool", ("token", "avg", "max"), NO_OTHER)
        require_flag(class_token, "class_token")
        require_int(num_classes, "num_classes", at_least=0)
        require_int(reg_tokens, "reg_tokens", at_least=0)
        if global_pool == "token" and not class_token:
            fail("a class token to pool", "class_token=False", 'Use global_pool="avg" or "max".')
        require_flag(fc_norm, "fc_norm")
        require_flag(distilled, "distilled")
        if distilled and global_pool != "token":
            fail('global_pool="token" with distilled=True', repr(global_pool), "Its two heads read two tokens.")
        self.distilled = distilled
        self.prefix = int(class_token) + int(distilled) + reg_tokens
        if attention in ("local", "sparse") and self.prefix:
            came = f"attention={attention!r} and {self.prefix} of them"
            fail("no prefix tokens with a grid pattern", came, 'Pass class_token=False and global_pool="avg".')
        self.global_pool = global_pool
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_chans, embed_dim)
        self.prefix_tokens = nn.Parameter(torch.zeros(1, self.prefix, embed_dim)) if self.prefix else None
        self.blocks = self.block_config.blocks(depth)
        last = norm_layer(norm, embed_dim, norm_eps)
        self.norm = nn.Identity() if fc_norm else last
        self.fc_norm = last if fc_norm else nn.Identity()
        self.head = nn.Linear(embed_dim, num_classes) if num_classes else nn.Identity()
        self.head_dist = nn.Linear(embed_dim, num_classes) if distilled and num_classes else nn.Identity()
        if self.prefix_tokens is not None:
            nn.init.normal_(self.prefix_tokens, std=1e-6)
        self.positions = self._mechanisms(config, self.coordinates)

    @property
    def coordinates(self) -> Grid:
        """The coordinates of the tokens of its image size, with the prefix."""
        return Grid(*self.patch_embed.grid_size, prefix=self.prefix)

    def _embed(
        self, images: Float[Tensor, "B C height width"]
    ) -> tuple[Float[Tensor, "B N E"], list[Terms], list[Mask | None], Grid]:
        """The input of the first block, the terms and the mask of each layer, and where the tokens are."""
        # Under autocast the convolution returns half precision; the residual stream keeps the weights' dtype.
        x = self.patch_embed(images).to(self.patch_embed.proj.weight.dtype)
        coordinates = self.patch_embed.grid((images.shape[2], images.shape[3]), self.prefix)
        if self.prefix_tokens is not None:
            x = torch.cat([self.prefix_tokens.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        mask = pattern(self.attention, coordinates)
        masks = [None if mask is None else mask.to(x.device)] * len(self.blocks)
        positions = in_use(self.positions)
        return self.pos_drop(positions.embed(x, coordinates)), positions.terms(coordinates), masks, coordinates

    def forward_features(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B N E"]:
        """Tokens after the last block, prefix first; normalized unless `fc_norm`."""
        features = self._features(*self._embed(images))
        return features if self.shared_sequence is None else self.shared_sequence.whole(features)

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """Class scores of images of any size that the patches divide and the position mechanism accepts.

        Raises:
            ValueError: images have another shape, dtype or device, or a size that the mechanism does not accept.
        """
        x = self.forward_features(images)
        if self.distilled:
            by_class, by_distilled = (self.head_drop(self.fc_norm(x[:, token])) for token in (0, 1))
            both: Tensor = (self.head(by_class) + self.head_dist(by_distilled)) / 2
            return both
        if self.global_pool == "token":
            pooled = x[:, 0]
        else:
            patches = x[:, self.prefix :]
            pooled = patches.mean(dim=1) if self.global_pool == "avg" else patches.amax(dim=1)
        scores: Tensor = self.head(self.head_drop(self.fc_norm(pooled)))
        return scores

    def attention_maps(self, images: Float[Tensor, "B C height width"]) -> Iterator[Float[Tensor, "B H N N"]]:
        """Yield the attention weights of each layer, for pictures."""
        yield from self._maps(*self._embed(images))

    def grow(self, img_size: int | tuple[int, int], rule: str) -> VisionTransformer:
        """A copy for another image size. Its mechanisms are extended by `rule`, one of `growth()`."""
        grid = self.patch_embed.grid(pair(img_size, "img_size"), self.prefix)
        model = copy.deepcopy(self)
        model.patch_embed.grid_size = grid.sizes
        model.patch_embed.num_patches = grid.count - grid.prefix
        model._grow(grid, rule)
        model.grown = (*self.grown, {"img_size": list(pair(img_size, "img_size")), "rule": rule})
        return model
