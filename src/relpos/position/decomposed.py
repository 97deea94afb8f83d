"""Decomposed relative positions: a vector for every offset along each axis, times the unscaled query.

    score[h, i, j] += sum over axes a of <q[i], vectors[a][i_a - j_a + W_a - 1]>

The vectors are shared by the heads, and 1/sqrt(D) does not apply to them. If the table's length is not
2 max(size) - 1, it is interpolated linearly, as published: another image size needs no call. Prefix tokens get 0.

Where queries and keys are grids of different sizes (pooled keys, MViT), the smaller one is stretched to the larger.
With n query and m key cells along an axis, published code reads the row

    floor(i * max(m / n, 1) + (m - 1 - j) * max(n / m, 1))

so row 0 is still the lowest offset, but offset 0 is not in the middle. Published code computes float32 products; here
they are integers. The two differ only where neither size divides the other and a product is rounded below its exact
integer.

Source: Li et al. 2022 (MViTv2), section 4.1; ViTDet and SAM (`add_decomposed_rel_pos`). Not to be confused with a
factored bias, which does not depend on queries.
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import (
    AxisVectors,
    Coordinates,
    Grid,
    Lines,
    Positions,
    Terms,
    at_least_float32,
    axis_lines,
    require_coordinates,
)
from relpos.core.cache import cached
from relpos.core.checks import fail, require_int, without_autocast
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, require_window, start_table

_FEW_CELLS = 2**13
"""Maximum cells, of queries and keys together, whose lines are cached."""


class DecomposedPosition(Mechanism):
    """One learned vector per offset and axis, multiplied with the query.

    `score[h, i, j] += <q[i], rows[i - j]> + <q[i], columns[i - j]>`, unscaled, the same vectors for all heads. Other
    grids are read by interpolation; prefix tokens get 0.

    Source: Li et al. 2022 (MViTv2), section 4.1; ViTDet and SAM.

    Args:
        head_dim: width of a head, D.
        window_size: cells along each axis of the larger of the two grids.
        init_std: standard deviation that the vectors start from; 0 for zeros.

    Attributes:
        rel_pos: one `[2 W - 1, D]` per axis (`rel_pos_h`, `rel_pos_w` in SAM), lowest offset first.

    Raises:
        ValueError: an argument out of its range; in `terms`, coordinates that are not grids with as many axes.

    Examples:
        >>> vectors = relpos.DecomposedPosition(head_dim=16, window_size=(4, 6))
        >>> [tuple(one.shape) for one in vectors.rel_pos]
        [(7, 16), (11, 16)]
        >>> q = k = v = torch.randn(1, 2, 24, 16)
        >>> relpos.attention(q, k, v, position=vectors, queries=relpos.Grid(4, 6)).shape
        torch.Size([1, 2, 24, 16])
    """

    growth = (AS_IS,)

    def __init__(self, head_dim: int, window_size: tuple[int, ...], *, init_std: float = 0.02) -> None:
        super().__init__()
        require_int(head_dim, "head_dim", at_least=1)
        require_std(init_std)
        self.sizes, self.head_dim, self.init_std = require_window(window_size), head_dim, init_std
        self.rel_pos = nn.ParameterList(nn.Parameter(torch.empty(2 * size - 1, head_dim)) for size in self.sizes)
        for vectors in self.rel_pos:
            start_table(vectors, init_std)

    @property
    def window_size(self) -> tuple[int, ...]:
        """Cells along each axis of its window."""
        return self.sizes

    @classmethod
    def from_site(cls, site: Site) -> Self:
        if not isinstance(site.queries, Grid):
            fail("a grid for decomposed positions", repr(site.queries), "Use shaw on a sequence.")
        sizes = _larger(site.queries, site.keys) if isinstance(site.keys, Grid) else site.queries.sizes
        return cls(site.head_dim, sizes, init_std=site.init_std)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        require_coordinates(queries, "queries")
        keys = queries if keys is None else keys
        require_coordinates(keys, "keys")
        if not isinstance(queries, Grid) or not isinstance(keys, Grid):
            fail("two grids for decomposed positions", f"{queries!r} and {keys!r}", "Use Grid(rows, columns).")
        if queries.axes != len(self.sizes) or keys.axes != len(self.sizes):
            fail(f"grids with {len(self.sizes)} axes", f"{queries!r} and {keys!r}", "Build it for that many axes.")
        larger = _larger(queries, keys)
        lines = self._axis_lines(queries, keys)
        vectors = tuple(  # without those that no pair of tokens reads: prefix pairs read there
            self._fitted(at_least_float32(x), 2 * size - 1)[:, : line.layout.tokens]
            for x, size, line in zip(self.rel_pos, larger, lines, strict=True)
        )
        return Terms(AxisVectors(vectors, lines))

    def _axis_lines(self, queries: Grid, keys: Grid) -> tuple[Lines, ...]:
        """One line per axis; if cells are few, the same objects in the next call."""
        larger, device = _larger(queries, keys), self.device

        def make() -> tuple[Lines, ...]:
            if queries.sizes == keys.sizes:
                return axis_lines(queries, keys, device=device)
            return axis_lines(
                _stretched(queries, larger, keys=False), _stretched(keys, larger, keys=True), device=device
            )

        if queries.count + keys.count > _FEW_CELLS:
            return make()
        return cached(self, (queries, keys, device), device, make)

    def _fitted(self, vectors: Float[Tensor, "R D"], rows: int) -> Float[Tensor, "1 R2 D"]:
        """The table, interpolated to `rows` rows as a product, so that its gradient is a sum in a fixed order."""
        have = vectors.shape[0]
        if have == rows:
            return vectors[None]
        unit = 2 * rows  # positions in whole numbers, so that weights are rounded once
        wanted = torch.arange(rows, device=vectors.device)
        centre = ((2 * wanted + 1) * have - rows).clamp(0, (have - 1) * unit)
        apart = (centre[:, None] - unit * torch.arange(have, device=vectors.device)).abs()
        weights = (unit - apart).clamp(min=0).to(vectors.dtype) / unit
        with without_autocast(self.device):
            return (weights @ vectors)[None]


def _larger(queries: Grid, keys: Grid) -> tuple[int, ...]:
    return tuple(max(a, b) for a, b in zip(queries.sizes, keys.sizes, strict=True))


def _stretched(grid: Grid, larger: tuple[int, ...], *, keys: bool) -> Positions:
    """The cells of a grid in the coordinates of the larger one; keys are counted from the last, which is 0."""
    sizes, whole = torch.tensor(grid.sizes), torch.tensor(larger)
    far = tuple((size - 1) * new // size for size, new in zip(grid.sizes, larger, strict=True))
    zeros = (0,) * grid.axes
    if not keys:
        return Positions(grid.tokens() * whole // sizes, low=zeros, high=far, prefix=grid.prefix)
    values = -((sizes - 1 - grid.tokens()) * whole // sizes)
    return Positions(values, low=tuple(-x for x in far), high=zeros, prefix=grid.prefix)


PRESETS = [
    Preset(
        name="decomposed",
        title="Decomposed vectors, 2-D",
        build=DecomposedPosition.from_site,
        summary="Queries are multiplied by one learned vector per row offset and one per column offset, so what an "
        "offset means depends on the query. Other sizes are interpolated.",
        source="Li et al. 2022 (MViTv2), section 4.1; ViTDet, SAM",
        token_axes=(2,),
        family="vectors",
    )
]
