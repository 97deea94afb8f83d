"""Learned relative position bias: a table of one number per offset and head, added to the scores.

    score[h, i, j] += table[index(i - j), h]

In 1-D the offset is the distance query - key, 2 L - 1 of them; in 2-D it is (d_row, d_col), (2 Wh - 1)(2 Ww - 1) of
them, row-major from the lowest: exactly Swin's index (Liu et al. 2021, section 3.2). In 3-D depth comes first, the
last axis fastest, as in Video Swin (Liu et al. 2022, section 3.2), torchvision's Swin3D and MONAI's SwinUNETR. With
prefix tokens three rows more, in BEiT's order (Bao et al. 2022): prefix to token, token to prefix, prefix to prefix.

Offsets beyond the table raise; `beyond="clip"` reads the border entry instead. Offsets inside a larger table are fine,
so a smaller grid needs nothing. Published 3-D models differ there: where an input is smaller than the window, N tokens
get `index[:N, :N]`, the first N cells of the whole window. Those have their true offsets only if depth alone is
smaller; for the others too, pass them as `Positions(Grid(*window).tokens()[:N], low=..., high=...)`.

`resize` makes a table for another window: bicubic in 2-D, linear in 1-D and 3-D, or along BEiT's geometric
progression, which keeps near offsets. `extend` repeats the farthest rows of a 1-D table.

Not to be confused with T5's bias (log buckets, opposite sign, no scale), Swin V2's (an MLP of the offset), or the
per-axis vectors of ViTDet and SAM, which depend on the query.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Hashable
from typing import Any, ClassVar, Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core import (
    Coordinates,
    Grid,
    Kind,
    Offsets,
    Sequence,
    at_least_float32,
    expand,
    lines,
    require_queries_and_keys,
)
from relpos.core.checks import fail, require_choice, require_int, shape_of
from relpos.position.base.preset import Preset
from relpos.position.base.saved_settings import ENTRY, Settings, plain
from relpos.position.base.site import Site
from relpos.position.base.table_bias import TableBias
from relpos.position.base.tables import (
    AXES_OF_GRIDS,
    covering,
    geometric_positions,
    read_between,
    require_grid_window,
    require_std,
    require_within,
    start_table,
)


class RelativePositionBias(TableBias):
    """A learned bias per offset and head, in one to three dimensions: Swin's and BEiT's table.

    `score[h, i, j] += table[index(i - j), h]`: 2 L - 1 rows in 1-D, (2 Wh - 1)(2 Ww - 1) in 2-D in Swin's order,
    (2 Wd - 1)(2 Wh - 1)(2 Ww - 1) in 3-D in Video Swin's, and with a prefix three more: prefix to token, token to
    prefix, prefix to prefix.

    Source: Liu et al. 2021 (Swin), section 3.2; Bao et al. 2022 (BEiT); Liu et al. 2022 (Video Swin), section 3.2.

    Args:
        num_heads: query heads, H.
        window_size: (rows, columns) of the grid, for `bias_type="2d"`, or (depth, rows, columns) for "3d".
        seq_len: length of the sequence, for `bias_type="1d"`.
        bias_type: "1d", "2d" or "3d"; default: by the size that is given.
        init_std: standard deviation of the truncated normal the table starts from; 0 for zeros.
        prefix: tokens before the grid or sequence (class token, registers); above 0 the table has BEiT's three
            more rows.
        beyond: what an offset beyond the table does: "raise" or "clip" (read the border).

    Attributes:
        relative_position_bias_table: `[num_relative_positions, num_heads]`.

    Raises:
        ValueError: sizes that do not go with `bias_type`; in `terms`, other axes, a prefix that it was not built for,
            or an offset beyond the table.

    Examples:
        >>> bias = relpos.RelativePositionBias(num_heads=8, window_size=(14, 14), prefix=1)
        >>> bias.relative_position_bias_table.shape  # 27 x 27 offsets, and three of the class token
        torch.Size([732, 8])
        >>> q = k = v = torch.randn(2, 8, 197, 64)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Grid(14, 14, prefix=1)).shape
        torch.Size([2, 8, 197, 64])
        >>> bias.resize((16, 16)).relative_position_bias_table.shape
        torch.Size([964, 8])
        >>> relpos.RelativePositionBias(num_heads=3, window_size=(8, 7, 7)).relative_position_bias_table.shape
        torch.Size([2535, 3])
    """

    growth = ("interpolated", "clipped")
    _covers_prefix = True
    _expects_entry = False  # weights of Swin and BEiT, which have none, fit as they are
    axes: ClassVar[int | None] = None

    def __init__(
        self,
        num_heads: int,
        window_size: tuple[int, int] | tuple[int, int, int] | None = None,
        seq_len: int | None = None,
        bias_type: Literal["1d", "2d", "3d"] | None = None,
        init_std: float = 0.02,
        *,
        prefix: int = 0,
        beyond: Literal["raise", "clip"] = "raise",
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(prefix, "prefix", at_least=0)
        require_choice(beyond, "beyond", ("raise", "clip"))
        if bias_type is None:
            three = isinstance(window_size, tuple | list) and len(window_size) == 3
            bias_type = "1d" if window_size is None else "3d" if three else "2d"
        require_choice(bias_type, "bias_type", ("1d", "2d", "3d"))
        wanted, other = ("seq_len", "window_size") if bias_type == "1d" else ("window_size", "seq_len")
        given = {"seq_len": seq_len, "window_size": window_size}
        if given[wanted] is None or given[other] is not None:
            fail(
                f"{wanted} and no {other} for bias_type={bias_type!r}",
                f"window_size={window_size!r}, seq_len={seq_len!r}",
                f"Pass {wanted}= alone.",
            )
        if bias_type == "1d":
            require_int(seq_len, "seq_len", at_least=1)
        else:
            require_grid_window(window_size, int(bias_type[0]))
        require_std(init_std)
        self.num_heads, self.init_std = num_heads, init_std
        self.bias_type = bias_type
        self.prefix = prefix
        self.beyond = beyond
        self.sizes = Grid(*(window_size or (seq_len,))).sizes
        rows = math.prod(self.table_sizes) + (3 if prefix else 0)
        self.relative_position_bias_table = nn.Parameter(torch.empty(rows, num_heads))
        start_table(self.relative_position_bias_table, init_std)

    def _arguments(self) -> dict[str, Any]:
        size = {"seq_len": self.sizes[0]} if self.bias_type == "1d" else {"window_size": self.sizes}
        none: dict[str, Any] = dict.fromkeys(("window_size", "seq_len", "bias_type"))  # the size says which type it is
        return {**super()._arguments(), **none, **size}

    @classmethod
    def from_site(cls, site: Site, bias_type: Literal["1d", "2d", "3d"] = "2d") -> Self:
        queries, keys = site.queries, site.queries if site.keys is None else site.keys
        prefix, std = max(queries.prefix, keys.prefix), site.init_std
        if bias_type == "1d":
            (length,) = covering(queries.raster(), keys.raster())
            return cls(site.num_heads, seq_len=length, bias_type="1d", init_std=std, prefix=prefix)
        axes = int(bias_type[0])
        named = "rows and columns" if axes == 2 else "depth, rows and columns"
        if not isinstance(queries, Grid) or queries.axes != axes:
            fail(f"a grid of {named} for a {axes}-D bias", repr(queries), "Use relative_1d on a sequence.")
        if keys.axes != axes:
            fail(f"keys with {named} for a {axes}-D bias", repr(keys), "Use relative_1d on a sequence.")
        window: Any = covering(queries, keys)
        return cls(site.num_heads, window_size=window, bias_type=bias_type, init_std=std, prefix=prefix)

    @property
    def table_sizes(self) -> tuple[int, ...]:
        """Offsets along each axis: 2 W - 1."""
        return tuple(2 * size - 1 for size in self.sizes)

    @property
    def relative_position_index(self) -> Int[Tensor, "N N"]:
        """The row of the table each pair reads, as Swin and BEiT store it. For reading; no engine uses it."""
        line = lines(self._coordinates(), device=self.device)
        index = line.index()
        tokens = line.layout.tokens
        kind = line.offsets().kind[index]
        return torch.where(kind == 0, index, tokens + kind - 1)

    def _coordinates(self) -> Coordinates:
        return (
            Sequence(self.sizes[0], prefix=self.prefix)
            if self.bias_type == "1d"
            else Grid(*self.sizes, prefix=self.prefix)
        )

    def _own_settings(self) -> Settings:
        return {} if self.bias_type == "1d" else {"window_size": plain(self.sizes)}

    def _has_entry(self) -> bool:
        """False for a square window or a cube, whose table has the published name and a shape that determines it."""
        return len(set(self.sizes)) > 1

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._has_entry():
            destination[prefix + ENTRY] = self._encoded()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        state_dict.pop(f"{prefix}relative_position_index", None)  # Swin and BEiT checkpoints carry it; ours is computed
        table = state_dict.get(f"{prefix}relative_position_bias_table")
        if table is not None and table.shape != self.relative_position_bias_table.shape:
            fail(
                f"a relative_position_bias_table of shape {tuple(self.relative_position_bias_table.shape)}",
                shape_of(table),
                "Build the bias with the size, prefix and heads it was trained at, load, then resize(size); in a "
                "model, relpos.resize_position(model, size).",
            )
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def _table(self) -> Float[Tensor, "R H"]:
        return self.relative_position_bias_table

    def _settings(self) -> Hashable:
        return self.sizes, self.beyond, self.prefix > 0

    def _in_order(self, offsets: Offsets) -> bool:
        if self.prefix or torch.compiler.is_compiling():
            return False
        reach = tuple(size - 1 for size in self.sizes)
        return offsets.high == reach and offsets.low == tuple(-one for one in reach)

    def _row_of(self, offsets: Offsets) -> Int[Tensor, " L"]:
        row = torch.zeros_like(offsets.kind)
        for axis, size in enumerate(self.sizes):
            reach = size - 1
            if self.beyond == "raise" and (offsets.low[axis] < -reach or offsets.high[axis] > reach):
                fail(
                    f"offsets from {-reach} to {reach} on axis {axis}",
                    f"{offsets.low[axis]} to {offsets.high[axis]}",
                    'Resize the table with resize(window), or build it with beyond="clip"; '
                    "grow(coordinates, rule) does either; in a model of another library, "
                    "relpos.resize_position(model, size).",
                )
            row = row * (2 * size - 1) + offsets.axes[:, axis].clamp(-reach, reach) + reach
        return torch.where(offsets.kind == int(Kind.TOKENS), row, math.prod(self.table_sizes) - 1 + offsets.kind)

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        cls._covers_prefix = cls.prefix_bias is RelativePositionBias.prefix_bias

    def prefix_bias(self) -> Float[Tensor, "H 3"] | None:
        return at_least_float32(self.relative_position_bias_table)[-3:].T if self.prefix else None

    def _accepted(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Coordinates, Coordinates | None]:
        require_queries_and_keys(queries, keys)
        if self.bias_type == "1d":
            queries, keys = queries.raster(), None if keys is None else keys.raster()
        for coordinates in (queries, queries if keys is None else keys):
            if coordinates.axes != len(self.sizes):
                fail(
                    f"coordinates with {len(self.sizes)} axes",
                    repr(coordinates),
                    f"Use a Grid{AXES_OF_GRIDS[len(self.sizes)]}.",
                )
            if coordinates.prefix and not self.prefix:
                fail(
                    "coordinates without a prefix",
                    repr(coordinates),
                    "Build the bias with the same prefix=: the table then has three more rows.",
                )
        if self.beyond == "raise":
            require_within(self.sizes, queries, keys)
        return super()._accepted(queries, keys)

    def forward(self) -> Float[Tensor, "H N N"]:  # type: ignore[override]  # as in Swin's module of this name
        """The dense bias of the window the table was built for, prefix first."""
        coordinates = self._coordinates()
        term = self.terms(coordinates).items[0]
        return expand(term.values, term.lines)  # type: ignore[attr-defined]

    def resize(
        self, size: int | tuple[int, ...], mode: Literal["bicubic", "geometric"] = "bicubic"
    ) -> RelativePositionBias:
        """A copy with the table interpolated to another window or length; the three rows are kept.

        Args:
            size: the new window, or length.
            mode: "bicubic" (in 1-D and 3-D linear) stretches the 2W - 1 offsets as a whole, as Swin does when it
                changes resolution and timm in `resize_rel_pos_bias_table_simple`. "geometric" stretches far offsets
                more than near ones, as BEiT does: see `geometric_positions`. Between them it is linear, as in timm's
                `resize_rel_pos_bias_table`; BEiT's own script has cubic splines there.

        Raises:
            ValueError: another number of axes, another mode.
        """
        require_choice(mode, "mode", ("bicubic", "geometric"))
        sizes = tuple(size) if isinstance(size, tuple | list) else (size,)
        if len(sizes) != len(self.sizes):
            fail(f"a size like {self.sizes}", shape_of(size), "Keep the number of axes.")
        for one in sizes:
            require_int(one, "each new size", at_least=1)
        resized = copy.deepcopy(self)
        resized.sizes = Grid(*sizes).sizes
        table = self.relative_position_bias_table.detach()
        count = math.prod(self.table_sizes)
        image = at_least_float32(table[:count]).T.unflatten(1, self.table_sizes)[None]
        if mode == "geometric":
            for axis, (old, new) in enumerate(zip(self.sizes, resized.sizes, strict=True)):
                image = read_between(image, 2 + axis, geometric_positions(old, new), new)
        else:
            smooth = {"1d": "linear", "2d": "bicubic", "3d": "trilinear"}[self.bias_type]
            image = F.interpolate(image, size=resized.table_sizes, mode=smooth)
        grown = torch.cat([image[0].flatten(1).T.to(table.dtype), table[count:]])
        resized.relative_position_bias_table = nn.Parameter(grown, self.relative_position_bias_table.requires_grad)
        return resized

    def extend(self, length: int) -> RelativePositionBias:
        """A copy for a longer sequence; offsets beyond the trained ones have the rows of the farthest trained ones.

        Raises:
            ValueError: a table of a grid.
        """
        require_int(length, "length", at_least=1)
        if self.bias_type != "1d":
            fail("a 1-D table", f"a window of {self.sizes}", "Use resize(window_size).")
        extended = copy.deepcopy(self)
        extended.sizes = (max(length, self.sizes[0]),)
        table, (count,) = self.relative_position_bias_table.detach(), self.table_sizes
        beyond = extended.sizes[0] - self.sizes[0]
        first, last = (row.expand(beyond, -1) for row in (table[:1], table[count - 1 : count]))
        rows = torch.cat([first, table[:count], last, table[count:]])
        extended.relative_position_bias_table = nn.Parameter(rows, self.relative_position_bias_table.requires_grad)
        return extended

    def grow(self, queries: Coordinates, rule: str) -> RelativePositionBias:
        if rule == "clipped":
            clipped = copy.deepcopy(self)
            clipped.beyond = "clip"
            return clipped
        if rule != "interpolated":
            super().grow(queries, rule)  # raises unless this one serves as it is
            return self
        if self.bias_type != "1d" and isinstance(queries, Grid):
            return self.resize(queries.sizes)
        return self.resize(queries.count - queries.prefix)


PRESETS = [
    Preset(
        name="relative_1d",
        title="Relative bias, 1-D",
        build=lambda site: RelativePositionBias.from_site(site, "1d"),
        summary="Each head learns one bias per distance along the sequence. On images the sequence is the raster "
        "order: a step to the next row and a long step sideways look alike.",
        source="Raffel et al. 2020, section 2.1, without buckets",
        token_axes=(1, 2),
        family="bias",
    ),
    Preset(
        name="relative_2d",
        title="Relative bias, 2-D",
        build=lambda site: RelativePositionBias.from_site(site, "3d" if site.queries.axes == 3 else "2d"),
        summary="Each head learns one bias per (row, column) offset between two patches; per (depth, row, column) in "
        "videos and volumes. The same offset means the same everywhere, so training at one position serves all others.",
        source="Liu et al. 2021 (Swin), section 3.2; Bao et al. 2022 (BEiT) for prefix tokens",
        token_axes=(2, 3),
        family="bias",
        aliases=("swin", "beit", "relative_3d"),
    ),
]
