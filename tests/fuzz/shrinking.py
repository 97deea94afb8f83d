"""A failing call made as small as it can be while it still fails: greedily, one step after another."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from fuzz.description import Described, Layout, Part, Tokens
from fuzz.draw_memory import tensors


def shrink(call: Described, fails: Callable[[Described], bool], most: int = 400) -> Described:
    """The smallest call found that `fails`, after trying at most so many."""
    tried = 0
    again = True
    while again and tried < most:
        again = False
        for simpler in _simpler(call):
            tried += 1
            if tried > most:
                break
            if fails(simpler):
                call, again = simpler, True
                break
    return call


def _without(items: tuple[Part, ...], place: int) -> tuple[Part, ...]:
    return items[:place] + items[place + 1 :]


FIELDS = (
    "terms", "masks", "layouts", "tiles", "frozen", "cut", "dropout", "shared", "autocast", "poison", "scale", "gain",
)  # fmt: skip
"""What may go altogether."""


def _simpler(call: Described) -> Iterator[Described]:
    """Calls with one thing less, the largest steps first."""
    nothing = Described(call.seed)
    for name in FIELDS:
        if getattr(call, name) != getattr(nothing, name):
            yield replace(call, **{name: getattr(nothing, name)})
    for place in range(len(call.terms)):
        yield replace(call, terms=_without(call.terms, place))
    for place in range(len(call.masks)):
        yield replace(call, masks=_without(call.masks, place))
    yield from _smaller(call)
    for name in ("layouts", "tiles"):
        known = getattr(call, name)
        for key in known:
            yield replace(call, **{name: {other: x for other, x in known.items() if other != key}})
    names = [name for name in tensors(call) if name not in call.frozen]
    if len(names) > 1:
        yield replace(call, frozen=(*call.frozen, *names))
    for name in names:
        yield replace(call, frozen=(*call.frozen, name))
    if call.lse:
        yield replace(call, lse=False, upstream="out")
        if call.upstream != "out":
            yield replace(call, upstream="out")
    if call.dtype != "float64":
        yield replace(call, dtype="float64")
    if call.dtype not in ("float64", "float32"):
        yield replace(call, dtype="float32")
    for kind in ("terms", "masks"):
        parts = getattr(call, kind)
        for place, part in enumerate(parts):
            for simpler in _plainer(part):
                yield replace(call, **{kind: (*parts[:place], simpler, *parts[place + 1 :])})
    for name, layout in call.layouts.items():
        for plainer in _denser(layout):
            yield replace(call, layouts={**call.layouts, name: plainer})


def _less(number: int, least: int = 1) -> Iterator[int]:
    """Smaller numbers, the smallest first."""
    seen = {number}
    for smaller in (least, least + 1, number // 2, number * 3 // 4, number - 1):
        if least <= smaller < number and smaller not in seen:
            seen.add(smaller)
            yield smaller


def _smaller(call: Described) -> Iterator[Described]:
    if call.batch > 1:
        yield replace(call, batch=1)
        yield replace(call, batch=call.batch - 1)
    if call.heads > 1:
        yield replace(call, heads=1, groups=1)
        if call.groups > 1:
            yield replace(call, heads=call.heads // call.groups, groups=1)
            yield replace(call, heads=call.groups)
        if call.heads > call.groups:
            yield replace(call, heads=call.groups)
            yield replace(call, groups=call.heads)
    for name in ("width", "value_width"):
        for smaller in _less(getattr(call, name)):
            yield replace(call, **{name: smaller})
            if call.width == call.value_width:
                yield replace(call, width=smaller, value_width=smaller)
    yield from _fewer_tokens(call)


def _fewer_tokens(call: Described) -> Iterator[Described]:
    for queries in _tokens(call.queries):
        yield replace(call, queries=queries)
    if call.keys is None:
        return
    yield replace(call, keys=None)
    for keys in _tokens(call.keys):
        yield replace(call, keys=keys)
    for queries in _tokens(call.queries):  # both, so that they stay as many
        for keys in _tokens(call.keys):
            if queries.count - keys.count == call.queries.count - call.keys.count:
                yield replace(call, queries=queries, keys=keys)


def _tokens(tokens: Tokens) -> Iterator[Tokens]:
    for place, size in enumerate(tokens.sizes):
        for smaller in _less(size):
            yield replace(tokens, sizes=(*tokens.sizes[:place], smaller, *tokens.sizes[place + 1 :]))
    for smaller in _less(tokens.prefix, 0):
        yield replace(tokens, prefix=smaller)
        if tokens.kind == "sequence":
            yield replace(tokens, prefix=smaller, sizes=(tokens.sizes[0] + tokens.prefix - smaller,))
    if len(tokens.sizes) > 1 and min(tokens.sizes) == 1:
        yield replace(tokens, sizes=tuple(size for size in tokens.sizes if size > 1) or (1,))
    if tokens.kind == "grid" and len(tokens.sizes) == 1:
        yield replace(tokens, kind="sequence")
    if tokens.kind == "positions":
        if tokens.axes == 1:
            yield Tokens("sequence", (max(1, math.prod(tokens.sizes)),), tokens.start, tokens.prefix)
        if tokens.batched:
            yield replace(tokens, batched=False)
        for place, span in enumerate(tokens.spans):
            for smaller in _less(span):
                yield replace(tokens, spans=(*tokens.spans[:place], smaller, *tokens.spans[place + 1 :]))
    if tokens.start or tokens.wide:
        yield replace(tokens, start=0, wide=0)


NEEDED = {
    "side", "rank", "rule", "value", "cap", "preset", "pairs", "layout", "rows", "grid", "size", "shift", "window_size",
    "dilation", "stride", "global_tokens", "share", "a_head",
}  # fmt: skip
"""Options without which a part is none."""


def _plainer(part: Part) -> Iterator[Part]:
    """With one option less, or a smaller number."""
    for name in part.options:
        if name not in NEEDED:
            yield replace(part, options={known: x for known, x in part.options.items() if known != name})
    for name, value in part.options.items():
        if isinstance(value, int) and not isinstance(value, bool):
            for smaller in _less(value, min(value, 1 if name in NEEDED else 0)):
                yield replace(part, options={**part.options, name: smaller})
        elif isinstance(value, tuple | list) and value and all(isinstance(x, int) for x in value) and name == "grid":
            for place, size in enumerate(value):
                for smaller in _less(size):
                    yield replace(part, options={**part.options, name: (*value[:place], smaller, *value[place + 1 :])})


def _denser(layout: Layout) -> Iterator[Layout]:
    dims = len(layout.order)
    plain = Layout(tuple(range(dims)), (0,) * dims, (1,) * dims, (0,) * dims)
    for name in ("order", "start", "step", "extra", "expanded"):
        if getattr(layout, name) != getattr(plain, name):
            yield replace(layout, **{name: getattr(plain, name)})
