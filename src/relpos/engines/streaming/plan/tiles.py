"""How a call is cut: query rows into blocks, and the keys that a block may see into tiles.

Under a mask a block has few tiles. Here two tiles cover all keys that rows 4 to 7 may see, and the other keys are never
computed. Pairs marked "." inside a tile are computed and then masked (in practice, a gap this small is closed):

           keys   0 1 2 3 4 5 6 7 8 9
    query 4       x x . . . x x . . .
    query 5       x x . . . x x x . .
    query 6       x x . . . . x x x .
    query 7       x x . . . . . x x x
    tiles        |---|     |---------|
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import LineBias, Mask


def count_of(keys: slice) -> int:
    """The number of keys in a slice that has a start and a stop."""
    return len(range(keys.start, keys.stop, keys.step or 1))


@dataclass(eq=False)
class Tile:
    """Some keys, for the rows of a block.

    Attributes:
        keys: the keys; a slice with a step for keys at equal distances.
        mask: the mask to apply; None if all pairs are allowed, or if the window already holds -inf elsewhere.
        forbidden: the pairs that `mask` forbids, computed on first use.
        bias: of `DensePlan`: the bias of all heads for each pair, in the unit of the scores.
        prefix_keys: of `HankelPlan`: how many of the first keys are prefix keys, before others.
        window_start, window_length: of `HankelPlan`: the window in the reversed values; starts at -1 for prefix keys.
        allowed_start, allowed_stop: of `HankelPlan`: the entries of the window that the mask allows.
    """

    keys: slice
    mask: Mask | None = None
    forbidden: Bool[Tensor, "#B #H n m"] | None = None
    bias: Tensor | None = None
    prefix_keys: int = 0
    window_start: int = -1
    window_length: int = 0
    allowed_start: int = 0
    allowed_stop: int = 0

    @property
    def count(self) -> int:
        """The number of keys."""
        return count_of(self.keys)

    @property
    def has_only_prefix_keys(self) -> bool:
        """Whether, in a `HankelPlan`, all keys are prefix keys, which have no window."""
        return self.window_start < 0

    @property
    def is_masked_by_window(self) -> bool:
        """Whether the window holds -inf for pairs that are not allowed."""
        return self.allowed_start > 0 or self.allowed_stop < self.window_length


@dataclass(frozen=True, eq=False)
class Block:
    """Query rows that are computed together, and their tiles.

    Attributes:
        queries: the index of the query of each row.
        first_query: the first of these, as a Python integer.
        first_coordinate: of `HankelPlan`: the line coordinate of the first row.
        coordinates: of `HankelPlan`: the line coordinate of each row.
        skew: of `HankelPlan`: how far the window moves from one row to the next; 0 in a prefix.
        box: of `HankelPlan`: how many columns of a grid along each of its axes but the first; empty in a prefix.
        tiles: the keys that its rows may see.
        head: the only head that the tiles belong to, or None for all heads.
    """

    queries: Int[Tensor, " n"]
    first_query: int
    first_coordinate: int = 0
    coordinates: Int[Tensor, " n"] | None = None
    skew: int = 0
    box: tuple[int, ...] = ()
    tiles: Sequence[Tile] = ()
    head: int | None = None

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(self.queries)

    def prefix_key_entries(self, bias: LineBias | None) -> Int[Tensor, " n"]:
        """Of `HankelPlan`: the entry of the reversed values that each row reads for prefix keys, which are at
        `-(L + 1)` (`core.line`)."""
        assert bias is not None
        assert self.coordinates is not None
        return bias.lines.length - 1 - (bias.lines.layout.tokens + 1 + bias.lines.origin) - self.coordinates

    @property
    def column_count(self) -> int:
        """The number of grid columns."""
        return math.prod(self.box)

    @property
    def column_rows(self) -> int:
        """The number of rows in each grid column."""
        return self.count // self.column_count
