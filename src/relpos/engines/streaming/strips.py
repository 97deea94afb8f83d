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

Under a mask, a block of rows has several tiles, one for each stretch of keys that it may see. Keys at equal distances e
are one tile too: `window[r + j * e]` is a view as well, and its gradient comes e rows at a time, whose entries lie side
by side.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineBias, LineVectors, Mask, Sinks
from relpos.core.line import Ramp
from relpos.engines.call import Call
from relpos.engines.streaming import masks
from relpos.engines.streaming.operands import side_by_side


def log_base(dtype: torch.dtype) -> float:
    """By what scores are multiplied before they are exponentiated: log2(e) for exp2, and in float64 1 for exp.

    On CPU, exp is several times slower than exp2 and, where it underflows, a hundred times. In float64 that one more
    rounding would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


ROWS, WIDTH = 256, 8192
"""Rows and keys of a tile at most."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows, in the order of the strips.

    Attributes:
        rows: where they stand there. numbers: which queries they are; head: the first of these, in plain numbers.
        place: the line number of the first, behind which the others follow at `-stride` each.
        step: keys by which a row's window is shifted against the one before; 0 in a prefix.
        strips: the places of the strips in the block, all as long as each other, less `place`.
    """

    rows: slice
    numbers: Int[Tensor, " n"]
    head: int
    place: int = 0
    step: int = 0
    strips: tuple[int, ...] = (0,)


@dataclass(eq=False)
class Tile:
    """A block's rows against some keys.

    Attributes:
        keys: which ones, of a pattern at equal distances.
        masked: whether single pairs may be forbidden; pairs: which are not, once that was asked.
        first: where in the reversed values the window begins; of a prefix, -1. width: of the window.
        low, high: entries of the window outside which the mask forbids all.
        mask: that of the tile's heads.
    """

    keys: slice
    masked: bool
    first: int = -1
    width: int = 0
    low: int = 0
    high: int = 0
    mask: Mask | None = None
    pairs: Tensor | None = None

    @property
    def count(self) -> int:
        """How many keys."""
        return count_of(self.keys)


def count_of(keys: slice) -> int:
    """How many keys a slice with a start and a stop has."""
    return len(range(keys.start, keys.stop, keys.step or 1))


class Strips:
    """Rows and tiles of a call whose only position is one regular line bias, or none."""

    def __init__(self, call: Call, rows: int = ROWS, width: int = WIDTH, unit: float | None = None) -> None:
        batch, heads, self.queries, _ = call.q.shape
        self.mask, self.device = call.mask, call.q.device
        self.batch, self.heads = batch, heads
        self.keys = call.k.shape[2]
        self.line = next(iter(call.terms.of(LineBias)), None)
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
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
        self.rows, self.most_rows = min(self.length, rows), rows
        plain = self.columns == 1 and self.query.prefix == 0
        self.cuts = masks.cuts(self.mask, self.length, self.device) if plain else []
        self.stepped = len(self.key.sizes) == 1 and self.key.prefix == 0 and not call.terms.of(LineVectors)

    @staticmethod
    def serve(call: Call) -> bool:
        """Whether this is all the call needs."""
        biases, kinds = call.terms.of(LineBias), (LineBias, LineVectors, Sinks)
        if call.dropout > 0 or len(biases) > 1 or any(not isinstance(term, kinds) for term in call.terms):
            return False
        for bias in biases:
            layout = bias.lines.layout
            if layout.query is None or layout.key is None or layout.query.strides != layout.key.strides:
                return False
            if call.terms.of(LineVectors) and layout.kind != "affine":
                return False
        return True

    def blocks(self) -> Iterator[Block]:
        """All rows once."""
        prefix = self.query.prefix
        if prefix:
            place = self.line.lines.layout.tokens if self.line is not None else 0
            yield Block(slice(0, prefix), torch.arange(prefix, device=self.device), 0, place)
        if self.length == 0:
            return
        at_once = 1 if self.mask is not None else min(self.columns, max(1, self.most_rows // self.length))
        for column in range(0, self.columns, at_once):
            strips = range(column, min(column + at_once, self.columns))
            offsets = [self._offset(one) for one in strips]
            for start, stop in self._stretches():
                last = self.length - 1 - start
                cells = self.length - 1 - torch.arange(start, stop, device=self.device)
                numbers = torch.cat([prefix + cells * self.columns + one for one in strips])
                first = prefix + column * self.length + start
                yield Block(
                    rows=slice(first, first + len(numbers)),
                    numbers=numbers,
                    head=prefix + last * self.columns + column,
                    place=offsets[0] + last * self.query.strides[0],
                    step=self.step,
                    strips=tuple(offset - offsets[0] for offset in offsets),
                )

    def _stretches(self) -> Iterator[tuple[int, int]]:
        """A strip in stretches of at most `rows`, cut where the mask wants it, counted from its end."""
        borders = [0, *(self.length - cut for cut in reversed(self.cuts)), self.length]
        for low, high in itertools.pairwise(borders):
            for start in range(low, high, self.rows):
                yield start, min(start + self.rows, high)

    def _offset(self, column: int) -> int:
        """The line number of a column's cell in the first row."""
        offset = self.query.start
        sizes, strides = self.query.sizes[1:], self.query.strides[1:]
        for length, stride in zip(reversed(sizes), reversed(strides), strict=True):
            offset += column % length * stride
            column //= length
        return offset

    # the bias

    @property
    def heads_apart(self) -> bool:
        """Whether what may be seen differs from head to head, in blocks."""
        own = self.mask is not None and self.mask.blocks is not None and self.mask.blocks.layout.shape[0] > 1
        return own and self.device.type == "cpu"

    def tiles(self, block: Block, head: int | None = None) -> Iterator[Tile]:
        """What the rows may see, of one head or of all, in stretches of at most `width` keys."""
        mask, prefix, done = self.mask, self.key.prefix, 0
        if head is not None and mask is not None and mask.blocks is not None:
            mask = replace(mask, blocks=replace(mask.blocks, layout=mask.blocks.layout[head : head + 1]))
        for span in masks.spans(mask, block.numbers, self.keys, stepped=self.stepped):
            if span.step is not None:
                yield self._tile(mask, block, span)
                continue
            if span.start < prefix:
                yield Tile(slice(span.start, min(span.stop, prefix)), mask is not None, mask=mask)
            start, stop = max(span.start - prefix, 0) // self.step * self.step, span.stop - prefix
            stop = min(self.keys - prefix, -(-stop // self.step) * self.step)
            start, done = max(start, done), max(stop, done)  # two stretches may end and begin in one row of the grid
            for first in range(start, stop, self.width):
                yield self._tile(mask, block, slice(prefix + first, prefix + min(first + self.width, stop)))

    def _tile(self, mask: Mask | None, block: Block, keys: slice) -> Tile:
        width = keys.stop - keys.start + ((block.rows.stop - block.rows.start) // len(block.strips) - 1) * block.step
        first = 0
        if self.line is not None and self.reversed is not None:
            key_place = self.key.start + (keys.start - self.key.prefix) // self.step * self.key.strides[0]
            first = self.reversed.shape[1] - 1 - (block.place - key_place + self.line.lines.origin)
        if mask is None:
            return Tile(keys, False, first, width, 0, width)
        if not mask.is_interval or block.step == 0 or self.columns != self.step:
            return Tile(keys, True, first, width, 0, width, mask)
        ahead = block.head - keys.start  # the offset of order at the window's first entry; it falls by 1 an entry
        low = 0 if mask.left is None else max(0, ahead - mask.left)
        high = width if mask.right is None else min(width, ahead + mask.right + 1)
        return Tile(keys, False, first, width, min(low, width), max(high, 0))

    def bias(self, block: Block, tile: Tile, heads: slice) -> Tensor | None:
        """What is added to the scores, in the units of `log_base`: `[g, n, m]` or broadcast to it, of several strips
        `[g, strips, rows of each, m]`."""
        whole = tile.low == 0 and tile.high == tile.width
        if self.reversed is None and whole:
            return None
        if tile.first < 0:
            assert self.reversed is not None
            return self.reversed[heads][:, self.reversed.shape[1] - 1 - self._prefix_index(block), None]
        window = self.window(block, tile, heads)
        n, m = (block.rows.stop - block.rows.start) // len(block.strips), tile.count
        strides = *window.stride()[:-1], block.step, tile.keys.step or 1
        return window.as_strided((*window.shape[:-1], n, m), strides, window.storage_offset())

    def window(self, block: Block, tile: Tile, heads: slice) -> Float[Tensor, "#g *s W"]:
        """What the rows of a tile read, row r from `r * step` on; one window a strip where there are several. Entries
        lie side by side, which those that keys of a grid of one column read do not in the values."""
        if self.reversed is None:
            window = torch.zeros(1, tile.width, dtype=self.dtype, device=self.device)
        else:
            own = self.reversed[heads]
            parts = [self._windows(own, tile.first - strip, tile.width).flatten(1) for strip in block.strips]
            window = side_by_side(parts[0]) if len(parts) == 1 else torch.stack(parts, dim=1)
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
        row = torch.arange(count // len(block.strips), device=self.device)
        falling = row * (self.query.strides[0] if block.step else 0)
        places = torch.cat([block.place + strip - falling for strip in block.strips])
        return places + lines.layout.tokens + 1 + lines.origin

    def _windows(self, x: Float[Tensor, "g L"], first: int, width: int) -> Tensor:
        """The window that begins at `first`, as a view `[g, cells of the first axis, further axes]`."""
        sizes = (x.shape[0], width // self.step, *self.key.sizes[1:])
        strides = (x.stride(0), *self.key.strides)
        return x.as_strided(sizes, strides, x.storage_offset() + first)

    # its gradient

    def skew(self, block: Block, tile: Tile) -> int:
        """By how many entries each row of the gradient's buffer is shifted."""
        return block.step if tile.first >= 0 and tile.keys.step is None else 0

    def collect(
        self,
        into: Float[Tensor, "BH L"],
        block: Block,
        tile: Tile,
        heads: slice,
        columns: Float[Tensor, "g s W"],
        d: Tensor,
    ) -> None:
        """Add to the gradient of the reversed values: `columns` are the sums of the shifted rows of `d`, by strips."""
        if tile.keys.step is not None:
            self._collect_stepped(into[heads], tile, d if block.step else d.sum(dim=1, keepdim=True))
            return
        if tile.first >= 0:
            for number, strip in enumerate(block.strips):
                view = self._windows(into[heads], tile.first - strip, columns.shape[2])
                view += columns[:, number].view(view.shape)
            return
        place = into.shape[1] - 1 - self._prefix_index(block)
        sums = d.sum(dim=2)
        if block.step == 0:
            place, sums = place[:1], sums.sum(dim=1, keepdim=True)
        into[heads, place] += sums

    @staticmethod
    def _collect_stepped(into: Float[Tensor, "g L"], tile: Tile, d: Float[Tensor, "g n m"]) -> None:
        """The same of keys at equal distances: of as many rows as these, no two pairs read one entry."""
        step, (g, n, m) = tile.keys.step, d.shape
        for start in range(0, n, step):
            some = d[:, start : start + step]
            first = into.storage_offset() + tile.first + start
            into.as_strided((g, some.shape[1], m), (into.stride(0), 1, step), first).add_(some)
