"""torchvision's MViT, of videos: one vector per offset in time, of rows and of columns, multiplied with the query.

    score[h, i, j] += <q[i], rel_pos_t[t]> + <q[i], rel_pos_h[row]> + <q[i], rel_pos_w[column]>      q unscaled

Queries, keys and values are pooled to grids of their own. The class token, which is always there, is not pooled and has
no position. Tables for another size are interpolated, as published. See `decomposed.py` for models of images.
"""

from __future__ import annotations

import math
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from relpos.adapters.common.kinds import PositionKind, Replaced, Verified
from relpos.adapters.common.random_inputs import RandomInputs
from relpos.adapters.common.retrofitted import Retrofitted
from relpos.adapters.retrofits.decomposed import DecomposedAttention, pooled_size
from relpos.core import Grid


class PooledVideo(Retrofitted):
    """What the layer does beside its position, retrofitted or replaced."""

    def grids(self, thw: tuple[int, ...]) -> tuple[Grid, Grid]:
        """The cells of queries and keys, with the class token, in a map of these frames, rows and columns."""
        queries, keys = (Grid(*pooled_size(_convolution(pool), thw), prefix=1) for pool in (self.pool_q, self.pool_k))
        return queries, keys

    def attend_video(self, x: Tensor, thw: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """Attention of the cells and the class token, `[B, 1 + T H W, E]`."""
        queries, keys = self.grids(thw)
        parts = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        pools = self.pool_q, self.pool_k, self.pool_v
        q, k, v = (one if pool is None else pool(one, thw)[0] for one, pool in zip(parts, pools, strict=True))
        out = self.attend_pooled(q, k, v, queries, keys)
        if self.residual_pool:
            out = out + (q if self.residual_with_cls_embed else F.pad(q[:, :, 1:], (0, 0, 1, 0)))
        return self.project(out.transpose(1, 2).flatten(2)), queries.sizes

    def attend_pooled(self, q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid) -> Tensor:
        """Attention with position, `[B, H, N, D]`."""
        raise NotImplementedError


class MultiscaleVideoAttention(PooledVideo, DecomposedAttention):
    """`MultiscaleAttention`: queries and keys are pooled to different grids."""

    def tables(self) -> tuple[Tensor, ...]:
        return self.rel_pos_t, self.rel_pos_h, self.rel_pos_w

    def forward(self, x: Tensor, thw: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """The published forward."""
        queries, keys = self.grids(thw)
        if not _divide(queries.sizes, keys.sizes) or not self.takes(queries.count, keys.count):
            published: tuple[Tensor, tuple[int, ...]] = super().forward(x, thw)
            return published
        return self.attend_video(x, thw)

    def attend_pooled(self, q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid) -> Tensor:
        """Attention with the module's own position."""
        return self.attend(q, k, v, position=self.decomposed(queries, keys), scale=self.scaler)


def _convolution(pool: Any) -> Any:
    return None if pool is None else pool.pool


def strides(module: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Cells of a map between two neighbouring queries, and between two keys, along each axis."""
    queries, keys = (getattr(_convolution(pool), "stride", (1, 1, 1)) for pool in (module.pool_q, module.pool_k))
    return queries, keys


def _divide(queries: tuple[int, ...], keys: tuple[int, ...]) -> bool:
    """Whether row indices are integers along each axis. The published floating-point products may miss an integer."""
    return all(max(pair) % min(pair) == 0 for pair in zip(queries, keys, strict=True))


def _unfit(module: Any) -> str | None:
    return "it is built without relative positions" if module.rel_pos_h is None else None


def _run(module: Any, draws: RandomInputs) -> tuple[Tensor, ...]:
    """Run on a grid that needs interpolated tables, and on the tables' own grid if it is small."""
    steps = list(zip(*strides(module), strict=True))
    tables = module.rel_pos_t, module.rel_pos_h, module.rel_pos_w
    own = tuple((len(x) + 1) // 2 * min(pair) for x, pair in zip(tables, steps, strict=True))
    small = tuple(cells * math.lcm(*pair) for cells, pair in zip((2, 2, 3), steps, strict=True))
    sizes = [small, own] if math.prod(own) <= 256 else [small]
    width = module.qkv.in_features
    return tuple(module(draws.normal(draws.batch, 1 + math.prod(size), width), size)[0] for size in sizes)


_ATTENTION = "torchvision.models.video.mvit.MultiscaleAttention"


KINDS = (
    PositionKind(
        name="a vector per axis",
        library="torchvision",
        replaced=(
            Replaced(
                "mvit_v2",
                _ATTENTION,
                MultiscaleVideoAttention,
                ("forward", "Pool", "_interpolate", "_add_rel_pos", "_add_shortcut"),
                _unfit,
            ),
        ),
        verified=(Verified(_ATTENTION, _run, ("rel_pos_h", "rel_pos_w", "rel_pos_t")),),
    ),
)
