"""What a mask lets some query rows see: which stretches of the keys, and which pairs in them."""

from __future__ import annotations

from dataclasses import fields

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core import Mask

_TILE = 64
"""Keys that are looked at or left out together where a mask has holes."""


def is_interval(mask: Mask) -> bool:
    """Whether the mask is `left` and `right` around the index and nothing else: known without reading a tensor."""
    return all(getattr(mask, field.name) is None for field in fields(mask) if field.name not in ("left", "right"))


def _at(x: Tensor | None, which: Tensor | slice) -> Tensor | None:
    return None if x is None else (x if x.dim() == 2 else x[None])[:, which]


def allowed(mask: Mask, rows: Int[Tensor, " n"], keys: slice) -> Bool[Tensor, "#B #H n m"]:
    """True where a pair is allowed, for some query rows by number and a stretch of keys."""
    pairs = torch.ones(1, len(rows), keys.stop - keys.start, dtype=torch.bool, device=rows.device)
    order = _at(mask.query_order, rows)
    order = rows[None] if order is None else order
    low, high = _at(mask.low, rows), _at(mask.high, rows)
    if mask.left is not None:
        low = order - mask.left if low is None else torch.maximum(low, order - mask.left)
    if mask.right is not None:
        high = order + mask.right if high is None else torch.minimum(high, order + mask.right)
    key_order = _at(mask.key_order, keys)
    if key_order is None:
        key_order = torch.arange(keys.start, keys.stop, device=rows.device)[None]
    if low is not None:
        pairs = pairs & (low[:, :, None] <= key_order[:, None, :])
    if high is not None:
        pairs = pairs & (key_order[:, None, :] <= high[:, :, None])
    query_global, key_global = _at(mask.query_global, rows), _at(mask.key_global, keys)
    if query_global is not None:
        pairs = pairs | query_global[:, :, None]
    if key_global is not None:
        pairs = pairs | key_global[:, None, :]
    mine, theirs = _at(mask.query_segments, rows), _at(mask.key_segments, keys)
    if mine is not None and theirs is not None:
        pairs = pairs & (mine[:, :, None] == theirs[:, None, :]) & (mine >= 0)[:, :, None]
    result = pairs[:, None]
    if mask.blocks is not None:
        columns = torch.arange(keys.start, keys.stop, device=rows.device) // mask.blocks.size
        result = result & mask.blocks.layout[:, rows // mask.blocks.size][:, :, columns][None]
    return result


def spans(mask: Mask | None, rows: Int[Tensor, " n"], queries: int, keys: int) -> list[tuple[int, int]]:
    """Stretches of keys that hold everything the rows may see. Tensors are read only on CPU.

    Intervals and segments give one stretch; a mask with globals or blocks is looked at tile by tile.
    """
    if mask is None or keys == 0:
        return [(0, keys)] if keys else []
    if rows.device.type != "cpu":
        return [(0, keys)]
    if mask.blocks is not None or mask.has_globals:
        seen = allowed(mask, rows, slice(0, keys)).flatten(0, 2).any(dim=0)
        return _runs(seen)
    if is_interval(mask):
        first, last = int(rows.min()), int(rows.max())
        start = 0 if mask.left is None else max(0, first - mask.left)
        stop = keys if mask.right is None else min(keys, last + mask.right + 1)
        return [(start, stop)] if stop > start else []
    seen = torch.ones(keys, dtype=torch.bool)
    low, high = mask.interval(queries)
    order = torch.arange(keys)[None] if mask.key_order is None else torch.atleast_2d(mask.key_order)
    if low is not None:
        seen = seen & (order >= low[:, rows].amin(dim=1, keepdim=True)).any(dim=0)
    if high is not None:
        seen = seen & (order <= high[:, rows].amax(dim=1, keepdim=True)).any(dim=0)
    mine, theirs = _at(mask.query_segments, rows), _at(mask.key_segments, slice(0, keys))
    if mine is not None and theirs is not None:
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
