"""What a position mechanism says to attention: a small closed set of frozen terms.

The score of query i and key j in head h is, in this order,

    softcap(scale * <rotate(q) + u, rotate(k)>) + line biases + vector terms + low-rank and dense biases + row rules,

then the mask, then sinks; vectors on the value side are added to v under the softmax's weights. Each class below says
in its docstring what it adds, and the reference engine has the same as code. All terms index query heads, also where
keys are grouped. Vectors meet unrotated q and k.
How terms come together is `core.algebra`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relpos.core.algebra import Single, Term
from relpos.core.checks import (
    broadcasts,
    fail,
    require_choice,
    require_device,
    require_flag,
    require_floating,
    require_int,
    require_number,
    require_tensor,
    require_wide,
    shape_of,
)
from relpos.core.line import Lines
from relpos.core.rotation import RotationLayout
from relpos.core.tree import register, static


def _heads_first(x: Tensor, name: str, width: str) -> None:
    require_tensor(x, name, dims=width.count(",") + 2)
    if not x.is_floating_point():
        fail(
            f"{name} to be floating point [heads, {width}]", shape_of(x), "Pass one row a query head, or a single row."
        )


def _require_lines(x: object, name: str) -> None:
    if not isinstance(x, Lines):
        fail(f"{name} lines to be Lines", shape_of(x), "Make them with relpos.lines(queries, keys).")


@register("relpos.core.terms.LineBias")
@dataclass(frozen=True, eq=False)
class LineBias(Term):
    """Adds `values[h, query_line[i] - key_line[j] + origin]`.

    Attributes:
        values: `[H, L]`, or `[1, L]` for all heads alike; float32 or wider.
        lines: where queries and keys stand; `lines.length` is L.
    """

    values: Float[Tensor, "H L"]
    lines: Lines

    def __post_init__(self) -> None:
        _heads_first(self.values, "LineBias values", "L")
        why = "Compute them with .float(); half precision cannot tell near biases apart."
        require_wide(self.values, "LineBias values", why)
        _require_lines(self.lines, "LineBias")
        if self.values.shape[1] != self.lines.length:
            fail(
                f"LineBias values of shape [heads, {self.lines.length}]",
                shape_of(self.values),
                "Give one value for each offset that lines.offsets() lists.",
            )

    def join(self, other: Self) -> LineBias | None:
        """Values on the same lines add up."""
        if not self.lines.same_structure(other.lines):
            return None
        require_device(other.values, "two LineBias", self.values.device, "Move the mechanisms to one device.")
        heads = f"{self.values.shape[0]} and {other.values.shape[0]}"
        if len({self.values.shape[0], other.values.shape[0]} - {1}) > 1:
            fail("LineBias for one number of heads", heads, "Build both mechanisms for the same query heads.")
        return LineBias(self.values + other.values, self.lines)

    def narrow(self, queries: slice, keys: slice) -> LineBias:
        return replace(self, lines=self.lines.narrow(queries, keys))


@register("relpos.core.terms.Rotation")
@dataclass(frozen=True, eq=False)
class Rotation(Single):
    """Turns q and k before the content product: `<rotate(q), rotate(k)>`. At most one.

    Attributes:
        query: angles `[1 or B, 1 or H, N, R/2]` in radians, float32 or wider.
        key: angles of the keys, or None where the keys come rotated already (a cache).
        layout: `"half"` or `"interleaved"`, see `core.rotation`.
        magnitude: multiplies the rotated dimensions of both sides (YaRN's attention factor).
        query_magnitude, key_magnitude: one an angle and side (xPos), multiplied with `magnitude`.
        width: the head width that the angles were made for, R or more; attention refuses another. None for any.
    """

    query: Float[Tensor, "#B #H N P"]
    key: Float[Tensor, "#B #H M P"] | None
    layout: RotationLayout = static()
    magnitude: float = static(default=1.0)
    query_magnitude: Float[Tensor, "#B #H N P"] | None = None
    key_magnitude: Float[Tensor, "#B #H M P"] | None = None
    width: int | None = static(default=None)

    def __post_init__(self) -> None:
        require_choice(self.layout, "layout", ("half", "interleaved"))
        require_number(self.magnitude, "Rotation magnitude", "above 0", "Leave it out for 1.")
        for name in ("query", "key", "query_magnitude", "key_magnitude"):
            x = getattr(self, name)
            if x is None and name != "query":
                continue
            require_tensor(x, f"Rotation {name}", dims=4)
            why = "Half precision rounds a position of 1995 to 1992; compute angles in float32."
            require_wide(x, f"Rotation {name}", why)
            if x.shape[3] != self.query.shape[3]:
                fail(
                    f"Rotation {name} with {self.query.shape[3]} angles per token, as the query has",
                    shape_of(x),
                    "Queries and keys rotate the same dimensions.",
                )
        if self.key is None and self.key_magnitude is not None:
            fail("no key magnitude where keys come rotated", shape_of(self.key_magnitude), "Apply it with rotate().")
        if self.width is not None:
            require_int(self.width, "Rotation width", at_least=1)
            turned = 2 * self.query.shape[3]
            if turned > self.width:
                fail(f"a Rotation of at most {self.width} dimensions", str(turned), "There is one angle per pair.")

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


@register("relpos.core.terms.QueryBias")
@dataclass(frozen=True, eq=False)
class QueryBias(Term):
    """Adds `u[h]` to the rotated query in the content product only (Transformer-XL's u).

    Attributes:
        u: `[1 or H, D]`.
    """

    u: Float[Tensor, "H D"]

    def __post_init__(self) -> None:
        _heads_first(self.u, "QueryBias u", "D")


Side = Literal["query", "key", "value"]


@register("relpos.core.terms.LineVectors")
@dataclass(frozen=True, eq=False)
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
        side: what the vectors are multiplied with.
        scaled: whether the attention's scale applies.
        bias: `[1 or H, D]`, added to q or k in this product only (Transformer-XL's v).
    """

    vectors: Float[Tensor, "#H R D"]
    index: Int[Tensor, " L"] | None
    lines: Lines
    side: Side = static()
    scaled: bool = static(default=True)
    bias: Float[Tensor, "#H D"] | None = None

    def __post_init__(self) -> None:
        _heads_first(self.vectors, "LineVectors vectors", "R, D")
        _require_lines(self.lines, "LineVectors")
        require_choice(self.side, "side", ("query", "key", "value"))
        require_flag(self.scaled, "scaled")
        if self.index is not None:
            whole = isinstance(self.index, Tensor) and not self.index.is_floating_point()
            if not whole or self.index.dtype == torch.bool or self.index.shape != (self.lines.length,):
                fail(
                    f"LineVectors index of integers of shape [{self.lines.length}]",
                    shape_of(self.index),
                    "Give one row number for each entry of the line.",
                )
        if self.bias is not None:
            if self.side == "value":
                fail("no bias beside value vectors", shape_of(self.bias), "A bias meets queries or keys only.")
            _heads_first(self.bias, "LineVectors bias", "D")

    def narrow(self, queries: slice, keys: slice) -> LineVectors:
        return replace(self, lines=self.lines.narrow(queries, keys))


@register("relpos.core.terms.AxisVectors")
@dataclass(frozen=True, eq=False)
class AxisVectors(Term):
    """Adds, for each axis a, `<q[i], vectors[a][h, query_line_a[i] - key_line_a[j] + origin_a]>`, q unscaled.

    The decomposed relative positions of MViTv2, ViTDet and SAM. Entries beyond the last vector (pairs with a prefix)
    add 0. Engines exploit that a grid's key line of one axis takes few values.

    Attributes:
        vectors: one `[1 or H, R_a, D]` an axis.
        lines: one per axis, as `core.axis_lines` makes them.
    """

    vectors: tuple[Float[Tensor, "#H _ D"], ...]
    lines: tuple[Lines, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, tuple) or not isinstance(self.lines, tuple):
            came = f"{shape_of(self.vectors)} and {shape_of(self.lines)}"
            fail("AxisVectors vectors and lines as tuples", came, "Give one of each an axis.")
        if len(self.vectors) != len(self.lines):
            fail("as many vectors as lines", f"{len(self.vectors)} and {len(self.lines)}", "Give one of each an axis.")
        for vectors, lines in zip(self.vectors, self.lines, strict=True):
            _heads_first(vectors, "AxisVectors vectors", "R, D")
            _require_lines(lines, "AxisVectors")

    def narrow(self, queries: slice, keys: slice) -> AxisVectors:
        return replace(self, lines=tuple(lines.narrow(queries, keys) for lines in self.lines))


@register("relpos.core.terms.LowRank")
@dataclass(frozen=True, eq=False)
class LowRank(Term):
    """Adds `<query[b, h, i], key[b, h, j]>`, unscaled (TUPE's untied product of positions).

    Attributes:
        query: `[1 or H, N, R]`, or `[1 or B, 1 or H, N, R]` where the elements of a batch differ.
        key: `[1 or H, M, R]` or `[1 or B, 1 or H, M, R]`.
    """

    query: Float[Tensor, "*#B #H N R"]
    key: Float[Tensor, "*#B #H M R"]

    def __post_init__(self) -> None:
        for name, x in (("LowRank query", self.query), ("LowRank key", self.key)):
            require_tensor(x, name, dims=(3, 4))
            if not x.is_floating_point():
                fail(f"{name} to be floating point", shape_of(x), "Convert it with .float().")
        if self.query.shape[-1] != self.key.shape[-1]:
            ranks = f"{self.query.shape[-1]} and {self.key.shape[-1]}"
            fail("LowRank query and key of one rank", ranks, "Make R equal.")

    def narrow(self, queries: slice, keys: slice) -> LowRank:
        return replace(self, query=self.query[..., queries, :], key=self.key[..., keys, :])


@register("relpos.core.terms.DenseBias")
@dataclass(frozen=True, eq=False)
class DenseBias(Term):
    """Adds `bias[b, h, i, j]`: the user's own N x M numbers (pair bias, a published model's dense matrix).

    Attributes:
        bias: `[1 or B, 1 or H, N, M]`.
    """

    bias: Float[Tensor, "#B #H N M"]

    def __post_init__(self) -> None:
        require_tensor(self.bias, "DenseBias bias", dims=4)
        if not self.bias.is_floating_point():
            fail("a floating-point DenseBias", shape_of(self.bias), "For a boolean mask use Mask.")

    def narrow(self, queries: slice, keys: slice) -> DenseBias:
        return replace(self, bias=self.bias[:, :, queries, keys])


Rule = Callable[..., Float[Tensor, "#B #H n M"]]


@register("relpos.core.terms.RowRule")
@dataclass(frozen=True, eq=False)
class RowRule(Term):
    """Adds a bias that depends on content, computed for a block of query rows at a time (CoPE, FIRE).

    `rule(q, k, allowed, rows, *parameters)` returns `[1 or B, 1 or H, n, M]` for the n query rows `rows` (a slice of
    all queries), from their unrotated, unscaled queries `q[B, H, n, D]`, all keys `k[B, H, M, D]` (repeated to the
    query heads) and `allowed[1 or B, 1 or H, n, M]`, True where the mask lets a pair through. It must treat rows
    independently. Gradients reach q, k and `parameters`; tensors that a rule only closes over get none in engines
    that recompute. `width` is the head width D that it was made for, None for any; attention refuses another.
    """

    rule: Rule = static()
    parameters: tuple[Tensor, ...] = ()
    offset: int = static(default=0)
    width: int | None = static(default=None)

    def __post_init__(self) -> None:
        if self.width is not None:
            require_int(self.width, "RowRule width", at_least=1)
        if not callable(self.rule):
            fail("a function as RowRule's rule", shape_of(self.rule), "See the docstring for what it receives.")
        if not isinstance(self.parameters, tuple) or not all(isinstance(x, Tensor) for x in self.parameters):
            fail("RowRule parameters as a tuple of tensors", shape_of(self.parameters), "Write parameters=(tensor,).")

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
        bias = self.rule(q, k, allowed, shifted, *self.parameters)
        (batch, heads, n, _), m = q.shape, k.shape[2]
        fits = isinstance(bias, Tensor) and bias.dim() == 4 and bias.shape[2] == n and bias.shape[3] == m
        if not fits or not broadcasts(bias.shape[0], batch) or not broadcasts(bias.shape[1], heads):
            fail(
                f"a RowRule's rule to return [1 or {batch}, 1 or {heads}, {n}, {m}]",
                shape_of(bias),
                "Return one number for each of the rows and every key.",
            )
        return bias


@register("relpos.core.terms.Scale")
@dataclass(frozen=True)
class Scale(Term):
    """Sets the factor on the content product (1 for T5). An argument `scale=` of attention beats it."""

    value: float = static()

    def __post_init__(self) -> None:
        require_number(self.value, "Scale", "above 0", "Leave the term out for 1/sqrt(head width).")

    def join(self, other: Self) -> Scale:
        """Equal scales are one; different ones contradict each other."""
        if self.value != other.value:
            fail(
                "one scale",
                f"{self.value} and {other.value} from two terms",
                "Keep one of the two mechanisms that set a scale.",
            )
        return self


@register("relpos.core.terms.Softcap")
@dataclass(frozen=True)
class Softcap(Single):
    """Bounds the scaled content product: `cap * tanh(x / cap)` (Gemma 2). At most one."""

    cap: float = static()

    def __post_init__(self) -> None:
        require_number(self.cap, "Softcap", "above 0", "Leave the term out to have no cap.")


@register("relpos.core.terms.Sinks")
@dataclass(frozen=True, eq=False)
class Sinks(Single):
    """Adds `exp(logits[h])` to the softmax's denominator: attention that goes nowhere. At most one.

    The log-sum-exp of a row holds it too, so of several shards of the keys one carries the sinks.

    Attributes:
        logits: `[H]`.
    """

    logits: Float[Tensor, " H"]

    def __post_init__(self) -> None:
        require_floating(self.logits, "Sinks logits", dims=1)
