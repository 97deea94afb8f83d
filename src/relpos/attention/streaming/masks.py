"""Which stretches of the keys a mask lets some query rows see."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask

_TILE = 64
"""Keys that are looked at or left out together where a mask has holes."""


def spans(mask: Mask | None, rows: Int[Tensor, " n"], keys: int) -> list[tuple[int, int]]:
    """Stretches of keys that hold everything the rows may see. Tensors are read only on CPU.

    Intervals and segments give one stretch; a mask with globals or blocks is looked at tile by tile.
    """
    if mask is None or keys == 0:
        return [(0, keys)] if keys else []
    if rows.device.type != "cpu":
        return [(0, keys)]
    if mask.blocks is not None or mask.has_globals:
        seen = mask.pairs(rows, slice(0, keys)).flatten(0, 2).any(dim=0)
        return _runs(seen)
    if mask.is_interval:
        first, last = int(rows.min()), int(rows.max())
        start = 0 if mask.left is None else max(0, first - mask.left)
        stop = keys if mask.right is None else min(keys, last + mask.right + 1)
        return [(start, stop)] if stop > start else []
    seen = torch.ones(keys, dtype=torch.bool)
    low, high = mask.interval(rows)
    order = torch.arange(keys)[None] if mask.key_order is None else torch.atleast_2d(mask.key_order)
    if low is not None:
        seen = seen & (order >= low.amin(dim=1, keepdim=True)).any(dim=0)
    if high is not None:
        seen = seen & (order <= high.amax(dim=1, keepdim=True)).any(dim=0)
    if mask.query_segments is not None and mask.key_segments is not None:
        mine, theirs = torch.atleast_2d(mask.query_segments)[:, rows], torch.atleast_2d(mask.key_segments)
        most = torch.iinfo(mine.dtype).max
        lowest = torch.where(mine < 0, most, mine).amin(dim=1, keepdim=True)
        seen = seen & ((theirs >= lowest.clamp(min=0)) & (theirs <= mine.amax(dim=1, keepdim=True))).any(dim=0)
    places = seen.nonzero()
    if not len(places):
        return []
    return [(int(places[0]), int(places[-1]) + 1)]


def _runs(seen: Bool[Tensor, " M"]) -> list[tuple[int, int]]:
    """The stretches of tiles that hold a True."""
    tile, keys = _TILE, len(seen)
    tiles = torch.nn.functional.pad(seen, (0, -keys % tile)).view(-1, tile).any(dim=1).tolist()
    found: list[tuple[int, int]] = []
    for number, there in enumerate(tiles):
        if there and found and found[-1][1] == number * tile:
            found[-1] = (found[-1][0], (number + 1) * tile)
        elif there:
            found.append((number * tile, (number + 1) * tile))
    return [(low, min(keys, high)) for low, high in found]
