"""torchvision's MViT v2, of videos. Own position: one vector per offset and axis, multiplied with the query.

Each layer is a stack, since it pools queries, keys and values to grids of its own. A pooled cell stands where the
centre of its convolution does. The mechanism is built for the finest grid that holds both:

    cells of the map      0  1  2  3  4  5  6  7
    queries, stride 1     0  1  2  3  4  5  6  7
    keys, stride 4        0           4

`DecomposedPosition` gets the two grids instead, and places them as published. The class token is a prefix token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from torch import Tensor

from relpos.adapters.replacements.repositioned import Repositioned
from relpos.adapters.replacements.stacks import Given, Own, Stack, require_class
from relpos.adapters.retrofits.decomposed import pooled_size
from relpos.adapters.retrofits.multiscale import PooledVideo, strides
from relpos.core import Coordinates, Grid, Positions, Terms
from relpos.core.checks import fail
from relpos.position import DecomposedPosition, Site
from relpos.position.base.states import terms_of
from relpos.position.base.wrapped import parts_of


class RepositionedMultiscale(PooledVideo, Repositioned):
    """`MultiscaleAttention`."""

    def resized(self, tokens: Coordinates) -> NoReturn:
        """The model reshapes its tokens to the size that it was built for."""
        came = "torchvision's MViT, which takes one size of videos"
        fail("a model that takes other sizes", came, "Build it with spatial_size= and temporal_size=.")

    def forward(self, x: Tensor, thw: tuple[int, ...]) -> tuple[Tensor, tuple[int, ...]]:
        """Attention of the cells and the class token, `[B, 1 + T H W, E]`."""
        return self.attend_video(x, thw)

    def attend_pooled(self, q: Tensor, k: Tensor, v: Tensor, queries: Grid, keys: Grid) -> Tensor:
        """Attention with the layer's mechanism."""
        self.begin(q)
        return self.attend(q, k, v, position=self._pooled_terms(queries, keys))

    def _pooled_terms(self, queries: Grid, keys: Grid) -> Terms:
        """The position of pooled queries and keys."""
        steps, joined = _steps(self), Terms()
        placed, placed_keys = (_placed(grid, one) for grid, one in zip((queries, keys), steps, strict=True))
        alike = queries == keys and steps[0] == steps[1]
        for part in parts_of(self.layer_position.mechanism):
            on_grids = alike or isinstance(part, DecomposedPosition)
            joined = joined + (terms_of(part, queries, keys) if on_grids else terms_of(part, placed, placed_keys))
        return joined


def _steps(layer: Any) -> list[tuple[int, ...]]:
    """Cells of the finest grid that holds queries and keys, from one query to the next, and from key to key."""
    both = strides(layer)
    units = [math.gcd(*pair) for pair in zip(*both, strict=True)]
    return [tuple(stride // unit for stride, unit in zip(one, units, strict=True)) for one in both]


def _placed(grid: Grid, steps: tuple[int, ...]) -> Positions:
    """The cells of a pooled grid on the finest one."""
    high = _high(grid, steps)
    cells = grid.tokens()
    return Positions(cells * cells.new_tensor(steps), low=(0,) * grid.axes, high=high, prefix=grid.prefix)


def _high(grid: Grid, steps: tuple[int, ...]) -> tuple[int, ...]:
    return tuple((size - 1) * step for size, step in zip(grid.sizes, steps, strict=True))


def _mvit(name: str, model: Any, given: Given) -> Iterator[Stack]:
    size = (model.pos_encoding.temporal_size, *model.pos_encoding.spatial_size)
    for number, block in enumerate(model.blocks):
        layer = require_class(block.attn, _ATTENTION)
        if layer.rel_pos_h is None:
            came = f"{type(model).__name__} with an absolute position, as in mvit_v1_b"
            fail("MViT v2 of torchvision, with relative positions", came, "Build mvit_v2_s, or rel_pos_embed=True.")
        pooled = [pooled_size(None if pool is None else pool.pool, size) for pool in (layer.pool_q, layer.pool_k)]
        highs = (_high(Grid(*one), steps) for one, steps in zip(pooled, _steps(layer), strict=True))
        finest = Grid(*(max(both) + 1 for both in zip(*highs, strict=True)), prefix=1)
        site = Site(layer.num_heads, layer.head_dim, layer.embed_dim, given.grid(finest))
        tables = ("attn.rel_pos_t", "attn.rel_pos_h", "attn.rel_pos_w")
        own = Own(tables[0], f"vectors of each axis, for maps of {size}", tables)
        where = f"{name}.blocks.{number}" if name else f"blocks.{number}"
        yield Stack(where, block, site, (layer,), RepositionedMultiscale, (own,))
        size = pooled[0]


_FILE = "torchvision.models.video.mvit"
_ATTENTION = f"{_FILE}.MultiscaleAttention"
STACKS = {f"{_FILE}.MViT": _mvit}
READS: dict[str, tuple[str, ...]] = {
    f"{_FILE}.MViT": ("forward",),
    f"{_FILE}.MultiscaleBlock": ("forward",),
    _ATTENTION: ("forward", "Pool", "_add_shortcut"),
}
