"""Swin Transformer, version 1 (Liu et al. 2021) and version 2 (Liu et al. 2022), with any position mechanism.

    patches -> norm -> position on tokens -> stages of blocks in windows, merging between them -> norm -> pool -> head

Tokens attend within their own window. In every other block the windows are shifted by half a window. Windows form a
batch: a block is the plain `TransformerBlock` on them, and position is that of a token in its window.

    version   blocks                   attention   position ("own")        merging
    1         pre-norm                 1/sqrt(D)   relative_2d, a table    norm, then projection
    2         residual post-norm       cosine      log_cpb, a network      projection, then norm

A height or width below the window's is one window, without a shift. Tokens that a shift joins from opposite edges are
masked from each other; timm adds -100, which is the same unless scores differ by about as much. If windows do not
divide the tokens, padding is masked; timm attends to it, so its numbers differ there. Linear layers have PyTorch's
initialization. The post-norms of version 2 start at 0, as published, so that its blocks start as the identity.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Grid, Terms
from relpos.core.checks import NO_OTHER, fail, require_choice, require_flag, require_int, require_probability, shape_of
from relpos.layers import PatchEmbedding
from relpos.layers.block import BlockConfig
from relpos.layers.norms import norm_layer
from relpos.layers.patch import pair
from relpos.models.config import SwinConfig
from relpos.models.positions import LayerPositions, ModuleSequence, PositionChoice, builder, canonical, in_use
from relpos.models.pretrained import PretrainedModel
from relpos.patterns import join, partition
from relpos.position import Mechanism, Site, Sum
from relpos.position.base.device import settle
from relpos.position.base.preset import SCHEDULE
from relpos.position.base.tables import require_std
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, parts_of

_OWN = {1: "relative_2d", 2: "log_cpb"}
"""The published position of each version."""


class SwinTransformer(PretrainedModel):
    """A Swin Transformer for classification. Arguments are named as in timm.

    `img_size`, `patch_size`, `in_chans`, `num_classes`, `drop_rate`, `pos_drop_rate`, `proj_drop_rate`,
    `attn_drop_rate`, `position_trainable`, `position_init_std` and `backend` are as in `VisionTransformer`,
    `mlp_ratio`, `qkv_bias` and `norm_eps` as in `TransformerBlock`. Other image sizes are accepted if the position on
    tokens accepts them, since windows keep their size.

    Args:
        global_pool: "avg" or "max" over the tokens.
        embed_dim: width of a token in the first stage, E; every stage doubles it.
        depths: blocks of each stage.
        num_heads: heads of each stage.
        window_size: tokens along the edges of a window, one number or (rows, columns).
        version: 1 or 2.
        position: "own" for the version's, or as in `VisionTransformer`. In attention it is within a window; on tokens
            it is among all patches.
        shared_position: True for one mechanism for all layers of a stage, False for one per layer.

    Raises:
        ValueError: arguments contradict each other, or the position does not apply to grids.

    Examples:
        >>> small = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 10}
        >>> model = relpos.SwinTransformer(img_size=32, patch_size=2, window_size=4, **small)
        >>> model(torch.randn(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int | tuple[int, int] = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", "max"] = "avg",
        embed_dim: int = 96,
        depths: tuple[int, ...] = (2, 2, 6, 2),
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        window_size: int | tuple[int, int] = 7,
        version: Literal[1, 2] = 1,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        position: PositionChoice = "own",
        shared_position: bool = False,
        position_trainable: bool = True,
        position_init_std: float = 0.02,
        backend: str = "auto",
        *,
        norm_eps: float | None = None,
    ) -> None:
        position = position if position == "own" else canonical(position, axes=2)
        if isinstance(position, tuple | list) or (isinstance(position, str) and SCHEDULE in position):
            remedy = "Name one; VisionTransformer takes a schedule."
            fail("one position for all layers of SwinTransformer", f"the schedule {position!r}", remedy)
        config = SwinConfig(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            num_classes=num_classes,
            global_pool=global_pool,
            embed_dim=embed_dim,
            depths=depths,
            num_heads=num_heads,
            window_size=window_size,
            version=version,
            mlp_ratio=mlp_ratio,
            qkv_bias=qkv_bias,
            drop_rate=drop_rate,
            pos_drop_rate=pos_drop_rate,
            proj_drop_rate=proj_drop_rate,
            attn_drop_rate=attn_drop_rate,
            position=position,
            shared_position=shared_position,
            position_trainable=position_trainable,
            position_init_std=position_init_std,
            backend=backend,
            norm_eps=norm_eps,
        )
        super().__init__(config)
        _require_stages(depths, num_heads)
        if version not in (1, 2) or isinstance(version, bool):
            fail("version to be 1 or 2", shape_of(version), "They differ in norms, attention and position.")
        require_choice(global_pool, "global_pool", ("avg", "max"), NO_OTHER)
        require_int(num_classes, "num_classes", at_least=0)
        require_probability(drop_rate, "drop_rate")
        require_probability(pos_drop_rate, "pos_drop_rate")
        require_flag(shared_position, "shared_position")
        require_std(position_init_std, "position_init_std")
        self.global_pool, self.shared_position, self.version = global_pool, shared_position, version
        self.window_size = pair(window_size, "window_size")
        self.patch_embed = PatchEmbedding(img_size, patch_size, in_chans, embed_dim)
        self.patch_norm = norm_layer("layernorm", embed_dim, norm_eps)
        self.pos_drop, self.head_drop = nn.Dropout(pos_drop_rate), nn.Dropout(drop_rate)
        configs = [
            BlockConfig(
                dim=embed_dim * 2**stage,
                num_heads=heads,
                mlp_ratio=mlp_ratio,
                qkv_bias=qkv_bias,
                qk_norm="cosine" if version == 2 else None,
                attn_drop=attn_drop_rate,
                proj_drop=proj_drop_rate,
                backend=backend,
                norm_eps=norm_eps,
                post_norm=version == 2,
            )
            for stage, heads in enumerate(num_heads)
        ]
        merging = [None, *(PatchMerging(one.dim, two.dim, version == 2, norm_eps) for one, two in pairwise(configs))]
        self.stages = nn.ModuleList(
            SwinStage(config.blocks(depth), merge)
            for config, depth, merge in zip(configs, depths, merging, strict=True)
        )
        width = configs[-1].dim
        self.norm = norm_layer("layernorm", width, norm_eps)
        self.head = nn.Linear(width, num_classes) if num_classes else nn.Identity()

        build = builder(_OWN[version] if position == "own" else position)

        def mechanisms(
            grid: Grid, config: BlockConfig, depth: int, acts: Callable[[Mechanism], bool]
        ) -> tuple[LayerPositions, list[Sum | None]]:
            site = Site(config.num_heads, config.dim // config.num_heads, config.dim, grid, init_std=position_init_std)
            return LayerPositions.and_own(
                lambda site: Sum(part for part in parts_of(build(site)) if acts(part)),
                site, depth, shared=shared_position or acts is acts_on_tokens, trainable=position_trainable,
            )  # fmt: skip

        self.token_position, _ = mechanisms(self.coordinates, configs[0], 1, acts_on_tokens)
        found = [
            mechanisms(window, config, depth, acts_in_attention)
            for window, config, depth in zip(self.windows, configs, depths, strict=True)
        ]
        self.positions = ModuleSequence(positions for positions, _ in found)
        for stage, (_, own) in zip(self.stages, found, strict=True):
            for block, one in zip(stage.blocks, own, strict=True):  # type: ignore[arg-type]
                block.attn.position = one
        if version == 2:
            for stage in self.stages:
                for block in stage.blocks:  # type: ignore[union-attr]
                    for norm in (block.norm1, block.norm2):
                        nn.init.zeros_(norm.weight)

    @property
    def coordinates(self) -> Grid:
        """The coordinates of the patches of its image size."""
        return Grid(*self.patch_embed.grid_size)

    @property
    def windows(self) -> list[Grid]:
        """The coordinates of a window's tokens in each stage; none is larger than the image."""
        sizes, found = self.patch_embed.grid_size, []
        for _ in self.stages:
            found.append(Grid(*(min(pair) for pair in zip(sizes, self.window_size, strict=True))))
            sizes = ((sizes[0] + 1) // 2, (sizes[1] + 1) // 2)
        return found

    def position_parameters(self) -> list[nn.Parameter]:
        """The parameters that position mechanisms own."""
        return [*self.token_position.parameters(), *self.positions.parameters()]

    def growth(self) -> tuple[str, ...]:
        """The rules by which its mechanisms extrapolate to other windows, as in `Sum`."""
        return Sum(one for own in (self.token_position, in_use(self.positions)[0]) for one in own.sums()[:1]).growth

    def forward_features(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B rows columns E"]:
        """Normalized tokens after the last stage, on their grid."""
        # Under autocast the convolution returns half precision; the residual stream keeps the weights' dtype.
        x = self.patch_embed(images).to(self.patch_embed.proj.weight.dtype)
        grid = self.patch_embed.grid((images.shape[2], images.shape[3]))
        x = self.pos_drop(in_use(self.token_position).embed(self.patch_norm(x), grid)).unflatten(1, grid.sizes)
        for stage, positions, window in zip(self.stages, in_use(self.positions), self.windows, strict=True):
            settle(positions, x.device)
            x = stage(x, positions.terms, window)
        features: Tensor = self.norm(x)
        return features

    def forward(self, images: Float[Tensor, "B C height width"]) -> Float[Tensor, "B classes"]:
        """Class scores of images of any size that the patches divide and the position on tokens accepts.

        Raises:
            ValueError: images have another shape, dtype or device, or a size that a mechanism does not accept.
        """
        x = self.forward_features(images).flatten(1, 2)
        pooled = x.mean(dim=1) if self.global_pool == "avg" else x.amax(dim=1)
        scores: Tensor = self.head(self.head_drop(pooled))
        return scores

    def grow(
        self, img_size: int | tuple[int, int], rule: str, *, window_size: int | tuple[int, int] | None = None
    ) -> SwinTransformer:
        """A copy for another image size and other windows. Its mechanisms are extended by `rule`, one of `growth()`.

        Args:
            window_size: of the copy; default unchanged.
        """
        if rule not in self.growth():
            rules = ", ".join(self.growth()) or "none at all"
            fail(f"a growth rule of its mechanisms ({rules})", repr(rule), "Build a model for that size.")
        model = copy.deepcopy(self)
        grid = self.patch_embed.grid(pair(img_size, "img_size"))
        model.patch_embed.grid_size, model.patch_embed.num_patches = grid.sizes, grid.count
        if window_size is not None:
            model.window_size = pair(window_size, "window_size")
        model.token_position = _grown(model.token_position, grid, rule)
        model.positions = ModuleSequence(
            _grown(positions, window, rule)  # type: ignore[arg-type]
            for positions, window in zip(model.positions, model.windows, strict=True)
        )
        step = {"img_size": list(pair(img_size, "img_size")), "rule": rule, "window_size": list(model.window_size)}
        model.grown = (*self.grown, step)
        return model


class SwinStage(nn.Module):
    """Optional merging of tokens, then blocks in windows, every other one shifted."""

    def __init__(self, blocks: nn.ModuleList, merging: PatchMerging | None) -> None:
        super().__init__()
        self.merging, self.blocks = merging, blocks

    def forward(
        self, x: Float[Tensor, "B rows columns E"], terms_of: Callable[[Grid], list[Terms]], window: Grid
    ) -> Float[Tensor, "B _ _ F"]:
        x = x if self.merging is None else self.merging(x)
        grid = Grid(*x.shape[1:3])
        size = tuple(min(pair) for pair in zip(grid.sizes, window.sizes, strict=True))
        half = tuple(0 if whole <= edge else edge // 2 for whole, edge in zip(grid.sizes, size, strict=True))
        for layer, (block, terms) in enumerate(zip(self.blocks, terms_of(Grid(*size)), strict=True)):
            shift = half if layer % 2 else 0
            tokens, mask = partition(x, size, shift)
            own = {} if block.attn.position is None else {"coordinates": Grid(*size)}  # type: ignore[union-attr]
            x = join(block(tokens, position=terms, mask=mask, **own), grid, size, shift)
        return x


class PatchMerging(nn.Module):
    """Merge 2 x 2 neighbouring tokens into one of another width; an odd height or width is padded with zeros.

    Args:
        dim, out_dim: width of a token before and after.
        post_norm: whether the norm comes after the projection, as in version 2, or before it.
        norm_eps: of the norm, as in `norm_layer`.
    """

    def __init__(self, dim: int, out_dim: int, post_norm: bool, norm_eps: float | None = None) -> None:
        super().__init__()
        self.post_norm = post_norm
        self.reduction = nn.Linear(4 * dim, out_dim, bias=False)
        self.norm = norm_layer("layernorm", out_dim if post_norm else 4 * dim, norm_eps)

    def forward(self, x: Float[Tensor, "B rows columns E"]) -> Float[Tensor, "B _ _ F"]:
        x = F.pad(x, (0, 0, 0, x.shape[2] % 2, 0, x.shape[1] % 2))
        # [B, rows, 2, columns, 2, E]; in a merged token, the column within the 2 x 2 is the outer index
        x = x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)
        merged: Tensor = self.norm(self.reduction(x)) if self.post_norm else self.reduction(self.norm(x))
        return merged


def _grown(positions: LayerPositions, grid: Grid, rule: str) -> LayerPositions:
    """Mechanisms extended by the model's rule, or by their own first rule if they lack it."""
    own = positions.growth()
    return positions.grown(grid, rule if rule in own else own[0])


def _require_stages(depths: tuple[int, ...], num_heads: tuple[int, ...]) -> None:
    for name, numbers in (("depths", depths), ("num_heads", num_heads)):
        if not isinstance(numbers, tuple | list) or not numbers:
            fail(f"{name} as a number for each stage", shape_of(numbers), f"Pass {name}=(2, 2, 6, 2), say.")
        for one in numbers:
            require_int(one, f"each of {name}", at_least=1)
    if len(depths) != len(num_heads):
        came = f"{len(depths)} and {len(num_heads)}"
        fail("as many num_heads as depths", came, "Each stage has a number of both.")
