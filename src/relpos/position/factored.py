"""Factored relative bias: one table per axis, summed.

    score[h, i, j] += sum over axes a of table[a][i_a - j_a, h]

A grid takes (2 H - 1) + (2 W - 1) numbers per head instead of (2 H - 1)(2 W - 1). None belongs to a pair of row and
column offsets: it can prefer the row above and the column to the right, but not only the one patch that is both.

Source: the two-table form of the 2-D relative bias; Raffel et al. 2020's bias per axis. Not to be confused with Swin's
joint table (`RelativePositionBias`), or with ViTDet's per-axis vectors, which depend on the query. Prefix tokens get 0.
"""

from __future__ import annotations

import copy
from typing import ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Grid, Offsets, at_least_float32, lookup
from relpos.core.checks import fail, require_choice, require_int, shape_of
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import covering, require_std, require_window, require_within, start_table


class FactoredBias(OffsetBias):
    """A learned bias per offset along each axis and head, added over the axes.

    `score[h, i, j] += rows[i - j, h] + columns[i - j, h]`. Prefix tokens get 0.

    Source: Raffel et al. 2020, one bias per axis.

    Args:
        num_heads: query heads, H.
        window_size: cells along each axis, of one or more.
        beyond: what an offset beyond a table does: "raise" or "clip" (read the border).
        init_std: standard deviation that the tables start from; 0 for zeros.

    Attributes:
        tables: one `[2 W - 1, num_heads]` per axis.

    Raises:
        ValueError: an argument out of its range; in `terms`, other axes, or an offset beyond a table that
            raises.

    Examples:
        >>> bias = relpos.FactoredBias(num_heads=2, window_size=(4, 6))
        >>> [tuple(table.shape) for table in bias.tables]  # 7 + 11 numbers a head, where a joint table has 77
        [(7, 2), (11, 2)]
        >>> q = k = v = torch.randn(1, 2, 24, 16)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Grid(4, 6)).shape
        torch.Size([1, 2, 24, 16])
    """

    growth = ("interpolated", "clipped")
    axes: ClassVar[int | None] = None

    def __init__(
        self,
        num_heads: int,
        window_size: tuple[int, ...],
        *,
        beyond: Literal["raise", "clip"] = "raise",
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_choice(beyond, "beyond", ("raise", "clip"))
        require_std(init_std)
        self.sizes, self.beyond = require_window(window_size), beyond
        self.num_heads, self.init_std = num_heads, init_std
        self.tables = nn.ParameterList(nn.Parameter(torch.empty(2 * size - 1, num_heads)) for size in self.sizes)
        for table in self.tables:
            start_table(table, init_std)

    @property
    def window_size(self) -> tuple[int, ...]:
        """Cells along each axis of its window."""
        return self.sizes

    @classmethod
    def from_site(cls, site: Site) -> Self:
        if not isinstance(site.queries, Grid):
            fail("a grid for a factored bias", repr(site.queries), "Use relative_1d on a sequence.")
        keys = site.queries if site.keys is None else site.keys
        if keys.axes != site.queries.axes:
            fail(
                f"keys with {site.queries.axes} axes for a factored bias", repr(keys), "Use relative_1d on a sequence."
            )
        return cls(site.num_heads, covering(site.queries, keys), init_std=site.init_std)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        if len(offsets.low) != len(self.sizes):
            fail(f"coordinates with {len(self.sizes)} axes", f"{len(offsets.low)}", "Build it for that many axes.")
        total: Tensor | None = None
        for axis, (size, table) in enumerate(zip(self.sizes, self.tables, strict=True)):
            reach = size - 1
            if self.beyond == "raise" and (offsets.low[axis] < -reach or offsets.high[axis] > reach):
                fail(
                    f"offsets from {-reach} to {reach} on axis {axis}",
                    f"{offsets.low[axis]} to {offsets.high[axis]}",
                    'Resize the tables with resize(window), or build it with beyond="clip".',
                )
            own = lookup(at_least_float32(table), offsets.axes[:, axis].clamp(-reach, reach) + reach)
            total = own if total is None else total + own
        assert total is not None
        return total.T

    def _accepted(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Coordinates, Coordinates | None]:
        if self.beyond == "raise":
            require_within(self.sizes, queries, keys)
        return super()._accepted(queries, keys)

    def resize(self, size: tuple[int, ...]) -> FactoredBias:
        """A copy with each table interpolated linearly to another window.

        Raises:
            ValueError: another number of axes.
        """
        if not isinstance(size, tuple | list) or len(size) != len(self.sizes):
            fail(f"a size like {self.sizes}", shape_of(size), "Keep the number of axes.")
        for one in size:
            require_int(one, "each new size", at_least=1)
        resized = copy.deepcopy(self)
        resized.sizes = Grid(*size).sizes
        grown = (
            F.interpolate(table.detach().float().T[None], 2 * new - 1, mode="linear")[0].T.to(table.dtype)
            for table, new in zip(self.tables, size, strict=True)
        )
        resized.tables = nn.ParameterList(
            nn.Parameter(x.contiguous(), table.requires_grad) for x, table in zip(grown, self.tables, strict=True)
        )
        return resized

    def grow(self, queries: Coordinates, rule: str) -> FactoredBias:
        if rule == "clipped":
            clipped = copy.deepcopy(self)
            clipped.beyond = "clip"
            return clipped
        if rule != "interpolated":
            super().grow(queries, rule)  # raises unless this one serves as it is
            return self
        if not isinstance(queries, Grid):
            fail("a grid for a factored bias to grow to", repr(queries), 'Use resize(window), or the rule "clipped".')
        return self.resize(queries.sizes)


PRESETS = [
    Preset(
        name="factored_2d",
        title="Factored relative bias, 2-D",
        build=FactoredBias.from_site,
        summary="Each head learns one bias per row offset and one per column offset, and adds the two. It has far "
        "fewer parameters than a joint table and cannot single out one diagonal neighbour.",
        source="Raffel et al. 2020, section 2.1, an axis each",
        token_axes=(2,),
        family="bias",
    )
]
