"""Tiles along rows of cells: where the tokens of a tile are on their line.

    coordinate(t) = t + t // INNER * JUMP + t // PLANE * FAR        t: tokens after the prefix, from 0

is the coordinate of a token of a grid with INNER tokens in a row and PLANE in a plane. A row ahead is JUMP more than a
row's tokens. If a tile's size divides INNER or is a multiple of it, and likewise PLANE, all tiles are alike:

    coordinate(start + r) = coordinate(start) + coordinate(r)       start: a multiple of the size

The bias of a pair is then at one address of the tile plus a constant of the pair. Tiles of 32 tokens on rows of 16,
with JUMP 15:

    r                  0  1 ... 15 | 16 17 ... 31
    coordinate(r)      0  1 ... 15 | 31 32 ... 46

Each token of a prefix is a tile of its own, of which other rows or columns are masked. So tiles of cells begin where
rows of cells do, and the bias of a prefix is read at one address of the tile, too.

A kernel's constants QUERIES and KEYS are (PREFIX, INNER, JUMP, PLANE, FAR). INNER and PLANE are 0 where there is one
row or one plane. ALIKE: whether tiles are; if not, both constants are zeros. `grid_tiles` has what kernels do with
them.
"""

from __future__ import annotations

import math

from relpos.core.line import Layout, Ramp

TileSide = tuple[int, int, int, int, int]
"""PREFIX, INNER, JUMP, PLANE, FAR."""
PLAIN_SIDE: TileSide = (0, 0, 0, 0, 0)
"""Of consecutive integers without a prefix."""
_MOST_PREFIX = 4
"""Tokens of a prefix, at most: beyond, their tiles cost more than is won."""
_MOST_ZEROS = 2**14
"""Zeros at one end of a table, at most: more are needed only by unlike grids, one with very long rows."""


def sides(layout: Layout, rows: int, columns: int, largest: int) -> tuple[TileSide, TileSide] | None:
    """QUERIES and KEYS of a kernel with tiles of `rows` queries and `columns` keys; None where tiles are not alike.

    Args:
        layout: of the lines.
        rows, columns: the tile.
        largest: the rows or columns of the largest tile of any kernel.
    """
    both = _both(layout)
    if both is None or _reach(both, largest) > _MOST_ZEROS:
        return None
    return both if _alike(both[0], rows) and _alike(both[1], columns) else None


def _both(layout: Layout) -> tuple[TileSide, TileSide] | None:
    query, key = (None if ramp is None else _side(ramp) for ramp in (layout.query, layout.key))
    return None if query is None or key is None else (query, key)


def _side(ramp: Ramp) -> TileSide | None:
    """The constant of regular lines; None if neighbours are not one apart, or there are more axes."""
    axes = [(size, stride) for size, stride in zip(ramp.sizes, ramp.strides, strict=True) if size > 1]
    if len(axes) > 3 or (axes and axes[-1][1] != 1):
        return None
    levels = [0, 0, 0, 0]
    for level in range(1, len(axes)):
        (size, stride), (_, following) = axes[-level], axes[-level - 1]
        levels[2 * level - 2 : 2 * level] = math.prod(size for size, _ in axes[-level:]), following - size * stride
    return (ramp.prefix, *levels)  # type: ignore[return-value]


def _alike(side: TileSide, size: int) -> bool:
    """Whether all tiles of a size are alike, and the columns of which kernels read eight in a row consecutive."""
    lengths = [length for length in side[1::2] if length]
    return side[0] <= _MOST_PREFIX and all(x % 8 == 0 and (x % size == 0 or size % x == 0) for x in lengths)


def _reach(both: tuple[TileSide, TileSide], largest: int) -> int:
    """How far on its line a token can be from one that is three tiles before it."""
    far = 3 * largest
    return max(
        far + sum(-(-far // length) * jump for length, jump in ((side[1], side[2]), (side[3], side[4])) if length)
        for side in both
    )


def padding(layout: Layout, largest: int) -> int:
    """How many zeros a table needs at both ends. A tile reaches one beyond the table; compilers that read ahead of the
    loop (for Blackwell) reach two more."""
    both = _both(layout)
    reach = 0 if both is None else _reach(both, largest)
    return reach if 0 < reach <= _MOST_ZEROS else 3 * largest


def starts(layout: Layout) -> tuple[int, int, int]:
    """The first query's coordinate minus the first key's, after their prefixes, and a query prefix's and a key prefix's
    minus that of the first token after it; zeros on irregular lines."""
    query, key, tokens = layout.query, layout.key, layout.tokens
    if query is None or key is None:
        return 0, 0, 0
    return query.start - key.start, tokens - query.start, -(tokens + 1) - key.start


def steps(count: int, side: TileSide, size: int) -> int:
    """How many tokens the tiles of a size cover, as if all were full."""
    return count + side[0] * (size - 1)
