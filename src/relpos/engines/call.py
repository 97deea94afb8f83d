"""One call of attention, checked and made explicit: what every engine receives.

`prepare` is the one place where arguments are checked, defaults resolved and autocast applied. Engines trust a `Call`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import (
    AxisVectors,
    Coordinates,
    DenseBias,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    QueryBias,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Term,
    Terms,
    require_coordinates,
    require_width,
)
from relpos.core.checks import (
    broadcasts,
    dtype_under_autocast,
    fail,
    require_device,
    require_flag,
    require_number,
    require_probability,
    require_tensor,
    shape_of,
)


@runtime_checkable
class SupportsTerms(Protocol):
    """What attention needs of a position mechanism (`relpos.position.SupportsTerms` is one)."""

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        """What it says to attention."""
        ...


@dataclass(frozen=True, eq=False)
class Call:
    """The arguments of one call, complete and consistent.

    Attributes:
        q: `[B, H, N, D]`; k: `[B, G, M, D]`; v: `[B, G, M, Dv]`, H a multiple of G, one dtype and device.
        terms: what position says.
        mask: which pairs may attend, or None for all.
        scale: the factor on the content product.
        dropout: probability; seed: a 32-bit word for it, drawn when the call runs; None where dropout is 0.
        return_lse: whether the log-sum-exp of the scores, `[B, H, N]`, is wanted.
    """

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M V"]
    terms: Terms
    mask: Mask | None
    scale: float
    dropout: float
    seed: Int[Tensor, ""] | None
    return_lse: bool

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch, or are no queries or no keys. Engines never see such a call."""
        return 0 in (*self.q.shape[:3], self.k.shape[2])

    def seeded(self) -> Call:
        """This call with a seed from PyTorch's generator, where it has dropout. Asking about a call draws none."""
        return replace(self, seed=torch.randint(2**32, (), device=self.q.device)) if self.dropout > 0 else self


Position = Terms | Term | SupportsTerms


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position: Position | None,
    queries: Coordinates | None,
    keys: Coordinates | None,
    mask: Mask | None,
    scale: float | None,
    dropout: float,
    return_lse: bool,
) -> Call:
    """Check the arguments of `relpos.attention` and make them a `Call`; see there."""
    _check_tensors(q, k, v)
    require_probability(dropout, "dropout")
    require_flag(return_lse, "return_lse")
    if scale is not None:
        require_number(scale, "scale", "above 0", "Leave it out for 1/sqrt(head width).")
    if mask is not None:
        if not isinstance(mask, Mask):
            fail("mask to be a relpos.Mask", shape_of(mask), "Use Mask.causal(), Mask.padding(valid) or DenseBias.")
        _check_mask(mask, q, k)
    terms = _resolve_terms(position, queries, keys, q, k)
    for term in terms:
        check_term(term, q, k, v)
    own = terms.one(Scale)
    if scale is None:
        scale = own.value if own is not None else q.shape[-1] ** -0.5
    q, k, v = (x.to(dtype_under_autocast(x)) for x in (q, k, v))
    return Call(q, k, v, terms, mask, float(scale), float(dropout), None, return_lse)


def _check_tensors(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tensor(x, name, dims=4)
        if not x.is_floating_point():
            fail(f"{name} to be floating point", shape_of(x), f"Convert {name}, e.g. {name}.float().")
        if x.shape[1] == 0 or x.shape[3] == 0:
            fail(f"{name} with at least one head and a width above 0", shape_of(x), f"Check the layout of {name}.")
    require_alike(q, k, v)
    if not q.shape[0] == k.shape[0] == v.shape[0]:
        fail(
            "one batch size",
            f"q {q.shape[0]}, k {k.shape[0]}, v {v.shape[0]}",
            "Layout is [batch, heads, tokens, width].",
        )
    if q.shape[3] != k.shape[3]:
        fail("q and k of one head width", f"{q.shape[3]} and {k.shape[3]}", "Project both to the same width.")
    if k.shape[1] != v.shape[1] or k.shape[2] != v.shape[2]:
        fail(
            "k and v with the same heads and tokens",
            f"k {tuple(k.shape)} and v {tuple(v.shape)}",
            "Layout is [batch, heads, tokens, width].",
        )
    if q.shape[1] % k.shape[1]:
        fail(
            "the query heads to be a multiple of the key heads",
            f"{q.shape[1]} and {k.shape[1]}",
            "Grouped keys serve equal groups of query heads.",
        )


def require_alike(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless all three are on one device and in one dtype, or in such as autocast makes one."""
    if not dtype_under_autocast(q) == dtype_under_autocast(k) == dtype_under_autocast(v):
        fail("q, k and v in one dtype", f"{q.dtype}, {k.dtype} and {v.dtype}", "Convert them, or use torch.autocast.")
    if not q.device == k.device == v.device:
        fail("q, k and v on one device", f"{q.device}, {k.device} and {v.device}", "Move them with .to(device).")


def _resolve_terms(
    position: Position | None, queries: Coordinates | None, keys: Coordinates | None, q: Tensor, k: Tensor
) -> Terms:
    if isinstance(position, SupportsTerms) and not isinstance(position, type):
        if queries is None:
            fail(
                "queries= beside a mechanism",
                "none",
                "Say where the tokens are, e.g. queries=Sequence(n) or Grid(h, w, prefix=1).",
            )
        # A mechanism made elsewhere may not say whether it acts in attention.
        if getattr(position, "acts_on_tokens", False) and not getattr(position, "acts_in_attention", True):
            fail(
                "a mechanism that acts in attention",
                f"{type(position).__name__}, which acts on tokens",
                "Call its embed() on the tokens before they are projected.",
            )
        sides = (("queries", queries, q.shape[2]), ("keys", queries if keys is None else keys, k.shape[2]))
        for name, coordinates, count in sides:
            require_coordinates(coordinates, name)
            if coordinates.count != count:
                fail(
                    f"{name} coordinates for {count} tokens",
                    f"{coordinates!r} with {coordinates.count}",
                    "Coordinates count the prefix too; where keys differ from queries, pass keys=.",
                )
        return position.terms(queries, keys)
    if queries is not None or keys is not None:
        fail(
            "coordinates only beside a mechanism",
            "terms or no position",
            "Terms hold their own; drop queries= and keys=.",
        )
    if position is None:
        return Terms()
    if isinstance(position, Term):
        return Terms(position)
    if not isinstance(position, Terms):
        fail(
            "position to be terms or a mechanism",
            shape_of(position),
            "Build the mechanism first, or wrap a dense tensor as DenseBias(bias).",
        )
    return position


def _check_mask(mask: Mask, q: Tensor, k: Tensor) -> None:
    mask.check(q.shape[2], k.shape[2])
    for name in (
        "low",
        "high",
        "query_order",
        "key_order",
        "query_segments",
        "key_segments",
        "query_global",
        "key_global",
    ):
        x = getattr(mask, name)
        if x is None:
            continue
        _check_device(x, f"Mask {name}", q)
        if x.dim() == 2 and not broadcasts(x.shape[0], q.shape[0]):
            fail(
                f"Mask {name} for a batch of {q.shape[0]}", shape_of(x), "Give one row, or one an element of the batch."
            )
    if mask.blocks is not None:
        _check_device(mask.blocks.layout, "the mask's block layout", q)
        _check_heads(mask.blocks.layout, "the mask's block layout", q)
        mask.blocks.check(q.shape[2], k.shape[2])


def _check_device(x: Tensor | None, name: str, q: Tensor) -> None:
    if x is not None:
        require_device(x, name, q.device, "Move the mechanism or mask to the device of q.")


def _check_heads(x: Tensor, name: str, q: Tensor, axis: int = 0) -> None:
    if not broadcasts(x.shape[axis], q.shape[1]):
        fail(
            f"{name} for {q.shape[1]} query heads, or for 1 that all share",
            shape_of(x),
            "Build the mechanism with num_heads as many as q has.",
        )


def _check_lines(lines: Lines, name: str, q: Tensor, k: Tensor) -> None:
    for side, line, x in (("queries", lines.query, q), ("keys", lines.key, k)):
        _check_device(line, f"the lines of {name}", q)
        if line.shape[-1] != x.shape[2]:
            fail(
                f"lines of {name} for {x.shape[2]} {side}",
                str(line.shape[-1]),
                "Build terms from the coordinates of these very tokens; a prefix counts too.",
            )
        if line.dim() == 2 and not broadcasts(line.shape[0], q.shape[0]):
            fail(f"lines of {name} for a batch of {q.shape[0]}", shape_of(line), "Give one row, or one an element.")


def _check_shape(x: Tensor, name: str, wanted: tuple[tuple[int, ...], ...]) -> None:
    if not all(any(size == one for one in allowed) for size, allowed in zip(x.shape, wanted, strict=True)):
        shape = ", ".join(" or ".join(str(n) for n in dict.fromkeys(allowed)) for allowed in wanted)
        fail(f"{name} of shape [{shape}]", shape_of(x), "Build it for the same q, k and v.")


def check_term(term: Term, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless a term fits q, k and v."""
    batch, heads, n, width = q.shape
    m = k.shape[2]
    name = type(term).__name__
    match term:
        case LineBias(values=values, lines=lines):
            _check_device(values, name, q)
            _check_heads(values, f"{name} values", q)
            _check_lines(lines, name, q, k)
        case Rotation():
            require_width(q, term.width)
            for side, count, angles, magnitude in (
                ("query", n, term.query, term.query_magnitude),
                ("key", m, term.key, term.key_magnitude),
            ):
                if angles is None:
                    continue
                _check_device(angles, f"Rotation {side} angles", q)
                _check_device(magnitude, f"Rotation {side} magnitude", q)
                pairs = term.query.shape[-1]
                wanted = ((1, batch), (1, heads), (count,), (pairs,))
                _check_shape(angles, f"Rotation {side} angles", wanted)
                if magnitude is not None:
                    _check_shape(magnitude, f"Rotation {side} magnitude", wanted)
                if 2 * pairs > width:
                    fail(
                        f"at most {width // 2} angles for a head width of {width}",
                        str(pairs),
                        "Rotate fewer dimensions.",
                    )
        case QueryBias(u=u):
            _check_device(u, name, q)
            _check_shape(u, f"{name} u", ((1, heads), (width,)))
        case LineVectors():
            _check_device(term.vectors, name, q)
            _check_device(term.index, f"{name} index", q)
            _check_device(term.bias, f"{name} bias", q)
            meets = v.shape[3] if term.side == "value" else width
            _check_shape(term.vectors, f"{name} vectors", ((1, heads), (term.vectors.shape[1],), (meets,)))
            if term.bias is not None:
                _check_shape(term.bias, f"{name} bias", ((1, heads), (width,)))
            _check_lines(term.lines, name, q, k)
        case AxisVectors():
            for vectors, lines in zip(term.vectors, term.lines, strict=True):
                _check_device(vectors, name, q)
                _check_shape(vectors, f"{name} vectors", ((1, heads), (vectors.shape[1],), (width,)))
                _check_lines(lines, name, q, k)
        case LowRank(query=query, key=key):
            _check_device(query, f"{name} query", q)
            _check_device(key, f"{name} key", q)
            for side, x, count in (("query", query, n), ("key", key, m)):
                wanted = ((1, batch), (1, heads), (count,), (query.shape[-1],))
                _check_shape(x, f"{name} {side}", wanted[4 - x.dim() :])
        case DenseBias(bias=bias):
            _check_device(bias, name, q)
            _check_shape(bias, name, ((1, batch), (1, heads), (n,), (m,)))
        case RowRule(parameters=parameters):
            require_width(q, term.width, name)
            for parameter in parameters:
                _check_device(parameter, f"{name} parameters", q)
        case Sinks(logits=logits):
            _check_device(logits, name, q)
            _check_shape(logits, f"{name} logits", ((heads,),))
        case _:
            pass
