"""The plan for a bias on regular lines: the bias of a tile is a strided view of `values`, so nothing is gathered.

Take queries that differ only in their coordinate on the first axis: a whole sequence, or one column of a grid. Order
them from the last to the first. Each row then reads `skew` entries further on than the row before it. `skew` is the
number of key columns: 1 in a sequence, the width in a grid. The entries that the rows of a tile read are its window:

    bias[r, j] = window[r * skew + j]

    a sequence, 4 keys                      a column of a grid with 2 key columns
        query 2   w0 w1 w2 w3                   query in row 2   w0 w1 w2 w3 w4 w5
        query 1      w1 w2 w3 w4                query in row 1         w2 w3 w4 w5 w6 w7
        query 0         w2 w3 w4 w5             query in row 0               w4 w5 w6 w7 w8 w9

This is a Hankel matrix, a view with strides (skew, 1). The window of a sequence is itself a view of the reversed
`values`. The window of a grid is a small copy, because each row of keys reads consecutive entries of the table:

    reversed values, as a table     . a b .
                                    . c d .          window   a b c d e f
                                    . e f .

The gradient of the scores is written into a skewed buffer (see `workspace`), whose column sums are the gradient of the
window. A mask by `left` and `right` also depends on r * skew + j only: it is written into the window as -inf.

Three cases differ. All prefix queries have one coordinate and read the same window (skew 0). All prefix keys give a row
the same value. Keys at equal distances e are one tile, the view `window[r + j * e]` (`columns.add_strided`).
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, LineVectors, Mask, Sinks
from relpos.core.line import Ramp
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.plan import masks
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient
from relpos.engines.streaming.plan.columns import Columns, add_strided, boxes, column_coordinate, rows_and_columns
from relpos.engines.streaming.plan.tile_plan import TilePlan
from relpos.engines.streaming.plan.tiles import Block, Tile
from relpos.engines.streaming.terms.near import Near
from relpos.engines.streaming.terms.vectors import Vectors
from relpos.engines.streaming.workspace import Workspace, clear_around, fill, whole


class HankelPlan(TilePlan):
    """A plan for a call whose only position terms are at most one regular line bias, and vectors on a sequence.

    Args:
        rows, keys: the most rows of a block and keys of a tile.
        pairs: the most scores of a chunk, over all its heads.
        unit, bfloat16: see `TilePlan`.
        whole_columns: whether each column of a grid is a separate block, even if it is short.
        only_prefix: whether to leave out the rows after the prefix, which the caller computes without blocks.
        apart: whether keys that no row of a block meets with vectors have tiles of their own, where they are many.
    """

    def __init__(
        self, call: Call, rows: int, keys: int, pairs: int, *, unit: float, bfloat16: bool,
        whole_columns: bool = False, only_prefix: bool = False, apart: bool = False,
    ) -> None:  # fmt: skip
        self.unit, self.bfloat16, self.pairs = unit, bfloat16, pairs
        self.mask, self.device = call.mask, call.q.device
        self.batch, self.heads, self.queries, _ = call.q.shape
        self.keys = call.k.shape[2]
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.renormalizes = self.dtype == torch.float64
        self.keeps_sums = self.dtype != call.q.dtype  # of a head, until its last block (`KeyGradient`)
        self.line_bias = call.terms.one(LineBias)
        self.reversed_values: Float[Tensor, "BH L"] | None = None
        self.d_reversed_values: Float[Tensor, "BH L"] | None = None
        if self.line_bias is None:
            self.query, self.key = (Ramp(0, (count,), (1,)) for count in (self.queries, self.keys))
        else:
            layout = self.line_bias.lines.layout
            assert layout.query is not None
            assert layout.key is not None
            self.query, self.key = layout.query, layout.key
            values = self.line_bias.values.detach().to(self.dtype).expand(self.heads, -1).flip(-1) * unit
            self.reversed_values = values.expand(self.batch, -1, -1).reshape(self.batch * self.heads, -1).contiguous()
        self.key_columns, self.query_columns = math.prod(self.key.sizes[1:]), math.prod(self.query.sizes[1:])
        self.column_length = self.query.sizes[0]
        self.tile_keys = max(self.key_columns, min(self.keys, keys) // self.key_columns * self.key_columns)
        one_column = whole_columns or self.mask is not None  # and prefix keys have a tile of their own
        self.block_rows, self.box = rows_and_columns(self.query, rows, one_column=one_column)
        self.joined_prefix = 0 if one_column else self.key.prefix
        self.near = Near(call, self.query.start, apart)
        self.strided_keys = len(self.key.sizes) == 1 and self.key.prefix == 0 and not call.terms.of(LineVectors)
        masks_differ = self.mask is not None and self.mask.blocks is not None and self.mask.blocks.layout.shape[0] > 1
        self.by_head = masks_differ and self.device.type == "cpu"
        blocks = [
            replace(block, head=head, tiles=list(self._tiles(block, head)))
            for block in (self._prefix_blocks() if only_prefix else self._row_blocks())
            for head in (range(self.heads) if self.by_head else (None,))
        ]
        tiles = [(tile, block.count * tile.count) for block in blocks for tile in block.tiles]
        self.by_block = self.by_head or any(tile.mask is not None for tile, _ in tiles)
        self.vectors = Vectors(call, self.query.start, unit, [] if self.by_block else tiles)
        windows = [
            tile.count - tile.prefix_keys for block in blocks for tile in block.tiles if self._is_read(block, tile)
        ]
        self.room = self.joined_prefix + max(windows, default=0)  # of all blocks: a buffer keeps its zeros
        self._blocks, self.heads_at_once = blocks, self._most_heads(blocks)
        self.groups = self.heads // (call.k if call.plain_k is None else call.plain_k).shape[1]  # share a key head
        self.own_heads: Sequence[int] = range(self.batch * self.heads)
        # a share has all query heads of a key head; with vectors, of the whole batch, which adds to the same sums
        shares = self.heads // self.groups * (1 if self.vectors else self.batch)
        self.share_count = 1 if self.by_block or bfloat16 else shares  # in bfloat16, threads only cost memory

    @staticmethod
    def supports(call: Call) -> bool:
        """Whether this plan covers all terms of the call."""
        biases, vectors = call.terms.of(LineBias), call.terms.of(LineVectors)
        known = all(isinstance(term, LineBias | LineVectors | Sinks) for term in call.terms)
        if len(biases) > 1 or not known:
            return False
        for bias in biases:
            layout = bias.lines.layout
            if layout.query is None or layout.key is None or layout.query.strides != layout.key.strides:
                return False
            if vectors and layout.kind != "affine":
                return False
        return all(term.lines.layout.kind == "affine" for term in vectors)

    # heads

    def head_slices(self) -> list[slice]:
        return self._slices(self.heads_at_once)

    def _slices(self, most: int) -> list[slice]:
        """Slices of at most `most` own heads."""
        pieces = [self.own_heads[start : start + most] for start in range(0, len(self.own_heads), most)]
        return [slice(piece[0], piece[-1] + 1) for piece in pieces]

    def passes(self) -> list[tuple[list[slice], list[Block]]]:
        """Blocks of a prefix have few rows, so they take more heads at once."""
        few = [block for block in self._blocks if block.skew == 0]
        if self.keeps_sums or not few:
            return [(self.head_slices(), self._blocks)]
        most = min(self._most_heads(few), self.groups if self.groups > 1 else self.heads)  # two groups' keys are copied
        passes = [(self._slices(most), few), (self.head_slices(), self._blocks[len(few) :])]
        return [(heads, blocks) for heads, blocks in passes if blocks]

    def shares(self, count: int) -> list[HankelPlan]:
        if count == 1:
            return [self]
        heads: list[list[int]] = [[] for _ in range(count)]
        for head in self.own_heads:
            heads[head // self.groups % self.share_count * count // self.share_count].append(head)
        return [self._share(own) for own in heads]

    def _share(self, heads: Sequence[int]) -> HankelPlan:
        """This plan for some heads, with buffers of its own."""
        plan = copy.copy(self)
        plan.own_heads, plan.vectors = heads, self.vectors.share(heads)
        return plan

    # blocks and tiles

    def blocks(self) -> list[Block]:
        return self._blocks

    def _most_heads(self, blocks: Sequence[Block]) -> int:
        """The number of heads per chunk for some blocks."""
        most_keys = max((tile.count for block in blocks for tile in block.tiles), default=1)
        most_rows = max((block.count for block in blocks), default=1)
        return 1 if self.vectors or self.by_head else max(1, self.pairs // (most_keys * most_rows))

    def _row_blocks(self) -> Iterator[Block]:
        """The blocks, without their tiles."""
        prefix = self.query.prefix
        yield from self._prefix_blocks()
        if self.column_length == 0:
            return
        for columns, box in boxes(self.query.sizes[1:], self.box):
            coordinates = [column_coordinate(self.query, column) for column in columns]
            for start, stop in self._row_ranges():
                last_row = self.column_length - 1 - start
                rows = self.column_length - 1 - torch.arange(start, stop, device=self.device)
                descent = rows * self.query.strides[0]
                yield Block(
                    queries=torch.cat([prefix + rows * self.query_columns + column for column in columns]),
                    first_query=prefix + last_row * self.query_columns + columns[0],
                    first_coordinate=coordinates[0] + last_row * self.query.strides[0],
                    coordinates=torch.cat([descent + coordinate for coordinate in coordinates]),
                    skew=self.key_columns,
                    box=box,
                )

    def _prefix_blocks(self) -> Iterator[Block]:
        """The block of the prefix, if there is one."""
        if self.query.prefix and self.line_bias is not None:
            first = self.line_bias.lines.layout.tokens
            queries = torch.arange(self.query.prefix, device=self.device)
            yield Block(queries, 0, first, torch.full_like(queries, first))

    def _row_ranges(self) -> Iterator[tuple[int, int]]:
        """Ranges of at most `block_rows` rows of a column, counted from its end and cut where the mask changes."""
        is_sequence = self.query_columns == 1 and self.query.prefix == 0
        cuts = masks.cuts(self.mask, self.column_length, self.device) if is_sequence else []
        borders = [0, *(self.column_length - cut for cut in reversed(cuts)), self.column_length]
        for border, next_border in itertools.pairwise(borders):
            for start in range(border, next_border, self.block_rows):
                yield start, min(start + self.block_rows, next_border)

    def _tiles(self, block: Block, head: int | None) -> Iterator[Tile]:
        """The keys that some row may see in `head` (None: in any): whole grid rows, at most `tile_keys` at once."""
        mask, prefix, covered = self.mask, self.key.prefix, 0
        if head is not None and mask is not None and mask.blocks is not None:
            mask = replace(mask, blocks=replace(mask.blocks, layout=mask.blocks.layout[head : head + 1]))
        for span in self.near.cut(block, masks.spans(mask, block.queries, self.keys, strided=self.strided_keys)):
            if span.step is not None:
                yield self._tile(mask, block, span)
                continue
            joined = self.joined_prefix if span.stop > prefix else 0
            if span.start < prefix and not joined:
                yield Tile(slice(span.start, min(span.stop, prefix)), mask)
            start, stop = max(span.start - prefix, 0) // self.key_columns * self.key_columns, span.stop - prefix
            stop = min(self.keys - prefix, -(-stop // self.key_columns) * self.key_columns)
            start, covered = max(start, covered), max(stop, covered)  # two spans may share a row of the grid
            for tile_start in range(start, stop, self.tile_keys):
                tile_stop = min(tile_start + self.tile_keys, stop)
                first_key = tile_start if tile_start == 0 and joined else prefix + tile_start
                yield self._tile(mask, block, slice(first_key, prefix + tile_stop))

    def _tile(self, mask: Mask | None, block: Block, keys: slice) -> Tile:
        """The tile of some keys, which may begin with all prefix keys, and the offset of its window."""
        prefix_keys = max(0, self.key.prefix - keys.start)
        keys, every = slice(keys.start + prefix_keys, keys.stop, keys.step), keys
        length, start = keys.stop - keys.start + (block.column_rows - 1) * block.skew, 0
        if self.line_bias is not None:
            lines = self.line_bias.lines
            first_key = self.key.start + (keys.start - self.key.prefix) // self.key_columns * self.key.strides[0]
            start = lines.length - 1 - (block.first_coordinate - first_key + lines.origin)
        if mask is None or not mask.is_interval or block.skew == 0 or self.query_columns != self.key_columns:
            return Tile(
                every, mask, prefix_keys=prefix_keys, window_start=start, window_length=length, allowed_stop=length
            )
        distance = block.first_query - keys.start  # query index - key index at window[0]; it falls by 1 with each entry
        allowed_start = 0 if mask.left is None else max(0, distance - mask.left)
        allowed_stop = length if mask.right is None else min(length, distance + mask.right + 1)
        return Tile(
            keys, window_start=start, window_length=length,
            allowed_start=min(allowed_start, length), allowed_stop=max(allowed_stop, 0),
        )  # fmt: skip

    # scores

    def highest_bias(self, chunk: Chunk) -> Float[Tensor, "g 1 1"] | None:
        values = self.reversed_values
        return None if values is None else values[chunk.head_slice].amax(dim=1)[:, None, None]

    def start_scores(self, workspace: Workspace, chunk: Chunk, tile: Tile, shift: Tensor | None) -> Tensor:
        g, n, _ = chunk.q.shape
        if not self.near.has(chunk.block, tile):
            score, prefix = workspace.scores.rows(g, n, tile.count), tile.prefix_keys
            fill(score[..., prefix:], self.bias(chunk.block, tile, chunk.head_slice), shift)
            if prefix:
                fill(score[..., :prefix], self._prefix_bias(chunk.block, chunk.head_slice), shift)
            return score
        score = workspace.scores.skewed(g, n, tile.count, skew=1)
        around = whole(score, skew=1)[:, 0]
        if shift is None and self.line_bias is None and self.vectors.write_queries(around[0], chunk, tile):
            return score
        has_window = self.line_bias is not None or tile.is_masked_by_window
        window = self.window(chunk.block, tile, chunk.head_slice)[:, None] if has_window else None
        fill(around, window, shift)
        self.vectors.add_queries(around[0], chunk, tile)
        return score

    def finish_scores(self, score: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile) -> None:
        if self.near.has(chunk.block, tile):
            self.vectors.add_keys(score[0], chunk, tile)

    def bias(self, block: Block, tile: Tile, heads: slice) -> Tensor | None:
        """The bias of the keys after the prefix, or of a tile with only prefix keys. It is broadcastable to
        `[g, n, m]`; for several columns, to `[g, columns, rows, m]`."""
        if self.reversed_values is None and not tile.is_masked_by_window:
            return None
        if tile.has_only_prefix_keys:
            return self._prefix_bias(block, heads)
        window = self.window(block, tile, heads)
        shape = (*window.shape[:-1], block.column_rows, tile.count - tile.prefix_keys)
        strides = (*window.stride()[:-1], block.skew, tile.keys.step or 1)
        return window.as_strided(shape, strides, window.storage_offset())

    def is_bare(self, block: Block, tile: Tile) -> bool:
        plain = self.reversed_values is None and tile.mask is None and tile.keys.step is None
        return plain and not tile.is_masked_by_window and not self.near.has(block, tile)

    def _prefix_bias(self, block: Block, heads: slice) -> Float[Tensor, "g n 1"]:
        """The same for prefix keys; those of a row all read one entry."""
        assert self.reversed_values is not None
        return self.reversed_values[heads].index_select(1, block.prefix_key_entries(self.line_bias))[..., None]

    def window(self, block: Block, tile: Tile, heads: slice) -> Float[Tensor, "#g *c W"]:
        """The window of a tile, with -inf where the mask forbids; for several columns one window each.

        Its entries are contiguous. (In `values`, those of keys on a grid with one column are not.)
        """
        if self.reversed_values is None:
            window = torch.zeros(1, tile.window_length, dtype=self.dtype, device=self.device)
        else:
            window = self._columns(block, tile).read(self.reversed_values[heads])
        if tile.is_masked_by_window:
            window = window.clone()
            window[:, : tile.allowed_start] = -torch.inf
            window[:, tile.allowed_stop :] = -torch.inf
        return window

    def _columns(self, block: Block, tile: Tile) -> Columns:
        """Where the columns of a block read the reversed values."""
        sizes = (tile.window_length // self.key_columns, *self.key.sizes[1:])
        box = block.box or (1,) * len(self.key.sizes[1:])
        return Columns(tile.window_start, box, sizes, self.key.strides)

    def add_values(
        self, out: Float[Tensor, "g n V"], weights: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile
    ) -> None:
        if self.vectors.of("value") and self.near.has(chunk.block, tile):
            clear_around(weights)
            self.vectors.add_outputs(out[0], whole(weights, skew=1)[0, 0], chunk, tile)

    # gradients

    def expect(self, gradients: Gradients) -> None:
        if self.line_bias is not None and self.reversed_values is not None and gradients.wants(self.line_bias.values):
            self.d_reversed_values = torch.zeros_like(self.reversed_values)
        self.vectors.expect()

    def gradient_buffer(self, workspace: Workspace, chunk: Chunk, tile: Tile) -> Float[Tensor, "g n m"]:
        (g, n, _), block = chunk.q.shape, chunk.block
        if self._gradient_skew(block, tile) == 0:
            return workspace.gradient.rows(g, n, tile.count)
        first = self.joined_prefix - tile.prefix_keys  # later keys have the same offset with and without a prefix
        keys = slice(first, first + tile.count)
        return workspace.skewed_gradient.skewed_in_zeros(g, n, self.room, block.skew, block.column_count, keys)

    def _gradient_skew(self, block: Block, tile: Tile) -> int:
        """The skew of the buffer of the scores' gradient; 0 where nothing needs its column sums."""
        unwanted = self.d_reversed_values is None and not self.near.has(block, tile)
        return 0 if unwanted or not self._is_read(block, tile) else block.skew

    def _is_read(self, block: Block, tile: Tile) -> bool:
        """Whether a tile reads a window of values or vectors."""
        read = tile.keys.step is None and not tile.has_only_prefix_keys
        return read and (self.line_bias is not None or self.near.has(block, tile))

    def values_backward(
        self, d: Float[Tensor, "g n m"], weights: Tensor, upstream: Float[Tensor, "g n V"], chunk: Chunk, tile: Tile
    ) -> None:
        if self.vectors.of("value") and self.near.has(chunk.block, tile):
            clear_around(weights)
            around = whole(d, skew=1)[0, 0], whole(weights, skew=1)[0, 0]
            self.vectors.outputs_backward(*around, upstream[0], chunk, tile)
            clear_around(d)

    def collect(
        self, d: Float[Tensor, "g n m"], chunk: Chunk, tile: Tile, d_q: Float[Tensor, "g n D"], d_k: KeyGradient | None
    ) -> None:
        block = chunk.block
        if self.near.has(block, tile):
            self.vectors.collect(d[0], whole(d, skew=1)[0, 0], chunk, tile, d_q[0], d_k)
        if self.d_reversed_values is None:
            return
        d_values = self.d_reversed_values[chunk.head_slice]
        if tile.keys.step is not None:
            add_strided(d_values, tile.window_start, tile.keys.step, d if block.skew else d.sum(dim=1, keepdim=True))
        elif tile.has_only_prefix_keys:
            self._collect_prefix(d_values, block, d)
        else:
            d_prefix, skew = d[..., : tile.prefix_keys], self._gradient_skew(block, tile)
            kept = d_prefix.clone()
            if tile.prefix_keys:
                self._collect_prefix(d_values, block, kept)
                d_prefix.zero_()  # a skewed buffer has them in columns of the window's entries
            sums = whole(d, skew, block.column_count).sum(dim=2) if skew else d.sum(dim=1, keepdim=True)
            self._columns(block, tile).add(d_values, sums[..., tile.prefix_keys :])
            d_prefix.copy_(kept)

    def _collect_prefix(self, d_values: Float[Tensor, "g L"], block: Block, d: Float[Tensor, "g n p"]) -> None:
        """Add the gradient of scores against prefix keys."""
        entries, sums = block.prefix_key_entries(self.line_bias), d.sum(dim=2)
        if block.skew == 0:
            entries, sums = entries[:1], sums.sum(dim=1, keepdim=True)
        d_values[:, entries] += sums

    def finish(self, gradients: Gradients) -> None:
        if self.d_reversed_values is not None and self.line_bias is not None:
            d_values = self.d_reversed_values.flip(-1).view(self.batch, self.heads, -1).sum(dim=0)
            gradients.add(self.line_bias.values, d_values.sum_to_size(self.line_bias.values.shape))
        self.vectors.finish(gradients)
