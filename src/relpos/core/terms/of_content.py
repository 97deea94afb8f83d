"""Terms of the content product and of the softmax: biases and factors of queries, scale, soft cap, sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Self, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.algebra import Single, Term, Terms
from relpos.core.checks import (
    fail,
    require_choice,
    require_floating,
    require_number,
    require_tensor,
    require_wide,
)
from relpos.core.rotation import RotationLayout
from relpos.core.terms.fitting import check_device, check_shape, heads_first
from relpos.core.terms.rotations import Rotation
from relpos.core.tree import changed, register, static, unchecked

FactorOn = Literal["content", "scores"]


@register("relpos.core.terms.QueryBias")
@dataclass(frozen=True, eq=False)
class QueryBias(Term):
    """Adds `u[h]` to the rotated query in the content product only (Transformer-XL's u).

    Attributes:
        u: `[1 or H, D]`.

    Raises:
        ValueError: no floating-point `[heads, D]`; in attention, for other heads or another width.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=relpos.QueryBias(torch.randn(2, 8))).shape
        torch.Size([1, 2, 5, 8])
    """

    adds_scores = meets_plain = False
    u: Float[Tensor, "H D"]

    def __post_init__(self) -> None:
        heads_first(self.u, "QueryBias u", "D")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.u, "QueryBias", q)
        check_shape(self.u, "QueryBias u", ((1, q.shape[1]), (q.shape[3],)))


@register("relpos.core.terms.QueryScale")
@dataclass(frozen=True, eq=False)
class QueryScale(Single):
    """One factor a query, before the soft cap: a temperature that grows with the position. At most one.

    `softcap(factor[i] * scale * <rotate(q) + u, rotate(k)>) + biases` on the content, as Llama 4, Ministral 3 and
    Mistral 4 have it; on the scores the biases are multiplied by `factor[i]` too, as in Inkling's full layers. Neither
    the mask nor sinks, nor vectors on the value side, are.

    Attributes:
        factor: `[1 or B, 1 or H, N]`, float32 or wider.
        on: "content" or "scores".

    Raises:
        ValueError: half precision, other dimensions, another choice; in attention, for other queries; in a sum, a
            second one.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> position = torch.arange(6.0)
        >>> llama4 = relpos.QueryScale((1 + 0.1 * torch.log1p((position + 1) // 8192))[None, None])
        >>> relpos.attention(q, k, v, position=llama4, mask="causal").shape
        torch.Size([1, 2, 6, 8])
    """

    meets_plain = False
    factor: Float[Tensor, "#B #H N"]
    on: FactorOn = static(default="content")

    def __post_init__(self) -> None:
        require_tensor(self.factor, "QueryScale factor", dims=3)
        require_wide(self.factor, "QueryScale factor", "Half precision rounds 1.1 to 1.102; compute it in float32.")
        require_choice(self.on, "on", get_args(FactorOn), 'Biases are multiplied too on "scores".')

    @property
    def adds_scores(self) -> bool:  # type: ignore[override]  # a constant of the others
        """Whether it changes what the other terms add."""
        return self.on != "content"

    @property
    def meets_content(self) -> bool:
        """Whether q is still to be multiplied: engines that have done so keep the term as one on what is added."""
        return self.on in get_args(FactorOn)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.factor, "QueryScale", q)
        check_shape(self.factor, "QueryScale factor", ((1, q.shape[0]), (1, q.shape[1]), (q.shape[2],)))

    def narrow(self, queries: slice, keys: slice) -> QueryScale:
        return changed(self, factor=self.factor[..., queries])

    def of_rows(self, x: Float[Tensor, "#B #H #N _"]) -> Float[Tensor, "#B #H N _"]:
        """Queries, or scores, each row times its factor, in the dtype of `x`."""
        return (x * self.factor[..., None]).to(x.dtype)


def after_content(terms: Terms) -> Terms:
    """What is left of terms once `content` has been applied to q and k."""
    left: list[Term] = []
    adds = any(term.adds_scores and not isinstance(term, QueryScale | Sinks) for term in terms)
    for term in terms:
        if isinstance(term, QueryScale) and term.on == "scores":
            left += [changed(term, on="added")] * adds
        elif not isinstance(term, QueryScale) or not term.meets_content:
            left += [] if isinstance(term, Rotation | QueryBias) else [term]
    return unchecked(Terms, items=tuple(left))


@register("relpos.core.terms.Scale")
@dataclass(frozen=True)
class Scale(Term):
    """Sets the factor on the content product (1 for T5). An argument `scale=` of attention beats it.

    Args:
        value: the factor, in place of 1/sqrt(D).

    Raises:
        ValueError: no number above 0; in a sum, another scale.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 5, 16)
        >>> unscaled = relpos.attention(q, k, v, position=relpos.Scale(1.0))
        >>> bool((unscaled == relpos.attention(q, k, v, scale=1.0)).all())
        True
    """

    adds_scores = meets_plain = False
    value: float = static()

    def __post_init__(self) -> None:
        require_number(self.value, "Scale", "above 0", "Leave the term out for 1/sqrt(head width).")

    def join(self, other: Self) -> Scale:
        """Equal scales are one; different ones contradict each other."""
        if self.value != other.value:
            came = f"{self.value} and {other.value} from two terms"
            fail("one scale", came, "Keep one of the two mechanisms that set a scale.")
        return self


@register("relpos.core.terms.Softcap")
@dataclass(frozen=True)
class Softcap(Single):
    """Bounds the scaled content product: `cap * tanh(x / cap)` (Gemma 2). At most one.

    Args:
        cap: the bound.

    Raises:
        ValueError: no number above 0; in a sum, a second one.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=relpos.Softcap(50.0) + relpos.Scale(0.25)).shape
        torch.Size([1, 2, 5, 8])
    """

    adds_scores = meets_plain = False
    cap: float = static()

    def __post_init__(self) -> None:
        require_number(self.cap, "Softcap", "above 0", "Leave the term out to have no cap.")


@register("relpos.core.terms.Sinks")
@dataclass(frozen=True, eq=False)
class Sinks(Single):
    """Adds `exp(logits[h])` to the softmax's denominator: attention that goes nowhere. At most one.

    The log-sum-exp of a row includes it too, so only one of several shards of the keys carries the sinks.

    Attributes:
        logits: `[H]`; or `[1 or B, 1 or H, N]`, one for each query (Inkling 2's).

    Raises:
        ValueError: no floating-point `[heads]` or `[B, heads, N]`; in a sum, a second one.

    Examples:
        >>> q = k = torch.zeros(1, 1, 1, 8)
        >>> v = torch.ones(1, 1, 1, 8)
        >>> sinks = relpos.Sinks(torch.zeros(1))
        >>> relpos.attention(q, k, v, position=sinks)[0, 0, 0, 0]  # half of the weight goes nowhere
        tensor(0.5000)
    """

    meets_plain = False
    logits: Float[Tensor, " H"] | Float[Tensor, "#B #H N"]

    def __post_init__(self) -> None:
        require_floating(self.logits, "Sinks logits", dims=(1, 3))

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.logits, "Sinks", q)
        of_queries = ((1, q.shape[0]), (1, q.shape[1]), (q.shape[2],))
        check_shape(self.logits, "Sinks logits", of_queries if self.of_queries else ((q.shape[1],),))

    @property
    def of_queries(self) -> bool:
        """Whether each query has one of its own."""
        return self.logits.dim() == 3

    def rows(self, dtype: torch.dtype) -> Float[Tensor, "#B #H #N"]:
        """The logits of rows of scores."""
        logits = self.logits.to(dtype)
        return logits if self.of_queries else logits[None, :, None]

    def narrow(self, queries: slice, keys: slice) -> Sinks:
        return changed(self, logits=self.logits[..., queries]) if self.of_queries else self


def content(
    terms: Terms,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B G M D"],
    rotate: Callable[..., Tensor] | None = None,
    turned: tuple[Float[Tensor, "B H N D"] | None, Float[Tensor, "B G M D"] | None] = (None, None),
) -> tuple[Float[Tensor, "B H N W"], Float[Tensor, "B G M W"]]:
    """`factor * (rotate(q) + u)` and `rotate(k)`, whose products are the content; W is D, or more where a rotation
    `widens`. Grouped keys may stay grouped if every head rotates alike. An engine may bring its own `rotate`. `turned`:
    `rotate(q)` and `rotate(k)`, if they are there."""
    rotation = terms.one(Rotation)
    if rotation is not None:
        into = product_layout(terms, rotation)
        q = rotation._turned(q, "query", rotate, into) if turned[0] is None else turned[0]
        if turned[1] is not None:
            k = turned[1]
        elif rotation.key is not None:
            k = rotation._turned(k, "key", rotate, into)
    for term in terms.of(QueryBias):
        if rotation is not None and rotation.widens > 1:
            came = f"a QueryBias with {type(rotation).__name__}, which makes queries wider"
            fail("one of the two", came, "Leave one of them out.")
        q = q + term.u[:, None, :].to(q.dtype)
    temperature = terms.one(QueryScale)
    if temperature is not None and temperature.meets_content:
        q = temperature.of_rows(q)
    return q, k


def product_layout(terms: Terms, rotation: Rotation) -> RotationLayout | None:
    """The layout of rotated queries and keys of which only the products are used; None for that of the rotation."""
    free = rotation._is_fixed and rotation.key is not None and terms.one(QueryBias) is None
    return "interleaved" if free else None
