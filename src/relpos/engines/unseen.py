"""Keys and values that no query sees may hold anything: padding, the unused part of a cache, uninitialized memory.

A forbidden pair has weight 0, but 0 times NaN is NaN, in the output and in the gradients. Therefore keys and values
that no query of their head sees, and queries that see no key, are replaced by 0 before an engine gets them, if q, k or
v hold NaN, infinities, or values whose products overflow. The mask decides which these are (see `core.visibility`).

On CPU one pass over q, k and v finds out whether this is needed, and nothing is copied if not. On a GPU this would take
a synchronization, and in a compiled graph it is impossible: there they are replaced under every mask but plain
intervals.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relpos.core import LineVectors, Term
from relpos.core.checks import known_value
from relpos.core.tree import changed
from relpos.core.visibility import hides_nothing, visible_tokens
from relpos.engines.call import Call


def without_unseen(call: Call) -> Call:
    """The call with 0 in keys and values that no query sees and in queries that see no key, if that may matter."""
    if call.mask is None or call.is_empty or hides_nothing(call.mask, call.q.shape[2], call.k.shape[2]):
        return call
    if holds_finite(call):
        return call
    return with_zeros(call, *visible_tokens(call.mask, call.q.shape[2], call.k.shape[2], call.q.device))


def holds_finite(call: Call) -> bool:
    """Whether it is known that no product of what queries, keys and values hold overflows."""
    return all(_is_finite(x) for x in (call.q, call.k, call.v, *_contents(call)))


def _contents(call: Call) -> list[Tensor]:
    return [term.content for term in call.terms.of(LineVectors) if term.content is not None]


def with_zeros(call: Call, rows: Bool[Tensor, "#B #H N"], columns: Bool[Tensor, "#B #H M"]) -> Call:
    """The call with 0 in queries, and in keys and values, that are not visible."""
    if columns.shape[1] > 1:
        columns = columns.unflatten(1, (call.k.shape[1], call.groups)).any(dim=2)

    def shown(term: Term) -> Term:
        if not isinstance(term, LineVectors) or term.content is None:
            return term
        return changed(term, content=_zeroed(term.content, rows))

    terms = call.terms.each(shown) if _contents(call) else call.terms
    q, k, v = _zeroed(call.q, rows), _zeroed(call.k, columns), _zeroed(call.v, columns)
    return replace(call, q=q, k=k, v=v, terms=terms)


def _is_finite(x: Float[Tensor, "B H N D"]) -> bool:
    """Whether the sum of all squares is known to be finite; then so is every product of two rows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    known = known_value(x.detach(), lambda own: torch.linalg.vector_norm(own, dtype=wide).isfinite())
    return bool(known)


def _zeroed(x: Float[Tensor, "B H N D"], visible: Bool[Tensor, "#B #H N"]) -> Float[Tensor, "B H N D"]:
    return x if known_value(visible, torch.all) else x.masked_fill(~visible[..., None], 0)
