"""Which queries of a mask see some key, and which keys some query sees: exactly, and without going through the pairs.

Sorted by segment and, within one, by order, the keys that a query sees lie side by side. Query i sees the places

    start[i] ... stop[i] - 1     by its interval, and
    first[i] ... last[i] - 1     of the global keys: all of its segment, up to the limit

So a key is seen where more stretches have begun than ended, and a query sees something where its stretch holds a key:
O((N + M) log M). A block layout is gone through a block of queries, or of keys, at a time: as many times that as there
are blocks. Nothing is read, so that a GPU need not be waited for, but on CPU whether a layout holds its diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core.checks import at_hand
from relpos.core.mask import Mask

_AT_ONCE = 2**22
"""Pairs of a block and a token that are looked at together."""


def seen(
    mask: Mask, queries: int, keys: int, device: torch.device
) -> tuple[Bool[Tensor, "#B #H N"], Bool[Tensor, "#B #H M"]] | None:
    """Whether each query sees some key, and each key is seen by some query, in a head; None where all do and are."""
    if _see_themselves(mask, queries, keys):
        if mask.query_segments is None:
            return None
        own = torch.atleast_2d(mask.query_segments >= 0)[:, None]
        return own, own
    blocks = mask.blocks
    if blocks is None:
        layout, size = torch.ones(1, 1, 1, dtype=torch.bool, device=device), max(queries, keys)
    else:
        layout, size = blocks.layout, blocks.size
    stretches = _stretches(mask, queries, keys, device)
    return _rows(stretches, layout, size), _columns(stretches, layout, size)


def _see_themselves(mask: Mask, queries: int, keys: int) -> bool:
    """Whether every token that is in a segment is known to see itself."""
    if queries != keys or mask.low is not None or mask.high is not None:
        return False
    if mask.query_order is not mask.key_order or mask.query_segments is not mask.key_segments:
        return False
    if any(bound is not None and bound < 0 for bound in (mask.left, mask.right, mask.limit)):
        return False
    return mask.blocks is None or bool(at_hand(mask.blocks.layout, lambda x: x.diagonal(dim1=1, dim2=2).all()))


@dataclass(frozen=True, eq=False)
class _Stretches:
    """What each query sees of the sorted keys.

    Attributes:
        place: where each key stands; number: which key stands at a place.
        start, stop: the places that a query sees. first, last: the same of global keys alone; None without those.
        of_all: which keys are global.
    """

    place: Int[Tensor, "#B M"]
    number: Int[Tensor, "#B M"]
    start: Int[Tensor, "#B N"]
    stop: Int[Tensor, "#B N"]
    first: Int[Tensor, "#B N"] | None
    last: Int[Tensor, "#B N"] | None
    of_all: Bool[Tensor, "#B M"] | None


def _stretches(mask: Mask, n: int, m: int, device: torch.device) -> _Stretches:
    rows = torch.arange(n, device=device)
    low, high = mask.interval(rows)
    most = None
    if mask.limit is not None:
        most = (rows if mask.query_order is None else mask.query_order) + mask.limit
    given = (
        low,
        high,
        most,
        mask.key_order,
        mask.query_segments,
        mask.key_segments,
        mask.query_global,
        mask.key_global,
    )
    wide = [None if x is None else torch.atleast_2d(x) for x in given]
    batch = max(x.shape[0] for x in (*wide, rows[None]) if x is not None)
    low, high, most, order, mine, theirs, query_global, key_global = (
        None if x is None else x.expand(batch, -1).contiguous() for x in wide
    )
    keys = torch.arange(m, device=device).expand(batch, -1).contiguous()
    number, sorted_order = (None, keys) if order is None else _sort(order)

    def rank(x: Tensor | None, *, right: bool) -> Tensor:
        """How many keys are of a lower order, or also of the same."""
        if x is None:
            return torch.full((batch, n), m if right else 0, device=device)
        return torch.searchsorted(sorted_order, x.to(sorted_order.dtype), right=right)

    start, stop, end = rank(low, right=False), rank(high, right=True), rank(most, right=True)
    begin = torch.zeros_like(start)
    if query_global is not None:
        start, stop = torch.where(query_global, begin, start), torch.where(query_global, end, stop)
    number = keys if number is None else number
    if mine is not None and theirs is not None:
        within = torch.searchsorted(sorted_order, sorted_order)  # keys of one order have one rank
        by_segment, sorted_theirs = _sort(theirs.gather(1, number))
        number = number.gather(1, by_segment)
        mine = mine.to(sorted_theirs.dtype)
        apart = m + 1  # between the ranks of one segment and those of the next
        known = torch.searchsorted(sorted_theirs, sorted_theirs) * apart + within.gather(1, by_segment)
        segment = torch.searchsorted(sorted_theirs, mine)
        none = mine.lt(0) | (sorted_theirs.gather(1, segment.clamp(max=m - 1)) != mine)
        start, stop, begin, end = (
            torch.searchsorted(known, x + segment * apart).masked_fill(none, 0) for x in (start, stop, begin, end)
        )
    place = torch.empty_like(number).scatter(1, number, keys)
    stop, end = torch.maximum(start, stop), torch.maximum(begin, end)
    return _Stretches(
        place, number, start, stop, *((begin, end) if key_global is not None else (None, None)), key_global
    )


def _sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the entries from the lowest on, and these as 64 bits."""
    found = x.long().sort(dim=1, stable=True)
    return found.indices, found.values


def _chunks(count: int, each: int) -> list[slice]:
    if count * each <= _AT_ONCE:  # which a compiler need not make a number of
        return [slice(0, count)]
    step = max(1, _AT_ONCE // max(1, each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _columns(of: _Stretches, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H M"]:
    """The keys that are seen, a few blocks of queries at a time."""
    batch, m = of.place.shape
    heads, count = layout.shape[:2]
    blocks_of_keys = torch.arange(m, device=layout.device) // size

    def inside(start: Tensor, stop: Tensor, some: slice) -> Tensor:
        own = (F.pad(x, (0, count * size - x.shape[1])).unflatten(1, (count, size))[:, some] for x in (start, stop))
        start, stop = own
        steps = start.new_zeros(*start.shape[:2], m + 1)
        one = start.new_ones(()).expand(start.shape)
        steps = steps.scatter_add(2, start, one).scatter_add(2, stop, -one)
        return (steps.cumsum(dim=2) > 0).gather(2, of.place[:, None].expand(-1, start.shape[1], -1))

    found = torch.zeros(batch, heads, m, dtype=torch.bool, device=layout.device)
    for some in _chunks(count, batch * heads * m):
        met = inside(of.start, of.stop, some)
        if of.of_all is not None and of.first is not None and of.last is not None:
            met = met | (inside(of.first, of.last, some) & of.of_all[:, None])
        found = found | (met[:, None] & layout[:, some][..., blocks_of_keys]).any(dim=2)
    return found


def _rows(of: _Stretches, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H N"]:
    """The queries that see something, a few blocks of keys at a time."""
    batch, n = of.start.shape
    heads, _, count = layout.shape
    blocks_of_keys = of.number // size
    blocks_of_queries = torch.arange(n, device=layout.device) // size

    def meets(start: Tensor, stop: Tensor, members: Bool[Tensor, "#B c M"]) -> Tensor:
        before = F.pad(members.int().cumsum(dim=2), (1, 0))
        begun, ended = (before.gather(2, x[:, None].expand(-1, before.shape[1], -1)) for x in (start, stop))
        return ended > begun

    found = torch.zeros(batch, heads, n, dtype=torch.bool, device=layout.device)
    for some in _chunks(count, batch * heads * max(n, of.number.shape[1])):
        numbers = torch.arange(some.start, some.stop, device=layout.device)
        members = blocks_of_keys[:, None] == numbers[:, None]
        met = meets(of.start, of.stop, members)
        if of.of_all is not None and of.first is not None and of.last is not None:
            met = met | meets(of.first, of.last, members & of.of_all.gather(1, of.number)[:, None])
        found = found | (met[:, None] & layout[:, blocks_of_queries, some].mT).any(dim=2)
    return found
