"""Attention under a mask to which no term adds, by PyTorch's flash attention kernel for CPU, forward and backward.

The kernel has no mask of O(N) numbers, and with a dense one computes all pairs. Here it computes a tile at a time: a
few rows, and the keys from the first to the last that some of them see. A tile's mask is dense; without one, if its
rows see all its keys.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Mask
from relpos.core.private import flash_kernel, flash_kernel_backward
from relpos.engines.call import Call
from relpos.engines.operators import Gradients, joined
from relpos.engines.streaming.cpu import partial_softmax
from relpos.engines.streaming.plan import masks
from relpos.engines.streaming.plan.chunks import contiguous_rows

_ROWS = 128
"""Rows of a tile: more compute more forbidden pairs, at the borders of what rows see."""


def supports(call: Call) -> bool:
    """Whether the kernel can compute a call, once its rotation is applied."""
    mask, width = call.mask, call.q.shape[3]
    if mask is None or len(call.terms) or call.dropout > 0 or flash_kernel() is None or flash_kernel_backward() is None:
        return False
    if mask.allowed is not None or mask.blocks is not None or mask.has_globals:
        return False  # of these, few tiles hold most pairs
    return all(x.is_cpu and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v))


def _tiles(mask: Mask, n: int, m: int) -> Iterator[tuple[slice, slice, Float[Tensor, "#B 1 _ _"] | None]]:
    """Rows, keys, and the tile's mask: 0 where a pair is allowed and -inf elsewhere, or None."""
    borders = [0, *masks.cuts(mask, n, torch.device("cpu")), n]
    for first, last in itertools.pairwise(borders):
        for start in range(first, last, _ROWS):
            stop = min(start + _ROWS, last)
            rows = torch.arange(start, stop)
            for keys in masks.spans(mask, rows, m):
                forbidden = ~mask.pairs(rows, keys)
                tile = torch.zeros(forbidden.shape).masked_fill_(forbidden, -torch.inf) if forbidden.any() else None
                yield slice(start, stop), keys, tile


def _inputs(call: Call) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as the kernel reads them, keys and values for each query head."""
    q, k, v = (contiguous_rows(x.detach()) for x in (call.q, call.k, call.v))
    return (q, k, v) if call.groups == 1 else (q, *(x.repeat_interleave(call.groups, dim=1) for x in (k, v)))


def forward(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp."""
    q, k, v = _inputs(call)
    out, lse = torch.zeros_like(q, memory_format=torch.contiguous_format), q.new_full(q.shape[:3], -torch.inf)
    assert call.mask is not None
    for rows, tiles in itertools.groupby(_tiles(call.mask, q.shape[2], k.shape[2]), lambda tile: tile[0]):
        parts = [_attend(q[:, :, rows], k[:, :, keys], v[:, :, keys], tile, call.scale) for _, keys, tile in tiles]
        out[:, :, rows], lse[:, :, rows] = joined(parts)
    return out, lse


def _attend(q: Tensor, k: Tensor, v: Tensor, tile: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = partial_softmax.attend(q, k, v, tile, scale, forbidding=True)
    return (out if tile is None else out.masked_fill_(lse == -torch.inf, 0)), lse[..., 0]


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, gradients: Gradients) -> None:
    """Add to the gradients; that of the log-sum-exp is taken for 0."""
    kernel, (q, k, v) = flash_kernel_backward(), _inputs(call)
    assert kernel is not None
    assert call.mask is not None
    sums = [torch.zeros_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    out, d_out = contiguous_rows(out), contiguous_rows(d_out)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing has no weights
    for rows, keys, tile in _tiles(call.mask, q.shape[2], k.shape[2]):
        d_own, q_own, out_own, lse_own = (x[:, :, rows] for x in (d_out, q, out, lse))
        tensors = d_own, q_own, k[:, :, keys], v[:, :, keys], out_own, lse_own
        found = kernel(*tensors, 0.0, False, attn_mask=tile, scale=call.scale)
        for into, part, own in zip(sums, (rows, keys, keys), found, strict=True):
            into[:, :, part] += own
    for x, gradient in zip((call.q, call.k, call.v), sums, strict=True):
        whole = gradient if gradient.shape == x.shape else gradient.unflatten(1, (-1, call.groups)).sum(dim=2)
        gradients.add(x, whole)
