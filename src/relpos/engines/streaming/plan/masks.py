"""The ranges of keys that some query rows may see under a mask, and the rows at which these ranges change."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask

GAP = 32
"""The largest gap, in keys, at which two ranges are joined: a few forbidden pairs cost less than one more product."""
_FEWEST = 4
"""The fewest ranges at equal distances that are turned into slices with a step."""
ALIGNED = 64
"""Minimum mean rows of a block, if blocks end at the borders of a block layout or where intervals jump."""
_OFTEN = 16
"""Minimum mean rows between changes from global to other rows, if blocks end at these."""


def spans(mask: Mask | None, rows: Int[Tensor, " n"], keys: int, *, strided: bool = False) -> list[slice]:
    """Disjoint ranges that hold all keys that some row may see, found in O(keys). Tensors are read only on CPU.

    For intervals and segments this is the smallest range around all of them; for globals and blocks the exact keys.

    Args:
        strided: whether keys at equal distances may become a slice with a step.
    """
    if mask is None or keys == 0:
        return [slice(0, keys)] if keys else []
    if rows.device.type != "cpu":
        return [slice(0, keys)]
    if mask.is_interval:
        first, last = int(rows.min()), int(rows.max())
        start = 0 if mask.left is None else max(0, first - mask.left)
        stop = keys if mask.right is None else min(keys, last + mask.right + 1)
        return [slice(start, stop)] if stop > start else []
    return _joined(_runs(_seen(mask, rows, keys)), strided)


def _seen(mask: Mask, rows: Int[Tensor, " n"], keys: int) -> Bool[Tensor, " M"]:
    """The keys that some row may see, and possibly more."""
    order = torch.arange(keys)[None] if mask.key_order is None else torch.atleast_2d(mask.key_order)
    low, high = mask.interval(rows)
    seen = torch.ones(1, keys, dtype=torch.bool)
    if low is not None:
        seen = seen & (order >= low.amin(dim=1, keepdim=True))
    if high is not None:
        seen = seen & (order <= high.amax(dim=1, keepdim=True))
    if mask.query_global is not None:
        seen = seen | torch.atleast_2d(mask.query_global)[:, rows].any(dim=1, keepdim=True)
    if mask.key_global is not None:
        seen = seen | torch.atleast_2d(mask.key_global)
    if mask.limit is not None and mask.has_globals:
        query_order = rows[None] if mask.query_order is None else torch.atleast_2d(mask.query_order)[:, rows]
        seen = seen & (order <= query_order.amax(dim=1, keepdim=True) + mask.limit)
    if mask.query_segments is not None and mask.key_segments is not None:
        queries, theirs = torch.atleast_2d(mask.query_segments)[:, rows], torch.atleast_2d(mask.key_segments)
        lowest = torch.where(queries < 0, torch.iinfo(queries.dtype).max, queries).amin(dim=1, keepdim=True)
        seen = seen & (theirs >= lowest.clamp(min=0)) & (theirs <= queries.amax(dim=1, keepdim=True))
    seen_in_batch = seen.any(dim=0)
    if mask.blocks is not None:
        layout, size = mask.blocks.layout, mask.blocks.size
        columns = layout[:, torch.unique(rows // size)].flatten(0, 1).any(dim=0)
        seen_in_batch = seen_in_batch & columns.repeat_interleave(size)[:keys]
    return seen_in_batch if mask.also is None else seen_in_batch & _seen(mask.also, rows, keys)


def _runs(seen: Bool[Tensor, " M"]) -> list[tuple[int, int]]:
    """The ranges of True, as (start, stop)."""
    change = torch.nn.functional.pad(seen, (1, 1)).int().diff()
    return list(zip((change == 1).nonzero()[:, 0].tolist(), (change == -1).nonzero()[:, 0].tolist(), strict=True))


def _joined(runs: list[tuple[int, int]], strided: bool) -> list[slice]:
    """The ranges as slices: joined over small gaps, and with a step where they are at equal distances."""
    found: list[slice] = []
    number = 0
    while number < len(runs):
        (start, stop), count = runs[number], _equidistant(runs, number) if strided else 1
        if count >= _FEWEST:
            distance, last = runs[number + 1][0] - start, runs[number + count - 1][0]
            found += [slice(key, key + last - start + 1, distance) for key in range(start, stop)]
        elif found and found[-1].step is None and start - found[-1].stop <= GAP:
            found[-1] = slice(found[-1].start, stop)
        else:
            found.append(slice(start, stop))
        number += count if count >= _FEWEST else 1
    return found


def _equidistant(runs: list[tuple[int, int]], number: int) -> int:
    """How many ranges, from this one on, have equal length and equal distances of at least twice the length."""
    start, stop = runs[number]
    distance = runs[number + 1][0] - start if number + 1 < len(runs) else 0
    if 2 * (stop - start) > distance:
        return 1
    count = 1
    while number + count < len(runs) and runs[number + count] == (start + count * distance, stop + count * distance):
        count += 1
    return count


def cuts(mask: Mask | None, rows: int, device: torch.device) -> list[int]:
    """Query rows at which a block should begin: where global rows begin or end, where the start of an interval jumps,
    and at the borders of a block layout."""
    if mask is None or device.type != "cpu":
        return []
    found: set[int] = set()
    for x, least, often in ((mask.query_global, 0, _OFTEN), (mask.low, 1, ALIGNED)):
        if x is not None:
            changes = (torch.atleast_2d(x).int().diff(dim=1).abs() > least).any(dim=0).nonzero()[:, 0] + 1
            if len(changes) * often <= rows:
                found |= set(changes.tolist())
    if mask.blocks is not None:
        size = mask.blocks.size
        found |= set(range(0, rows, size * -(-ALIGNED // size)))
    return sorted(found.union(cuts(mask.also, rows, device)) - {0})
