"""A line bias block by block without gathering it: rows of a strip see one window of `values`, shifted.

A strip is the queries that differ in their first axis alone: a whole sequence, or a grid's column. In the order of
falling coordinates, row r of a strip reads what row 0 reads, `step` keys further on, where `step` is the number of keys
a cell of the first axis holds (1 in a sequence, a row's width in a grid):

    bias[r, j] = window[r * step + j]

so the bias of a block is a view of one vector, with strides (step, 1): Hankel instead of Toeplitz because the queries
run backwards. The window itself is a view of the reversed `values`, or for grids a small copy. The gradient goes the
same way: the scores' gradient is written into a buffer whose row r begins r * step further to the right, and the sums
of its columns are the window's gradient. A mask by `left` and `right` around the index is a function of r * step + j
too, and becomes -inf in the window.

All prefix queries stand at one place and read one window unshifted; all prefix keys give a row one value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.attention.streaming import masks
from relpos.attention.streaming.plan import Work
from relpos.core import LineBias, LineVectors, Sinks
from relpos.core.lines import Ramp


def log_base(dtype: torch.dtype) -> float:
    """By what scores are multiplied before they are exponentiated: log2(e) for exp2, and in float64 1 for exp.

    On CPU, exp is several times slower than exp2 and, where it underflows, a hundred times. In float64 that one more
    rounding would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


ROWS, WIDTH = 128, 8192
"""Rows and keys of a tile at most."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows, in the order in which queries are gathered.

    Attributes:
        rows: where they stand there. numbers: which queries they are; head: the first of these, in plain numbers.
        place: the line number of the first, behind which the others follow at `-stride` each.
        step: keys by which a row's window is shifted against the one before; 0 in a prefix.
    """

    rows: slice
    numbers: Int[Tensor, " n"]
    head: int
    place: int = 0
    step: int = 0


@dataclass(eq=False)
class Tile:
    """A block's rows against some keys.

    Attributes:
        keys: which ones.
        masked: whether single pairs may be forbidden; pairs: which are not, once that was asked.
        first: where in the reversed values the window begins; of a prefix, -1. width: of the window.
        low, high: entries of the window outside which the mask forbids all.
    """

    keys: slice
    masked: bool
    first: int = -1
    width: int = 0
    low: int = 0
    high: int = 0
    pairs: Tensor | None = None


class Strips:
    """Rows and tiles of a call whose only position is one regular line bias, or none."""

    together = False

    def __init__(self, work: Work, rows: int = ROWS, width: int = WIDTH, unit: float | None = None) -> None:
        batch, heads, self.queries, _ = work.q.shape
        self.mask, self.device = work.mask, work.q.device
        self.batch, self.heads = batch, heads
        self.keys = work.k.shape[2]
        self.line = next(iter(work.terms.of(LineBias)), None)
        self.dtype = torch.promote_types(work.q.dtype, torch.float32)
        self.reversed: Tensor | None = None
        self.highest: Tensor | None = None
        if self.line is None:
            self.query = Ramp(0, (self.queries,), (1,))
            self.key = Ramp(0, (self.keys,), (1,))
        else:
            layout = self.line.lines.layout
            assert layout.query is not None
            assert layout.key is not None
            self.query, self.key = layout.query, layout.key
            values = self.line.values.detach().to(self.dtype).expand(heads, -1).flip(-1) * (
                log_base(self.dtype) if unit is None else unit
            )
            self.reversed = values.expand(batch, *values.shape).reshape(batch * heads, -1).contiguous()
            self.highest = self.reversed.amax(dim=1)[:, None, None]
        self.step = math.prod(self.key.sizes[1:])
        self.columns = math.prod(self.query.sizes[1:])
        self.length = self.query.sizes[0]
        self.width = max(self.step, min(self.keys, width) // self.step * self.step)
        self.rows = min(self.length, rows)

    @staticmethod
    def serve(work: Work) -> bool:
        """Whether this is all the call needs."""
        biases, kinds = work.terms.of(LineBias), (LineBias, LineVectors, Sinks)
        if work.dropout > 0 or len(biases) > 1 or any(not isinstance(term, kinds) for term in work.terms):
            return False
        for bias in biases:
            layout = bias.lines.layout
            if layout.query is None or layout.key is None or layout.query.strides != layout.key.strides:
                return False
            if work.terms.of(LineVectors) and layout.kind != "affine":
                return False
        return True

    # the order of the queries

    def gather(self, x: Float[Tensor, "B H N D"]) -> Float[Tensor, "BH N D"]:
        """Queries in the order of the blocks."""
        prefix = self.query.prefix
        tokens = x[:, :, prefix:].unflatten(2, (self.length, self.columns)).flip(2).transpose(2, 3).flatten(2, 3)
        return (torch.cat([x[:, :, :prefix], tokens], dim=2) if prefix else tokens).flatten(0, 1)

    def scatter(self, x: Float[Tensor, "BH N D"]) -> Float[Tensor, "B H N D"]:
        """The adjoint and inverse of `gather`."""
        prefix = self.query.prefix
        x = x.unflatten(0, (self.batch, self.heads))
        tokens = x[:, :, prefix:].unflatten(2, (self.columns, self.length)).transpose(2, 3).flip(2).flatten(2, 3)
        return torch.cat([x[:, :, :prefix], tokens], dim=2) if prefix else tokens

    def blocks(self) -> Iterator[Block]:
        """All rows once."""
        prefix, size = self.query.prefix, self.query.sizes
        if prefix:
            place = self.line.lines.layout.tokens if self.line is not None else 0
            yield Block(slice(0, prefix), torch.arange(prefix, device=self.device), 0, place)
        for column in range(self.columns):
            offset, rest = self.query.start, column
            for length, stride in zip(reversed(size[1:]), reversed(self.query.strides[1:]), strict=True):
                offset += rest % length * stride
                rest //= length
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                cells = self.length - 1 - torch.arange(start, stop, device=self.device)
                place = offset + (self.length - 1 - start) * self.query.strides[0]
                rows = slice(prefix + column * self.length + start, prefix + column * self.length + stop)
                head = prefix + (self.length - 1 - start) * self.columns + column
                yield Block(rows, prefix + cells * self.columns + column, head, place, self.step)

    # the bias

    def tiles(self, block: Block) -> Iterator[Tile]:
        """What the rows may see, in stretches of at most `width` keys."""
        prefix = self.key.prefix
        for low, high in masks.spans(self.mask, block.numbers, self.queries, self.keys):
            if low < prefix:
                yield Tile(slice(low, min(high, prefix)), self.mask is not None)
            start, stop = max(low - prefix, 0) // self.step * self.step, high - prefix
            stop = min(self.keys - prefix, -(-stop // self.step) * self.step)
            for first in range(start, stop, self.width):
                yield self._tile(block, first, min(first + self.width, stop))

    def _tile(self, block: Block, start: int, stop: int) -> Tile:
        keys = slice(self.key.prefix + start, self.key.prefix + stop)
        width = stop - start + (block.rows.stop - block.rows.start - 1) * block.step
        first = 0
        if self.line is not None and self.reversed is not None:
            key_place = self.key.start + start // self.step * self.key.strides[0]
            first = self.reversed.shape[1] - 1 - (block.place - key_place + self.line.lines.origin)
        if self.mask is None:
            return Tile(keys, False, first, width, 0, width)
        if not masks.is_interval(self.mask) or block.step == 0 or self.columns != self.step:
            return Tile(keys, True, first, width, 0, width)
        ahead = block.head - keys.start  # the offset of order at the window's first entry; it falls by 1 an entry
        low = 0 if self.mask.left is None else max(0, ahead - self.mask.left)
        high = width if self.mask.right is None else min(width, ahead + self.mask.right + 1)
        return Tile(keys, False, first, width, min(low, width), max(high, 0))

    def bias(self, block: Block, tile: Tile, heads: slice) -> Tensor | None:
        """What is added to the scores, `[g, n, m]` or broadcast to it, in the units of `log_base`."""
        whole = tile.low == 0 and tile.high == tile.width
        if self.reversed is None and whole:
            return None
        if tile.first < 0:
            assert self.reversed is not None
            return self.reversed[heads][:, self.reversed.shape[1] - 1 - self._prefix_index(block), None]
        window = self.window(tile, heads)
        n, m = block.rows.stop - block.rows.start, tile.keys.stop - tile.keys.start
        return window.as_strided((window.shape[0], n, m), (window.stride(0), block.step, 1), window.storage_offset())

    def window(self, tile: Tile, heads: slice) -> Float[Tensor, "#g W"]:
        """What the rows of a tile read, row r from `r * step` on."""
        if self.reversed is None:
            window = torch.zeros(1, tile.width, dtype=self.dtype, device=self.device)
        else:
            window = self._windows(self.reversed[heads], tile.first, tile.width).flatten(1)
        if tile.low > 0 or tile.high < tile.width:
            window = window.clone()
            window[:, : tile.low] = -torch.inf
            window[:, tile.high :] = -torch.inf
        return window

    def _prefix_index(self, block: Block) -> Int[Tensor, " n"]:
        """Where in `values` each row meets a prefix key."""
        assert self.line is not None
        lines = self.line.lines
        count = block.rows.stop - block.rows.start
        falling = torch.arange(count, device=self.device) * (self.query.strides[0] if block.step else 0)
        return block.place - falling + lines.layout.tokens + 1 + lines.origin

    def _windows(self, x: Float[Tensor, "g L"], first: int, width: int) -> Tensor:
        """The window that begins at `first`, as a view `[g, cells of the first axis, further axes]`."""
        sizes = (x.shape[0], width // self.step, *self.key.sizes[1:])
        strides = (x.stride(0), *self.key.strides)
        return x.as_strided(sizes, strides, x.storage_offset() + first)

    # its gradient

    def skew(self, block: Block, tile: Tile) -> int:
        """By how many entries each row of the gradient's buffer is shifted."""
        return block.step if tile.first >= 0 else 0

    def collect(
        self,
        into: Float[Tensor, "BH L"],
        block: Block,
        tile: Tile,
        heads: slice,
        columns: Float[Tensor, "g W"],
        d: Tensor,
    ) -> None:
        """Add to the gradient of the reversed values: `columns` are the sums of the shifted rows of `d`."""
        if tile.first >= 0:
            view = self._windows(into[heads], tile.first, columns.shape[1])
            view += columns.view(view.shape)
            return
        place = into.shape[1] - 1 - self._prefix_index(block)
        sums = d.sum(dim=2)
        if block.step == 0:
            place, sums = place[:1], sums.sum(dim=1, keepdim=True)
        into[heads, place] += sums
