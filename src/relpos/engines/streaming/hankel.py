"""The plan for a bias on regular lines, which is never gathered: a block's rows read one window of `values`, shifted.

Take the queries that differ in their first axis alone, a whole sequence or one column of a grid, the last one first.
Row r then reads what row 0 reads, r * step entries further on, where `step` is the number of keys in a cell of that
axis: 1 in a sequence, a row's width in a grid.

    bias[r, j] = window[r * step + j]

    a sequence, 4 keys                      a column of a grid whose rows have 2 keys
        query 2   w0 w1 w2 w3                   query in row 2   w0 w1 w2 w3 w4 w5
        query 1      w1 w2 w3 w4                query in row 1         w2 w3 w4 w5 w6 w7
        query 0         w2 w3 w4 w5             query in row 0               w4 w5 w6 w7 w8 w9

So the bias of a tile is a view of one vector, with strides (step, 1): a Hankel matrix. With queries in rising order it
would be a Toeplitz matrix. The window itself is a view of the reversed `values`, or for grids a small copy: each row
of keys reads consecutive entries of one row of the table.

    reversed values, as a table     . a b .                          window   a b c d e f
                                    . c d .                          query in row r begins r * 2 further on
                                    . e f .

The gradient takes the same way back: the scores' gradient is written into a skewed buffer (see `workspace`), and the
sums of its columns are the window's gradient. A mask by `left` and `right` around the index is a function of
r * step + j too, and becomes -inf in the window.

All prefix queries have one line number and read one window, unshifted; all prefix keys give a row one value. Keys at
equal distances e are one tile: `window[r + j * e]` is a view as well, and of e consecutive rows no two pairs read one
entry, so their gradient is added through that view, e rows at a time.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineBias, LineVectors, Mask, Sinks
from relpos.core.line import Ramp
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming import masks
from relpos.engines.streaming.chunks import Chunk, KeyGradient, contiguous_rows
from relpos.engines.streaming.plan import Plan
from relpos.engines.streaming.tiles import Block, Tile
from relpos.engines.streaming.vectors import Vectors
from relpos.engines.streaming.workspace import Workspace, clear_around, fill, whole


class HankelPlan(Plan):
    """A plan for a call whose only position is one regular line bias or none, and vectors on a sequence.

    Args:
        rows, width: rows of a block and keys of a tile at most. pairs: scores of all heads of a chunk at most.
        unit: by what scores are multiplied. native: whether matrix products are in bfloat16.
        whole_columns: one column of a grid makes a block, however short.
    """

    def __init__(
        self, call: Call, rows: int, width: int, pairs: int, *, unit: float, native: bool, whole_columns: bool = False
    ) -> None:
        self.unit, self.native, self.pairs = unit, native, pairs
        self.mask, self.device = call.mask, call.q.device
        self.batch, self.heads, queries, _ = call.q.shape
        self.keys = call.k.shape[2]
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.renormalizes = self.dtype == torch.float64
        self.line = call.terms.one(LineBias)
        self.reversed: Tensor | None = None
        self.d_values: Tensor | None = None
        if self.line is None:
            self.query, self.key = (Ramp(0, (count,), (1,)) for count in (queries, self.keys))
        else:
            layout = self.line.lines.layout
            assert layout.query is not None
            assert layout.key is not None
            self.query, self.key = layout.query, layout.key
            values = self.line.values.detach().to(self.dtype).expand(self.heads, -1).flip(-1) * unit
            self.reversed = values.expand(self.batch, *values.shape).reshape(self.batch * self.heads, -1).contiguous()
        self.vectors = Vectors(call, self.query.start, unit)
        self.step, self.columns = math.prod(self.key.sizes[1:]), math.prod(self.query.sizes[1:])
        self.length = self.query.sizes[0]
        self.width = max(self.step, min(self.keys, width) // self.step * self.step)
        self.rows = min(self.length, rows)
        alone = whole_columns or self.mask is not None
        self.columns_at_once = 1 if alone else max(1, rows // max(1, self.length))
        self.stepped = len(self.key.sizes) == 1 and self.key.prefix == 0 and not self.vectors
        heads_apart = self.mask is not None and self.mask.blocks is not None and self.mask.blocks.layout.shape[0] > 1
        self.heads_apart = heads_apart and self.device.type == "cpu"
        heads = range(self.heads) if self.heads_apart else (None,)
        blocks = [
            replace(block, head=head, tiles=list(self._tiles(block, head)))
            for block in self._row_blocks()
            for head in heads
        ]
        self._keep(blocks)
        self.by_block = self.heads_apart or any(tile.mask is not None for block in self._blocks for tile in block.tiles)

    @staticmethod
    def supports(call: Call) -> bool:
        """Whether it covers all of the call."""
        biases, vectors = call.terms.of(LineBias), call.terms.of(LineVectors)
        known = all(isinstance(term, LineBias | LineVectors | Sinks) for term in call.terms)
        if call.dropout > 0 or len(biases) > 1 or not known:
            return False
        for bias in biases:
            layout = bias.lines.layout
            if layout.query is None or layout.key is None or layout.query.strides != layout.key.strides:
                return False
            if vectors and layout.kind != "affine":
                return False
        return all(term.lines.layout.kind == "affine" and term.index is None for term in vectors)

    def prefix(self) -> HankelPlan:
        """The same plan for the prefix's rows alone, with scores in base 2. `self` has them in natural units."""
        own = copy.copy(self)
        own._keep([block for block in self._blocks if block.step == 0])
        own.unit = math.log2(math.e)
        own.reversed = None if self.reversed is None else self.reversed * own.unit
        return own

    # blocks and tiles

    def blocks(self) -> list[Block]:
        return self._blocks

    def _keep(self, blocks: list[Block]) -> None:
        """Set the blocks, and how many heads of the largest tile the buffers hold."""
        widest = max((tile.count for block in blocks for tile in block.tiles), default=1)
        tallest = max((block.count for block in blocks), default=1)
        self._blocks = blocks
        self.heads_at_once = 1 if self.vectors or self.heads_apart else max(1, self.pairs // (widest * tallest))

    def _row_blocks(self) -> Iterator[Block]:
        prefix = self.query.prefix
        if prefix and self.line is not None:
            yield Block(torch.arange(prefix, device=self.device), 0, self.line.lines.layout.tokens)
        if self.length == 0:
            return
        for first in range(0, self.columns, self.columns_at_once):
            columns = range(first, min(first + self.columns_at_once, self.columns))
            lines = [self._line_of(column) for column in columns]
            for start, stop in self._row_ranges():
                last = self.length - 1 - start
                cells = self.length - 1 - torch.arange(start, stop, device=self.device)
                yield Block(
                    numbers=torch.cat([prefix + cells * self.columns + column for column in columns]),
                    first=prefix + last * self.columns + first,
                    line=lines[0] + last * self.query.strides[0],
                    step=self.step,
                    columns=tuple(line - lines[0] for line in lines),
                )

    def _row_ranges(self) -> Iterator[tuple[int, int]]:
        """The rows of a column in ranges of at most `rows`, divided where the mask changes, counted from the end."""
        plain = self.columns == 1 and self.query.prefix == 0
        cuts = masks.cuts(self.mask, self.length, self.device) if plain else []
        for low, high in itertools.pairwise([0, *(self.length - cut for cut in reversed(cuts)), self.length]):
            for start in range(low, high, self.rows):
                yield start, min(start + self.rows, high)

    def _line_of(self, column: int) -> int:
        """The line number of a column's cell in the first row."""
        line = self.query.start
        for size, stride in zip(reversed(self.query.sizes[1:]), reversed(self.query.strides[1:]), strict=True):
            line += column % size * stride
            column //= size
        return line

    def _tiles(self, block: Block, head: int | None) -> Iterator[Tile]:
        """What the rows may see, of one head or of all, in whole rows of the keys' grid and at most `width` keys."""
        mask, prefix, done = self.mask, self.key.prefix, 0
        if head is not None and mask is not None and mask.blocks is not None:
            mask = replace(mask, blocks=replace(mask.blocks, layout=mask.blocks.layout[head : head + 1]))
        for span in masks.spans(mask, block.numbers, self.keys, stepped=self.stepped):
            if span.step is not None:
                yield self._tile(mask, block, span)
                continue
            if span.start < prefix:
                yield Tile(slice(span.start, min(span.stop, prefix)), mask)
            start, stop = max(span.start - prefix, 0) // self.step * self.step, span.stop - prefix
            stop = min(self.keys - prefix, -(-stop // self.step) * self.step)
            start, done = max(start, done), max(stop, done)  # two spans may end and begin in one row of the grid
            for first in range(start, stop, self.width):
                yield self._tile(mask, block, slice(prefix + first, prefix + min(first + self.width, stop)))

    def _tile(self, mask: Mask | None, block: Block, keys: slice) -> Tile:
        width = keys.stop - keys.start + (block.count // len(block.columns) - 1) * block.step
        first = 0
        if self.line is not None:
            key_line = self.key.start + (keys.start - self.key.prefix) // self.step * self.key.strides[0]
            first = self.line.lines.length - 1 - (block.line - key_line + self.line.lines.origin)
        if mask is None or not mask.is_interval or block.step == 0 or self.columns != self.step:
            return Tile(keys, mask, first=first, width=width, high=width)
        ahead = block.first - keys.start  # query index - key index at window[0]; it falls by 1 with each entry
        low = 0 if mask.left is None else max(0, ahead - mask.left)
        high = width if mask.right is None else min(width, ahead + mask.right + 1)
        return Tile(keys, first=first, width=width, low=min(low, width), high=max(high, 0))

    # scores

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "g 1 1"] | None:
        return None if self.reversed is None else self.reversed[chunk.which].amax(dim=1)[:, None, None]

    def start_scores(self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Tensor | None) -> Tensor:
        g, n, _ = chunk.q.shape
        if not self.vectors:
            score = workspace.scores.rows(g, n, tile.count)
            fill(score, self.bias(chunk.block, tile, chunk.which), shift)
            return score
        score = workspace.scores.skewed(g, n, tile.count, step=1)
        around = whole(score, step=1)[:, 0]
        masked = tile.low > 0 or tile.high < tile.width
        window = self.window(chunk.block, tile, chunk.which)[:, None] if self.line is not None or masked else None
        fill(around, window, shift)
        self.vectors.add_queries(around[0], chunk, tile)
        return score

    def finish_scores(self, score: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile) -> None:
        if self.vectors:
            self.vectors.add_keys(score[0], chunk, tile)

    def bias(self, block: Block, tile: Tile, heads: slice) -> Tensor | None:
        """What is added to the scores, `[g, n, m]` or broadcast to it; of several columns `[g, columns, r, m]`."""
        if self.reversed is None and tile.low == 0 and tile.high == tile.width:
            return None
        if tile.first < 0:
            assert self.reversed is not None
            return self.reversed[heads][:, self.reversed.shape[1] - 1 - self._prefix_entries(block), None]
        window = self.window(block, tile, heads)
        shape = (*window.shape[:-1], block.count // len(block.columns), tile.count)
        strides = (*window.stride()[:-1], block.step, tile.keys.step or 1)
        return window.as_strided(shape, strides, window.storage_offset())

    def window(self, block: Block, tile: Tile, heads: slice) -> Float[Tensor, "#g *c W"]:
        """What the rows of a tile read, row r from `r * step` on; of several columns a window each. Entries are
        contiguous, which in the values those of keys on a grid of one column are not."""
        if self.reversed is None:
            window = torch.zeros(1, tile.width, dtype=self.dtype, device=self.device)
        else:
            views = [self._window(self.reversed[heads], tile, column).flatten(1) for column in block.columns]
            window = contiguous_rows(views[0]) if len(views) == 1 else torch.stack(views, dim=1)
        if tile.low > 0 or tile.high < tile.width:
            window = window.clone()
            window[:, : tile.low] = -torch.inf
            window[:, tile.high :] = -torch.inf
        return window

    def _window(self, x: Float[Tensor, "g L"], tile: Tile, column: int) -> Tensor:
        """A column's window of the reversed values, a view `[g, cells of the first axis, further axes]`."""
        sizes = (x.shape[0], tile.width // self.step, *self.key.sizes[1:])
        return x.as_strided(sizes, (x.stride(0), *self.key.strides), x.storage_offset() + tile.first - column)

    def _prefix_entries(self, block: Block) -> Int[Tensor, " n"]:
        """The entry of `values` that each row reads for prefix keys, which have coordinate `-(L + 1)` (`core.line`)."""
        assert self.line is not None
        lines = self.line.lines
        row = torch.arange(block.count // len(block.columns), device=self.device)
        falling = row * (self.query.strides[0] if block.step else 0)
        rows = torch.cat([block.line + column - falling for column in block.columns])
        return rows + lines.layout.tokens + 1 + lines.origin

    def add_values(
        self, out: Float[Tensor, "g n V"], weights: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile
    ) -> None:
        if self.vectors.of("value"):
            clear_around(weights)
            self.vectors.add_outputs(out[0], whole(weights, step=1)[0, 0], chunk, tile)

    # gradients

    def expect(self, gradients: Gradients) -> None:
        if self.line is not None and self.reversed is not None and gradients.wants(self.line.values):
            self.d_values = torch.zeros_like(self.reversed)

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        (g, n, _), m, block = chunk.q.shape, tile.count, chunk.block
        if self._skew(block, tile) == 0:
            return workspace.gradient.rows(g, n, m)
        return workspace.skewed_gradient.skewed_in_zeros(g, n, m, block.step, len(block.columns))

    def _skew(self, block: Block, tile: Tile) -> int:
        wanted = self.d_values is not None or self.vectors
        return block.step if wanted and tile.first >= 0 and tile.keys.step is None else 0

    def values_backward(
        self, d: Float[Tensor, "g n m"], weights: Tensor, upstream: Float[Tensor, "g n V"], chunk: Chunk, tile: Tile
    ) -> None:
        if self.vectors.of("value"):
            clear_around(weights)
            around = whole(d, step=1)[0, 0], whole(weights, step=1)[0, 0]
            self.vectors.outputs_backward(*around, upstream[0], chunk, tile)
            clear_around(d)

    def collect(
        self, d: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile, d_q: Float[Tensor, "g n D"], d_k: KeyGradient | None
    ) -> None:
        block = chunk.block
        if self.vectors:
            of_keys = None if d_k is None else d_k.at(chunk.which, tile.keys)[0]
            self.vectors.collect(d[0], whole(d, step=1)[0, 0], chunk, tile, d_q[0], of_keys)
        if self.d_values is None:
            return
        into = self.d_values[chunk.which]
        if tile.keys.step is not None:
            self._collect_stepped(into, tile, d if block.step else d.sum(dim=1, keepdim=True))
        elif tile.first >= 0:
            step = self._skew(block, tile)
            sums = whole(d, step, len(block.columns)).sum(dim=2) if step else d.sum(dim=1, keepdim=True)
            for number, column in enumerate(block.columns):
                view = self._window(into, tile, column)
                view += sums[:, number].view(view.shape)
        else:
            entries, sums = into.shape[1] - 1 - self._prefix_entries(block), d.sum(dim=2)
            if block.step == 0:
                entries, sums = entries[:1], sums.sum(dim=1, keepdim=True)
            into[:, entries] += sums

    @staticmethod
    def _collect_stepped(into: Float[Tensor, "g L"], tile: Tile, d: Float[Tensor, "g n m"]) -> None:
        """The same of keys at equal distances."""
        step, (g, n, m) = tile.keys.step, d.shape
        for start in range(0, n, step):
            rows = d[:, start : start + step]
            first = into.storage_offset() + tile.first + start
            into.as_strided((g, rows.shape[1], m), (into.stride(0), 1, step), first).add_(rows)

    def finish(self, gradients: Gradients) -> None:
        if self.d_values is not None and self.line is not None:
            of_heads = self.d_values.flip(-1).view(self.batch, self.heads, -1).sum(dim=0)
            gradients.add(self.line.values, of_heads.sum_to_size(self.line.values.shape))
        self.vectors.finish(gradients)
