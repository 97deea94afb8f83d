"""What no query sees may hold anything: padding, the unused part of a cache, numbers that no one has written.

A forbidden pair has a weight of 0, but 0 times NaN is NaN, in a product of weights and values as in the gradients. So
where q, k or v hold what is no number, or so large that a product of two is none, keys and values that are hidden from
every query of their head are made 0 before any engine sees them, and so are queries that see nothing: their gradient is
0 because nothing of them is used. The mask alone says which these are (see `core.seen`). On CPU one pass over q, k and
v tells whether that is called for, and nothing is copied where it is not. A GPU would have to be waited for to know,
and a compiled graph cannot: there they are made 0 under every mask but plain intervals.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from relpos.core.checks import at_hand
from relpos.core.seen import hides_nothing, seen
from relpos.engines.call import Call


def without_hidden(call: Call) -> Call:
    """The call with 0 for keys and values that no query sees, and for queries that see no key, where it may matter."""
    if call.mask is None or call.is_empty or hides_nothing(call.mask, call.q.shape[2], call.k.shape[2]):
        return call
    if all(_is_tame(x) for x in (call.q, call.k, call.v)):
        return call
    rows, columns = seen(call.mask, call.q.shape[2], call.k.shape[2], call.q.device)
    if columns.shape[1] > 1:
        columns = columns.unflatten(1, (call.k.shape[1], call.groups)).any(dim=2)
    return replace(call, q=_alone(call.q, rows), k=_alone(call.k, columns), v=_alone(call.v, columns))


def _is_tame(x: Float[Tensor, "B H N D"]) -> bool:
    """Whether the sum of all squares is known to be a number; so is then every product of two rows."""
    wide = torch.promote_types(x.dtype, torch.float32)
    known = at_hand(x.detach(), lambda own: torch.linalg.vector_norm(own, dtype=wide).isfinite())
    return bool(known)


def _alone(x: Float[Tensor, "B H N D"], which: Bool[Tensor, "#B #H N"]) -> Float[Tensor, "B H N D"]:
    return x if at_hand(which, torch.all) else x.masked_fill(~which[..., None], 0)
