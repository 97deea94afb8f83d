"""A failing call made as small as it can be while it still fails: greedily, one step after another.

A step takes one thing of the description away, or makes a number less. Many of the calls that come of it are none:
they fail otherwise, and are passed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, replace
from typing import Any

from fuzz.description import Described, Layout, Part, Tokens
from fuzz.draw_memory import tensors


def shrink(call: Described, fails: Callable[[Described], bool], most: int = 800) -> Described:
    """The smallest call found that `fails`, after trying at most so many."""
    tried = 0
    again = True
    while again and tried < most:
        again = False
        for simpler in (*_plainer(call), *_together(call)):
            tried += 1
            if tried > most:
                break
            if fails(simpler):
                call, again = simpler, True
                break
    return call


def _plainer(x: Any) -> Iterator[Any]:
    """Simpler values in place of one, the largest steps first."""
    match x:
        case bool():
            yield from [False] * x
        case int():
            yield from sorted({y for y in (0, 1, 2, x // 2, x * 3 // 4, x - 1) if abs(y) < abs(x)})
        case dict():
            for key in x:
                yield {other: value for other, value in x.items() if other != key}
            for key, value in x.items():
                yield from ({**x, key: simpler} for simpler in _plainer(value))
        case tuple() | list():
            for place in range(len(x)):
                yield x[:place] + x[place + 1 :]
            for place, value in enumerate(x):
                yield from (type(x)([*x[:place], simpler, *x[place + 1 :]]) for simpler in _plainer(value))
        case Described() | Layout() | Part() | Tokens():
            if isinstance(x, Tokens) and x.kind in ("grid", "positions") and len(x.sizes) == 1:
                yield Tokens("sequence", x.sizes, x.start, x.prefix)
            known = [one for one in fields(x) if one.name != "seed"]
            for one in known:
                default = one.default if one.default_factory is MISSING else one.default_factory()
                value = getattr(x, one.name)
                larger = isinstance(value, int) and abs(default) >= abs(value)
                if default is not MISSING and value != default and not larger:
                    yield replace(x, **{one.name: default})
            for one in known:
                yield from (replace(x, **{one.name: simpler}) for simpler in _plainer(getattr(x, one.name)))


def _together(call: Described) -> Iterator[Described]:
    """Calls of which two things are less at once, which belong together."""
    yield from (replace(call, heads=x, groups=x) for x in (1, call.groups) if x < call.heads)
    yield from (replace(call, width=x, value_width=x) for x in _plainer(min(call.width, call.value_width)))
    if call.keys is not None:
        for queries, keys in itertools.product(_plainer(call.queries), _plainer(call.keys)):
            if queries.count - keys.count == call.queries.count - call.keys.count:  # they stay as many
                yield replace(call, queries=queries, keys=keys)
    for tokens in (x for x in _plainer(call.queries) if x.prefix < call.queries.prefix and x.kind == "sequence"):
        yield replace(call, queries=replace(tokens, sizes=(call.queries.count - tokens.prefix,)))
    learned = [name for name in tensors(call) if name not in call.frozen]
    yield from (
        replace(call, frozen=(*call.frozen, *names)) for names in (learned, *([name] for name in learned)) if names
    )
