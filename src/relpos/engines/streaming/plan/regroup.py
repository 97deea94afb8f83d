"""Splits calls with scattered segments into one smaller call for each group of equal segments.

Tokens of different segments never attend to each other, so each segment (a window of a grid, every d-th token under a
dilated window) can be computed alone. Segments with equal size and equal offsets become the batch of one call:

    tokens      0 1 2 3 4 5 6 7 8                     batch   tokens
    segments    A B C A B C A B C      becomes          A     0 3 6
                                                        B     1 4 7
                                                        C     2 5 8

The tokens of a segment often are a sequence or a grid, whose bias reads some entries of `values`. If they are d apart,
a window of w tokens becomes one of w // d. Calls whose segments are consecutive tokens stay whole, because few tiles
cover what their rows may see.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from relpos.core import (
    AxisVectors,
    Grid,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    Sinks,
    Softcap,
    Term,
    lines,
)
from relpos.engines.call import Call

_LEAST = 16
"""Minimum mean tokens of a group; with fewer, the fixed cost of calls exceeds what they save."""
_SUPPORTED = (AxisVectors, LineBias, LineVectors, LowRank, Sinks, Softcap)


def token_groups(call: Call) -> list[Int[Tensor, "C n"]] | None:
    """The tokens of each group of equal segments, every token once; None if the call stays whole."""
    mask, n = call.mask, call.q.shape[2]
    if mask is None or mask.blocks is not None or mask.query_segments is None or call.q.device.type != "cpu":
        return None
    if mask.also is not None:
        return None
    segments, key_segments = torch.atleast_2d(mask.query_segments), torch.atleast_2d(mask.key_segments)
    if n != call.k.shape[2] or segments.shape[0] > 1 or not torch.equal(segments, key_segments):
        return None
    if not all(isinstance(term, _SUPPORTED) for term in call.terms) or any(s.of_queries for s in call.terms.of(Sinks)):
        return None
    segments = segments[0].clamp(min=-1)
    names, sizes = segments.unique(return_counts=True)
    changes = int((segments[1:] != segments[:-1]).sum())
    if len(names) == 1 or (changes < len(names) and not any(line.layout.kind == "nested" for line in _lines(call))):
        return None
    by_segment = list(segments.argsort(stable=True).split(sizes.tolist()))
    groups = [by_segment.pop(0)[None]] if names[0] < 0 else []
    by_size: dict[int, list[Tensor]] = {}
    for tokens in by_segment:
        by_size.setdefault(len(tokens), []).append(tokens)
    for equal_size in by_size.values():
        tokens = torch.stack(equal_size)
        offsets = [tokens.new_zeros(len(tokens), 1), *(_offsets(line, tokens) for line in _lines(call))]
        _, kind = torch.cat(offsets, dim=1).unique(dim=0, return_inverse=True)
        groups += [tokens[kind == number] for number in range(int(kind.max()) + 1)]
    return groups if len(groups) * _LEAST <= n else None


def _lines(call: Call) -> list[Lines]:
    """All lines of the terms."""
    terms = (term for term in call.terms if isinstance(term, LineBias | LineVectors | AxisVectors))
    return [line for term in terms for line in (term.lines if isinstance(term, AxisVectors) else (term.lines,))]


def _offsets(line: Lines, tokens: Int[Tensor, "C n"]) -> Int[Tensor, "C F"]:
    """The coordinates of each segment minus its first: equal for two segments that read the same entries."""
    query, key = (torch.atleast_2d(x)[:, tokens].transpose(0, 1) for x in (line.query, line.key))  # [C, B or 1, n]
    first = query[..., :1]
    batch = max(query.shape[1], key.shape[1])
    return torch.cat([(x - first).expand(-1, batch, -1).flatten(1) for x in (query, key)], dim=1)


@dataclass(eq=False)
class Group:
    """C equal segments of n tokens each, as a call with a batch of B * C.

    Attributes:
        whole: the call that they belong to. call: the smaller call. tokens: their tokens.
        links: for each tensor of the whole call, the tensor made from it, and a function that adds the gradient of the
            second to the gradient of the first.
    """

    whole: Call
    tokens: Int[Tensor, "C n"]
    links: list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        whole = self.whole
        self.batch = whole.q.shape[0]
        q, k, v = (self._linked(x) for x in (whole.q, whole.k, whole.v))
        plain_q, plain_k = (None if x is None else self._linked(x) for x in (whole.plain_q, whole.plain_k))
        self.call = replace(
            whole, q=q, k=k, v=v, plain_q=plain_q, plain_k=plain_k, terms=whole.terms.each(self._term),
            mask=self._mask(), tokens=self.tokens,
        )  # fmt: skip

    # tensors

    def take(self, x: Tensor) -> Tensor:
        """`[1 or B, H, N, ...]` as `[B * C, H, n, ...]`."""
        taken = torch.unflatten(x.index_select(2, self.tokens.flatten()), 2, tuple(self.tokens.shape)).transpose(1, 2)
        return taken.expand(self.batch, *taken.shape[1:]).flatten(0, 1)

    def put(self, into: Tensor, x: Tensor) -> None:
        """The reverse of `take`: write the group's tokens."""
        into.index_copy_(2, self.tokens.flatten(), self._back(x))

    def _back(self, x: Tensor) -> Tensor:
        """`[B * C, H, n, ...]` as `[B, H, C * n, ...]`."""
        return torch.unflatten(x, 0, (self.batch, -1)).transpose(1, 2).flatten(2, 3)

    def _linked(self, x: Tensor) -> Tensor:
        """The group's tokens of `[1 or B, 1 or H, N, ...]`, or of `[1 or H, N, R]`, with a link."""
        made = self.take(x if x.dim() == 4 else x[None])

        def add(into: Tensor, gradient: Tensor) -> None:
            gradient, wide = self._back(gradient), into if into.dim() == 4 else into[None]
            sums = gradient.sum_to_size(*wide.shape[:2], *gradient.shape[2:])
            wide[:, :, self.tokens.flatten()] += sums.to(into.dtype)

        self.links.append((x, made, add))
        return made

    def _shared(self, x: Tensor, entries: Int[Tensor, " l"] | None = None) -> Tensor:
        """Some entries of `[H, L, ...]`, or a whole tensor that several terms may share, with a link."""
        if entries is not None:
            made = x.index_select(1, entries)
            self.links.append((x, made, lambda into, gradient: into.index_add_(1, entries, gradient.to(into.dtype))))
            return made
        if not any(known is x for _, known, _ in self.links):
            self.links.append((x, x, lambda into, gradient: into.add_(gradient)))
        return x

    # positions

    def _term(self, term: Term) -> Term:
        match term:
            case LineBias(values=values):
                line, entries = self._line(term.lines)
                return LineBias(self._shared(values, entries), line)
            case LineVectors():
                return self._vectors(term)
            case AxisVectors(vectors=vectors):
                axes = tuple(self._line(line, regular=False)[0] for line in term.lines)
                return AxisVectors(tuple(self._shared(x) for x in vectors), axes)
            case LowRank(query=query, key=key):
                return LowRank(self._linked(query), self._linked(key))
            case Sinks(logits=logits):
                return Sinks(self._shared(logits))
            case _:
                return term

    def _vectors(self, term: LineVectors) -> LineVectors:
        bias = None if term.bias is None else self._shared(term.bias)
        term = replace(term, content=None if term.content is None else self._linked(term.content))
        line, entries = self._line(term.lines)
        index, count = term.index, term.vectors.shape[1]
        if entries is not None and index is None and int(entries.max()) < count:
            return replace(term, vectors=self._shared(term.vectors, entries), lines=line, bias=bias)
        if entries is not None:
            index = torch.where(entries < count, entries, -1) if index is None else index[entries]
        return replace(term, vectors=self._shared(term.vectors), index=index, lines=line, bias=bias)

    def _line(self, line: Lines, *, regular: bool = True) -> tuple[Lines, Int[Tensor, " l"] | None]:
        """The lines of the tokens and, if these are a sequence or a grid, the entries of `line` that they read."""
        query, key = (torch.atleast_2d(x)[:, self.tokens] for x in (line.query, line.key))  # [1 or B, C, n]
        ramps = None
        if query.shape[0] == key.shape[0] == 1:
            query, key = query[0, 0], key[0, 0]  # the segments have equal offsets
            ramps = _ramp(query) if regular and torch.equal(query - query[0], key - key[0]) else None
        else:
            query, key = (x.expand(self.batch, -1, -1).flatten(0, 1) for x in (query, key))
        if ramps is not None:
            entries = (query[0] - key[0] + line.origin).reshape(1)
            for size, stride in ramps:
                entries = (entries[:, None] + torch.arange(1 - size, size) * stride).flatten()
            if len(entries.unique()) == len(entries):
                return lines(Grid(*(size for size, _ in ramps))), entries
        layout = replace(line.layout, query=None, key=None)
        return Lines(query, key, line.origin, line.length, layout), None

    # mask

    def _mask(self) -> Mask | None:
        mask = self.whole.mask
        assert mask is not None
        assert mask.query_segments is not None
        if int(mask.query_segments.flatten()[self.tokens[0, 0]]) < 0:
            nothing = torch.full((self.tokens.shape[1],), -1)
            return Mask(query_segments=nothing, key_segments=nothing)
        if not mask.has_interval:
            return None
        mask = replace(mask, query_segments=None, key_segments=None)
        distances = self.tokens.diff(dim=1).unique().tolist()
        if mask.is_interval and len(distances) <= 1:
            distance = distances[0] if distances else 1
            left, right = (None if bound is None else bound // distance for bound in (mask.left, mask.right))
            return Mask(left=left, right=right)
        orders = {
            name: torch.arange(self.whole.q.shape[2]) if getattr(mask, name) is None else getattr(mask, name)
            for name in ("query_order", "key_order")
        }
        given = {name: getattr(mask, name) for name in ("low", "high", "query_global", "key_global")} | orders
        fields: dict[str, Any] = {name: self._of_tokens(x) for name, x in given.items() if x is not None}
        return replace(mask, **fields)

    def _of_tokens(self, x: Tensor) -> Tensor:
        """`[N]` or `[B, N]` as `[B * C, n]`."""
        taken: Tensor = torch.atleast_2d(x)[:, self.tokens]
        return taken.expand(self.batch, -1, -1).flatten(0, 1)


def _ramp(x: Int[Tensor, " n"]) -> list[tuple[int, int]] | None:
    """Sizes and strides of x as nested arithmetic progressions, the last fastest; None if x has no such form."""
    found: list[tuple[int, int]] = []
    count, rest = len(x), x - x[0]
    while len(rest) > 1:
        stride = int(rest[1])
        breaks = (rest != torch.arange(len(rest)) * stride).nonzero()
        size = int(breaks[0]) if len(breaks) else len(rest)
        if len(rest) % size or stride <= 0:
            return None
        if not torch.equal(rest, (rest[::size, None] + torch.arange(size) * stride).flatten()):
            return None
        found.insert(0, (size, stride))
        rest = rest[::size]
    assert math.prod(size for size, _ in found) == count
    return found or [(1, 1)]


def by_segments(call: Call) -> Iterator[Group] | None:
    """The groups of a call's segments, one after another, or None if it stays whole."""
    groups = token_groups(call)
    return None if groups is None else (Group(call, tokens) for tokens in groups)
