"""Which queries of a mask see some key, and which keys some query sees: exactly, and without going through the pairs.

Sort the keys by segment and, within a segment, by order: the keys that a query sees are then consecutive. Query i sees
the positions

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
) -> tuple[Bool[Tensor, "#B #H N"], Bool[Tensor, "#B #H M"]]:
    """Whether each query sees some key, and each key is seen by some query, in a head."""
    if _see_themselves(mask, queries, keys) and mask.query_segments is not None:
        own = torch.atleast_2d(mask.query_segments >= 0)[:, None]
        return own, own
    blocks = mask.blocks
    if blocks is None:
        layout, size = torch.ones(1, 1, 1, dtype=torch.bool, device=device), max(queries, keys)
    else:
        layout, size = blocks.layout, blocks.size
    stretches = _stretches(mask, queries, keys, device)
    return _rows(stretches, layout, size), _columns(stretches, layout, size)


def hides_nothing(mask: Mask, queries: int, keys: int) -> bool:
    """Whether it is known at once that every query sees some key, and every key is seen."""
    return mask.query_segments is None and _see_themselves(mask, queries, keys)


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
        place: the position of each key in the sorted order; number: the key at each position.
        start, stop: the positions that a query sees. first, last: the same for global keys; None without those.
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
    tokens = (mask.key_order, mask.query_segments, mask.key_segments, mask.query_global, mask.key_global)
    wide = [None if x is None else torch.atleast_2d(x) for x in (low, high, most, *tokens)]
    batch = max(x.shape[0] for x in (*wide, rows[None]) if x is not None)
    low, high, most, order, mine, theirs, query_global, key_global = (
        None if x is None else x.expand(batch, -1).contiguous() for x in wide
    )
    keys = torch.arange(m, device=device).expand(batch, -1).contiguous()
    number, sorted_order = (keys, keys) if order is None else _sort(order)

    def rank(x: Tensor | None, *, right: bool) -> Tensor:
        """How many keys are of a lower order, or also of the same."""
        if x is None:
            return torch.full((batch, n), m if right else 0, device=device)
        return torch.searchsorted(sorted_order, x.to(sorted_order.dtype), right=right)

    start, stop, end = rank(low, right=False), rank(high, right=True), rank(most, right=True)
    begin = torch.zeros_like(start)
    if query_global is not None:
        start, stop = torch.where(query_global, begin, start), torch.where(query_global, end, stop)
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
    first, last = (None, None) if key_global is None else (begin, end)
    return _Stretches(place, number, start, stop, first, last, key_global)


def _sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """The numbers of the entries from the lowest on, and these as 64 bits."""
    found = x.long().sort(dim=1, stable=True)
    return found.indices, found.values


def _chunks(count: int, each: int) -> list[slice]:
    if count * each <= _AT_ONCE:  # which a compiler need not make a number of
        return [slice(0, count)]
    step = max(1, _AT_ONCE // max(1, each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _in_blocks(x: Tensor, count: int, size: int) -> Tensor:
    """`[..., N]` as `[..., blocks, size]`, the last one filled up with 0."""
    return torch.unflatten(F.pad(x, (0, count * size - x.shape[-1])), -1, (count, size))


def _columns(of: _Stretches, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H M"]:
    """The keys that are seen, a few blocks of queries at a time."""
    m, (rows, columns) = of.place.shape[1], layout.shape[1:]

    def inside(start: Tensor, stop: Tensor, some: slice) -> Tensor:
        start, stop = (_in_blocks(x, rows, size)[:, some] for x in (start, stop))
        one = torch.ones((), dtype=torch.int32, device=start.device).expand(start.shape)
        steps = one.new_zeros(*start.shape[:2], m + 1).scatter_add(2, start, one).scatter_add(2, stop, -one)
        return (steps.cumsum(dim=2, dtype=torch.int32) > 0).gather(2, of.place[:, None].expand(-1, start.shape[1], -1))

    counts = torch.zeros((), device=layout.device)
    for some in _chunks(rows, of.place.numel()):
        met = inside(of.start, of.stop, some)
        if of.of_all is not None and of.first is not None and of.last is not None:
            met = met | (inside(of.first, of.last, some) & of.of_all[:, None])
        cells = _in_blocks(met.float(), columns, size)
        counts = counts + torch.einsum("hij,bijs->bhjs", layout[:, some].float(), cells)
    return counts.flatten(2)[..., :m] > 0


def _rows(of: _Stretches, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H N"]:
    """The queries that see something, a few blocks of keys at a time."""
    n, (rows, columns) = of.start.shape[1], layout.shape[1:]

    def meets(start: Tensor, stop: Tensor, members: Bool[Tensor, "#B c M"]) -> Tensor:
        before = F.pad(members.cumsum(dim=2, dtype=torch.int32), (1, 0))
        begun, ended = (before.gather(2, x[:, None].expand(-1, before.shape[1], -1)) for x in (start, stop))
        return ended > begun

    counts = torch.zeros((), device=layout.device)
    for some in _chunks(columns, max(of.start.numel(), of.number.numel())):
        numbers = torch.arange(some.start, some.stop, device=layout.device)
        members = (of.number // size)[:, None] == numbers[:, None]
        met = meets(of.start, of.stop, members)
        if of.of_all is not None and of.first is not None and of.last is not None:
            met = met | meets(of.first, of.last, members & of.of_all.gather(1, of.number)[:, None])
        cells = _in_blocks(met.float(), rows, size)
        counts = counts + torch.einsum("hij,bjis->bhis", layout[:, :, some].float(), cells)
    return counts.flatten(2)[..., :n] > 0
