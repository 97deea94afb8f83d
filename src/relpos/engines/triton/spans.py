"""A mask as arguments of the kernels: also which keys each block of queries may see, and the reverse."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask
from relpos.engines.triton.tiles import Allowed, Spans

COARSE = 128
"""Tokens of a block here; a multiple of the rows and columns of every tile."""

_UNKNOWN = Spans(None, 0)


def allowed(mask: Mask | None, n: int, m: int, device: torch.device) -> tuple[Allowed, Spans, Spans]:
    """The mask's parts, and the spans of queries and of keys; empty spans if `left` and `right` are enough."""
    if mask is None:
        return Allowed(*[None] * 18), _UNKNOWN, _UNKNOWN
    if mask.is_interval:  # bounded by the number of tokens, so that sums fit in 32 bits
        most = max(n, m)
        left, right = (None if x is None else max(-most, min(x, most)) for x in (mask.left, mask.right))
        return Allowed(left, right, *[None] * 16), _UNKNOWN, _UNKNOWN
    tokens, also = torch.arange(n, device=device), Mask() if mask.also is None else mask.also
    bounds, more = mask.interval(tokens), also.interval(tokens)
    parts: list[Tensor | int | None] = []
    for x in (*bounds, mask.key_order, mask.query_segments, mask.key_segments, *more, also.key_order):
        wide = None if x is None else torch.atleast_2d(x).contiguous()
        parts += [wide, 0 if wide is None or wide.shape[0] == 1 else wide.stride(0)]
    visible = _visible(mask, *bounds, n, m, device) & _visible(also, *more, n, m, device)
    return Allowed(None, None, *parts), _hull(visible, m), _hull(visible.mT, n)


def _extremes(x: Int[Tensor, "*#B N"]) -> tuple[Tensor, Tensor]:
    """The minimum and maximum of each block, `[1 or B, blocks]`."""
    x = torch.atleast_2d(x)
    x = torch.cat([x, x[:, -1:].expand(-1, -x.shape[1] % COARSE)], dim=1)
    blocks = x.unflatten(1, (-1, COARSE))
    return blocks.amin(dim=2), blocks.amax(dim=2)


def _visible(
    mask: Mask, low: Tensor | None, high: Tensor | None, n: int, m: int, device: torch.device
) -> Bool[Tensor, "_ n m"]:
    """Which blocks of keys each block of queries may see, and possibly more if order and segments do not ascend."""
    visible = torch.ones(1, -(-n // COARSE), -(-m // COARSE), dtype=torch.bool, device=device)
    if low is not None or high is not None:
        least, most = _extremes(torch.arange(m, device=device) if mask.key_order is None else mask.key_order)
        if low is not None:
            visible = visible & (most[:, None, :] >= _extremes(low)[0][:, :, None])
        if high is not None:
            visible = visible & (least[:, None, :] <= _extremes(high)[1][:, :, None])
    if mask.query_segments is not None and mask.key_segments is not None:
        (first, last), (least, most) = _extremes(mask.query_segments), _extremes(mask.key_segments)
        visible = (
            visible & (most[:, None, :] >= first.clamp(min=0)[:, :, None]) & (least[:, None, :] <= last[:, :, None])
        )
    return visible


def _hull(visible: Bool[Tensor, "_ n m"], end: int) -> Spans:
    """The range that holds all that each block may see."""
    count = visible.shape[2]
    numbers = torch.arange(count, device=visible.device)
    first = torch.where(visible, numbers, count).amin(dim=2)
    last = torch.where(visible, numbers + 1, 0).amax(dim=2)
    found = torch.stack([first.clamp(max=count - 1), last], dim=2).mul(COARSE).clamp(max=end)
    found = torch.where(last[..., None] == 0, 0, found).to(torch.int32).contiguous()
    return Spans(found, 0 if found.shape[0] == 1 else found.stride(0))
