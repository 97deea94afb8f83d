"""Attention under a mask to which no term adds, by PyTorch's flash attention kernel for CPU, forward and backward.

The kernel has no mask of O(N) numbers, and with a dense one computes all pairs. Here it computes a tile at a time, with
a dense mask of the tile, or none if all its pairs are allowed:

    forward     a few rows, and the keys from the first to the last that some of them see
    backward    a few keys, and the rows from the first to the last that see some of them: of the three gradients,
                only that of the queries is then a sum over tiles
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

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


class _KernelTile(NamedTuple):
    """Rows and keys of a call of the kernel, and its mask, 0 and -inf, or None."""

    rows: slice
    keys: slice
    mask: Float[Tensor, "#B 1 n m"] | None


def supports(call: Call) -> bool:
    """Whether the kernel can compute a call, once its rotation is applied."""
    mask, width = call.mask, call.q.shape[3]
    if mask is None or len(call.terms) or call.dropout > 0 or flash_kernel() is None or flash_kernel_backward() is None:
        return False
    if mask.allowed is not None or mask.blocks is not None or mask.has_globals:
        return False
    return all(x.is_cpu and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v))


class _KernelTiles:
    """The tiles of a mask."""

    def __init__(self, mask: Mask, n: int, m: int) -> None:
        self.mask, self.n, self.m = mask, n, m
        self.first, self.last = self._bounds()

    def _bounds(self) -> tuple[Int[Tensor, " N"] | None, Int[Tensor, " N"] | None]:
        """The first and the last key that each row sees, if it sees all between and the batch is alike."""
        mask = self.mask
        if mask.key_order is not None or mask.query_segments is not None or mask.also is not None:
            return None, None
        low, high = mask.interval(torch.arange(self.n))
        if any(x is not None and x.shape[0] > 1 for x in (low, high)):
            return None, None
        first = torch.zeros(self.n, dtype=torch.long) if low is None else low[0].clamp(min=0)
        last = torch.full((self.n,), self.m - 1) if high is None else high[0].clamp(max=self.m - 1)
        return first, last

    def by_rows(self) -> Iterator[_KernelTile]:
        """Tiles of a few rows; all of some rows in turn."""
        borders = [0, *masks.cuts(self.mask, self.n, torch.device("cpu")), self.n]
        for begin, end in itertools.pairwise(borders):
            for start in range(begin, end, _FEW):
                rows = slice(start, min(start + _FEW, end))
                if self.first is None or self.last is None:
                    spans = masks.spans(self.mask, torch.arange(rows.start, rows.stop), self.m)
                else:
                    spans = [slice(int(self.first[rows].min()), int(self.last[rows].max()) + 1)]
                yield from (self._tile(rows, keys) for keys in spans if keys.start < keys.stop)

    def by_keys(self) -> Iterator[_KernelTile]:
        """Tiles of a few keys, where bounds are known; else of a few rows."""
        if self.first is None or self.last is None:
            yield from self.by_rows()
            return
        for start in range(0, self.m, _FEW):
            keys = slice(start, min(start + _FEW, self.m))
            rows = ((self.first < keys.stop) & (self.last >= start) & (self.first <= self.last)).nonzero()
            if len(rows):
                yield self._tile(slice(int(rows[0]), int(rows[-1]) + 1), keys)

    def may_blank(self, rows: slice) -> bool:
        """Whether some row may see no key."""
        return self.first is None or self.last is None or bool((self.first[rows] > self.last[rows]).any())

    def _tile(self, rows: slice, keys: slice) -> _KernelTile:
        if self.first is None or self.last is None:
            forbidden = ~self.mask.pairs(torch.arange(rows.start, rows.stop), keys)
            mask = torch.zeros(forbidden.shape).masked_fill_(forbidden, -torch.inf) if forbidden.any() else None
            return _KernelTile(rows, keys, mask)
        count = keys.stop - keys.start
        first = (self.first[rows] - keys.start).clamp_(min=0)
        last = (self.last[rows] - keys.start).clamp_(max=count - 1)
        seen = count, first.numpy().tobytes(), last.numpy().tobytes()
        make = _often_made if count * len(first) <= _OFTEN_MADE else _interval_mask
        return _KernelTile(rows, keys, make(*seen))


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


def _zeros_like(x: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
    """Zeros, token by token as the kernel writes them: sums over tiles are then of consecutive numbers."""
    return x.new_zeros(x.shape[0], x.shape[2], x.shape[1], x.shape[3]).transpose(1, 2)


def forward(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp."""
    assert call.mask is not None
    q, k, v = _inputs(call)
    out, lse = _zeros_like(q), q.new_full((*q.shape[:3], 1), -torch.inf)
    tiles, done = _KernelTiles(call.mask, q.shape[2], k.shape[2]), 0
    for rows, keys, mask in tiles.by_rows():
        tile, may_blank = (q[:, :, rows], k[:, :, keys], v[:, :, keys], mask), tiles.may_blank(rows)
        tile_out, tile_lse = partial_softmax.attend(*tile, call.scale, forbidding=may_blank)
        if may_blank:
            tile_out.masked_fill_(tile_lse == -torch.inf, 0)
        own_out, own_lse = out[:, :, rows], lse[:, :, rows]
        if rows.start < done:  # further keys of the same rows
            total = torch.logaddexp(own_lse, tile_lse)
            own_out *= partial_softmax.share(own_lse, total)
            tile_out *= partial_softmax.share(tile_lse, total)
            tile_out, tile_lse = tile_out.add_(own_out), total
        own_out.copy_(tile_out)
        own_lse.copy_(tile_lse)
        done = rows.stop
    return out, lse[..., 0]


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, gradients: Gradients) -> None:
    """Add to the gradients; that of the log-sum-exp is taken for 0."""
    kernel, (q, k, v) = flash_kernel_backward(), _inputs(call)
    assert kernel is not None
    assert call.mask is not None
    sums = [_zeros_like(x) for x in (q, k, v)]
    d_out, out = contiguous_rows(d_out), contiguous_rows(out)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has no weights
    for rows, keys, mask in _KernelTiles(call.mask, q.shape[2], k.shape[2]).by_keys():
        upstream, own_q, *saved = (x[:, :, rows] for x in (d_out, q, out, lse))
        tile = upstream, own_q, k[:, :, keys], v[:, :, keys], *saved
        found = kernel(*tile, 0.0, False, attn_mask=mask, scale=call.scale)
        for into, part, own in zip(sums, (rows, keys, keys), found, strict=True):
            into[:, :, part].add_(own)
    for x, gradient in zip((call.q, call.k, call.v), sums, strict=True):
        whole = gradient if gradient.shape == x.shape else gradient.unflatten(1, (-1, call.groups)).sum(dim=2)
        gradients.add(x, whole)
