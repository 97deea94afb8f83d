"""Which ranges of keys a mask lets some query rows see, and where rows that see other keys begin."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask

GAP = 32
"""Keys between two ranges up to which they become one: a few forbidden pairs cost less than one more product."""
_FEWEST = 4
"""Ranges at equal distances from which they become slices with a step."""
ALIGNED = 64
"""Mean rows of a block at least, where it ends at the borders of a block layout or where intervals jump."""
_OFTEN = 16
"""Mean rows between global ones and others, below which blocks do not end there."""


def spans(mask: Mask | None, rows: Int[Tensor, " n"], keys: int, *, stepped: bool = False) -> list[slice]:
    """Disjoint ranges of keys that hold all that the rows may see. Tensors are read only on CPU.

    They are found in O(keys), without looking at pairs: of intervals and segments the smallest range around all, of
    globals and blocks exactly those keys.

    Args:
        stepped: whether a range may leave out keys at equal distances, as a slice with a step.
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
    return _joined(_runs(_seen(mask, rows, keys)), stepped)


def _seen(mask: Mask, rows: Int[Tensor, " n"], keys: int) -> Bool[Tensor, " M"]:
    """The keys that some of the rows may see, and some more."""
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
        own = rows[None] if mask.query_order is None else torch.atleast_2d(mask.query_order)[:, rows]
        seen = seen & (order <= own.amax(dim=1, keepdim=True) + mask.limit)
    if mask.query_segments is not None and mask.key_segments is not None:
        mine, theirs = torch.atleast_2d(mask.query_segments)[:, rows], torch.atleast_2d(mask.key_segments)
        most = torch.iinfo(mine.dtype).max
        lowest = torch.where(mine < 0, most, mine).amin(dim=1, keepdim=True)
        seen = seen & (theirs >= lowest.clamp(min=0)) & (theirs <= mine.amax(dim=1, keepdim=True))
    together = seen.any(dim=0)
    if mask.blocks is not None:
        layout, size = mask.blocks.layout, mask.blocks.size
        columns = layout[:, torch.unique(rows // size)].flatten(0, 1).any(dim=0)
        together = together & columns.repeat_interleave(size)[:keys]
    return together


def _runs(seen: Bool[Tensor, " M"]) -> list[tuple[int, int]]:
    """The ranges of True."""
    padded = torch.nn.functional.pad(seen, (1, 1)).int()
    steps = padded.diff()
    return list(zip((steps == 1).nonzero()[:, 0].tolist(), (steps == -1).nonzero()[:, 0].tolist(), strict=True))


def _joined(runs: list[tuple[int, int]], stepped: bool) -> list[slice]:
    """The ranges with small gaps between them closed, and those at equal distances as slices with a step."""
    found: list[slice] = []
    number = 0
    while number < len(runs):
        (start, stop), many = runs[number], _alike(runs, number) if stepped else 1
        if many >= _FEWEST:
            step, last = runs[number + 1][0] - start, runs[number + many - 1][0]
            found += [slice(one, one + last - start + 1, step) for one in range(start, stop)]
        elif found and found[-1].step is None and start - found[-1].stop <= GAP:
            found[-1] = slice(found[-1].start, stop)
        else:
            found.append(slice(start, stop))
        number += many if many >= _FEWEST else 1
    return found


def _alike(runs: list[tuple[int, int]], number: int) -> int:
    """How many ranges from this one on are of one length and at one distance, of which they cover at most half."""
    start, stop = runs[number]
    step = runs[number + 1][0] - start if number + 1 < len(runs) else 0
    if 2 * (stop - start) > step:
        return 1
    count = 1
    while number + count < len(runs) and runs[number + count] == (start + count * step, stop + count * step):
        count += 1
    return count


def cuts(mask: Mask | None, rows: int, device: torch.device) -> list[int]:
    """Query rows at which a block should begin: where global ones begin and end, where the beginning of an interval
    jumps, and at the borders of a block layout."""
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
    return sorted(found - {0})
