"""Which entry of a line and which pairs: positions, masks, patterns and dropout, written out densely.

The oracle's own reading of what the documentation says. Imports nothing from relpos.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# where tokens are


@dataclass
class Side:
    """Tokens: coordinates `[n, A]` or `[B, n, A]` behind a prefix, and the least and largest they can be."""

    places: Tensor
    prefix: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def line_index(query: Side, key: Side) -> tuple[Tensor, int]:
    """Which entry of a line bias each pair reads, `[N, M]` or `[B, N, M]`, and how many entries there are.

    The offsets between tokens come first, the lowest first and the last axis fastest; then the pairs of a prefix query
    with tokens, of tokens with a prefix key, and of both.
    """
    spans = [qh - ql + kh - kl + 1 for ql, qh, kl, kh in zip(query.low, query.high, key.low, key.high, strict=True)]
    count, batch = math.prod(spans), torch.broadcast_shapes(query.places.shape[:-2], key.places.shape[:-2])
    n, m = query.places.shape[-2], key.places.shape[-2]
    between = torch.zeros(*batch, n, m, dtype=torch.long)
    own, theirs, origin = torch.zeros(*batch, n, dtype=torch.long), torch.zeros(*batch, m, dtype=torch.long), 0
    for axis, span in enumerate(spans):
        offset = query.places[..., :, None, axis].long() - key.places[..., None, :, axis].long()
        between = between * span + offset - (query.low[axis] - key.high[axis])
        own = own * span + query.places[..., axis].long() - query.low[axis]
        theirs = theirs * span + key.places[..., axis].long() - key.low[axis]
        origin = origin * span + key.high[axis] - key.low[axis]
    index = torch.empty(*batch, query.prefix + n, key.prefix + m, dtype=torch.long)
    index[..., query.prefix :, key.prefix :] = between
    index[..., : query.prefix, key.prefix :] = (count + origin - theirs)[..., None, :]
    index[..., query.prefix :, : key.prefix] = (count + 1 + origin + own)[..., :, None]
    index[..., : query.prefix, : key.prefix] = 2 * count + 1 + origin
    ends = [count]
    if query.prefix:
        ends.append(count + origin + 1)
    if key.prefix:
        ends.append(2 * count + 1)
    if query.prefix and key.prefix:
        ends.append(2 * count + origin + 2)
    return index, max(ends)


# which pairs are allowed


def allowed_by(mask: Mapping[str, Any], n: int, m: int) -> Tensor:
    """The pairs that one mask allows, `[1 or B, 1 or H, N, M]`, from its fields."""

    def rows(name: str) -> Tensor:
        return torch.atleast_2d(mask[name])[:, None, :, None]

    def columns(name: str) -> Tensor:
        return torch.atleast_2d(mask[name])[:, None, None, :]

    own = rows("query_order") if mask.get("query_order") is not None else torch.arange(n).view(1, 1, n, 1)
    theirs = columns("key_order") if mask.get("key_order") is not None else torch.arange(m).view(1, 1, 1, m)
    own, theirs = own.long(), theirs.long()
    seen = torch.ones(1, 1, n, m, dtype=torch.bool)
    if mask.get("left") is not None:
        seen = seen & (own - theirs <= mask["left"])
    if mask.get("right") is not None:
        seen = seen & (theirs - own <= mask["right"])
    if mask.get("low") is not None:
        seen = seen & (theirs >= rows("low").long())
    if mask.get("high") is not None:
        seen = seen & (theirs <= rows("high").long())
    if mask.get("query_global") is not None:
        seen = seen | rows("query_global")
    if mask.get("key_global") is not None:
        seen = seen | columns("key_global")
    if mask.get("limit") is not None:
        seen = seen & (theirs - own <= mask["limit"])
    if mask.get("query_segments") is not None:
        mine, others = rows("query_segments").long(), columns("key_segments").long()
        seen = seen & (mine == others) & (mine >= 0) & (others >= 0)
    if mask.get("layout") is not None:
        size = mask["size"]
        i, j = torch.meshgrid(torch.arange(n) // size, torch.arange(m) // size, indexing="ij")
        seen = seen & mask["layout"][None, :, i, j]
    return seen


def apart(n: int, m: int) -> Tensor:
    """i - j."""
    return torch.arange(n)[:, None] - torch.arange(m)


def _local(n: int, m: int, window_size: int, causal: bool = False, step: int = 1) -> Tensor:
    away = apart(n, m)
    if causal:
        return (away >= 0) & (away <= step * (window_size - 1))
    return away.abs() <= step * (window_size // 2)


def _dilated(n: int, m: int, window_size: int, dilation: int, causal: bool = False) -> Tensor:
    return _local(n, m, window_size, causal, dilation) & (apart(n, m) % dilation == 0)


def _fixed(n: int, m: int, stride: int, summaries: int = 1, causal: bool = False) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(m)
    seen = (i // stride == j // stride) | (j % stride >= stride - summaries)
    return seen & (j <= i) if causal else seen


def _strided(n: int, m: int, stride: int, causal: bool = False) -> Tensor:
    away = apart(n, m)
    return (away % stride == 0) & ((away >= 0) | torch.tensor(not causal))


def _longformer(n: int, m: int, window_size: int, global_tokens: list[int]) -> Tensor:
    everywhere = torch.tensor([i in global_tokens for i in range(n)], dtype=torch.bool)
    return _local(n, m, window_size) | everywhere[:, None] | everywhere[None, :]


def _windows(n: int, m: int, grid: tuple[int, ...], size: tuple[int, ...], shift: tuple[int, ...]) -> Tensor:
    seen = torch.ones(n, m, dtype=torch.bool)
    cells = torch.arange(n)
    for cell_count, one, ahead in zip(reversed(grid), reversed(size), reversed(shift), strict=True):
        place = (cells % cell_count - ahead) // one  # which window, counted from the shifted border
        seen &= place[:, None] == place[None, :]
        cells = cells // cell_count
    return seen


PATTERNS: dict[str, Callable[..., Tensor]] = {
    "local": _local,
    "dilated": _dilated,
    "fixed": _fixed,
    "strided": _strided,
    "longformer": _longformer,
    "windows": _windows,
}


# dropout


def _word(x: Tensor) -> Tensor:
    """lowbias32 (Wellons 2018) in Python's whole numbers, which do not overflow, by way of 16-bit halves."""
    mask = 2**32 - 1

    def times(y: Tensor, factor: int) -> Tensor:
        return (((y >> 16) * factor % 2**16 << 16) + (y & 0xFFFF) * factor) & mask

    x = x ^ (x >> 16)
    x = times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = times(x, 0x846CA68B)
    return x ^ (x >> 16)


def kept_pairs(seed: int, shape: tuple[int, int, int, int], dropout: float) -> Tensor:
    """The factor of each weight, `[B, H, N, M]`: 0 or 1 / (1 - dropout)."""
    word = _word(torch.tensor(seed & (2**32 - 1)))
    for axis, size in enumerate(shape):
        word = _word(word ^ torch.arange(size).view(*(1,) * axis, size, *(1,) * (3 - axis)))
    return (word >= math.floor(dropout * 2**32)).double() / (1 - dropout)
