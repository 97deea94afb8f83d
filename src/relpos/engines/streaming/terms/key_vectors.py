"""Vectors that are multiplied with keys, in the streaming engine.

Key j and row r of a block read entry j + r of a window of vectors `w` (see `vectors`). The products of some keys with
their part of the window are a band, whose diagonals are the scores:

    band = w @ k.T           score[r, j] += band[r + j, j]

    entry 0   s00  .   .          n = 2 rows, 3 keys
    entry 1   s10 s01  .
    entry 2    .  s11 s02
    entry 3    .   .  s12

`KeyBands` multiplies each band. Where many offsets share a vector (DeBERTa's buckets), the products of all keys with
all vectors are fewer than those of the bands. `KeyProducts` computes them once per head, and copies the rows of a band
from them. Its backward sums the scores' gradient by vector, and also multiplies once per head. It needs heads one after
another, and memory for R x M numbers, where R is at most a constant.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.streaming.plan.chunks import Chunk, KeyGradient
from relpos.engines.streaming.plan.tiles import Tile
from relpos.engines.streaming.terms.vector_term import VectorTerm, add_sums
from relpos.engines.streaming.workspace import Buffer, whole

_KEYS_AT_ONCE = 128
"""Keys of a band: with more, more products beside the diagonals are wasted; with fewer, products are small."""


class KeyVectors(VectorTerm, ABC):
    """A term on the key side."""

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float) -> None:
        super().__init__(term, call, start, unit)
        self._make_buffers()

    def share(self, heads: Sequence[int]) -> Self:
        term = super().share(heads)
        term._make_buffers()
        return term

    def _make_buffers(self) -> None:
        self.buffer = Buffer(self.vectors.dtype, self.vectors.device)

    def _bands(self, chunk: Chunk, tile: Tile) -> Iterator[tuple[slice, slice, slice, bool]]:
        """Rows and keys of a tile, the entries of the line that they read, and whether all read one entry.

        Row r and key j read entry r + j of the tile's window.
        """
        n, first, last = chunk.block.count, 0, tile.count
        for window, entries, one in self.parts(chunk, tile, slice(0, n)):
            keys = slice(window.start, window.stop - n + 1)
            if one and keys.stop > keys.start:
                yield slice(0, n), keys, entries, True
                first, last = (keys.stop, last) if keys.start == 0 else (first, keys.start)
        start = self.window_start(chunk, tile)
        for band in range(first, last, _KEYS_AT_ONCE):
            stop = min(band + _KEYS_AT_ONCE, last)
            for begin, end, one in self.cut(0, n, self.low - start - stop + 1, self.high - start - band):
                entry = start + band + begin
                entries = slice(entry, entry + 1 if one else start + end + stop - 1)
                yield slice(begin, end), slice(band, stop), entries, one

    def add_products(self, score: Float[Tensor, "n m"], chunk: Chunk, tile: Tile) -> None:
        """Add the products with keys to the scores."""
        for rows, keys, entries, one in self._bands(chunk, tile):
            band = self.buffer.rows(1, entries.stop - entries.start, keys.stop - keys.start)[0]
            self._write(band, entries, slice(tile.keys.start + keys.start, tile.keys.start + keys.stop), chunk)
            added = band if one else _diagonals(band, rows.stop - rows.start)
            score[rows, keys].add_(added, alpha=self.factor)

    @abstractmethod
    def _write(self, band: Float[Tensor, "w s"], entries: slice, keys: slice, chunk: Chunk) -> None:
        """Write the products of some entries with some keys."""

    @abstractmethod
    def collect(self, d: Float[Tensor, "n m"], chunk: Chunk, tile: Tile, d_k: KeyGradient | None) -> None:
        """The backward of `add_products`; `d` is the gradient of the scores."""


class KeyBands(KeyVectors):
    """A term whose vectors are multiplied with a few keys at a time."""

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self.in_zeros = Buffer(self.vectors.dtype, self.vectors.device)

    def _write(self, band: Float[Tensor, "w s"], entries: slice, keys: slice, chunk: Chunk) -> None:
        k = self.with_bias(chunk.heads.plain_k[0, keys], chunk)
        torch.mm(self.of_head(self.vectors, chunk)[entries], k.mT, out=band)

    def collect(self, d: Float[Tensor, "n m"], chunk: Chunk, tile: Tile, d_k: KeyGradient | None) -> None:
        own, into = self.of_head(self.vectors, chunk), self.d_of_head(chunk)
        k = self.with_bias(chunk.heads.plain_k[0, tile.keys], chunk)
        d_tile_k = None if d_k is None else d_k.at(chunk.head_slice, tile.keys)[0]
        for rows, keys, entries, one in self._bands(chunk, tile):
            if one:
                sums = d[rows, keys].sum(dim=0)[:, None]
            else:
                sums = self.in_zeros.skewed_in_zeros(1, keys.stop - keys.start, rows.stop - rows.start, 1, 1)
                sums.copy_(d[rows, keys].mT)
                sums = whole(sums, 1)[0, 0]
            d_x = torch.mm(sums, own[entries]).mul_(self.scale)
            add_sums(into[entries], sums, k[keys], self.scale)
            if d_tile_k is not None:
                d_tile_k[keys] += d_x
            self.add_d_bias(d_x, chunk)


class KeyProducts(KeyVectors):
    """A term of few vectors, whose products with the keys are computed once per head.

    Args:
        last_tile: the last tile of each head.
    """

    by_entry = False

    def __init__(self, term: LineVectors, call: Call, start: int, unit: float, last_tile: Tile) -> None:
        super().__init__(term, call, start, unit)
        self.last_tile = last_tile

    def _make_buffers(self) -> None:
        super()._make_buffers()
        self.head: int | None = None  # the head of `products`
        self.products: Float[Tensor, "_ M"] | None = None
        self.d_products: Float[Tensor, "_ M"] | None = None

    def _write(self, band: Float[Tensor, "w s"], entries: slice, keys: slice, chunk: Chunk) -> None:
        assert self.index is not None
        head = chunk.head_slice.start
        if self.products is None or self.head != head:
            k = self.with_bias(chunk.heads.plain_k[0], chunk)
            self.products = torch.mm(self.of_head(self.vectors, chunk), k.mT, out=self.products)
            self.head = head
        torch.index_select(self.products[:, keys], 0, self.index[entries], out=band)

    def collect(self, d: Float[Tensor, "n m"], chunk: Chunk, tile: Tile, d_k: KeyGradient | None) -> None:
        assert self.index is not None
        assert self.products is not None
        if self.d_products is None:
            self.d_products = torch.zeros_like(self.products)
        into = self.d_products[:, tile.keys]
        for rows, keys, entries, one in self._bands(chunk, tile):
            index = self.index[entries]
            if one:
                into[:, keys].index_add_(0, index, d[rows, keys].sum(dim=0, keepdim=True))
            else:
                diagonals = index.as_strided((rows.stop - rows.start, keys.stop - keys.start), (1, 1))
                into[:, keys].scatter_add_(0, diagonals, d[rows, keys])
        if tile is self.last_tile:
            self._finish_head(self.d_products, chunk, d_k)

    def _finish_head(self, d_products: Float[Tensor, "_ M"], chunk: Chunk, d_k: KeyGradient | None) -> None:
        """Add a head's gradients of keys and vectors, from the summed gradient of its products."""
        k = self.with_bias(chunk.heads.plain_k[0], chunk)
        d_x = torch.mm(d_products.mT, self.of_head(self.vectors, chunk)).mul_(self.scale)
        self.d_of_head(chunk).addmm_(d_products, k, alpha=self.scale)
        if d_k is not None:
            d_k.at(chunk.head_slice, slice(0, len(d_x)))[0].add_(d_x)
        self.add_d_bias(d_x, chunk)
        d_products.zero_()


def _diagonals(band: Float[Tensor, "w s"], n: int) -> Float[Tensor, "n s"]:
    """A view of `band[r + j, j]`."""
    return band.as_strided((n, band.shape[1]), (band.stride(0), band.stride(0) + 1), band.storage_offset())
