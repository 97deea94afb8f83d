"""Each axis has one vector per offset, multiplied with the query: SAM and its encoders, ViTDet, MViTv2, BoTNet.

    score[h, i, j] += <q[i], rel_pos_h[row i - row j]> + <q[i], rel_pos_w[column i - column j]>      q unscaled

The forward uses the module's own projections. Tables for another size are interpolated as published. Keys that MViTv2
pools to a coarser grid are placed on the finer grid of the queries.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from relpos.adapters.common.borders import NEVER, PUBLISHED
from relpos.adapters.common.kinds import PositionKind, Refused, Replaced, Verified, class_path
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import Grid, Terms
from relpos.position import DecomposedPosition


class DecomposedAttention(Retrofitted):
    """Common base of the mixins in this file."""

    # slower than published in every timing, up to 4,096 cells on a CPU; `border=` enables it to save memory
    border = NEVER
    training_border = NEVER
    on_gpu = PUBLISHED

    def tables(self) -> tuple[Tensor, ...]:
        """The vectors of each axis, lowest offset (query - key) first."""
        return self.rel_pos_h, self.rel_pos_w

    def make_mechanism(self) -> DecomposedPosition:
        """The position for tables of the module's sizes."""
        tables = self.tables()
        sizes = tuple((len(x) + 1) // 2 for x in tables)
        return DecomposedPosition(tables[0].shape[1], sizes, init_std=0.0)

    def decomposed(self, queries: Grid, keys: Grid) -> Terms:
        """The position terms from the module's own tables."""
        tables = {f"rel_pos.{axis}": x for axis, x in enumerate(self.tables())}
        terms: Terms = self.mechanism.terms_from(tables, queries, keys)
        return terms

    def on_a_grid(self, x: Tensor, heads: int, dropout: float) -> Tensor:
        """Attention among the cells of `[B, H, W, E]`, before the output projection."""
        batch, height, width, _ = x.shape
        q, k, v = self.qkv(x).view(batch, height * width, 3, heads, -1).permute(2, 0, 3, 1, 4)
        q, k = self.normed(q), self.normed(k, keys=True)
        grid = Grid(height, width)
        out = self.attend(
            q,
            k,
            v,
            position=self.decomposed(grid, grid),
            scale=float(self.scale),
            dropout=dropout,
        )
        return out.transpose(1, 2).reshape(batch, height, width, -1)

    def normed(self, x: Tensor, *, keys: bool = False) -> Tensor:
        """Queries or keys after normalization."""
        return x


class SamAttention(DecomposedAttention):
    """`SamVisionAttention` and its copies."""

    drops = True

    def forward(self, hidden_states: Tensor, output_attentions: Any = None) -> Any:
        """Attention of a window, or of the whole image; with attention weights as published."""
        tokens = hidden_states.shape[1] * hidden_states.shape[2]
        if output_attentions or not self.takes(tokens, tokens):
            return super().forward(hidden_states, output_attentions)
        dropout = float(self.dropout) if self.drops and self.training else 0.0
        out = self.on_a_grid(hidden_states, self.num_attention_heads, dropout)
        return self.proj(out), None


class SamSdpaAttention(SamAttention):
    """`SamVisionSdpaAttention`, which has no dropout, and its copies."""

    drops = False


class SegGptAttention(SamAttention):
    """`SegGptAttention`, which has no dropout either."""

    drops = False


class VitDetAttention(DecomposedAttention):
    """`VitDetAttention`."""

    def forward(self, hidden_state: Tensor, output_attentions: Any = False) -> Any:
        """Attention of a window, or of the whole image; with attention weights as published."""
        tokens = hidden_state.shape[1] * hidden_state.shape[2]
        if output_attentions or not self.takes(tokens, tokens):
            return super().forward(hidden_state, output_attentions)
        out = self.on_a_grid(hidden_state, self.num_heads, 0.0)
        return (self.proj(out),)


class TimmSamAttention(DecomposedAttention):
    """`Attention` of timm's `vision_transformer_sam`."""

    def forward(self, x: Tensor) -> Tensor:
        """Attention of a window, or of the whole image."""
        tokens = x.shape[1] * x.shape[2]
        if not self.takes(tokens, tokens):
            published: Tensor = super().forward(x)
            return published
        dropout = float(self.attn_drop.p) if self.training else 0.0
        out = self.proj(self.on_a_grid(x, self.num_heads, dropout))
        dropped: Tensor = self.proj_drop(out)
        return dropped

    def normed(self, x: Tensor, *, keys: bool = False) -> Tensor:
        out: Tensor = self.k_norm(x) if keys else self.q_norm(x)
        return out


class MultiScaleAttention(DecomposedAttention):
    """MViTv2's `MultiScaleAttention`: queries and keys are pooled to different grids."""

    def forward(self, x: Tensor, feat_size: Any) -> Any:
        """Attention of the cells and of a class token, if there is one."""
        sizes = [pooled_size(pool, feat_size) for pool in (self.pool_q, self.pool_k)]
        prefix = int(self.has_cls_token)
        queries, keys = (Grid(*size, prefix=prefix) for size in sizes)
        tables = (self.rel_pos_h, self.rel_pos_w)
        fit = all(_fits(*axis) for axis in zip(*sizes, tables, strict=True))
        if not fit or not self.takes(queries.count, keys.count):
            return super().forward(x, feat_size)
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = (self.pooled(name, one, feat_size) for name, one in zip("qkv", parts, strict=True))
        out = self.attend(q, k, v, position=self.decomposed(queries, keys), scale=float(self.scale))
        if self.residual_pooling:
            out = out + q
        return self.proj(out.transpose(1, 2).flatten(2)), list(sizes[0])

    def pooled(self, name: str, x: Tensor, feat_size: Any) -> Tensor:
        """Queries, keys or values, `[B, H, N, D]`, pooled and normalized."""
        pool, norm = getattr(self, f"pool_{name}"), getattr(self, f"norm_{name}")
        if pool is not None:
            library = sys.modules[type(self).__module__]
            x, token = library.reshape_pre_pool(x, feat_size, self.has_cls_token)
            x, _ = library.reshape_post_pool(pool(x), self.num_heads, token)
        return x if norm is None else norm(x)


class BottleneckAttention(DecomposedAttention):
    """`BottleneckAttn` of timm's BoTNets. Its tables count key - query, and `scale_pos_embed` scales their products."""

    def tables(self) -> tuple[Tensor, ...]:
        factor = self.scale if self.scale_pos_embed else 1.0
        own = self.pos_embed
        return factor * own.height_rel.flip(0), factor * own.width_rel.flip(0)

    def forward(self, x: Tensor) -> Tensor:
        """Attention of all cells, channels first; the output is pooled where the layer is strided."""
        height, width = x.shape[2:]
        fit = (height, width) == (self.pos_embed.height, self.pos_embed.width)
        if not fit or not self.takes(height * width, height * width):
            published: Tensor = super().forward(x)
            return published
        parts = self.qkv(x).flatten(2).split([self.dim_out_qk, self.dim_out_qk, self.dim_out_v], dim=1)
        q, k, v = (part.unflatten(1, (self.num_heads, -1)).mT for part in parts)
        grid = Grid(height, width)
        out = self.attend(q, k, v, position=self.decomposed(grid, grid), scale=float(self.scale))
        pooled: Tensor = self.pool(out.mT.reshape(x.shape[0], -1, height, width))
        return pooled


def pooled_size(pool: Any, size: Any) -> tuple[int, ...]:
    """Cells along each axis after pooling by a convolution, or None."""
    if pool is None:
        return tuple(size)
    pairs = ((x, x) if isinstance(x, int) else x for x in (pool.kernel_size, pool.stride, pool.padding))
    return tuple((n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, *pairs, strict=True))


def _fits(queries: int, keys: int, table: Any) -> bool:
    """Whether a table has the size for these cells, as MViTv2 does not interpolate, and whether row indices are
    integers. The published floating-point products may miss an integer."""
    return 2 * max(queries, keys) - 1 == len(table) and max(queries, keys) % min(queries, keys) == 0


def _unfit(module: Any) -> str | None:
    if getattr(module, "rel_pos_type", "spatial") != "spatial" or not hasattr(module, "rel_pos_h"):
        return "it is built without relative positions"
    return None


def _window(module: Any) -> int | None:
    """Tokens of the window or image that a module is built for; None if it has no tables."""
    return (len(module.rel_pos_h) + 1) // 2 * ((len(module.rel_pos_w) + 1) // 2) if _unfit(module) is None else None


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on a non-square grid that needs interpolated tables, and on the tables' own grid if it is small."""
    height, width = ((len(x) + 1) // 2 for x in (module.rel_pos_h, module.rel_pos_w))
    sizes = [(4, 6)]
    if height * width <= 64:
        sizes.append((height, width))
    outputs = (module(draws.normal(draws.batch, *size, module.qkv.in_features)) for size in sizes)
    return tuple(out if isinstance(out, Tensor) else out[0] for out in outputs)


def _run_pooled(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on the grid of the tables, which are sized for the larger of the query and key grids."""
    strides = (getattr(pool, "stride", 1) for pool in (module.pool_q, module.pool_k))
    finer = min(x if isinstance(x, int) else x[0] for x in strides)
    size = (len(module.rel_pos_h) + 1) // 2 * finer
    tokens = size * size + int(module.has_cls_token)
    return (module(draws.normal(draws.batch, tokens, module.qkv.in_features), (size, size))[0],)


def _run_bottleneck(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on the grid of the tables."""
    own = module.pos_embed
    return (module(draws.normal(draws.batch, module.qkv.in_channels, own.height, own.width)),)


_TABLES = ("rel_pos_h", "rel_pos_w")
_BOTTLENECK = "timm.layers.bottleneck_attn.BottleneckAttn"
_SAM = {
    "sam": ("SamVisionAttention", "SamVisionSdpaAttention"),
    "sam_hq": ("SamHQVisionAttention", "SamHQVisionSdpaAttention"),
    "deepseek_ocr2": ("DeepseekOcr2SamVisionAttention", "DeepseekOcr2SamVisionSdpaAttention"),
    "unlimited_ocr": ("UnlimitedOcrSamVisionAttention", "UnlimitedOcrSamVisionSdpaAttention"),
    "got_ocr2": ("GotOcr2VisionAttention",),
    "pp_formulanet": ("PPFormulaNetVisionAttention",),
    "slanext": ("SLANeXtVisionAttention",),
}


_LIKE_SAM = tuple(
    Replaced(
        architecture,
        name,
        SamSdpaAttention if "Sdpa" in name else SamAttention,
        reads=("forward", "get_rel_pos", "get_decomposed_rel_pos"),
        unfit=_unfit,
        tokens=_window,
    )
    for architecture, names in _SAM.items()
    for name in names
)

KINDS = (
    PositionKind(
        name="a vector per axis",
        library="transformers",
        replaced=(
            *_LIKE_SAM,
            Replaced(
                "vitdet",
                "VitDetAttention",
                VitDetAttention,
                reads=("forward", "get_rel_pos", "add_decomposed_relative_positions"),
                unfit=_unfit,
            ),
            Replaced(
                "seggpt",
                "SegGptAttention",
                SegGptAttention,
                reads=("forward", "get_rel_pos", "add_decomposed_rel_pos"),
                unfit=_unfit,
            ),
        ),
        verified=(
            *(Verified(one.path, _run, _TABLES) for one in _LIKE_SAM),
            Verified(class_path("vitdet", "VitDetAttention"), _run, _TABLES),
            Verified(class_path("seggpt", "SegGptAttention"), _run, _TABLES),
        ),
        refused=tuple(
            Refused(
                architecture,
                name,
                "a network computes its bias from the boxes of the queries: it has no table of offsets",
            )
            for architecture, name in (("sam3", "Sam3DetrDecoder"), ("sam3_lite_text", "Sam3LiteTextDetrDecoder"))
        ),
    ),
    PositionKind(
        name="a vector per axis",
        library="timm",
        replaced=(
            Replaced(
                "vision_transformer_sam",
                "timm.models.vision_transformer_sam.Attention",
                TimmSamAttention,
                reads=("forward", "get_rel_pos", "get_decomposed_rel_pos_bias"),
                unfit=_unfit,
            ),
            Replaced(
                "mvitv2",
                "timm.models.mvitv2.MultiScaleAttention",
                MultiScaleAttention,
                reads=("forward", "cal_rel_pos_type", "reshape_pre_pool", "reshape_post_pool"),
                unfit=_unfit,
            ),
            Replaced("bottleneck", _BOTTLENECK, BottleneckAttention, reads=("forward", "PosEmbedRel", "rel_logits_1d")),
        ),
        verified=(
            Verified("timm.models.vision_transformer_sam.Attention", _run, _TABLES),
            Verified("timm.models.mvitv2.MultiScaleAttention", _run_pooled, _TABLES),
            Verified(_BOTTLENECK, _run_bottleneck, ("height_rel", "width_rel")),
        ),
        refused=(
            Refused(
                "mvitv2",
                "timm.models.mvitv2.MultiScaleAttentionPoolFirst",
                "its own forward fails: it multiplies queries with keys that are not transposed",
            ),
            Refused(
                "halo",
                "timm.layers.halo_attn.HaloAttn",
                "each block attends to itself and a halo of fixed size: it is in O(N) already",
            ),
            Refused("lambda", "timm.layers.lambda_layer.LambdaLayer", "it has no scores of pairs to add a position to"),
        ),
    ),
)
