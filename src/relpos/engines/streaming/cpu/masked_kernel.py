"""Attention under a mask to which no term adds, by PyTorch's flash attention kernel for CPU, forward and backward.

The kernel has no mask of O(N) numbers, and with a dense one computes all pairs. Here it computes a tile at a time, with
a dense mask of the tile, or none if all its pairs are allowed:

    forward     a few rows, and the keys from the first to the last that some of them see
    backward    a few keys, and the rows from the first to the last that see some of them: of the three gradients,
                only that of the queries is then a sum over tiles
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import Mask
from relpos.core.private import flash_kernel, flash_kernel_backward
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.streaming.cpu import partial_softmax
from relpos.engines.streaming.plan import masks
from relpos.engines.streaming.plan.chunks import contiguous_rows

_FEW = 128
"""Rows, or keys, of a tile: more compute more forbidden pairs."""
Bounds = Int[np.ndarray, " N"]


class _KernelTile(NamedTuple):
    """Rows and keys of a call of the kernel, its mask, 0 and -inf, or None, and whether some row may see no key."""

    rows: slice
    keys: slice
    mask: Float[Tensor, "#B 1 n m"] | None
    may_blank: bool


def supports(call: Call) -> bool:
    """Whether the kernel can compute a call, once its rotation is applied."""
    mask, width = call.mask, call.q.shape[3]
    if mask is None or len(call.terms) or call.dropout > 0 or flash_kernel() is None or flash_kernel_backward() is None:
        return False
    if mask.allowed is not None or mask.blocks is not None or mask.has_globals:
        return False
    return all(x.is_cpu and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v))


class _Cut(NamedTuple):
    """Some rows, and the keys that some of them see. `first`, `last`: those that each row sees, int64, from the first
    of these keys."""

    rows: slice
    keys: slice
    first: bytes
    last: bytes
    may_blank: bool

    def tile(self) -> _KernelTile:
        """With its mask."""
        count = self.keys.stop - self.keys.start
        make = _often_made if count * (self.rows.stop - self.rows.start) <= _OFTEN_MADE else _interval_mask
        return _KernelTile(self.rows, self.keys, make(count, self.first, self.last), self.may_blank)


class _KernelTiles:
    """The tiles of a mask."""

    def __init__(self, mask: Mask, n: int, m: int) -> None:
        self.mask, self.n, self.m = mask, n, m
        self.bounds = self._bounds()

    def _bounds(self) -> tuple[bytes, bytes] | None:
        """The first and the last key that each row sees, int64, if it sees all between and the batch is alike."""
        mask = self.mask
        if mask.key_order is not None or mask.query_segments is not None or mask.also is not None:
            return None
        low, high = mask.interval(torch.arange(self.n))
        if any(x is not None and x.shape[0] > 1 for x in (low, high)):
            return None
        first = torch.zeros(self.n, dtype=torch.long) if low is None else low[0].long().clamp(min=0)
        last = torch.full((self.n,), self.m - 1) if high is None else high[0].long().clamp(max=self.m - 1)
        return first.numpy().tobytes(), last.numpy().tobytes()

    def by_rows(self) -> Iterator[_KernelTile]:
        """Tiles of a few rows; all of some rows in turn."""
        borders = 0, *masks.cuts(self.mask, self.n, torch.device("cpu")), self.n
        if self.bounds is not None:
            cut = _often_cut if self.n <= _OFTEN_CUT else _cut_rows
            yield from (one.tile() for one in cut(*self.bounds, borders, _FEW))
            return
        for start, stop in _pieces(borders, _FEW):
            rows = torch.arange(start, stop)
            for keys in masks.spans(self.mask, rows, self.m):
                forbidden = ~self.mask.pairs(rows, keys)
                mask = torch.zeros(forbidden.shape).masked_fill_(forbidden, -torch.inf) if forbidden.any() else None
                yield _KernelTile(slice(start, stop), keys, mask, may_blank=True)

    def by_keys(self) -> Iterator[_KernelTile]:
        """Tiles of a few keys, where bounds are known; else of a few rows."""
        if self.bounds is None:
            return self.by_rows()
        cut = _often_cut_keys if self.m <= _OFTEN_CUT else _cut_keys
        return (one.tile() for one in cut(*self.bounds, self.m, _FEW))


def _pieces(borders: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of at most so many rows, from border to border."""
    for begin, end in itertools.pairwise(borders):
        for start in range(begin, end, most):
            yield start, min(start + most, end)


def _cut_rows(first: bytes, last: bytes, borders: Sequence[int], few: int) -> list[_Cut]:
    """The tiles of at most `few` rows, of rows that see the keys from `first` to `last` (int64)."""
    low, high = (np.frombuffer(x, dtype=np.int64) for x in (first, last))
    cuts = (_cut_of(low, high, slice(*rows), None) for rows in _pieces(borders, few))
    return [one for one in cuts if one.keys.start < one.keys.stop]


def _cut_keys(first: bytes, last: bytes, keys: int, few: int) -> list[_Cut]:
    """The tiles of at most `few` keys, of the same rows."""
    low, high = (np.frombuffer(x, dtype=np.int64) for x in (first, last))
    cuts = []
    for start, stop in _pieces((0, keys), few):
        (rows,) = ((low < stop) & (high >= start) & (low <= high)).nonzero()
        if len(rows):
            cuts.append(_cut_of(low, high, slice(int(rows[0]), int(rows[-1]) + 1), slice(start, stop)))
    return cuts


def _cut_of(low: Bounds, high: Bounds, rows: slice, keys: slice | None) -> _Cut:
    """Some rows with some keys; by default with all that some row sees."""
    low, high = low[rows], high[rows]
    keys = slice(int(low.min()), int(high.max()) + 1) if keys is None else keys
    first, last = (low - keys.start).clip(min=0), (high - keys.start).clip(max=keys.stop - keys.start - 1)
    return _Cut(rows, keys, first.tobytes(), last.tobytes(), bool((low > high).any()))


_OFTEN_CUT = 2**15
"""Most rows, or keys, of a mask whose tiles are kept for later calls and layers: with 16 of them, 16 MiB at most."""
_often_cut, _often_cut_keys = lru_cache(16)(_cut_rows), lru_cache(16)(_cut_keys)


def _interval_mask(count: int, first: bytes, last: bytes) -> Float[Tensor, "1 1 n m"] | None:
    """The mask of rows that see the keys from `first` to `last` (int64) of so many."""
    low, high = (torch.frombuffer(bytearray(x), dtype=torch.long)[:, None] for x in (first, last))
    before, after = int(low.max()), int(high.min()) + 1
    if before == 0 and after == count:
        return None
    mask, order = torch.zeros(1, 1, len(low), count, device="cpu"), torch.arange(count, device="cpu")
    for hides, columns in ((torch.gt, slice(0, before)), (torch.lt, slice(max(0, after), count))):
        edge = low if hides is torch.gt else high
        mask[0, 0, :, columns].masked_fill_(hides(edge, order[columns]), -torch.inf)
    return mask


_OFTEN_MADE = 2**17
"""Most pairs of a mask that is kept for later tiles, calls and layers: with 32 of them, 16 MiB at most."""
_often_made = lru_cache(32)(_interval_mask)


def _inputs(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the kernel reads them, keys and values for each query head."""
    q, k, v = (contiguous_rows(x.detach()) for x in (call.q, call.k, call.v))
    if call.groups > 1:
        k, v = (x.repeat_interleave(call.groups, dim=1) for x in (k, v))
    return q, k, v


def forward(*calls: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp of one softmax over the pairs of all calls, which share none."""
    out, lse = (_by_token(calls[0].q, width) for width in (calls[0].v.shape[3], 1))
    written = 0  # rows that have some result
    for call in calls:
        q, k, v = _inputs(call)
        assert call.mask is not None
        tiles = _KernelTiles(call.mask, q.shape[2], k.shape[2])
        for rows, keys, mask, may_blank in tiles.by_rows():
            tile = q[:, :, rows], k[:, :, keys], v[:, :, keys], mask
            tile_out, tile_lse = partial_softmax.attend(*tile, call.scale, forbidding=may_blank)
            if may_blank:
                tile_out.masked_fill_(tile_lse == -torch.inf, 0)
            if rows.start < written:  # further keys of these rows
                partial_softmax.merge(out[:, :, rows], lse[:, :, rows], tile_out, tile_lse)
                continue
            _leave_blank(out, lse, written, rows.start)
            out[:, :, rows], lse[:, :, rows] = tile_out, tile_lse
            written = rows.stop
        _leave_blank(out, lse, written, q.shape[2])
        written = q.shape[2]
    return out, lse[..., 0]


def _by_token(x: Float[Tensor, "B H N _"], width: int) -> Float[Tensor, "B H N {width}"]:
    """An uninitialized tensor, token by token as the kernel writes: some of its rows are then consecutive numbers."""
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1], width).transpose(1, 2)


def _leave_blank(out: Float[Tensor, "B H N V"], lse: Float[Tensor, "B H N 1"], start: int, stop: int) -> None:
    """The results of rows that see nothing."""
    if start < stop:
        out[:, :, start:stop], lse[:, :, start:stop] = 0, -torch.inf


def backward(calls: Sequence[Call], out: Tensor, lse: Tensor, d_out: Tensor, gradients: Gradients) -> None:
    """Add to the gradients, from the results of `forward`; that of the log-sum-exp is taken for 0."""
    kernel = flash_kernel_backward()
    assert kernel is not None
    d_out, out = contiguous_rows(d_out), contiguous_rows(out)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has no weights
    sums: dict[int, tuple[Tensor, Tensor]] = {}  # of queries, keys and values that calls may share
    for call in calls:
        q, k, v = inputs = _inputs(call)
        into = []
        for x, own in zip((call.q, call.k, call.v), inputs, strict=True):
            _, gradient = sums.setdefault(id(x), (x, _by_token(own, own.shape[3]).zero_()))
            into.append(gradient)
        assert call.mask is not None
        for rows, keys, mask, _ in _KernelTiles(call.mask, q.shape[2], k.shape[2]).by_keys():
            upstream, own_q, *saved = (x[:, :, rows] for x in (d_out, q, out, lse))
            tile = upstream, own_q, k[:, :, keys], v[:, :, keys], *saved
            found = kernel(*tile, 0.0, False, attn_mask=mask, scale=call.scale)
            for gradient, part, own in zip(into, (rows, keys, keys), found, strict=True):
                gradient[:, :, part].add_(own)
    for x, gradient in sums.values():
        whole = gradient if gradient.shape == x.shape else gradient.unflatten(1, (x.shape[1], -1)).sum(dim=2)
        gradients.add(x, whole)
