"""The scores of all terms for every pair, which the dense engines share: the sum of `Term.scores`."""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.core import DenseBias, PairRotations, QueryScale, RowRule, Terms, at_least_float32, content
from relpos.core.algebra import Keys, Queries
from relpos.core.private import exporting

PAIRS_AT_ONCE = 2**18
"""Pairs of query and key for which a rule is called at once."""


def product(terms: Terms, q: Queries, k: Keys) -> Float[Tensor, "B H N M"]:
    """The content product of every pair, not scaled."""
    chosen = terms.one(PairRotations)
    if chosen is None:
        q, k = content(terms, q, k)
        return q @ k.mT
    found = torch.zeros((), dtype=q.dtype, device=q.device)
    for alone, mask in chosen.parts(terms, None):
        found = torch.where(mask.dense(q.shape[2], k.shape[2], q.device), product(alone, q, k), found)
    return found


def scores(
    terms: Terms,
    q: Queries,
    k: Keys,
    scale: float,
    allowed: Bool[Tensor, "#B #H N M"] | None,
) -> Float[Tensor, "#B #H #N #M"] | None:
    """The sum that is added to the content score, in the order of the terms; None if there is none. An axis of equal
    rows or columns may have size 1. See `Term.scores`."""
    found = [
        _in_blocks(term, q, k, scale, allowed) if isinstance(term, RowRule) else term.scores(q, k, scale, allowed)
        for term in terms
    ]
    added = [at_least_float32(x) for x in found if x is not None]
    if not added:
        return None
    total = reduce(torch.add, added)
    total = total if total.dtype == q.dtype else total.to(q.dtype)
    total = total if total.dim() == 4 else total.unsqueeze(0)
    temperature = terms.one(QueryScale)
    if temperature is None or not temperature.adds_scores:
        return total
    if allowed is not None and terms.one(DenseBias) is not None:  # elsewhere it may hold NaN
        total = total.masked_fill(~allowed, 0)
    return temperature.of_rows(total)


def _in_blocks(
    term: RowRule,
    q: Queries,
    k: Keys,
    scale: float,
    allowed: Bool[Tensor, "#B #H N M"] | None,
) -> Float[Tensor, "#B #H N M"]:
    """The scores of a rule; for many pairs, a checkpointed block of rows at a time, because a rule may hold dozens of
    numbers per pair for its gradient."""
    n, m = q.shape[2], k.shape[2]
    step = max(1, PAIRS_AT_ONCE // max(1, m))
    if exporting() or n <= step:  # a program for any length has no number of blocks
        return term.scores(q, k, scale, allowed)
    blocks = []
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        allowed_rows = None if allowed is None else allowed[:, :, rows]
        block = checkpoint(term, q[:, :, rows], k, allowed_rows, rows, use_reentrant=False)
        assert isinstance(block, Tensor)
        blocks.append(block)
    return torch.cat(blocks, dim=2)
