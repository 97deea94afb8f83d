"""One term of vectors on a line: its vectors, their gradient, and which entries a tile reads.

Far offsets often share one row (Shaw's beyond 16, DeBERTa's beyond 512). Such a part of the window takes one product,
with that row alone; the gradient uses the sums over the part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineVectors
from relpos.core.gather import ordered_segment_sum
from relpos.engines.call import Call
from relpos.engines.streaming.plan.chunks import Chunk
from relpos.engines.streaming.plan.tiles import Tile

_ROWS_AT_ONCE = 256
"""Rows of a product with queries; they read only their own part of the window."""
_LEAST_ALIKE = 64
"""Minimum entries at an end of a window that are merged because they read one row."""


class VectorTerm:
    """One term and its gradient; entries of the line are in reverse order.

    Attributes:
        by_entry: whether `vectors` and their gradient have a row for each entry, `[1 or H, L, D]`, instead of the
            term's own rows and one of zeros, `[1 or H, R + 1, D]`.
        index: the row of the term that each entry reads; None if each entry has its own.
        low, high: entries below `low` all read one row, and so do those from `high` on.
        first, stop: entries before `first` and from `stop` on read zeros.
        content: `[B * H, N, D]`, what the vectors meet in place of the queries, or None; d_content: its gradient.
    """

    by_entry: ClassVar[bool] = True

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float) -> None:
        self.term, self.heads = term, call.q.shape[1]
        self.scale = call.scale if term.scaled else 1.0
        self.factor = self.scale * unit
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        length, count = term.lines.length, term.vectors.shape[1]
        vectors = term.vectors.detach().to(dtype)
        self.index: Int[Tensor, " L"] | None = None
        self.low, self.high = 0, length
        self.first, self.stop = reading(term)
        if term.index is None:
            self.vectors = F.pad(vectors[:, :length], (0, 0, 0, max(0, length - count))).flip(1)
        else:
            index = term.index.long()  # a narrow dtype may not hold the number of rows
            self.index = torch.where((index >= 0) & (index < count), index, count).flip(0)
            self.vectors = F.pad(vectors, (0, 0, 0, 1))
            if self.by_entry:
                self.vectors = self.vectors.index_select(1, self.index)
            if self.index.device.type == "cpu":
                self.low, self.high = alike(self.index)
        self.bias = None if term.bias is None else term.bias.detach().to(dtype)
        self.content: Float[Tensor, "BH N D"] | None = None
        self.d_content: Float[Tensor, "BH N D"] | None = None
        if term.content is not None:
            self.content = term.content.detach().expand(*call.q.shape[:2], -1, -1).flatten(0, 1)
        self.d_vectors: _Sums | None = None
        self.d_bias: _Sums | None = None
        self.origin = origin_of(term, start)

    def expect(self) -> None:
        """Allocate the gradients."""
        self.d_vectors, self.d_bias = _Sums(self.vectors), None if self.bias is None else _Sums(self.bias)
        if self.content is not None:  # each head has rows of its own, which one thread adds to
            self.d_content = torch.zeros(self.content.shape, dtype=self.vectors.dtype, device=self.vectors.device)

    def share(self, heads: Sequence[int]) -> Self:
        """This term for some heads, for another thread."""
        term = copy.copy(self)
        term.d_vectors, term.d_bias = (
            None if sums is None else sums.share({self._row(sums.whole, head) for head in heads})
            for sums in (self.d_vectors, self.d_bias)
        )
        return term

    def finished(self) -> Float[Tensor, "_ R D"]:
        """The gradient of the term's own vectors."""
        assert self.d_vectors is not None
        d, count = self.d_vectors.total(), self.term.vectors.shape[1]
        if not self.by_entry:
            return d[:, :count]
        if self.index is None:
            return F.pad(d.flip(1), (0, 0, 0, max(0, count - d.shape[1])))[:, :count]
        first, last = max(self.low - 1, 0), min(self.high + 1, d.shape[1])
        d[:, first] += d[:, :first].sum(dim=1)
        d[:, last - 1] += d[:, last:].sum(dim=1)
        rows, index = d[:, first:last].transpose(0, 1), self.index[first:last]
        return ordered_segment_sum(rows, index, count + 1)[:count].transpose(0, 1)

    def _row(self, x: Tensor, head: int) -> int:
        """The index of one of the B * H heads in a tensor `[1 or H, ...]`."""
        return head % self.heads if x.shape[0] > 1 else 0

    def of_head(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The part of the chunk's only head in a tensor `[1 or H, ...]`."""
        return x[self._row(x, chunk.head_slice.start)]

    def d_of_head(self, chunk: Chunk) -> Float[Tensor, "_ D"]:
        """The sums of the gradient of the chunk's vectors."""
        assert self.d_vectors is not None
        return self.d_vectors.at(self._row(self.vectors, chunk.head_slice.start))

    def parts(self, chunk: Chunk, tile: Tile, rows: slice) -> Iterator[tuple[slice, slice, bool]]:
        """The parts of a tile's window that some rows read, but, on the side of queries and values, for its ends that
        read zeros. With each come its entries of the line, or only the first if all read one vector, and whether they
        do."""
        window = self.window_start(chunk, tile)
        start, stop = window + rows.start, window + rows.stop - 1 + tile.count
        if self.term.side != "key":
            start, stop = max(start, self.first), min(stop, self.stop)
        for first, last, one in self.cut(start, stop, self.low, self.high):
            yield slice(first - window, last - window), slice(first, first + 1 if one else last), one

    def window_start(self, chunk: Chunk, tile: Tile) -> int:
        """The entry that the first row reads for the tile's first key."""
        return self.origin - chunk.block.first_coordinate + int(tile.keys.start)

    @staticmethod
    def cut(start: int, stop: int, low: int, high: int) -> Iterator[tuple[int, int, bool]]:
        """Nonempty parts of `start ... stop` cut at `low` and `high`, and whether a part lies outside of these. Short
        outer parts join the middle."""
        low, high = (min(max(x, start), stop) for x in (low, max(low, high)))
        low, high = start if low - start < _LEAST_ALIKE else low, stop if stop - high < _LEAST_ALIKE else high
        for first, last, outside in ((start, low, True), (low, high, False), (high, stop, True)):
            if last > first:
                yield first, last, outside

    def strips(self, chunk: Chunk, tile: Tile) -> Iterator[tuple[slice, slice, slice]]:
        """Some rows at a time, a part of their window, and its entries."""
        for start in range(0, chunk.block.count, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, chunk.block.count))
            for window, entries, _ in self.parts(chunk, tile, rows):
                yield rows, window, entries

    @staticmethod
    def strip_count(chunk: Chunk) -> int:
        """How many strips there are if each has one part."""
        return -(-chunk.block.count // _ROWS_AT_ONCE)

    def queries(self, chunk: Chunk) -> Float[Tensor, "n D"]:
        """What the vectors meet for the chunk's rows."""
        if self.content is None:
            return self.with_bias(chunk.plain_q[0], chunk)
        return chunk.take(self.content)[0].to(self.vectors.dtype)

    def with_bias(self, x: Float[Tensor, "n D"], chunk: Chunk) -> Float[Tensor, "n D"]:
        """Queries or keys plus the term's bias."""
        return x if self.bias is None else x + self.of_head(self.bias, chunk)

    def add_d_bias(self, d_x: Float[Tensor, "n D"], chunk: Chunk) -> None:
        """Add to the gradient of the bias; `d_x` is the gradient of `with_bias`."""
        if self.d_bias is not None:
            self.d_bias.at(self._row(self.d_bias.whole, chunk.head_slice.start)).add_(d_x.sum(dim=0))


class _Sums:
    """Sums for each head, or one for all heads, to which threads add in parallel.

    If several threads add to one row, all but the first use separate sums, which are added at the end.
    """

    def __init__(self, like: Float[Tensor, "R ..."]) -> None:
        self.whole = torch.zeros_like(like)
        self.taken: set[int] = set()
        self.own: dict[int, Tensor] = {}
        self.others: list[dict[int, Tensor]] = []

    def share(self, rows: set[int]) -> _Sums:
        """The sums of some heads for one thread."""
        share = copy.copy(self)
        share.own = {row: torch.zeros_like(self.whole[row]) for row in rows & self.taken}
        self.taken |= rows
        self.others.append(share.own)
        return share

    def at(self, row: int) -> Tensor:
        """The sums to add to."""
        return self.own[row] if row in self.own else self.whole[row]

    def total(self) -> Float[Tensor, "R ..."]:
        """The sums of all threads."""
        for own in self.others:
            while own:
                row, sums = own.popitem()
                self.whole[row] += sums
        return self.whole


def origin_of(term: LineVectors, start: int) -> int:
    """The entry that key 0 and a query of the line coordinate 0 read, if the first query has the coordinate `start`."""
    layout = term.lines.layout
    assert layout.query is not None
    assert layout.key is not None
    return term.lines.length - 1 - (layout.query.start - start - layout.key.start + term.lines.origin)


def reading(term: LineVectors) -> tuple[int, int]:
    """`(first, stop)`: entries before `first` and from `stop` on read zeros, as far as is known without waiting."""
    length, count = term.lines.length, term.vectors.shape[1]
    if term.index is None:
        return max(0, length - count), length
    if term.index.device.type != "cpu":
        return 0, length
    read = ((term.index >= 0) & (term.index < count)).flip(0).nonzero()
    return (int(read[0]), int(read[-1]) + 1) if len(read) else (0, 0)


def alike(index: Int[Tensor, " L"]) -> tuple[int, int]:
    """`(low, high)`: entries below `low` read the first entry's row, those from `high` on the last's."""
    first, last = (index != index[0]).nonzero()[:, 0], (index != index[-1]).nonzero()[:, 0]
    return (int(first[0]), int(last[-1]) + 1) if len(first) else (len(index), len(index))


def add_sums(into: Float[Tensor, "w D"], sums: Float[Tensor, "n w"], x: Float[Tensor, "n D"], scale: float = 1) -> None:
    """Add `sums.T @ x`. A single row, to which thousands of far offsets add, uses a tree sum, which rounds less."""
    if sums.shape[1] == 1:
        into.add_((sums * x).sum(dim=0), alpha=scale)
    else:
        into.addmm_(sums.mT, x, alpha=scale)
