"""One call of attention, checked and made explicit: what every engine receives.

`Arguments.call` makes it, the one place where arguments are checked, defaults resolved and autocast applied. Engines
trust a `Call`. `packing` takes it apart for autograd or a custom operator, and puts it together again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import (
    LineBias,
    Mask,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    Sinks,
    Term,
    Terms,
    after_content,
    at_least_float32,
    content,
)
from relpos.core.terms.of_content import product_layout
from relpos.core.terms.rotations import turned_by_each


def _on_content(term: Term) -> bool:
    """Whether `Call.rotated` applies a term to q and k."""
    if isinstance(term, QueryScale):
        return term.meets_content
    return isinstance(term, PairRotations | Rotation | QueryBias)


@dataclass(eq=False)  # frozen it would take three times as long to make, and every call is made twice
class Call:
    """The arguments of one call, complete and consistent. Only `prepared` is ever set later: it is no field, so that no
    copy with other tensors has it, and nothing that goes through the fields of a call, as `packing`, sees it.

    Attributes:
        q: `[B, H, N, D]`; k: `[B, G, M, D]`; v: `[B, G, M, V]`, H a multiple of G, one dtype and device.
        terms: what position says, but for `Scale`, which is `scale`.
        mask: which pairs may attend, or None for all.
        scale: the factor on the content product.
        dropout: probability; seed: a 32-bit word for it, drawn when the call runs; None where dropout is 0.
        return_lse: whether the log-sum-exp of the scores, `[B, H, N]`, is wanted.
        plain_q, plain_k: the queries and keys before `rotated`, where vectors meet them and they differ; else None.
        first_row: the number of the first query, for dropout.
        tokens: `[C, n]`, where the batch is made of C stretches of n tokens for each of its elements, their numbers,
            for dropout.
        others: what else its rows attend to under the same softmax, one call for each other rotation (`PairRotations`).
        is_part: whether it is one of several under one softmax. The results that its backward gets are those of all.
        prepared: what an engine's forward leaves to its backward, beside the tensors that autograd saves; or None.
    """

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B G M D"]
    v: Float[Tensor, "B G M V"]
    terms: Terms
    mask: Mask | None
    scale: float
    dropout: float = 0.0
    seed: Int[Tensor, ""] | None = None
    return_lse: bool = False
    plain_q: Float[Tensor, "B H N _"] | None = None
    plain_k: Float[Tensor, "B _ M _"] | None = None
    first_row: int = 0
    tokens: Int[Tensor, "C n"] | None = None
    others: tuple[Call, ...] = ()
    is_part: bool = False
    prepared = cast("Any", None)

    @property
    def groups(self) -> int:
        """Query heads that share a key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def is_grouped(self) -> bool:
        """Whether query heads share key heads: a bool, where sizes are symbols, or tensors of torch.jit, too."""
        return True if self.q.shape[1] != self.k.shape[1] else False  # noqa: SIM210

    @property
    def is_empty(self) -> bool:
        """Whether there is no batch, or are no queries or no keys. Engines never see such a call."""
        return 0 in (*self.q.shape[:3], self.k.shape[2])

    @property
    def only_bias(self) -> LineBias | None:
        """A bias on regular lines, if nothing else is added to the scores."""
        only = None
        for term in self.terms.items:
            if not term.adds_scores:
                continue
            if only is not None or not isinstance(term, LineBias):
                return None
            only = term
        return None if only is None or only.lines.layout.kind == "irregular" else only

    @property
    def has_content_terms(self) -> bool:
        """Whether `rotated` applies some term to q and k."""
        return any(map(_on_content, self.terms.items))

    def seeded(self) -> Call:
        """This call with a seed from PyTorch's generator, where it has dropout. Asking about a call draws none."""
        return replace(self, seed=torch.randint(2**32, (), device=self.q.device)) if self.dropout > 0 else self

    def each(self) -> tuple[Call, ...]:
        """This call alone, and `others`."""
        if not self.others:
            return (self,)
        return tuple(replace(one, others=(), is_part=True) for one in (self, *self.others))

    def parts(self) -> list[Call]:
        """A call for each of its rotations: itself, but for `PairRotations`."""
        chosen = self.terms.one(PairRotations)
        if chosen is None:
            return [self]
        return [replace(self, terms=terms, mask=mask) for terms, mask in chosen.parts(self.terms, self.mask)]

    def rotated(
        self,
        rotate: Callable[..., Tensor] | None = None,
        turned: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> Call:
        """This call with its rotation, query bias and query scale applied to q and k, and without these terms.

        With `PairRotations` it has the pairs of one rotation, and those of the rest are `others`.

        Args:
            rotate: what applies the rotation, for an engine that has its own.
            turned: of `content`.
        """
        if not self.has_content_terms:
            return self
        if self.terms.one(PairRotations) is not None:
            return self._rotated_by_pair(rotate)
        q, k, v = self.q, self.k, self.v
        plain_q = plain_k = None
        rotation = self.terms.one(Rotation)
        if any(term.meets_plain for term in self.terms):
            plain_q, plain_k = q, k
        if rotation is not None and rotation.turns_keys_by_head:
            k, v = k.repeat_interleave(self.groups, dim=1), v.repeat_interleave(self.groups, dim=1)
        q, k = content(self.terms, q, k, rotate, turned)
        return Call(
            q, k, v, after_content(self.terms), self.mask, self.scale, self.dropout, self.seed, self.return_lse,
            plain_q, plain_k, self.first_row, self.tokens,
        )  # fmt: skip

    def _rotated_by_pair(self, rotate: Callable[..., Tensor] | None) -> Call:
        parts = self.parts()
        rotations = [part.terms.of(Rotation)[0] for part in parts]
        first_of = [next(at for at, other in enumerate(rotations) if one.turns_keys_as(other)) for one in rotations]
        queries: list[Tensor | None] = [None] * len(parts)
        keys: dict[int, Tensor] = {}
        if rotate is None and not any(rotation.turns_keys_by_head for rotation in rotations):
            into = [product_layout(part.terms, one) for part, one in zip(parts, rotations, strict=True)]
            queries = list(turned_by_each(rotations, self.q, "query", into))
            own = [at for at in sorted(set(first_of)) if rotations[at].key is not None]
            turned = turned_by_each([rotations[at] for at in own], self.k, "key", [into[at] for at in own])
            keys = dict(zip(own, turned, strict=True))
        calls = []
        for part, q, at in zip(parts, queries, first_of, strict=True):
            calls.append(part.rotated(rotate, (q, keys.get(at))))
            keys.setdefault(at, calls[-1].k)
        return replace(calls[0], others=tuple(calls[1:]))

    def empty_result(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and log-sum-exp where `is_empty`, or on meta: zeros, to which gradients lead all the same."""
        leaves = (self.q, self.k, self.v, *pytree.tree_leaves(self.terms))
        learned = (x for x in leaves if isinstance(x, Tensor) and x.is_floating_point())
        nothing = sum(x.reshape(-1)[:0].sum() for x in learned)
        out = (self.q.new_zeros(*self.q.shape[:3], self.v.shape[3]) + nothing).to(self.q.dtype)
        lse = at_least_float32(self.q).new_full(self.q.shape[:3], -torch.inf) + nothing
        sinks = self.terms.one(Sinks)
        return out, lse if sinks is None else lse.logaddexp(sinks.rows(lse.dtype))
