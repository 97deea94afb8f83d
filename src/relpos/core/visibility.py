"""Which queries see some key, and which keys some query sees, under a mask: exact, without a loop over pairs.

If keys are sorted by segment and, within a segment, by order, the keys that a query sees are consecutive. Query i sees
the ranks

    start[i] ... stop[i] - 1                  by its interval, and
    global_start[i] ... global_stop[i] - 1    if the key is global: all of its segment, up to the limit

A key is visible if more ranges begin than end up to its rank; a query sees a key if its range is not empty. This takes
O((N + M) log M), times the number of blocks with a block layout. No tensor is read, which would synchronize a GPU,
except on CPU to see whether a layout contains its diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core.checks import known_value
from relpos.core.mask import Mask

_AT_ONCE = 2**22
"""Maximum pairs of a block and a token in memory."""


def visible_tokens(
    mask: Mask, queries: int, keys: int, device: torch.device
) -> tuple[Bool[Tensor, "#B #H N"], Bool[Tensor, "#B #H M"]]:
    """Whether each query sees some key, and whether each key is visible to some query."""
    if mask.allowed is not None or mask.also is not None:
        pairs = mask.dense(queries, keys, device)
        return pairs.any(dim=3), pairs.any(dim=2)
    if _see_themselves(mask, queries, keys) and mask.query_segments is not None:
        in_segment = torch.atleast_2d(mask.query_segments >= 0)[:, None]
        return in_segment, in_segment
    blocks = mask.blocks
    if blocks is None:
        layout, size = torch.ones(1, 1, 1, dtype=torch.bool, device=device), max(queries, keys)
    else:
        layout, size = blocks.layout, blocks.size
    ranges = _ranges(mask, queries, keys, device)
    return _seeing_queries(ranges, layout, size), _seen_keys(ranges, layout, size)


def hides_nothing(mask: Mask, queries: int, keys: int) -> bool:
    """Whether it is known, without a search, that every query sees a key and every key is visible."""
    return mask.query_segments is None and _see_themselves(mask, queries, keys)


def _see_themselves(mask: Mask, queries: int, keys: int) -> bool:
    """Whether it is known that every token in a segment sees itself."""
    if queries != keys or any(x is not None for x in (mask.allowed, mask.also, mask.low, mask.high)):
        return False
    if mask.query_order is not mask.key_order or mask.query_segments is not mask.key_segments:
        return False
    if any(bound is not None and bound < 0 for bound in (mask.left, mask.right, mask.limit)):
        return False
    return mask.blocks is None or bool(known_value(mask.blocks.layout, lambda x: x.diagonal(dim1=1, dim2=2).all()))


@dataclass(frozen=True, eq=False)
class _Ranges:
    """The ranges of sorted keys that each query sees.

    Attributes:
        rank: the rank of each key in the sorted order. key: the key of each rank.
        start, stop: the ranks that each query sees.
        global_start, global_stop: the ranks whose key each query sees if it is global.
        key_global: which keys are global, or None.
    """

    rank: Int[Tensor, "#B M"]
    key: Int[Tensor, "#B M"]
    start: Int[Tensor, "#B N"]
    stop: Int[Tensor, "#B N"]
    global_start: Int[Tensor, "#B N"]
    global_stop: Int[Tensor, "#B N"]
    key_global: Bool[Tensor, "#B M"] | None


def _ranges(mask: Mask, n: int, m: int, device: torch.device) -> _Ranges:
    rows = torch.arange(n, device=device)
    low, high = mask.interval(rows)
    most = None
    if mask.limit is not None:
        most = (rows if mask.query_order is None else mask.query_order) + mask.limit
    tokens = (mask.key_order, mask.query_segments, mask.key_segments, mask.query_global, mask.key_global)
    wide = [None if x is None else torch.atleast_2d(x) for x in (low, high, most, *tokens)]
    batch = max(x.shape[0] for x in (*wide, rows[None]) if x is not None)
    low, high, most, order, query_segments, key_segments, query_global, key_global = (
        None if x is None else x.expand(batch, -1).contiguous() for x in wide
    )
    keys = torch.arange(m, device=device).expand(batch, -1).contiguous()
    key, sorted_order = (keys, keys) if order is None else _sort(order)

    def count_below(x: Tensor | None, *, right: bool) -> Tensor:
        """The number of keys of a lower order; `right`: or of the same order."""
        if x is None:
            return torch.full((batch, n), m if right else 0, device=device)
        return torch.searchsorted(sorted_order, x.to(sorted_order.dtype), right=right)

    start, stop = count_below(low, right=False), count_below(high, right=True)
    global_start, global_stop = torch.zeros_like(start), count_below(most, right=True)
    if query_global is not None:
        start = torch.where(query_global, global_start, start)
        stop = torch.where(query_global, global_stop, stop)
    if query_segments is not None and key_segments is not None:
        within = torch.searchsorted(sorted_order, sorted_order)  # keys of the same order count as one rank
        by_segment, sorted_segments = _sort(key_segments.gather(1, key))
        key = key.gather(1, by_segment)
        query_segments = query_segments.to(sorted_segments.dtype)
        stride = m + 1  # from the ranks of one segment to those of the next
        known = torch.searchsorted(sorted_segments, sorted_segments) * stride + within.gather(1, by_segment)
        segment = torch.searchsorted(sorted_segments, query_segments)
        none = query_segments.lt(0) | (sorted_segments.gather(1, segment.clamp(max=m - 1)) != query_segments)
        start, stop, global_start, global_stop = (
            torch.searchsorted(known, x + segment * stride).masked_fill(none, 0)
            for x in (start, stop, global_start, global_stop)
        )
    rank = torch.empty_like(key).scatter(1, key, keys)
    stop, global_stop = torch.maximum(start, stop), torch.maximum(global_start, global_stop)
    return _Ranges(rank, key, start, stop, global_start, global_stop, key_global)


def _sort(x: Tensor) -> tuple[Tensor, Tensor]:
    """The indices that sort x, and the sorted entries, in 64 bits."""
    found = x.long().sort(dim=1, stable=True)
    return found.indices, found.values


def _chunks(count: int, each: int) -> list[slice]:
    if count * each <= _AT_ONCE:  # so that a compiler need not specialize on `each`
        return [slice(0, count)]
    step = max(1, _AT_ONCE // max(1, each))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _in_blocks(x: Tensor, count: int, size: int) -> Tensor:
    """`[..., N]` as `[..., blocks, size]`, padded with 0."""
    return torch.unflatten(F.pad(x, (0, count * size - x.shape[-1])), -1, (count, size))


def _seen_keys(ranges: _Ranges, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H M"]:
    """The keys that are visible, a few blocks of queries at a time."""
    m, (rows, columns) = ranges.rank.shape[1], layout.shape[1:]

    def inside(start: Tensor, stop: Tensor, some: slice) -> Tensor:
        start, stop = (_in_blocks(x, rows, size)[:, some] for x in (start, stop))
        one = torch.ones((), dtype=torch.int32, device=start.device).expand(start.shape)
        steps = one.new_zeros(*start.shape[:2], m + 1).scatter_add(2, start, one).scatter_add(2, stop, -one)
        rank = ranges.rank[:, None].expand(-1, start.shape[1], -1)
        return (steps.cumsum(dim=2, dtype=torch.int32) > 0).gather(2, rank)

    counts = torch.zeros((), device=layout.device)
    for some in _chunks(rows, ranges.rank.numel()):
        visible = inside(ranges.start, ranges.stop, some)
        if ranges.key_global is not None:
            visible = visible | (inside(ranges.global_start, ranges.global_stop, some) & ranges.key_global[:, None])
        cells = _in_blocks(visible.float(), columns, size)
        counts = counts + torch.einsum("hij,bijs->bhjs", layout[:, some].float(), cells)
    return counts.flatten(2)[..., :m] > 0


def _seeing_queries(ranges: _Ranges, layout: Bool[Tensor, "#H r c"], size: int) -> Bool[Tensor, "#B #H N"]:
    """The queries that see a key, a few blocks of keys at a time."""
    n, (rows, columns) = ranges.start.shape[1], layout.shape[1:]

    def see(start: Tensor, stop: Tensor, members: Bool[Tensor, "#B c M"]) -> Tensor:
        before = F.pad(members.cumsum(dim=2, dtype=torch.int32), (1, 0))
        begun, ended = (before.gather(2, x[:, None].expand(-1, before.shape[1], -1)) for x in (start, stop))
        return ended > begun

    counts = torch.zeros((), device=layout.device)
    for some in _chunks(columns, max(ranges.start.numel(), ranges.key.numel())):
        blocks = torch.arange(some.start, some.stop, device=layout.device)
        members = (ranges.key // size)[:, None] == blocks[:, None]
        visible = see(ranges.start, ranges.stop, members)
        if ranges.key_global is not None:
            global_members = members & ranges.key_global.gather(1, ranges.key)[:, None]
            visible = visible | see(ranges.global_start, ranges.global_stop, global_members)
        cells = _in_blocks(visible.float(), rows, size)
        counts = counts + torch.einsum("hij,bjis->bhis", layout[:, :, some].float(), cells)
    return counts.flatten(2)[..., :n] > 0
