"""What a position mechanism says to attention: a small closed set of frozen terms.

The score of query i and key j in head h is, in this order,

    softcap(scale * <rotate(q) + u, rotate(k)>) + line biases + vector terms + low-rank and dense biases + row rules,

then the mask, then sinks; vectors on the value side are added to v under the softmax's weights. Each class below says
in its docstring what it adds, and the reference engine has the same as code. All terms index query heads, also where
keys are grouped. Vectors meet unrotated q and k.

`Terms` is an ordered, immutable collection. `+` joins terms and collections, and is where contradictions show: two
rotations, two soft caps, two sinks or two different scales raise. Line biases on the same lines are added into one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relpos.core.checks import fail, require_choice, require_tensor, shape_of
from relpos.core.lines import Lines
from relpos.core.rotation import RotationLayout
from relpos.core.tree import register, static


class Term:
    """Base of the terms. `a + b` joins terms into `Terms`."""

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms(self) + other

    def narrow(self, queries: slice, keys: slice) -> Term:
        """The same term for some consecutive queries and keys."""
        return self


def _is_concrete(x: object) -> bool:
    """False while a tree of terms is mapped over something that is no tensor."""
    return isinstance(x, Tensor)


def _heads_first(x: Tensor, name: str, width: str) -> None:
    require_tensor(x, name, dims=width.count(",") + 2)
    if not x.is_floating_point():
        fail(
            f"{name} to be floating point [heads, {width}]", shape_of(x), "Pass one row a query head, or a single row."
        )


@register
@dataclass(frozen=True)
class LineBias(Term):
    """Adds `values[h, query_line[i] - key_line[j] + origin]`.

    Attributes:
        values: `[H, L]`, or `[1, L]` for all heads alike; float32 or wider.
        lines: where queries and keys stand; `lines.length` is L.
    """

    values: Float[Tensor, "H L"]
    lines: Lines

    def __post_init__(self) -> None:
        if not _is_concrete(self.values):
            return
        _heads_first(self.values, "LineBias values", "L")
        if self.values.shape[1] != self.lines.length:
            fail(
                f"LineBias values of shape [heads, {self.lines.length}]",
                shape_of(self.values),
                "Give one value for each offset that lines.offsets() lists.",
            )

    def narrow(self, queries: slice, keys: slice) -> LineBias:
        return replace(self, lines=self.lines.narrow(queries, keys))


@register
@dataclass(frozen=True)
class Rotation(Term):
    """Turns q and k before the content product: `<rotate(q), rotate(k)>`. At most one.

    Attributes:
        query: angles `[1 or B, 1 or H, N, R/2]` in radians, float32 or wider.
        key: angles of the keys, or None where the keys come rotated already (a cache).
        layout: `"half"` or `"interleaved"`, see `core.rotation`.
        magnitude: multiplies the rotated dimensions of both sides (YaRN's attention factor).
        query_magnitude, key_magnitude: one an angle and side (xPos), multiplied with `magnitude`.
    """

    query: Float[Tensor, "#B #H N P"]
    key: Float[Tensor, "#B #H M P"] | None
    layout: RotationLayout = static()
    magnitude: float = static(default=1.0)
    query_magnitude: Float[Tensor, "#B #H N P"] | None = None
    key_magnitude: Float[Tensor, "#B #H M P"] | None = None

    def __post_init__(self) -> None:
        if not _is_concrete(self.query):
            return
        require_choice(self.layout, "layout", ("half", "interleaved"))
        for name in ("query", "key", "query_magnitude", "key_magnitude"):
            x = getattr(self, name)
            if x is None:
                continue
            require_tensor(x, f"Rotation {name}", dims=4)
            if x.dtype not in (torch.float32, torch.float64):
                fail(
                    f"Rotation {name} in float32 or float64",
                    shape_of(x),
                    "Half precision rounds a position of 1995 to 1992; compute angles in float32.",
                )

    def narrow(self, queries: slice, keys: slice) -> Rotation:
        def cut(x: Tensor | None, part: slice) -> Tensor | None:
            return None if x is None else x[..., part, :]

        return replace(
            self,
            query=self.query[..., queries, :],
            key=cut(self.key, keys),
            query_magnitude=cut(self.query_magnitude, queries),
            key_magnitude=cut(self.key_magnitude, keys),
        )


@register
@dataclass(frozen=True)
class QueryBias(Term):
    """Adds `u[h]` to the rotated query in the content product only (Transformer-XL's u).

    Attributes:
        u: `[1 or H, D]`.
    """

    u: Float[Tensor, "H D"]

    def __post_init__(self) -> None:
        if _is_concrete(self.u):
            _heads_first(self.u, "QueryBias u", "D")


Side = Literal["query", "key", "value"]


@register
@dataclass(frozen=True)
class LineVectors(Term):
    """Vectors on the line. With `r = index[query_line[i] - key_line[j] + origin]` and `w = vectors[h, r]`,

        side "query"   adds  s * <q[i] + bias, w>  to the score (Shaw's keys, DeBERTa's c2p, Transformer-XL)
        side "key"     adds  s * <k[j] + bias, w>  (DeBERTa's p2c)
        side "value"   adds  p[i, j] * w           to the output (Shaw's values)

    where s is the attention's scale if `scaled`, else 1.

    Attributes:
        vectors: `[1 or H, R, D]`; R may be far below L (clipping, buckets).
        index: `Int[L]`, the row each entry of the line reads; -1 reads a row of zeros. None: entry l reads row l,
            and entries from R on read zeros.
        lines: where queries and keys stand.
        side: what the vectors meet.
        scaled: whether the attention's scale applies.
        bias: `[1 or H, D]`, added to q or k in this product only (Transformer-XL's v).
    """

    vectors: Float[Tensor, "H R D"]
    index: Int[Tensor, L] | None
    lines: Lines
    side: Side = static()
    scaled: bool = static(default=True)
    bias: Float[Tensor, "H D"] | None = None

    def __post_init__(self) -> None:
        if not _is_concrete(self.vectors):
            return
        _heads_first(self.vectors, "LineVectors vectors", "R, D")
        require_choice(self.side, "side", ("query", "key", "value"))
        if self.index is not None and self.index.shape != (self.lines.length,):
            fail(
                f"LineVectors index of shape [{self.lines.length}]",
                shape_of(self.index),
                "Give one row number for each entry of the line.",
            )
        if self.side == "value" and self.bias is not None:
            fail("no bias beside value vectors", shape_of(self.bias), "A bias meets queries or keys only.")

    def narrow(self, queries: slice, keys: slice) -> LineVectors:
        return replace(self, lines=self.lines.narrow(queries, keys))


@register
@dataclass(frozen=True)
class AxisVectors(Term):
    """Adds, for each axis a, `<q[i], vectors[a][h, query_line_a[i] - key_line_a[j] + origin_a]>`, q unscaled.

    The decomposed relative positions of MViTv2, ViTDet and SAM. Entries beyond the last vector (pairs with a prefix)
    add 0. Engines exploit that a grid's key line of one axis takes few values.

    Attributes:
        vectors: one `[1 or H, R_a, D]` an axis.
        lines: one an axis, as `core.axis_lines` makes them.
    """

    vectors: tuple[Float[Tensor, "H _ D"], ...]
    lines: tuple[Lines, ...]

    def __post_init__(self) -> None:
        if not all(_is_concrete(vectors) for vectors in self.vectors):
            return
        if len(self.vectors) != len(self.lines):
            fail("as many vectors as lines", f"{len(self.vectors)} and {len(self.lines)}", "Give one of each an axis.")
        for vectors in self.vectors:
            _heads_first(vectors, "AxisVectors vectors", "R, D")

    def narrow(self, queries: slice, keys: slice) -> AxisVectors:
        return replace(self, lines=tuple(lines.narrow(queries, keys) for lines in self.lines))


@register
@dataclass(frozen=True)
class LowRank(Term):
    """Adds `<query[h, i], key[h, j]>`, unscaled (TUPE's untied product of positions).

    Attributes:
        query: `[1 or H, N, R]`.
        key: `[1 or H, M, R]`.
    """

    query: Float[Tensor, "H N R"]
    key: Float[Tensor, "H M R"]

    def __post_init__(self) -> None:
        if not _is_concrete(self.query):
            return
        _heads_first(self.query, "LowRank query", "N, R")
        _heads_first(self.key, "LowRank key", "M, R")
        if self.query.shape[2] != self.key.shape[2]:
            fail("LowRank query and key of one rank", f"{self.query.shape[2]} and {self.key.shape[2]}", "Make R equal.")

    def narrow(self, queries: slice, keys: slice) -> LowRank:
        return replace(self, query=self.query[:, queries], key=self.key[:, keys])


@register
@dataclass(frozen=True)
class DenseBias(Term):
    """Adds `bias[b, h, i, j]`: the user's own N x M numbers (pair bias, a published model's dense matrix).

    Attributes:
        bias: `[1 or B, 1 or H, N, M]`.
    """

    bias: Float[Tensor, "#B #H N M"]

    def __post_init__(self) -> None:
        if not _is_concrete(self.bias):
            return
        require_tensor(self.bias, "DenseBias bias", dims=4)
        if not self.bias.is_floating_point():
            fail("a floating-point DenseBias", shape_of(self.bias), "For a boolean mask use Mask.")

    def narrow(self, queries: slice, keys: slice) -> DenseBias:
        return replace(self, bias=self.bias[:, :, queries, keys])


Rule = Callable[..., Float[Tensor, "#B #H n M"]]


@register
@dataclass(frozen=True)
class RowRule(Term):
    """Adds a bias that depends on content, computed for a block of query rows at a time (CoPE, FIRE).

    `rule(q, k, allowed, rows, *parameters)` returns `[1 or B, 1 or H, n, M]` for the n query rows `rows` (a slice of
    all queries), from their unrotated, unscaled queries `q[B, H, n, D]`, all keys `k[B, H, M, D]` (repeated to the
    query heads) and `allowed[1 or B, 1 or H, n, M]`, True where the mask lets a pair through. It must treat rows
    independently. Gradients reach q, k and `parameters`; tensors that a rule only closes over get none in engines
    that recompute.
    """

    rule: Rule = static()
    parameters: tuple[Tensor, ...] = ()
    offset: int = static(default=0)

    def narrow(self, queries: slice, keys: slice) -> RowRule:
        """Only rows can be cut: the rule sees all keys."""
        if keys.start not in (None, 0):
            fail("all keys for a RowRule", str(keys), "Narrow the queries only.")
        return replace(self, offset=self.offset + (queries.start or 0))

    def __call__(
        self, q: Float[Tensor, "B H n D"], k: Float[Tensor, "B H M D"], allowed: Bool[Tensor, "#B #H n M"], rows: slice
    ) -> Float[Tensor, "#B #H n M"]:
        """The bias of the rows."""
        shifted = slice(rows.start + self.offset, rows.stop + self.offset)
        return self.rule(q, k, allowed, shifted, *self.parameters)


@register
@dataclass(frozen=True)
class Scale(Term):
    """Sets the factor on the content product (1 for T5). An argument `scale=` of attention beats it."""

    value: float = static()


@register
@dataclass(frozen=True)
class Softcap(Term):
    """Bounds the scaled content product: `cap * tanh(x / cap)` (Gemma 2). At most one."""

    cap: float = static()

    def __post_init__(self) -> None:
        if not self.cap > 0:
            fail("a Softcap above 0", repr(self.cap), "Leave the term out to have no cap.")


@register
@dataclass(frozen=True)
class Sinks(Term):
    """Adds `exp(logits[h])` to the softmax's denominator: attention that goes nowhere. At most one.

    Attributes:
        logits: `[H]`.
    """

    logits: Float[Tensor, H]

    def __post_init__(self) -> None:
        if _is_concrete(self.logits):
            require_tensor(self.logits, "Sinks logits", dims=1)


T = TypeVar("T", bound=Term)


@register
@dataclass(frozen=True, init=False)
class Terms:
    """An ordered collection of terms that do not contradict one another. `Terms()` says nothing."""

    items: tuple[Term, ...]

    def __init__(self, *terms: Term) -> None:
        joined: list[Term] = []
        for term in terms:
            _join(joined, term)
        object.__setattr__(self, "items", tuple(joined))

    def __iter__(self) -> Iterator[Term]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __add__(self, other: Term | Terms) -> Terms:
        return Terms(*self, *((other,) if isinstance(other, Term) else other))

    def of(self, kind: type[T]) -> tuple[T, ...]:
        """The terms of one kind, in order."""
        return tuple(term for term in self.items if isinstance(term, kind))

    def one(self, kind: type[T]) -> T | None:
        """The term of a kind that occurs at most once."""
        return next(iter(self.of(kind)), None)

    def narrow(self, queries: slice, keys: slice) -> Terms:
        """The same terms for some consecutive queries and keys: one step of decoding, a block, a shard."""
        return Terms(*(term.narrow(queries, keys) for term in self))


def _join(joined: list[Term], term: Term) -> None:
    """Append `term`, or fold it into an earlier one, or raise where they contradict."""
    if not isinstance(term, Term):
        fail("terms (LineBias, Rotation, ...)", shape_of(term), "Call mechanism.terms(queries, keys) first.")
    for place, other in enumerate(joined):
        if type(other) is not type(term):
            continue
        if isinstance(term, LineBias) and isinstance(other, LineBias):
            if other.lines.same_structure(term.lines):
                joined[place] = LineBias(other.values + term.values, other.lines)
                return
        elif isinstance(term, Scale) and isinstance(other, Scale):
            if term.value != other.value:
                fail(
                    "one scale",
                    f"{other.value} and {term.value} from two terms",
                    "Drop one, or pass scale= to attention, which beats both.",
                )
            return
        elif isinstance(term, Rotation | Softcap | Sinks):
            fail(f"at most one {type(term).__name__}", "two", "Compose mechanisms so that only one brings it.")
    joined.append(term)
