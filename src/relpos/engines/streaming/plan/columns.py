"""The windows of a grid's columns (see `hankel`), read and accumulated together.

Each column reads one entry earlier than the column before it, so all are one view of the reversed values, last column
first. The view overlaps itself. Its sums are written into rows one entry longer than the rows read, which shifts each
row by one. They are summed over the columns before they are added to the values:

    columns     s00 s01 s02  .          as they are read    s00 s01 s02  .
                s10 s11 s12  .                               .  s10 s11 s12
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
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


def rows_and_columns(queries: Ramp, most: int, *, one_column: bool = False) -> tuple[int, int]:
    """The rows of a column and the columns of a block of at most `most` queries.

    They are about equal if the grid has enough columns. Each row of a column makes a skewed tile (see `workspace`) a
    row of keys wider, and each column reads and accumulates its own window.
    """
    rows, columns = queries.sizes[0], math.prod(queries.sizes[1:])
    if one_column or columns <= 1 or rows == 0:
        return min(rows, most), 1
    at_once = _size_of_pieces(rows, max(math.isqrt(most), -(-most // columns)))
    return at_once, _size_of_pieces(columns, most // at_once)


def _size_of_pieces(count: int, most: int) -> int:
    """The piece size that cuts `count` into the fewest, about equal pieces of at most `most`."""
    return -(-count // -(-count // most))


@dataclass(frozen=True)
class Columns:
    """Where some columns read values.

    Attributes:
        start: the entry that the first column reads first.
        offsets: how many entries earlier each column reads.
        sizes, strides: of the entries that a column reads, rows of keys first.
    """

    start: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def _is_one_view(self) -> bool:
        """Whether all columns are one view."""
        count = len(self.offsets)
        return len(self.sizes) == 2 and count > 1 and self.offsets == tuple(range(count))

    def read(self, values: Float[Tensor, "g L"]) -> Float[Tensor, "g *c W"]:
        """The entries that each column reads; a view for a single contiguous column."""
        if self._is_one_view:
            view = self._view(values, self.offsets[-1], (len(self.offsets), *self.sizes), (1, *self.strides))
            return view.flip(1).flatten(2).contiguous()  # a flipped view may have another memory order
        views = [self._view(values, offset, self.sizes, self.strides).flatten(1) for offset in self.offsets]
        return contiguous_rows(views[0]) if len(views) == 1 else torch.stack(views, dim=1)

    def add(self, values: Float[Tensor, "g L"], sums: Float[Tensor, "g c W"]) -> None:
        """Add to the entries that each column reads."""
        if not self._is_one_view or len(self.offsets) > _MOST * self.sizes[1]:
            for number, offset in enumerate(self.offsets):
                view = self._view(values, offset, self.sizes, self.strides)
                view += sums[:, number].view(view.shape)
            return
        count, (rows, width) = len(self.offsets), self.sizes
        read = width + count - 1
        written = sums.new_zeros(len(sums), rows, count, read + 1)
        written[..., :width] = sums.unflatten(2, self.sizes).flip(1).transpose(1, 2)
        shifted = written.flatten(2)[..., : count * read].unflatten(2, (count, read))
        self._view(values, self.offsets[-1], (rows, read), self.strides).add_(shifted.sum(dim=2))

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
