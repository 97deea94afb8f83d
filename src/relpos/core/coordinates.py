"""Where tokens are: sequences, grids, and anything irregular; the nodes of a graph are in `graph.py`.

Queries and keys each have coordinates of their own, so that cross-attention, decoding with a cache and sharding need no
special case. `prefix` counts the tokens that come first and have no position in the sequence or grid (class token,
registers); it is part of `count`.

A coordinate system answers four questions, all in plain Python except the last:

    count        how many tokens, prefix included
    low, high    the smallest and largest coordinate an axis can take, one number per axis
    axes         how many axes
    tokens()     Int[count - prefix, axes], or with a batch axis in front, without the prefix
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor

from relpos.core.checks import fail, is_dense, is_integer, require_fits, require_int, require_wide, shape_of
from relpos.core.graph import Graph


@dataclass(frozen=True)
class Sequence:
    """`prefix` tokens without a position, then `length` tokens at start, start + 1, ...

    Args:
        length: tokens besides the prefix; may be 0 only where there is a prefix.
        start: coordinate of the first of them; may be negative.
        prefix: tokens before them that have no position (class token, registers).

    Raises:
        ValueError: no integers, or no token at all.

    Examples:
        >>> relpos.Sequence(10, prefix=1).count
        11
        >>> relpos.Sequence(1, start=9).tokens().tolist()  # the token that is decoded after nine others
        [[9]]
    """

    length: int
    start: int = 0
    prefix: int = 0

    def __post_init__(self) -> None:
        require_int(self.prefix, "Sequence prefix", at_least=0)
        require_int(self.length, "Sequence length", at_least=0 if self.prefix else 1)
        require_int(self.start, "Sequence start", at_least=None, remedy="Pass the first token's position as an int.")

    @property
    def axes(self) -> int:
        """How many axes."""
        return 1

    @property
    def count(self) -> int:
        """How many tokens, prefix included."""
        return self.prefix + self.length

    @property
    def low(self) -> tuple[int, ...]:
        """The smallest coordinate of each axis."""
        return (self.start,)

    @property
    def high(self) -> tuple[int, ...]:
        """The largest coordinate of each axis."""
        return (self.start + max(self.length, 1) - 1,)

    def tokens(self, device: torch.device | None = None) -> Shaped[Tensor, "N A"]:
        """Coordinates of the tokens after the prefix, `Int[length, 1]`."""
        return torch.arange(self.start, self.start + self.length, device=device)[:, None]

    def raster(self) -> Sequence:
        """This sequence itself: it is a line already."""
        return self


@dataclass(frozen=True, init=False)
class Grid:
    """`prefix` tokens without a position, then the cells of a grid in raster order (last axis fastest).

    Args:
        cells: how many along each axis, rows first: `Grid(14, 14)`, `Grid(8, 14, 14)`.
        sizes: the same as a tuple, `Grid(sizes=(14, 14))`.
        prefix: tokens before them that have no position (class token, registers).

    Raises:
        ValueError: no axis, or a size below 1.

    Examples:
        >>> grid = relpos.Grid(14, 14, prefix=1)  # a class token, then 196 patches
        >>> grid.count
        197
        >>> relpos.Grid(2, 2).tokens().tolist()  # (row, column), columns fastest
        [[0, 0], [0, 1], [1, 0], [1, 1]]
    """

    sizes: tuple[int, ...]
    prefix: int = 0

    def __init__(self, *cells: int, sizes: Any = (), prefix: int = 0) -> None:
        every = (*cells, *sizes)  # by name: `dataclasses.replace`, and FSDP; each is checked below
        if not every:
            fail("Grid to have at least one axis", "none", "Write Grid(rows, columns).")
        for size in every:
            require_int(size, "each Grid size", at_least=1)
        require_int(prefix, "Grid prefix", at_least=0)
        object.__setattr__(self, "sizes", every)
        object.__setattr__(self, "prefix", prefix)

    def __repr__(self) -> str:
        sizes = ", ".join(str(size) for size in self.sizes)
        return f"Grid({sizes}, prefix={self.prefix})" if self.prefix else f"Grid({sizes})"

    @property
    def axes(self) -> int:
        """How many axes."""
        return len(self.sizes)

    @property
    def count(self) -> int:
        """How many tokens, prefix included."""
        return self.prefix + math.prod(self.sizes)

    @property
    def low(self) -> tuple[int, ...]:
        """The smallest coordinate of each axis."""
        return (0,) * self.axes

    @property
    def high(self) -> tuple[int, ...]:
        """The largest coordinate of each axis."""
        return tuple(size - 1 for size in self.sizes)

    def tokens(self, device: torch.device | None = None) -> Shaped[Tensor, "N A"]:
        """Coordinates of the cells in raster order, `Int[cells, axes]`."""
        grids = torch.meshgrid([torch.arange(size, device=device) for size in self.sizes], indexing="ij")
        return torch.stack([grid.flatten() for grid in grids], dim=-1)

    def raster(self) -> Sequence:
        """The same tokens as a one-axis mechanism sees them: in raster order, with the prefix."""
        return Sequence(math.prod(self.sizes), prefix=self.prefix)


@dataclass(frozen=True, eq=False, init=False)
class Positions:
    """Tokens at the coordinates of a tensor, for whatever is irregular: packed, shuffled, subsampled, mixed.

    Args:
        values: with `low` and `high` numbers, one axis: `[N]` or `[B, N]`; with tuples of A numbers: `[N, A]` or
            `[B, N, A]`. Integers; floating point serves rotations only.
        low: the smallest coordinate that each axis can take. A plain number, so that no engine has to read the tensor
            to learn the shape of the work; the range may be wider than the tensor's own, never narrower (checked only
            on CPU: elsewhere it would synchronise).
        high: the largest coordinate that each axis can take.
        prefix: tokens before these that have no position. They are counted, and are not in `values`.

    Raises:
        ValueError: a tensor of another shape or dtype, or values outside `low` and `high`.

    Examples:
        >>> places = torch.tensor([[0, 1, 2, 0, 1], [0, 1, 2, 3, 4]])  # the first row holds two documents
        >>> queries = relpos.Positions(places, low=0, high=4)
        >>> q = k = v = torch.randn(2, 4, 5, 16)
        >>> relpos.attention(q, k, v, position=relpos.RotaryEmbedding(16), queries=queries).shape
        torch.Size([2, 4, 5, 16])
    """

    values: Tensor
    low: tuple[int, ...]
    high: tuple[int, ...]
    prefix: int

    def __init__(
        self, values: Tensor, *, low: int | tuple[int, ...], high: int | tuple[int, ...], prefix: int = 0
    ) -> None:
        one_axis = is_integer(low)
        lows = tuple(low) if isinstance(low, tuple | list) else (low,)
        highs = tuple(high) if isinstance(high, tuple | list) else (high,)
        whole = all(is_integer(bound) for bound in (*lows, *highs))
        if not whole or len(lows) != len(highs) or any(a > b for a, b in zip(lows, highs, strict=True)):
            wanted = "low and high to have one integer per axis with low <= high"
            fail(wanted, f"low={low!r}, high={high!r}", "Give the range of coordinates that can occur.")
        for bound in (*lows, *highs):
            require_fits(bound, "low and high of Positions")
        numbers = isinstance(values, Tensor) and is_dense(values)
        if not numbers or values.dtype == torch.bool or values.is_complex():
            fail("Positions to hold a tensor of numbers", shape_of(values), "Pass an integer tensor.")
        if values.is_floating_point():
            require_wide(values, "Positions values", "Half precision rounds 1995 to 1992: use a wider dtype.")
        if one_axis:
            values = values[..., None]
        if values.dim() not in (2, 3) or values.shape[-1] != len(lows):
            shapes = "[N] or [B, N]" if one_axis else f"[N, {len(lows)}] or [B, N, {len(lows)}]"
            fail(f"Positions values of shape {shapes}", shape_of(values), "Give low and high one number per axis.")
        require_int(prefix, "Positions prefix", at_least=0)
        if type(values) is Tensor and values.device.type == "cpu" and not torch.compiler.is_compiling():
            _check_range(values, lows, highs)
        for name, value in (("values", values), ("low", lows), ("high", highs), ("prefix", prefix)):
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        shape = tuple(self.values.shape)
        return f"Positions(values of shape {shape}, low={self.low}, high={self.high}, prefix={self.prefix})"

    @property
    def axes(self) -> int:
        """How many axes."""
        return len(self.low)

    @property
    def count(self) -> int:
        """How many tokens, prefix included."""
        return self.prefix + self.values.shape[-2]

    def tokens(self, device: torch.device | None = None) -> Shaped[Tensor, "*B N A"]:
        """The coordinates, `[N, axes]` or `[B, N, axes]`."""
        return self.values.to(device)

    def raster(self) -> Positions:
        """These positions, if they have one axis; several axes have no raster order."""
        if self.axes != 1:
            fail(
                "coordinates with one axis or a Grid for a one-axis mechanism",
                f"Positions with {self.axes} axes",
                "Use a mechanism with as many axes, or Positions with one.",
            )
        return self


Coordinates = Sequence | Grid | Positions | Graph
COORDINATES = (Sequence, Grid, Positions, Graph)
"""The same for `isinstance`: Dynamo of torch 2.10 does not support a named union there."""


def _check_range(values: Shaped[Tensor, "*B N A"], low: tuple[int, ...], high: tuple[int, ...]) -> None:
    for axis, (lowest, highest) in enumerate(zip(low, high, strict=True)):
        column = values[..., axis]
        if column.numel() and (column.min() < lowest or column.max() > highest):
            fail(
                f"Positions values from low={lowest} to high={highest} on axis {axis}",
                f"{column.min().item()} to {column.max().item()}",
                "Widen low and high to the range that can occur.",
            )


def require_coordinates(x: object, name: str) -> None:
    """Raise unless `x` says where tokens are."""
    if not isinstance(x, COORDINATES):
        wanted = f"{name} to be coordinates (Sequence, Grid or Positions)"
        fail(
            wanted,
            shape_of(x),
            "Write Sequence(length) or Grid(rows, columns); for a tensor, Positions(x, low=..., high=...).",
        )


def require_queries_and_keys(queries: Coordinates, keys: Coordinates | None) -> None:
    """Raise unless both say where tokens are; keys may be left out."""
    require_coordinates(queries, "queries")
    if keys is not None:
        require_coordinates(keys, "keys")
