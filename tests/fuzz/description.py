"""What one fuzzed call is, in plain numbers: everything else follows from it.

A description is printed by `shown` and read back by `read`, so that a failing call can be run again. Numbers in tensors
are drawn by their tensor's name and the call's seed: what else a call has does not change them, which is what lets a
shrinker take parts away.
"""

from __future__ import annotations

import math
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

Options = dict[str, Any]


@dataclass(frozen=True)
class Tokens:
    """Where tokens are.

    Attributes:
        kind: "sequence", "grid", "positions" (irregular), or "nowhere" (no terms on lines).
        sizes: of a sequence its length, of a grid its axes, of others the number of tokens.
        start: the first coordinate. prefix: tokens before them.
        spans: of positions, how many coordinates each axis has. batched: whether each element has its own.
        wide: by how much low and high are wider than they need to be.
    """

    kind: str
    sizes: tuple[int, ...]
    start: int = 0
    prefix: int = 0
    spans: tuple[int, ...] = ()
    batched: bool = False
    wide: int = 0

    @property
    def count(self) -> int:
        return self.prefix + math.prod(self.sizes)

    @property
    def axes(self) -> int:
        return len(self.spans) if self.kind == "positions" else len(self.sizes)


@dataclass(frozen=True)
class Layout:
    """How a tensor lies in memory, an entry a dimension.

    Attributes:
        order: the dimensions from the slowest to the fastest.
        start, step, extra: entries left out before, between and behind.
        expanded: dimensions of stride 0.
    """

    order: tuple[int, ...] = ()
    start: tuple[int, ...] = ()
    step: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    expanded: tuple[int, ...] = ()


@dataclass(frozen=True)
class Part:
    """One term, or one of the masks that are joined with `&`: its kind, the name its tensors go by, and options."""

    kind: str
    name: str
    options: Options = field(default_factory=dict)


@dataclass(frozen=True)
class Described:
    """One call.

    Attributes:
        seed: of all numbers in tensors.
        dtype: of q, k and v. batch, heads, groups, width, value_width: B, H, G, D, V.
        queries, keys: None where keys are the queries.
        cut: the queries and keys that are kept of those the terms were made for, or None for all.
        gain: by what q and k are multiplied.
        shared: which of q, k and v are one tensor: "", "kv" or "qkv".
        lse: whether the log-sum-exp is asked for. upstream: which results have a gradient: "out", "lse" or "both".
        frozen: names of tensors that need no gradient.
        layouts: name of a tensor to how it lies in memory.
        tiles: constants of the engines and what they are set to.
        autocast: whether the call is made under autocast to bfloat16.
        poison: what tokens hold that the mask leaves out altogether: "", "nan" or "inf".
    """

    seed: int
    dtype: str = "float64"
    batch: int = 1
    heads: int = 1
    groups: int = 1
    width: int = 1
    value_width: int = 1
    queries: Tokens = Tokens("nowhere", (1,))
    keys: Tokens | None = None
    cut: tuple[tuple[int, int], tuple[int, int]] | None = None
    terms: tuple[Part, ...] = ()
    masks: tuple[Part, ...] = ()
    gain: float = 1.0
    scale: float | None = None
    dropout: float = 0.0
    shared: str = ""
    lse: bool = False
    upstream: str = "out"
    frozen: tuple[str, ...] = ()
    layouts: dict[str, Layout] = field(default_factory=dict)
    tiles: dict[str, int] = field(default_factory=dict)
    autocast: bool = False
    poison: str = ""

    @property
    def sides(self) -> tuple[Tokens, Tokens]:
        """Queries and keys."""
        return self.queries, self.queries if self.keys is None else self.keys

    @property
    def counts(self) -> tuple[int, int]:
        """N and M."""
        if self.cut is not None:
            (a, b), (c, d) = self.cut
            return b - a, d - c
        return self.sides[0].count, self.sides[1].count


def shown(x: Any) -> str:
    """`repr`, without what is as it is by default."""
    if isinstance(x, Described | Layout | Part | Tokens):
        given = []
        for one in fields(x):
            value = getattr(x, one.name)
            default = one.default_factory() if one.default_factory is not MISSING else one.default
            if default is MISSING or value != default:
                given.append(f"{one.name}={shown(value)}")
        return f"{type(x).__name__}({', '.join(given)})"
    if isinstance(x, dict):
        return "{" + ", ".join(f"{key!r}: {shown(value)}" for key, value in x.items()) + "}"
    if isinstance(x, tuple):
        return "(" + "".join(f"{shown(one)}, " for one in x).rstrip(" " if len(x) == 1 else ", ") + ")"
    return repr(x)


def read(text: str) -> Described:
    """The description that `shown` wrote."""
    known = {cls.__name__: cls for cls in (Described, Layout, Part, Tokens)}
    made = eval(text, {"__builtins__": {}}, known)
    assert isinstance(made, Described)
    return made
