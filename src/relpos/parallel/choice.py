"""Which method computes a call: the one asked for, or with "auto" the one by which a rank sends least.

Forward, in numbers (the backward sends in the same proportions), of H query heads, G key heads, widths D and V:

    ring      keys that other ranks see  x  G (D + V)                at most (R - 1) n of them from each rank
    ulysses   n (R - 1) / R  x  (H + G) (D + V)                      queries, keys, values and output
    gather    (R - 1) n  x  G (D + V)                                and all keys in memory: only where it must be
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from relpos.core import Terms
from relpos.parallel.by_heads import lacks_heads
from relpos.parallel.by_ring import lacks_blocks
from relpos.parallel.ring_schedule import Schedule

ShardMethod = Literal["auto", "gather", "ring", "ulysses"]


def choose_method(
    method: ShardMethod, terms: Terms, q: Tensor, k: Tensor, v: Tensor, has_states: bool, schedule: Schedule
) -> ShardMethod:
    """The method of a call, the same on every rank.

    Raises:
        NotImplementedError: the one asked for lacks something.
    """
    size = len(schedule.blocks)
    lacks = {
        "ring": lacks_blocks(terms, schedule.mask),
        "ulysses": lacks_heads(terms, q.shape[1], k.shape[1], size),
        "gather": None,
    }
    if method != "auto":
        if (lack := lacks[method]) is not None:
            other = next(name for name, reason in lacks.items() if reason is None)
            raise NotImplementedError(
                f"expected {lack} for method {method!r}; got another. Use method={other!r} or 'auto'."
            )
        return method
    if lacks["ring"] is not None:
        return "gather"
    if lacks["ulysses"] is not None or has_states:
        return "ring"
    heads, key_heads, width = q.shape[1], k.shape[1], k.shape[3] + v.shape[3]
    exchanged = q.shape[2] * (size - 1) * (heads + key_heads) * width // size
    sent = max(schedule.tokens_sent(rank) for rank in range(size)) * key_heads * width
    return "ulysses" if exchanged < sent else "ring"
