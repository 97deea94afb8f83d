"""Which pairs may attend, as O(N) structure: order, intervals, segments, globals and blocks.

A pair is allowed if

    query_segments[i] == key_segments[j] >= 0,  and
    low[i] <= key_order[j] <= high[i]  or  query i or key j is global,  and
    key_order[j] <= query_order[i] + limit,  and
    the block layout, if any, allows the block of the pair,  and
    allowed[b, h, i, j], if there is such a tensor, and the mask `also`, if any, allows it.

The interval is given by integers `left` and `right` around `query_order[i]` (causal: right=0; a window: both), by
tensors `low` and `high`, or by both, which must then both hold. Globals ignore the interval but not `limit`, which
keeps a pattern with globals causal: `mask & Mask.causal()` sets it. Order is independent of position: `query_order` and
`key_order` default to the index, which needs as many queries as keys. Only `allowed` is N x M.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from relpos.core.blocks import Blocks
from relpos.core.checks import broadcasts, consecutive, fail, require_int, require_pairs, require_tensor, shape_of
from relpos.core.pairs import Compared
from relpos.core.tree import Movable, fields_of, register, static


def _at(x: Tensor | None, which: Tensor | slice) -> Tensor | None:
    """Some entries of `[N]` or `[B, N]`, as `[1 or B, n]`."""
    return None if x is None else (x if x.dim() == 2 else x[None])[:, which]


_JOINED: dict[str, Callable[[Any, Any], Any]] = {
    "left": min, "right": min, "limit": min, "low": torch.maximum, "high": torch.minimum, "allowed": torch.logical_and,
    "also": lambda mine, theirs: mine & theirs,
}  # fmt: skip
"""How the bounds of two masks combine; no other part may be set in both."""


@register("relpos.core.mask.Mask")
@dataclass(frozen=True, eq=False)
class Mask(Movable):
    """Which pairs may attend, as O(N) structure. All tensors are `[N]` or `[B, N]`, those of keys `[M]` or `[B, M]`.

    A pair is allowed if both tokens are in the same segment, the key is in the query's interval or one of them is
    global, the key is within `limit`, and the block layout allows it. A query that sees no key gives output 0 and
    gradient 0. Such queries, and keys and values that no query of their batch element sees, may hold anything. A NaN
    that is hidden from only some queries may still reach these.

    Attributes:
        left: how far before its own order a query sees, or None for no bound.
        right: how far after it, or None.
        low: `Int`, the lowest key order that each query sees.
        high: `Int`, the highest.
        query_order: `Int`; default the index.
        key_order: `Int`; default the index.
        query_segments: `Int`; tokens see their own segment only, and none if it is negative.
        key_segments: `Int`, beside `query_segments`.
        query_global: `Bool`; a global query ignores the interval.
        key_global: `Bool`; so does a global key.
        blocks: a block layout.
        limit: how far after its own order a query sees, global keys included, or None for no bound.
        allowed: `Bool[1 or B, 1 or H, 1 or N, 1 or M]`, True where a pair may attend, as in PyTorch's SDPA.
        also: a second interval that must hold the pair too, of another order.

    Raises:
        ValueError: tensors of another dtype or number of dimensions; in attention, for other tokens, or a bound on
            order without an order where queries and keys differ in number.

    Examples:
        >>> relpos.Mask.causal().dense(3, 3)[0, 0].int()
        tensor([[1, 0, 0],
                [1, 1, 0],
                [1, 1, 1]], dtype=torch.int32)
        >>> documents = torch.tensor([0, 0, 1, 1, 1, -1])  # two of them, and padding
        >>> mask = relpos.Mask.causal() & relpos.Mask.packed(documents)
        >>> mask.dense(6, 6)[0, 0].sum(dim=1)  # how many keys each token sees
        tensor([1, 2, 1, 2, 3, 0])
    """

    left: int | None = static(default=None)
    right: int | None = static(default=None)
    low: Int[Tensor, "*#B N"] | None = None
    high: Int[Tensor, "*#B N"] | None = None
    query_order: Int[Tensor, "*#B N"] | None = None
    key_order: Int[Tensor, "*#B M"] | None = None
    query_segments: Int[Tensor, "*#B N"] | None = None
    key_segments: Int[Tensor, "*#B M"] | None = None
    query_global: Bool[Tensor, "*#B N"] | None = None
    key_global: Bool[Tensor, "*#B M"] | None = None
    blocks: Blocks | None = None
    limit: int | None = static(default=None)
    allowed: Bool[Tensor, "#B #H #N #M"] | None = None
    also: Mask | None = None

    def __post_init__(self) -> None:
        for name, x in fields_of(self).items():
            if x is None:
                continue
            if name in ("left", "right", "limit"):
                require_int(x, f"Mask {name}", at_least=None, remedy="Leave it out for no bound on that side.")
            elif name == "allowed":
                require_pairs(x, "Mask allowed", (4,))
            elif name in ("blocks", "also"):
                if not isinstance(x, Blocks if name == "blocks" else Mask):
                    kind = "Blocks(layout, size)" if name == "blocks" else "Mask(...)"
                    fail(f"Mask {name} to be {kind.partition('(')[0]}", shape_of(x), f"Write {kind}.")
                if isinstance(x, Mask) and not x.is_bounds:
                    fail("Mask also to be bounds alone", "more parts", "Give these to the first mask.")
            else:
                require_tensor(x, f"Mask {name}", dims=(1, 2))
                kind = "a boolean" if name.endswith("global") else "an integer"
                if x.is_floating_point() or (x.dtype == torch.bool) != (kind == "a boolean"):
                    fail(f"{kind} tensor for Mask {name}", shape_of(x), "Convert it before the call.")
        if (self.query_segments is None) != (self.key_segments is None):
            fail("segments of queries and of keys", "only one of them", "Mask.packed(segments) sets both.")

    @classmethod
    def of(cls, mask: MaskLike) -> Mask:
        """A mask from a `Mask`, "causal", or a boolean tensor, True where a pair may attend.

        Args:
            mask: a `Mask`; "causal"; or `[N, M]` or `[B, H, N, M]`, in which any axis may be 1, as SDPA has it.

        Returns:
            The `Mask`; a tensor becomes its field `allowed`.

        Raises:
            ValueError: anything else.

        Examples:
            >>> relpos.Mask.of(torch.tensor([[True, False], [True, True]])).dense(2, 2)[0, 0].int()
            tensor([[1, 0],
                    [1, 1]], dtype=torch.int32)
        """
        if isinstance(mask, Mask):
            return mask
        if isinstance(mask, str) and mask == "causal":
            return cls.causal()
        if not isinstance(mask, Tensor):
            remedy = "Use Mask.causal(), Mask.padding(valid) or DenseBias."
            fail("mask to be a relpos.Mask, 'causal' or a boolean tensor", shape_of(mask), remedy)
        if mask.dim() == 3:
            remedy = "One per element, [B, N, M]: pass mask[:, None]. One per head, [H, N, M]: pass mask[None]."
            fail("mask to be a tensor with 2 or 4 dimensions", shape_of(mask), remedy)
        require_pairs(mask, "mask", (2, 4))
        return cls(allowed=mask[None, None] if mask.dim() == 2 else mask)

    @classmethod
    def causal(cls, query_order: Tensor | None = None, key_order: Tensor | None = None) -> Mask:
        """Each query sees keys up to its own order. Both orders default to the index."""
        return cls(right=0, query_order=query_order, key_order=key_order)

    @classmethod
    def window(cls, left: int | None, right: int | None) -> Mask:
        """Each query sees `left` tokens before it, itself, and `right` after it."""
        for name, bound in (("left", left), ("right", right)):
            if bound is not None:
                require_int(bound, f"the window's {name}", at_least=0)
        return cls(left=left, right=right)

    @classmethod
    def packed(
        cls,
        segments: Int[Tensor, "*#B M"],
        key_segments: Int[Tensor, "*#B _"] | None = None,
        *,
        queries: Int[Tensor, "*#B N"] | None = None,
    ) -> Mask:
        """Packed documents: tokens see their own segment only, and later tokens too: `& Mask.causal()` hides these.

        Negative segments are padding. With a cache, `segments` are those of all keys and `queries` those of the new
        tokens, as in `padding`. With `key_segments`, `segments` are those of the queries.
        """
        if queries is not None:
            if key_segments is not None:
                fail("queries or key_segments", "both", "Write Mask.packed(segments_of_keys, queries=...).")
            segments, key_segments = queries, segments
        return cls(query_segments=segments, key_segments=segments if key_segments is None else key_segments)

    @classmethod
    def padding(cls, valid: Bool[Tensor, "*#B M"], *, queries: Bool[Tensor, "*#B N"] | None = None) -> Mask:
        """Keys are seen where `valid` is True. `queries` defaults to `valid`; queries where it is False give 0."""
        rows = valid if queries is None else queries
        for x in (valid, rows):
            if not isinstance(x, Tensor) or x.dtype != torch.bool:
                fail("a boolean tensor, True at real tokens", shape_of(x), "Pass attention_mask.bool().")
        theirs = valid.int() - 1
        return cls(query_segments=theirs if rows is valid else rows.int() - 1, key_segments=theirs)

    def __and__(self, other: Mask) -> Mask:
        """The pairs that both allow. Intervals of one order intersect; any other part may be set in one mask only."""
        if not isinstance(other, Mask):
            fail("a Mask on both sides of &", shape_of(other), "For a boolean tensor write Mask.of(tensor).")
        self, other = self._limited(other), other._limited(self)
        if (self.has_globals and (other._is_lifted or other.has_globals)) or (other.has_globals and self._is_lifted):
            remedy = "Build one Mask with both: globals widen only its own interval. Mask.causal() can be joined to it."
            fail("globals and intervals on the same mask", "one mask with globals and another with an interval", remedy)
        orders = ((self.query_order, other.query_order), (self.key_order, other.key_order))
        if self.has_interval and other.has_interval and any(mine is not theirs for mine, theirs in orders):
            fail("intervals of the same order", "two masks with different orders", "Build both with the same order.")
        merged: dict[str, Any] = {}
        for field in fields(self):
            mine, theirs = getattr(self, field.name), getattr(other, field.name)
            if mine is None or theirs is None or mine is theirs:
                merged[field.name] = theirs if mine is None else mine
            elif field.name not in _JOINED:
                fail(f"{field.name} in only one of two masks", "it in both", "Combine both before building masks.")
            elif field.name == "allowed" and not all(
                broadcasts(one, other) or other == 1 for one, other in zip(mine.shape, theirs.shape, strict=True)
            ):
                both = f"{shape_of(mine)} and {shape_of(theirs)}"
                fail("tensors for the same pairs in two masks", both, "Build both from the same tokens.")
            elif isinstance(mine, Tensor) and field.name != "allowed" and mine.shape[-1] != theirs.shape[-1]:
                sizes = f"{mine.shape[-1]} and {theirs.shape[-1]}"
                fail(f"{field.name} for equally many queries in two masks", sizes, "Build both from the same tokens.")
            else:
                merged[field.name] = _JOINED[field.name](mine, theirs)
        return replace(self, **merged)

    def _limited(self, other: Mask) -> Mask:
        """This mask for `&`: a bound on the right only also limits the globals of the other mask."""
        bounded_otherwise = any(x is not None for x in (self.left, self.low, self.high))
        if self.right is None or bounded_otherwise or self.has_globals or not other.has_globals:
            return self
        limit = self.right if self.limit is None else min(self.right, self.limit)
        return replace(self, right=None, limit=limit)

    @property
    def _is_lifted(self) -> bool:
        """Whether there is an interval, which globals ignore."""
        return any(x is not None for x in (self.left, self.right, self.low, self.high))

    @property
    def has_interval(self) -> bool:
        """Whether any bound depends on order."""
        return self._is_lifted or self.limit is not None

    @property
    def is_bounds(self) -> bool:
        """Whether nothing but bounds in one order decide."""
        others = self.query_segments, self.query_global, self.key_global, self.blocks, self.allowed, self.also
        return all(x is None for x in others)

    @property
    def has_globals(self) -> bool:
        """Whether some token may be global."""
        return self.query_global is not None or self.key_global is not None

    @property
    def is_plain_causal(self) -> bool:
        """Whether this is `Mask.causal()` by index, which engines have a fast path for."""
        return self.right == 0 and all(getattr(self, f.name) is None for f in fields(self) if f.name != "right")

    @property
    def is_interval(self) -> bool:
        """Whether this is only `left` and `right` around the index."""
        return all(getattr(self, f.name) is None for f in fields(self) if f.name not in ("left", "right"))

    @property
    def may_blank_rows(self) -> bool:
        """Whether some query may see no key, judged without reading tensors."""
        if any(bound is not None and bound < 0 for bound in (self.left, self.right, self.limit)):
            return True
        bounds = ("left", "right", "limit")
        return any(getattr(self, field.name) is not None for field in fields(self) if field.name not in bounds)

    @property
    def _is_relative(self) -> bool:
        """Whether any bound depends on the order of queries."""
        return any(x is not None for x in (self.left, self.right, self.limit))

    def check(self, queries: int, keys: int) -> None:
        """Raise ValueError unless the mask fits these numbers of queries and keys."""
        if self.allowed is not None and not all(map(broadcasts, self.allowed.shape[2:], (queries, keys))):
            wanted = f"a mask of [{queries}, {keys}], or [B, H, {queries}, {keys}] in which any axis may be 1"
            remedy = "For a mask of keys, [B, M], pass valid[:, None, None, :] or Mask.padding(valid)."
            fail(wanted, shape_of(self.allowed), remedy)
        for field in fields(self):
            x = None if field.name == "allowed" else getattr(self, field.name)
            count = keys if field.name.startswith("key") else queries
            if isinstance(x, Tensor) and x.shape[-1] != count:
                remedy = "Build the mask from the same tokens; for a cache, from all keys, with queries= the new ones."
                fail(f"Mask {field.name} for {count} tokens", shape_of(x), remedy)
        if self.has_interval and queries != keys:
            missing = ["query_order"] if self._is_relative and self.query_order is None else []
            missing += ["key_order"] if self.key_order is None else []
            if missing:
                wanted = f"{' and '.join(missing)} for a causal or windowed mask of {queries} queries and {keys} keys"
                cache = "Mask.causal(torch.arange(keys - queries, keys), torch.arange(keys))"
                fail(wanted, "no order", f"Give the order of queries and keys; for a cache: {cache}.")
        for part in (self.blocks, self.also):
            if part is not None:
                part.check(queries, keys)

    def narrow(self, queries: slice, keys: slice, device: torch.device | None = None) -> Mask:
        """The mask of some consecutive queries and keys: one step of decoding, a block, a shard.

        Args:
            queries: a slice. It needs a start and a stop if the order is the index and no tensor of the mask tells how
                many tokens there are.
            keys: likewise.
            device: the device of an order that becomes explicit; default that of the mask's tensors.

        Raises:
            ValueError: a slice has a step, is empty, lacks a stop that is needed, or begins inside a block.
        """
        cut: dict[str, Any] = {}
        spans: list[tuple[int, int] | None] = []
        rows, columns = (None, None) if self.allowed is None else self.allowed.shape[2:]
        for part, of_keys, size in ((queries, False, rows), (keys, True, columns)):
            tensors = self._tensors(of_keys=of_keys)
            count = None if size == 1 else size  # an axis of 1 stands for any number
            spans.append(consecutive(part, next((x.shape[-1] for x in tensors.values()), count)))
            cut |= {name: x[..., part] for name, x in tensors.items()}
        if self.allowed is not None:
            own = self.allowed if rows == 1 else self.allowed[:, :, queries]
            cut["allowed"] = own if columns == 1 else own[..., keys]
        if device is None:
            device = next((x.device for x in cut.values()), None)
        if self.blocks is not None:
            known = (part if span is None else slice(*span) for part, span in zip((queries, keys), spans, strict=True))
            cut["blocks"] = self.blocks.narrow(*known)
        if self.also is not None:
            cut["also"] = self.also.narrow(queries, keys, device)
        absolute = any(x is not None for x in (self.low, self.high, self.query_order, self.key_order))
        if absolute or spans[0] is None or spans[0] != spans[1]:  # else differences of indices stay the same
            orders = ("query_order", queries, self._is_relative), ("key_order", keys, self.has_interval)
            for (name, part, needed), span in zip(orders, spans, strict=True):
                if needed and getattr(self, name) is None:
                    if span is None:
                        wanted = "slice(start, stop) for a mask whose order is the index"
                        fail(wanted, str(part), "The mask does not know the number of tokens.")
                    cut[name] = torch.arange(*span, device=device)
        return replace(self, **cut)

    def _tensors(self, *, of_keys: bool) -> dict[str, Tensor]:
        """The tensors of keys, or those of queries, by name."""
        found = {name: x for name, x in fields_of(self).items() if isinstance(x, Tensor) and name != "allowed"}
        return {name: x for name, x in found.items() if name.startswith("key") == of_keys}

    def interval(self, rows: Int[Tensor, " n"]) -> tuple[Int[Tensor, "*#B n"] | None, Int[Tensor, "*#B n"] | None]:
        """The lowest and highest key order that queries with these indices see unless a token is global.

        `[1 or B, n]` each, or None for no bound.
        """
        low, high = _at(self.low, rows), _at(self.high, rows)
        if self.left is not None:
            least = self._order(rows) - self.left
            low = least if low is None else torch.maximum(low, least)
        for bound in (self.right, self.limit):
            if bound is not None:
                most = self._order(rows) + bound
                high = most if high is None else torch.minimum(high, most)
        return low, high

    def _order(self, rows: Int[Tensor, " n"]) -> Int[Tensor, "*#B n"]:
        """The order of some queries, `[1 or B, n]`."""
        order = _at(self.query_order, rows)
        return rows[None] if order is None else order

    def dense(self, queries: int, keys: int, device: torch.device | None = None) -> Bool[Tensor, "#B #H N M"]:
        """The mask of all pairs, `[1 or B, 1 or H, N, M]`, True where a pair is allowed."""
        self.check(queries, keys)
        return self.pairs(torch.arange(queries, device=device), slice(0, keys))

    def pairs(self, rows: Int[Tensor, " n"], keys: slice) -> Bool[Tensor, "#B #H n m"]:
        """The same for queries with these indices, in any order, and a slice of keys with start and stop, unchecked."""
        columns = torch.arange(keys.start, keys.stop, keys.step or 1, device=rows.device)
        every = torch.ones(1, rows.shape[0], columns.shape[0], dtype=torch.bool, device=rows.device)
        compared = self.compared(rows, columns, keys)
        result = compared.allowed(every, lambda x: x[:, :, None], lambda x: x[:, None, :])[:, None]
        if self.blocks is not None:
            size = self.blocks.size
            result = result & self.blocks.layout[:, rows // size][:, :, columns // size][None]
        if self.allowed is not None:
            own = self.allowed if self.allowed.shape[2] == 1 else self.allowed[:, :, rows]
            result = result & (own if own.shape[3] == 1 else own[..., keys])
        return result if self.also is None else result & self.also.pairs(rows, keys)

    def compared(self, rows: Int[Tensor, " n"], columns: Int[Tensor, " m"], keys: slice) -> Compared:
        """All but blocks, `allowed` and `also`, for some queries and keys; `columns` and `keys` are the same keys."""
        low, high = self.interval(rows)
        most = self._order(rows) + self.limit if self.limit is not None and self.has_globals else None
        order = _at(self.key_order, keys)
        if order is None and not (low is high is None):
            order = columns[None]
        return Compared(
            low, high, most, _at(self.query_global, rows), _at(self.query_segments, rows), order,
            _at(self.key_global, keys), _at(self.key_segments, keys),
        )  # fmt: skip


MaskLike = Mask | Tensor | Literal["causal"]
"""What `mask=` takes: a `Mask`, "causal" for `Mask.causal()`, or a boolean tensor `[N, M]` or `[B, H, N, M]`."""
