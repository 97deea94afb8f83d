"""A mask's parts as the kernels take them, and which stretches of one side each stretch of the other may meet."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor

from relpos.core import Mask
from relpos.engines.triton.tiles import Allowed, Spans

COARSE = 128
"""Tokens of a stretch; a multiple of the rows and columns of every tile."""

_UNKNOWN = Spans(None, 0)


def allowed(mask: Mask | None, n: int, m: int, device: torch.device) -> tuple[Allowed, Spans, Spans]:
    """The mask's parts, and the spans of its queries and of its keys: empty where every tile knows them by itself."""
    if mask is None:
        return Allowed(*[None] * 12), _UNKNOWN, _UNKNOWN
    if mask.is_interval:  # no further than there are tokens, so that sums stay within 32 bits
        most = max(n, m)
        left, right = (None if x is None else max(-most, min(x, most)) for x in (mask.left, mask.right))
        return Allowed(left, right, *[None] * 10), _UNKNOWN, _UNKNOWN
    low, high = mask.interval(torch.arange(n, device=device))
    order, mine, theirs = mask.key_order, mask.query_segments, mask.key_segments
    parts: list[Tensor | int | None] = []
    for x in (low, high, order, mine, theirs):
        wide = None if x is None else torch.atleast_2d(x).contiguous()
        parts += [wide, 0 if wide is None or wide.shape[0] == 1 else wide.stride(0)]
    of_queries, of_keys = _spans(low, high, order, mine, theirs, n, m, device)
    return Allowed(None, None, *parts), of_queries, of_keys


def _extremes(x: Int[Tensor, "*#B N"]) -> tuple[Tensor, Tensor]:
    """The least and the largest of each stretch, `[1 or B, stretches]`."""
    x = torch.atleast_2d(x)
    x = torch.cat([x, x[:, -1:].expand(-1, -x.shape[1] % COARSE)], dim=1)
    stretches = x.unflatten(1, (-1, COARSE))
    return stretches.amin(dim=2), stretches.amax(dim=2)


def _spans(
    low: Tensor | None,
    high: Tensor | None,
    order: Tensor | None,
    mine: Tensor | None,
    theirs: Tensor | None,
    n: int,
    m: int,
    device: torch.device,
) -> tuple[Spans, Spans]:
    """The hull of what each stretch may meet: right for any mask, tight where order and segments do not fall."""
    meet = torch.ones(1, -(-n // COARSE), -(-m // COARSE), dtype=torch.bool, device=device)
    if low is not None or high is not None:
        least, most = _extremes(torch.arange(m, device=device) if order is None else order)
        if low is not None:
            meet = meet & (most[:, None, :] >= _extremes(low)[0][:, :, None])
        if high is not None:
            meet = meet & (least[:, None, :] <= _extremes(high)[1][:, :, None])
    if mine is not None and theirs is not None:
        (first, last), (least, most) = _extremes(mine), _extremes(theirs)
        meet = meet & (most[:, None, :] >= first.clamp(min=0)[:, :, None]) & (least[:, None, :] <= last[:, :, None])
    return _hull(meet, m), _hull(meet.mT, n)


def _hull(meet: Tensor, end: int) -> Spans:
    count = meet.shape[2]
    numbers = torch.arange(count, device=meet.device)
    first = torch.where(meet, numbers, count).amin(dim=2)
    last = torch.where(meet, numbers + 1, 0).amax(dim=2)
    found = torch.stack([first.clamp(max=count - 1), last], dim=2).mul(COARSE).clamp(max=end)
    found = torch.where(last[..., None] == 0, 0, found).to(torch.int32).contiguous()
    return Spans(found, 0 if found.shape[0] == 1 else found.stride(0))
