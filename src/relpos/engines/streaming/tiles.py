"""How a call is cut: query rows into blocks, and what a block may see into tiles.

A mask leaves a block few tiles. Here two of them cover all that rows 4 to 7 may see. The other keys are never computed;
the pairs marked "." inside a tile are, and are then masked (in practice, gaps this small are closed):

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
        mask: which pairs of the tile are allowed; None if all are, or if the window already holds -inf where not.
        forbidden: the pairs that `mask` forbids, filled in when they are first needed.
        bias: `DensePlan`: the bias of all heads for each pair, in the unit of the scores.
        first, width: `HankelPlan`: where the tile's window begins in the reversed values, and its length; `first` is -1
            if all keys are prefix keys.
        low, high: `HankelPlan`: the mask allows `window[low:high]`.
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
        numbers: the indices of the queries; first: the first of them, as a Python integer.
        line: `HankelPlan`: the line coordinate of the first row.
        step: `HankelPlan`: by how many keys the window moves from one row to the next; 0 in a prefix.
        columns: `HankelPlan`: the line coordinate of the first row of each grid column in the block, less `line`.
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
