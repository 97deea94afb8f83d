"""The windows of a grid's columns (see `hankel`), read and accumulated together.

Each column reads one entry earlier than the column before it, so all are one view of the reversed values, last column
first. The view overlaps itself. Its sums are written into rows one entry longer than the rows read, which shifts each
row by one. They are summed over the columns before they are added to the values:

    columns     s00 s01 s02  .          as they are read    s00 s01 s02  .
                s10 s11 s12  .                               .  s10 s11 s12

With more than two axes, columns are a box of cells. They are first summed over all its axes but the last, each along
its own axis of the keys.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from relpos.core.line import Ramp
from relpos.engines.streaming.plan.chunks import contiguous_rows

_MOST = 2
"""Maximum columns, per entry of a key row, whose sums are written side by side; with more, too many numbers are
zeros."""


def column_coordinate(queries: Ramp, column: int) -> int:
    """The line coordinate of a column's cell in the first row of a grid."""
    coordinate = queries.start
    for size, stride in zip(reversed(queries.sizes[1:]), reversed(queries.strides[1:]), strict=True):
        coordinate += column % size * stride
        column //= size
    return coordinate


def rows_and_columns(queries: Ramp, most: int, *, one_column: bool = False) -> tuple[int, tuple[int, ...]]:
    """The rows of a column, and the box of columns, of a block of at most `most` queries.

    They are about equal if the grid has enough columns. Each row of a column makes a skewed tile (see `workspace`) a
    row of keys wider, and each column reads and accumulates its own window.
    """
    rows, *others = queries.sizes
    columns = math.prod(others)
    if one_column or columns <= 1 or rows == 0:
        return min(rows, most), (1,) * len(others)
    at_once = _size_of_pieces(rows, max(math.isqrt(most), -(-most // columns)))
    left, box = most // at_once, []
    for size in reversed(others):
        box.append(_size_of_pieces(size, left))
        left = max(1, left // box[-1])
    return at_once, tuple(reversed(box))


def _size_of_pieces(count: int, most: int) -> int:
    """The piece size that cuts `count` into the fewest, about equal pieces of at most `most`."""
    return -(-count // -(-count // most))


def boxes(sizes: Sequence[int], most: Sequence[int]) -> Iterator[tuple[list[int], tuple[int, ...]]]:
    """The columns, and the sizes, of each box that a grid of columns is cut into, of at most these sizes."""
    cuts = [
        [range(x, min(x + step, size)) for x in range(0, size, step)] for size, step in zip(sizes, most, strict=True)
    ]
    for box in itertools.product(*cuts):
        columns = [0]
        for size, part in zip(sizes, box, strict=True):
            columns = [column * size + x for column in columns for x in part]
        yield columns, tuple(map(len, box))


@dataclass(frozen=True)
class Columns:
    """Where the columns of a block read values.

    Attributes:
        start: the entry that the first column reads first. The next along an axis reads a stride of that axis earlier.
        box: how many columns along each axis but the first.
        sizes, strides: of the entries that a column reads, rows of keys first.
    """

    start: int
    box: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def _last(self) -> int:
        """How many entries earlier the last column reads."""
        return sum((count - 1) * stride for count, stride in zip(self.box, self.strides[1:], strict=True))

    def read(self, values: Float[Tensor, "g L"]) -> Float[Tensor, "g *c W"]:
        """The entries that each column reads; a view for a single contiguous column."""
        if math.prod(self.box) == 1:
            return contiguous_rows(self._view(values, 0, self.sizes, self.strides).flatten(1))
        axes = len(self.box)
        view = self._view(values, self._last, (*self.box, *self.sizes), (*self.strides[1:], *self.strides))
        read = view.flip(*range(1, 1 + axes)).flatten(1 + axes).flatten(1, axes)
        return read.contiguous()  # a flipped view may have another memory order

    def add(self, values: Float[Tensor, "g L"], sums: Float[Tensor, "g c W"]) -> None:
        """Add to the entries that each column reads."""
        if math.prod(self.box) == 1:
            self._view(values, 0, self.sizes, self.strides).add_(sums.unflatten(-1, self.sizes)[:, 0])
            return
        count, width = self.box[-1], self.sizes[-1]
        sums, sizes = self._over_outer(sums)
        if count > _MOST * width:
            for column in range(count):
                back = self._last - (count - 1 - column) * self.strides[-1]
                self._view(values, back, (*sizes, width), self.strides).add_(sums[:, column])
            return
        read = width + count - 1
        written = sums.new_zeros(len(sums), math.prod(sizes), count, read + 1)
        written[..., :width] = sums.flatten(2, -2).flip(1).transpose(1, 2)
        shifted = written.flatten(2)[..., : count * read].unflatten(2, (count, read))
        total = shifted.sum(dim=2).unflatten(1, sizes)
        self._view(values, self._last, (*sizes, read), self.strides).add_(total)

    def _over_outer(self, sums: Float[Tensor, "g c W"]) -> tuple[Float[Tensor, "g n *s w"], tuple[int, ...]]:
        """The sums over all axes of columns but the last, and their sizes but the last: as the last of these read."""
        rows, *inner, width = self.sizes
        outer = self.box[:-1]
        parts = sums.unflatten(1, self.box).unflatten(-1, self.sizes)
        sizes = rows, *(size + count - 1 for size, count in zip(inner, outer, strict=True))
        if math.prod(outer) == 1:
            return parts.flatten(1, len(self.box)), sizes
        total = sums.new_zeros(len(sums), self.box[-1], *sizes, width)
        for at in itertools.product(*map(range, outer)):
            shifts = (count - 1 - x for x, count in zip(at, outer, strict=True))
            read = (slice(shift, shift + size) for shift, size in zip(shifts, inner, strict=True))
            total[:, :, :, *read] += parts[:, *at]
        return total, sizes

    def _view(self, x: Tensor, offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        return x.as_strided((len(x), *sizes), (x.stride(0), *strides), x.storage_offset() + self.start - offset)


def add_strided(values: Float[Tensor, "g L"], start: int, distance: int, sums: Float[Tensor, "g n m"]) -> None:
    """Add to the entries that rows read for keys at equal distances: row r and key j read entry start + r + j *
    distance. In `distance` consecutive rows no two pairs read the same."""
    g, n, m = sums.shape
    for first in range(0, n, distance):
        rows = sums[:, first : first + distance]
        offset = values.storage_offset() + start + first
        values.as_strided((g, rows.shape[1], m), (values.stride(0), 1, distance), offset).add_(rows)
