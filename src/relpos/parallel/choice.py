"""Which method computes a call: the one asked for, or with "auto" the one by which a rank sends least.

Forward, in numbers (the backward sends in the same proportions), of H query heads, G key heads, widths D and V:

    ring      keys that other ranks see  x  G (D + V)                at most (R - 1) n of them from each rank
    ulysses   n (R - 1) / R  x  (H + G) (D + V)                      queries, keys, values and output
    gather    (R - 1) n  x  G (D + V)                                and all keys in memory: only where it must be
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from relpos.core import Mask, PairRotations
from relpos.parallel.by_heads import lacks_heads
from relpos.parallel.by_ring import by_rotation, lacks_blocks
from relpos.parallel.exchange import Shares
from relpos.parallel.local_terms import TermsOfQueries
from relpos.parallel.ring_schedule import Schedule

ShardMethod = Literal["auto", "gather", "ring", "ulysses"]


def choose_method(
    method: ShardMethod, terms_of: TermsOfQueries, q: Tensor, k: Tensor, v: Tensor, has_states: bool,
    mask: Mask | None, schedule: Schedule,
) -> ShardMethod:  # fmt: skip
    """The method of a call, the same on every rank.

    Raises:
        NotImplementedError: the one asked for lacks something, or with "auto" all do.
    """
    terms, shares = terms_of(schedule.own[0]), schedule.spans
    size = len(shares)
    lacks: dict[ShardMethod, str | None] = {
        "ring": lacks_blocks(terms, mask),
        "gather": _lacks_rows(mask, shares),
        "ulysses": lacks_heads(terms, q.shape[1], k.shape[1], size),
    }
    able = next((name for name, lack in lacks.items() if lack is None), None)
    if able is None or (method != "auto" and lacks[method] is not None):
        lack = lacks["gather" if method == "auto" else method]
        remedy = f"Use method={able!r} or 'auto'." if able else "No other method computes this call."
        raise NotImplementedError(f"expected {lack} for method {method!r}; got another. {remedy}")
    if method != "auto":
        return method
    if lacks["ring"] is not None:
        return able
    if lacks["ulysses"] is not None or has_states:
        return "ring"
    heads, key_heads, width = q.shape[1], k.shape[1], k.shape[3] + v.shape[3]
    exchanged = q.shape[2] * (size - 1) * (heads + key_heads) * width // size
    rings = by_rotation(schedule, terms_of.whole.one(PairRotations))
    sent = (sum(ring.tokens_sent(rank) for ring in rings) * key_heads * width for rank in range(size))
    return "ulysses" if any(exchanged < one for one in sent) else "ring"  # most often the first rank decides


def _lacks_rows(mask: Mask | None, shares: Shares) -> str | None:
    """Why a rank cannot compute its own queries alone, in words; None if it can."""
    if mask is None or mask.blocks is None:
        return None
    size = mask.blocks.size
    if any(start % size for spans in shares for start, _ in spans):
        return f"shares that begin at a multiple of {size}, the size of the mask's blocks,"
    return None
