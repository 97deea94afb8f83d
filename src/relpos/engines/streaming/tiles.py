"""How a call is cut: query rows into blocks, and what a block may see into tiles.

A mask leaves a block few tiles. Here two of them hold all that rows 4 to 7 may see, and nothing else is computed:

           keys   0 1 2 3 4 5 6 7 8 9
    query 4       x x . . . x x . . .
    query 5       x x . . . x x x . .
    query 6       x x . . . . x x x .
    query 7       x x . . . . . x x x
    tiles        |---|     |---------|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask


def count_of(keys: slice) -> int:
    """How many keys a slice with a start and a stop has."""
    return len(range(keys.start, keys.stop, keys.step or 1))


@dataclass(eq=False)
class Tile:
    """A block's rows against some keys.

    Attributes:
        keys: which ones; with a step, keys at equal distances.
        mask: which single pairs are allowed, where the bias does not say so already; forbidden: the pairs which are
            not, once that was computed.
        bias: of all heads, in the unit of the scores, where a plan computes it for each pair.
        first, width: where the tile's window begins and how long it is; first is -1 where all keys are prefix keys.
        low, high: the entries of the window that the mask allows. These four are of `HankelPlan`.
    """

    keys: slice
    mask: Mask | None = None
    forbidden: Bool[Tensor, "#B #H n m"] | None = None
    bias: Tensor | None = None
    first: int = -1
    width: int = 0
    low: int = 0
    high: int = 0

    @property
    def count(self) -> int:
        """How many keys."""
        return count_of(self.keys)


@dataclass(frozen=True, eq=False)
class Block:
    """Query rows that are computed together, and their tiles.

    Attributes:
        numbers: which queries they are; first: the first of them, in plain numbers.
        line, step, columns: of `HankelPlan`. The line number of the first row; the keys by which a row's window is
            shifted against that of the row before, 0 in a prefix; the line numbers of the first rows of the grid
            columns in the block, less `line`.
        head: the only head that these tiles are of, where masks differ by head.
    """

    numbers: Int[Tensor, " n"]
    first: int
    line: int = 0
    step: int = 0
    columns: tuple[int, ...] = (0,)
    tiles: Sequence[Tile] = ()
    head: int | None = None

    @property
    def count(self) -> int:
        """How many rows."""
        return len(self.numbers)
