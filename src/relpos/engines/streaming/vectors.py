"""Vectors on the line of a sequence (Shaw, Transformer-XL, DeBERTa), by matrix products alone.

In a block of a sequence (see `hankel`) row r and key j read entry r + j of a window, here a window of vectors `w`.
Vectors that are multiplied with queries take one matrix product with the whole window; the scores are the skewed tile
in it (see `workspace`), to which the content product is added in place:

    whole = q @ w.T          score[r, j] += whole[r, r + j]

    row 0   s00 s01 s02  .   .        the products at the dots are not used
    row 1    .  s10 s11 s12  .
    row 2    .   .  s20 s21 s22

With zeros at the dots, the product of the whole buffer and `w` is the weighted sum of the vectors on the value side, or
the gradient of the queries. For vectors that are multiplied with keys the roles change, a few keys at a time:

    band = k @ w.T           score[r, j] += band[j, r + j]

Buckets and clipping are resolved first: `_VectorTerm` has one row for each entry of the line. Far offsets often share
one row (Shaw's beyond 16, DeBERTa's beyond 512). Such a stretch of the window takes one product, with that row alone,
and the sums of the stretch take its place in the gradient.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineVectors
from relpos.core.gather import ordered_segment_sum
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.chunks import Chunk
from relpos.engines.streaming.tiles import Tile
from relpos.engines.streaming.workspace import Buffer, whole

_KEYS_AT_ONCE = 128
"""Keys of a band: with more, more products beside the diagonals are wasted; with fewer, products are small."""
_ROWS_AT_ONCE = 256
"""The same for rows, which read only their own part of the window."""
_LEAST_ALIKE = 64
"""The fewest entries that read one row, at an end of a window, that are taken together."""


class _VectorTerm:
    """One term: a vector for each entry of the line, in reverse order, and their gradient.

    Attributes:
        index: the row of the term that each entry reads, in reverse order, or None for its own.
        low, high: entries below `low` all read one row, and so do those from `high` on.
    """

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float) -> None:
        layout = term.lines.layout
        assert layout.query is not None
        assert layout.key is not None
        self.term, self.heads = term, call.q.shape[1]
        self.scale = call.scale if term.scaled else 1.0
        self.factor = self.scale * unit
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        length, count = term.lines.length, term.vectors.shape[1]
        vectors = term.vectors.detach().to(dtype)
        self.index: Int[Tensor, " L"] | None = None
        self.low, self.high = 0, length
        if term.index is None:
            self.vectors = F.pad(vectors[:, :length], (0, 0, 0, max(0, length - count))).flip(1)
        else:
            inside = (term.index >= 0) & (term.index < count)
            self.index = torch.where(inside, term.index, count).flip(0)
            self.vectors = F.pad(vectors, (0, 0, 0, 1)).index_select(1, self.index)
            if self.index.device.type == "cpu":
                self.low, self.high = _alike(self.index)
        self.bias = None if term.bias is None else term.bias.detach().to(dtype)
        self.d_vectors: _Sums | None = None
        self.d_bias: _Sums | None = None
        self.origin = length - 1 - (layout.query.start - start - layout.key.start + term.lines.origin)

    def expect(self) -> None:
        """Allocate the gradients."""
        self.d_vectors, self.d_bias = _Sums(self.vectors), None if self.bias is None else _Sums(self.bias)

    def share(self, heads: Sequence[int]) -> _VectorTerm:
        """This term for some heads, in a thread of its own."""
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
        if self.index is None:
            return F.pad(d.flip(1), (0, 0, 0, max(0, count - d.shape[1])))[:, :count]
        first, last = max(self.low - 1, 0), min(self.high + 1, d.shape[1])
        d[:, first] += d[:, :first].sum(dim=1)
        d[:, last - 1] += d[:, last:].sum(dim=1)
        rows, index = d[:, first:last].transpose(0, 1), self.index[first:last]
        return ordered_segment_sum(rows, index, count + 1)[:count].transpose(0, 1)

    def _row(self, x: Tensor, head: int) -> int:
        """The place of one of the B * H heads in a tensor with all query heads, or with one for all of them."""
        return head % self.heads if x.shape[0] > 1 else 0

    def of_head(self, x: Tensor, chunk: Chunk) -> Tensor:
        """The part of the chunk's only head in such a tensor."""
        return x[self._row(x, chunk.head_slice.start)]

    def d_of_head(self, chunk: Chunk) -> Float[Tensor, "L D"]:
        """What to add the gradient of the chunk's vectors to."""
        assert self.d_vectors is not None
        return self.d_vectors.at(self._row(self.vectors, chunk.head_slice.start))

    def parts(self, chunk: Chunk, tile: Tile, rows: slice) -> Iterator[tuple[slice, slice]]:
        """What some rows of a tile read of its window: in parts the entries, and their vectors or the only one."""
        window = self.origin - (chunk.block.first_coordinate - tile.keys.start)
        start, stop = window + rows.start, window + rows.stop - 1 + tile.count
        low, high = (min(max(x, start), stop) for x in (self.low, max(self.low, self.high)))
        low, high = start if low - start < _LEAST_ALIKE else low, stop if stop - high < _LEAST_ALIKE else high
        for first, last, alike in ((start, low, True), (low, high, False), (high, stop, True)):
            if last > first:
                yield slice(first - window, last - window), slice(first, first + 1 if alike else last)

    def strips(self, chunk: Chunk, tile: Tile) -> Iterator[tuple[slice, slice, slice]]:
        """The same for a few rows at a time, which come first."""
        for start in range(0, chunk.block.count, _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, chunk.block.count))
            yield from ((rows, *part) for part in self.parts(chunk, tile, rows))

    def bands(self, chunk: Chunk, tile: Tile) -> Iterator[tuple[slice, slice]]:
        """Some keys at a time, and the rows that queries read for these: one, or for `_diagonals` one an entry.

        Key j reads entries j to j + n - 1 of the window.
        """
        n, m = chunk.block.count, tile.count
        start, first, last = self.origin - (chunk.block.first_coordinate - tile.keys.start), 0, m
        for entries, rows in self.parts(chunk, tile, slice(0, n)):
            if rows.stop - rows.start == 1:
                keys = slice(entries.start, entries.stop - n + 1)
                if keys.stop - keys.start >= _LEAST_ALIKE:
                    yield keys, rows
                    first, last = (keys.stop, last) if keys.start == 0 else (first, keys.start)
        for band in range(first, last, _KEYS_AT_ONCE):
            stop = min(band + _KEYS_AT_ONCE, last)
            yield slice(band, stop), slice(start + band, start + stop + n - 1)

    def with_bias(self, x: Float[Tensor, "n D"], chunk: Chunk) -> Float[Tensor, "n D"]:
        """Queries or keys plus the term's bias."""
        return x if self.bias is None else x + self.of_head(self.bias, chunk)

    def add_d_bias(self, d_x: Float[Tensor, "n D"], chunk: Chunk) -> None:
        """Add to the gradient of the bias; `d_x` is that of `with_bias`."""
        if self.d_bias is not None:
            self.d_bias.at(self._row(self.d_bias.whole, chunk.head_slice.start)).add_(d_x.sum(dim=0))


class _Sums:
    """Sums for each head, or one for all heads, to which threads add side by side.

    Where several threads add to one row, all but the first have sums of their own, which are added in the end.
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
        """What to add to."""
        return self.own[row] if row in self.own else self.whole[row]

    def total(self) -> Float[Tensor, "R ..."]:
        """The sums of all threads."""
        for own in self.others:
            while own:
                row, sums = own.popitem()
                self.whole[row] += sums
        return self.whole


class Vectors:
    """All vector terms of a call on a sequence whose first query has the line coordinate `start`."""

    def __init__(self, call: Call, start: int, unit: float) -> None:
        self.terms = [_VectorTerm(term, call, start, unit) for term in call.terms.of(LineVectors)]
        dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.products, self.in_zeros = (Buffer(dtype, call.q.device) for _ in range(2))

    def expect(self) -> None:
        """Allocate the gradients of all terms."""
        for vectors in self.terms:
            vectors.expect()

    def share(self, heads: Sequence[int]) -> Vectors:
        """The terms for some heads, in a thread of its own."""
        share = copy.copy(self)
        share.terms = [vectors.share(heads) for vectors in self.terms]
        share.products, share.in_zeros = (Buffer(x.store.dtype, x.store.device) for x in (self.products, self.in_zeros))
        return share

    def __len__(self) -> int:
        return len(self.terms)

    def of(self, side: str) -> list[_VectorTerm]:
        """The terms on one side: "query", "key" or "value"."""
        return [vectors for vectors in self.terms if vectors.term.side == side]

    # forward

    def add_queries(self, around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with queries to the whole buffer of the scores."""
        for vectors in self.of("query"):
            own, q = vectors.of_head(vectors.vectors, chunk), vectors.with_bias(chunk.plain_q[0], chunk)
            for queries, entries, rows in vectors.strips(chunk, tile):
                _add_product(around[queries, entries], q[queries], own[rows], vectors.factor)

    def add_keys(self, score: Float[Tensor, "n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with keys to the scores."""
        n = score.shape[0]
        for vectors in self.of("key"):
            own, k = (
                vectors.of_head(vectors.vectors, chunk),
                vectors.with_bias(chunk.heads.plain_k[0, tile.keys], chunk),
            )
            for keys, rows in vectors.bands(chunk, tile):
                if _is_one(rows, keys, n):
                    score[:, keys].add_((k[keys] @ own[rows].mT).mT, alpha=vectors.factor)
                    continue
                band = self.products.rows(1, keys.stop - keys.start, rows.stop - rows.start)[0]
                torch.mm(k[keys], own[rows].mT, out=band)
                score[:, keys].add_(_diagonals(band, n).mT, alpha=vectors.factor)

    def add_outputs(self, out: Float[Tensor, "n V"], around: Float[Tensor, "n W"], chunk: Chunk, tile: Tile) -> None:
        """Add the weighted sum of the vectors to the output; `around` holds the weights, and zeros around them."""
        for vectors in self.of("value"):
            own = vectors.of_head(vectors.vectors, chunk)
            for queries, entries, rows in vectors.strips(chunk, tile):
                out[queries].addmm_(_summed(around[queries, entries], rows), own[rows])

    # backward

    def outputs_backward(
        self, d: Float[Tensor, "n W"], weights: Float[Tensor, "n W"], upstream: Tensor, chunk: Chunk, tile: Tile
    ) -> None:
        """The backward of `add_outputs`, for whole buffers; the weights are 0 around their tile."""
        for vectors in self.of("value"):
            own, into = vectors.of_head(vectors.vectors, chunk), vectors.d_of_head(chunk)
            for queries, entries, rows in vectors.strips(chunk, tile):
                _add_product(d[queries, entries], upstream[queries], own[rows], 1.0)
                _add_sums(into[rows], _summed(weights[queries, entries], rows), upstream[queries])

    def collect(
        self,
        d: Float[Tensor, "n m"],
        around: Float[Tensor, "n W"],
        chunk: Chunk,
        tile: Tile,
        d_q: Float[Tensor, "n D"],
        d_k: Float[Tensor, "m D"] | None,
    ) -> None:
        """The backward of `add_queries` and `add_keys`; `around` holds `d`, and zeros around it."""
        for vectors in self.of("query"):
            own, into = vectors.of_head(vectors.vectors, chunk), vectors.d_of_head(chunk)
            q = vectors.with_bias(chunk.plain_q[0], chunk)
            d_x = torch.zeros_like(d_q)
            for queries, entries, rows in vectors.strips(chunk, tile):
                sums = _summed(around[queries, entries], rows)
                d_x[queries].addmm_(sums, own[rows], alpha=vectors.scale)
                _add_sums(into[rows], sums, q[queries], vectors.scale)
            d_q += d_x
            vectors.add_d_bias(d_x, chunk)
        n = d.shape[0]
        for vectors in self.of("key"):
            own, into = vectors.of_head(vectors.vectors, chunk), vectors.d_of_head(chunk)
            k = vectors.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
            for keys, rows in vectors.bands(chunk, tile):
                if _is_one(rows, keys, n):
                    sums = d[:, keys].sum(dim=0)[:, None]
                else:
                    sums = self.in_zeros.skewed_in_zeros(1, keys.stop - keys.start, n, 1, 1)
                    sums.copy_(d[:, keys].mT)
                    sums = whole(sums, 1)[0, 0]
                d_x = torch.mm(sums, own[rows]).mul_(vectors.scale)
                _add_sums(into[rows], sums, k[keys], vectors.scale)
                if d_k is not None:
                    d_k[keys] += d_x
                vectors.add_d_bias(d_x, chunk)

    def finish(self, gradients: Gradients) -> None:
        """Add the gradients of the terms to those of the call."""
        for vectors in self.terms:
            gradients.add(vectors.term.vectors, vectors.finished() if gradients.wants(vectors.term.vectors) else None)
            gradients.add(vectors.term.bias, None if vectors.d_bias is None else vectors.d_bias.total())


def _alike(index: Int[Tensor, " L"]) -> tuple[int, int]:
    """Up to which entry all read the row of the first, and from which on that of the last."""
    first, last = (index != index[0]).nonzero()[:, 0], (index != index[-1]).nonzero()[:, 0]
    return (int(first[0]), int(last[-1]) + 1) if len(first) else (len(index), len(index))


def _add_product(
    into: Float[Tensor, "n w"], x: Float[Tensor, "n D"], rows: Float[Tensor, "_ D"], factor: float
) -> None:
    """Add `x @ rows.T`; one row is the same for all columns."""
    if rows.shape[0] == into.shape[1]:
        into.addmm_(x, rows.mT, alpha=factor)
    else:
        into.add_(x @ rows.mT, alpha=factor)


def _summed(x: Float[Tensor, "n w"], rows: slice) -> Float[Tensor, "n _"]:
    """x, or its row sums where all columns read one row."""
    return x if rows.stop - rows.start == x.shape[1] else x.sum(dim=1, keepdim=True)


def _add_sums(
    into: Float[Tensor, "w D"], sums: Float[Tensor, "n w"], x: Float[Tensor, "n D"], scale: float = 1
) -> None:
    """Add `sums.T @ x`. One row, to which far offsets add by the thousand, is summed in a tree, which rounds less."""
    if sums.shape[1] == 1:
        into.add_((sums * x).sum(dim=0), alpha=scale)
    else:
        into.addmm_(sums.mT, x, alpha=scale)


def _is_one(rows: slice, keys: slice, n: int) -> bool:
    """Whether some keys and n queries read one row, and not one for each entry of the window."""
    return bool(rows.stop - rows.start != keys.stop - keys.start + n - 1)


def _diagonals(band: Float[Tensor, "s W"], n: int) -> Float[Tensor, "s n"]:
    """A view of `band[j, j + r]`: row j from its entry j on."""
    return band.as_strided((band.shape[0], n), (band.stride(0) + 1, 1), band.storage_offset())
