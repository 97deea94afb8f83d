"""A call whose segments are scattered over the tokens, as one smaller call for all segments that are alike.

Tokens of different segments never attend to each other, so each segment is a call of its own: the remainder classes of
a dilated window, the windows of a grid. Segments of equal size, at equal distances on every line, become the batch of
one call:

    tokens      0 1 2 3 4 5 6 7 8                     batch   tokens
    segments    A B C A B C A B C      becomes          A     0 3 6
                                                        B     1 4 7
                                                        C     2 5 8

The tokens of a segment are themselves a sequence or a grid, whose bias reads some entries of `values`. Between tokens
d apart, a window of width w becomes one of w // d. Segments of consecutive tokens stay in the call, where few tiles
hold what their rows may see.
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
    Sequence,
    Sinks,
    Softcap,
    Term,
    lines,
)
from relpos.engines.call import Call

_LEAST = 16
"""Mean number of tokens in a group of segments at least: of fewer, the calls cost more than the pairs."""
_SUPPORTED = (AxisVectors, LineBias, LineVectors, LowRank, Sinks, Softcap)


def token_groups(call: Call) -> list[Int[Tensor, "C n"]] | None:
    """The numbers of the tokens of segments that are alike, every token once; None where the call stays whole."""
    mask, n = call.mask, call.q.shape[2]
    if mask is None or mask.blocks is not None or mask.query_segments is None or call.q.device.type != "cpu":
        return None
    mine, theirs = torch.atleast_2d(mask.query_segments), torch.atleast_2d(mask.key_segments)
    if n != call.k.shape[2] or mine.shape[0] > 1 or not torch.equal(mine, theirs):
        return None
    if not all(isinstance(term, _SUPPORTED) for term in call.terms):
        return None
    segments = mine[0].clamp(min=-1)
    names, sizes = segments.unique(return_counts=True)
    changes = int((segments[1:] != segments[:-1]).sum())
    if len(names) == 1 or (changes < len(names) and not any(one.layout.kind == "nested" for one in _lines(call))):
        return None
    tokens = list(segments.argsort(stable=True).split(sizes.tolist()))
    found = [tokens.pop(0)[None]] if names[0] < 0 else []
    of_size: dict[int, list[Tensor]] = {}
    for own in tokens:
        of_size.setdefault(len(own), []).append(own)
    for some in of_size.values():
        numbers = torch.stack(some)
        alike = [numbers.new_zeros(len(numbers), 1), *(_distances(line, numbers) for line in _lines(call))]
        _, kind = torch.cat(alike, dim=1).unique(dim=0, return_inverse=True)
        found += [numbers[kind == one] for one in range(int(kind.max()) + 1)]
    return found if len(found) * _LEAST <= n else None


def _lines(call: Call) -> list[Lines]:
    """All lines of the terms."""
    found = []
    for term in call.terms:
        if isinstance(term, LineBias | LineVectors):
            found.append(term.lines)
        elif isinstance(term, AxisVectors):
            found += term.lines
    return found


def _distances(line: Lines, numbers: Int[Tensor, "C n"]) -> Int[Tensor, "C F"]:
    """Numbers that are equal in two segments exactly if these read the same entries of a line."""
    query, key = (torch.atleast_2d(x)[:, numbers].transpose(0, 1) for x in (line.query, line.key))  # [C, B or 1, n]
    first = query[..., :1]
    batch = max(query.shape[1], key.shape[1])
    return torch.cat([(x - first).expand(-1, batch, -1).flatten(1) for x in (query, key)], dim=1)


@dataclass(eq=False)
class Group:
    """Segments that are alike, C of them with n tokens each, as a call with a batch of B * C.

    Attributes:
        whole: the call that they belong to; numbers: their tokens; call: the smaller call.
        links: each tensor of the whole call, the one made of it, and what adds the gradient of the second to that of
            the first.
    """

    whole: Call
    numbers: Int[Tensor, "C n"]
    links: list[tuple[Tensor, Tensor, Callable[[Tensor, Tensor], object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        whole = self.whole
        self.batch = whole.q.shape[0]
        self.tokens = self.numbers.flatten()
        q, k, v = (self._linked(x) for x in (whole.q, whole.k, whole.v))
        plain_q, plain_k = (None if x is None else self._linked(x) for x in (whole.plain_q, whole.plain_k))
        self.call = replace(
            whole, q=q, k=k, v=v, plain_q=plain_q, plain_k=plain_k, terms=whole.terms.each(self._term),
            mask=self._mask(), tokens=self.numbers,
        )  # fmt: skip

    # tensors

    def take(self, x: Tensor) -> Tensor:
        """`[1 or B, H, N, ...]` as `[B * C, H, n, ...]`."""
        own = torch.unflatten(x.index_select(2, self.tokens), 2, tuple(self.numbers.shape)).transpose(1, 2)
        return own.expand(self.batch, *own.shape[1:]).flatten(0, 1)

    def put(self, into: Tensor, x: Tensor) -> None:
        """Write what `take` would take."""
        into.index_copy_(2, self.tokens, self._back(x))

    def _back(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, 0, (self.batch, -1)).transpose(1, 2).flatten(2, 3)

    def _linked(self, x: Tensor) -> Tensor:
        """Some tokens of `[1 or B, 1 or H, N, ...]`, or of `[1 or H, N, R]`."""
        made = self.take(x if x.dim() == 4 else x[None])

        def add(into: Tensor, gradient: Tensor) -> None:
            own, wide = self._back(gradient), into if into.dim() == 4 else into[None]
            wide[:, :, self.tokens] += own.sum_to_size(*wide.shape[:2], *own.shape[2:]).to(into.dtype)

        self.links.append((x, made, add))
        return made

    def _shared(self, x: Tensor, entries: Int[Tensor, " l"] | None = None) -> Tensor:
        """Some entries of `[H, L, ...]`, each once, or a whole tensor, in which several terms may be tied."""
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
                own = tuple(self._line(one, regular=False)[0] for one in term.lines)
                return AxisVectors(tuple(self._shared(one) for one in vectors), own)
            case LowRank(query=query, key=key):
                return LowRank(self._linked(query), self._linked(key))
            case Sinks(logits=logits):
                return Sinks(self._shared(logits))
            case _:
                return term

    def _vectors(self, term: LineVectors) -> LineVectors:
        bias = None if term.bias is None else self._shared(term.bias)
        line, entries = self._line(term.lines)
        index, count = term.index, term.vectors.shape[1]
        if entries is not None and index is None and int(entries.max()) < count:
            return replace(term, vectors=self._shared(term.vectors, entries), lines=line, bias=bias)
        if entries is not None:
            index = torch.where(entries < count, entries, -1) if index is None else index[entries]
        return replace(term, vectors=self._shared(term.vectors), index=index, lines=line, bias=bias)

    def _line(self, line: Lines, *, regular: bool = True) -> tuple[Lines, Int[Tensor, " l"] | None]:
        """The lines of the tokens, and where these are a sequence or a grid, which entries of the whole they read."""
        query, key = (torch.atleast_2d(x)[:, self.numbers] for x in (line.query, line.key))  # [1 or B, C, n]
        ramps = None
        if query.shape[0] == key.shape[0] == 1:
            query, key = query[0, 0], key[0, 0]  # all segments are at the same distances
            ramps = _ramp(query) if regular and torch.equal(query - query[0], key - key[0]) else None
        else:
            query, key = (x.expand(self.batch, -1, -1).flatten(0, 1) for x in (query, key))
        if ramps is not None:
            entries = (query[0] - key[0] + line.origin).reshape(1)
            for size, stride in ramps:
                entries = (entries[:, None] + torch.arange(1 - size, size) * stride).flatten()
            if len(entries.unique()) == len(entries):
                sizes = [size for size, _ in ramps]
                return lines(Sequence(*sizes) if len(sizes) == 1 else Grid(*sizes)), entries
        layout = replace(line.layout, query=None, key=None)
        return Lines(query, key, line.origin, line.length, layout), None

    # mask

    def _mask(self) -> Mask | None:
        mask = self.whole.mask
        assert mask is not None
        assert mask.query_segments is not None
        if int(mask.query_segments.flatten()[self.tokens[0]]) < 0:
            nothing = torch.full((self.numbers.shape[1],), -1)
            return Mask(query_segments=nothing, key_segments=nothing)
        if not mask.has_interval:
            return None
        own = replace(mask, query_segments=None, key_segments=None)
        steps = self.numbers.diff(dim=1).unique().tolist()
        if own.is_interval and len(steps) <= 1:
            apart = steps[0] if steps else 1
            left, right = (None if bound is None else bound // apart for bound in (mask.left, mask.right))
            return Mask(left=left, right=right)
        orders = {
            name: torch.arange(self.whole.q.shape[2]) if getattr(mask, name) is None else getattr(mask, name)
            for name in ("query_order", "key_order")
        }
        given = {name: getattr(mask, name) for name in ("low", "high", "query_global", "key_global")} | orders
        fields: dict[str, Any] = {name: self._of_tokens(x) for name, x in given.items() if x is not None}
        return replace(own, **fields)

    def _of_tokens(self, x: Tensor) -> Tensor:
        own: Tensor = torch.atleast_2d(x)[:, self.numbers]
        return own.expand(self.batch, -1, -1).flatten(0, 1)


def _ramp(x: Int[Tensor, " n"]) -> list[tuple[int, int]] | None:
    """Sizes and strides of nested arithmetic progressions, the last fastest; None where x is none."""
    found: list[tuple[int, int]] = []
    count, rest = len(x), x - x[0]
    while len(rest) > 1:
        stride = int(rest[1])
        ahead = (rest != torch.arange(len(rest)) * stride).nonzero()
        size = int(ahead[0]) if len(ahead) else len(rest)
        if len(rest) % size or stride <= 0:
            return None
        if not torch.equal(rest, (rest[::size, None] + torch.arange(size) * stride).flatten()):
            return None
        found.insert(0, (size, stride))
        rest = rest[::size]
    assert math.prod(size for size, _ in found) == count
    return found or [(1, 1)]


def by_segments(call: Call) -> Iterator[Group] | None:
    """The call by groups of its segments, one after another, or None where it stays whole."""
    found = token_groups(call)
    return None if found is None else (Group(call, numbers) for numbers in found)
