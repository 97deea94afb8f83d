"""Terms added to the score: line biases, low-rank biases, dense biases, and rules that depend on content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relpos.core.algebra import Keys, Queries, Term
from relpos.core.checks import (
    broadcasts,
    fail,
    require_device,
    require_int,
    require_tensor,
    require_wide,
    shape_of,
)
from relpos.core.densify import expand
from relpos.core.line import Lines
from relpos.core.rotation import require_width
from relpos.core.terms.fitting import check_device, check_heads, check_lines, check_shape, heads_first, require_lines
from relpos.core.tree import changed, register, static


@register("relpos.core.terms.LineBias")
@dataclass(frozen=True, eq=False)
class LineBias(Term):
    """Adds `values[h, query_line[i] - key_line[j] + origin]`.

    Every content-free relative bias is this term.

    Attributes:
        values: `[H, L]`, or `[1, L]` for all heads alike; float32 or wider.
        lines: the line coordinates of queries and keys; `lines.length` is L.

    Raises:
        ValueError: values that do not fit the lines, or in half precision; in attention, for other heads or tokens.

    Examples:
        >>> lines = relpos.lines(relpos.Sequence(4))
        >>> values = -lines.offsets().axes[:, 0].abs()[None].float()  # [1, 7]: 3 steps back to 3 ahead
        >>> q = k = v = torch.zeros(1, 2, 4, 8)
        >>> relpos.attention_weights(q, k, position=relpos.LineBias(values, lines))[0, 0, 0]
        tensor([0.6439, 0.2369, 0.0871, 0.0321])
    """

    meets_plain = False
    values: Float[Tensor, "H L"]
    lines: Lines

    def __post_init__(self) -> None:
        heads_first(self.values, "LineBias values", "L")
        why = "Compute them with .float(); half precision rounds close biases to one value."
        require_wide(self.values, "LineBias values", why)
        require_lines(self.lines, "LineBias")
        if self.values.shape[1] != self.lines.length:
            wanted = f"LineBias values of shape [heads, {self.lines.length}]"
            fail(wanted, shape_of(self.values), "Give one value for each offset that lines.offsets() lists.")

    def join(self, other: Self) -> LineBias | None:
        """Values on the same lines add up."""
        if not self.lines.same_structure(other.lines):
            return None
        require_device(other.values, "two LineBias", self.values.device, "Move the mechanisms to one device.")
        heads = f"{self.values.shape[0]} and {other.values.shape[0]}"
        if len({self.values.shape[0], other.values.shape[0]} - {1}) > 1:
            fail("LineBias for equally many heads", heads, "Build both mechanisms for the same query heads.")
        return LineBias(self.values + other.values, self.lines)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.values, "LineBias", q)
        check_heads(self.values, "LineBias values", q)
        check_lines(self.lines, "LineBias", q, k)

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "*#B #H N M"]:
        return expand(self.values, self.lines)

    def narrow(self, queries: slice, keys: slice) -> LineBias:
        return changed(self, lines=self.lines.narrow(queries, keys))


@register("relpos.core.terms.LowRank")
@dataclass(frozen=True, eq=False)
class LowRank(Term):
    """Adds `<query[b, h, i], key[b, h, j]>`, unscaled (TUPE's untied product of positions).

    Attributes:
        query: `[1 or H, N, R]`, or `[1 or B, 1 or H, N, R]` where the elements of a batch differ.
        key: `[1 or H, M, R]` or `[1 or B, 1 or H, M, R]`.

    Raises:
        ValueError: two ranks, or other dimensions; in attention, for other heads or tokens.

    Examples:
        >>> p, r = torch.randn(2, 5, 3), torch.randn(2, 5, 3)  # [H, N, R] and [H, M, R]
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=relpos.LowRank(p, r)).shape
        torch.Size([1, 2, 5, 8])
    """

    meets_plain = False
    query: Float[Tensor, "*#B #H N R"]
    key: Float[Tensor, "*#B #H M R"]

    def __post_init__(self) -> None:
        for name, x in (("LowRank query", self.query), ("LowRank key", self.key)):
            require_tensor(x, name, dims=(3, 4))
            if not x.is_floating_point():
                fail(f"{name} to be floating point", shape_of(x), "Convert it with .float().")
        if self.query.shape[-1] != self.key.shape[-1]:
            ranks = f"{self.query.shape[-1]} and {self.key.shape[-1]}"
            fail("LowRank query and key of the same rank", ranks, "Make R equal.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for field, x, other in (("query", self.query, q), ("key", self.key, k)):
            check_device(x, f"LowRank {field}", q)
            wanted = ((1, q.shape[0]), (1, q.shape[1]), (other.shape[2],), (self.query.shape[-1],))
            check_shape(x, f"LowRank {field}", wanted[4 - x.dim() :])

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "*#B #H N M"]:
        return self.query.to(q.dtype) @ self.key.to(q.dtype).mT

    def narrow(self, queries: slice, keys: slice) -> LowRank:
        return replace(self, query=self.query[..., queries, :], key=self.key[..., keys, :])


@register("relpos.core.terms.DenseBias")
@dataclass(frozen=True, eq=False)
class DenseBias(Term):
    """Adds `bias[b, h, i, j]`: the user's own N x M numbers (pair bias, a published model's dense matrix).

    An axis of size 1 broadcasts: a bias per key is `[B, 1, 1, M]`, as other libraries use for padding, and a bias per
    query is `[B, 1, N, 1]`. The axis keeps size 1 in `narrow`, and in engines that compute in blocks.

    Attributes:
        bias: `[1 or B, 1 or H, 1 or N, 1 or M]`, floating point, in units of the score: it is not scaled.

    Raises:
        ValueError: no floating-point tensor of 4 dimensions; in attention, another shape or device than q and k need.

    Examples:
        >>> q, k, v = torch.randn(3, 2, 8, 5, 16)
        >>> penalty = torch.rand(2, 5)  # one number a key of each element of the batch
        >>> unlikely = relpos.DenseBias(-penalty[:, None, None, :])
        >>> relpos.attention(q, k, v, position=unlikely).shape
        torch.Size([2, 8, 5, 16])
    """

    meets_plain = False
    bias: Float[Tensor, "#B #H #N #M"]

    def __post_init__(self) -> None:
        require_tensor(self.bias, "DenseBias bias", dims=4)
        if not self.bias.is_floating_point():
            fail("a floating-point DenseBias", shape_of(self.bias), "For a boolean mask use Mask.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.bias, "DenseBias", q)
        check_shape(self.bias, "DenseBias", tuple((1, size) for size in (*q.shape[:3], k.shape[2])))

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "#B #H #N #M"]:
        return self.bias

    def narrow(self, queries: slice, keys: slice) -> DenseBias:
        """Axes of size 1 broadcast, and stay."""
        rows, columns = self.bias.shape[2:]
        queries = slice(None) if rows == 1 else queries
        keys = slice(None) if columns == 1 else keys
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
    that recompute.

    Args:
        rule: the function.
        parameters: tensors passed to it, which receive gradients.
        offset: added to the row indices; only `narrow` sets it.
        width: the head width that it was made for, or None.

    Raises:
        ValueError: no function, or parameters that are no tensors; in attention, a bias of another shape.

    Examples:
        >>> def recent(q, k, allowed, rows, slope):  # [1, 1, n, M] for the queries of `rows`
        ...     steps = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(k.shape[2])
        ...     return -(slope * steps.abs())[None, None]
        ...
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=relpos.RowRule(recent, (torch.tensor(0.5),))).shape
        torch.Size([1, 2, 5, 8])
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

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_width(q, self.width, "RowRule")
        for parameter in self.parameters:
            check_device(parameter, "RowRule parameters", q)

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "#B #H N M"]:
        return self(q, k, allowed, slice(0, q.shape[2]))

    def narrow(self, queries: slice, keys: slice) -> RowRule:
        """Only rows can be cut: the rule sees all keys."""
        if keys.start not in (None, 0):
            fail("all keys for a RowRule", str(keys), "Narrow the queries only.")
        return replace(self, offset=self.offset + (queries.start or 0))

    def __call__(
        self, q: Queries, k: Keys, allowed: Bool[Tensor, "#B #H N M"] | None, rows: slice
    ) -> Float[Tensor, "#B #H N M"]:
        """The bias of the rows; every pair is allowed if `allowed` is None."""
        (batch, heads, n, _), m = q.shape, k.shape[2]
        seen = torch.ones(1, 1, n, m, dtype=torch.bool, device=q.device) if allowed is None else allowed
        shifted = slice(rows.start + self.offset, rows.stop + self.offset)
        bias = self.rule(q, k, seen, shifted, *self.parameters)
        fits = isinstance(bias, Tensor) and bias.dim() == 4 and bias.shape[2] == n and bias.shape[3] == m
        if not fits or not broadcasts(bias.shape[0], batch) or not broadcasts(bias.shape[1], heads):
            wanted = f"a RowRule's rule to return [1 or {batch}, 1 or {heads}, {n}, {m}]"
            fail(wanted, shape_of(bias), "Return one number per row and key.")
        return bias
