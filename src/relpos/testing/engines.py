"""Which engines a suite runs, and what an engine cannot do for any mechanism.

Every engine takes float64, float32 and bfloat16, and every one but `triton` takes every term. What an engine lacks for
one mechanism alone is declared by that mechanism's suite (`MechanismSuite.lacks`).
"""

from __future__ import annotations

from typing import Any

import torch

from relpos.core import LineBias, LowRank, Mask, Scale, Terms
from relpos.engines import backends
from relpos.engines.selection import ENGINES
from relpos.engines.triton.limits import MOST_RANK
from relpos.position import Mechanism
from relpos.testing.calls import terms_of_case

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""The dtypes of comparisons, finest first."""

FINEST = DTYPES[0]
"""The dtype in which results of one engine are compared with each other."""

INTERPRETED = () if torch.cuda.is_available() else ("triton",)
"""Engines whose kernels only an interpreter can run on this machine, at 20 ms a tile."""


def engines() -> list[str]:
    """All registered engines but FlexAttention's, which compiles every call."""
    return [name for name in backends() if name != "flex"]


def lacking(engine: str, position: Terms | Mechanism, *tokens: Any, mask: Mask | None = None) -> str | None:
    """A word of the engine's NotImplementedError for a position and a mask; None if it supports them.

    Args:
        engine: its name.
        position: terms, or a mechanism.
        tokens: coordinates of queries and of keys, for a mechanism.
        mask: of the call.
    """
    if engine != "triton":
        return None
    if mask is not None and mask.has_globals:
        return "globals"
    if mask is not None and mask.blocks is not None:
        return "blocks"
    terms = position if isinstance(position, Terms) else terms_of_case(position, *tokens)
    served = next(one.served for one in ENGINES if one.name == engine) or ()
    for term in terms:
        if not isinstance(term, (*served, Scale)):  # a scale is the call's
            return type(term).__name__
    biases = terms.of(LineBias)
    if len(biases) > 1:
        return "several line biases"
    if sum(term.query.shape[-1] for term in terms.of(LowRank)) > MOST_RANK:
        return "low-rank biases"
    learned = [term.lines for term in biases if term.values.requires_grad and term.lines.layout.kind == "irregular"]
    return "irregular lines" if any(x.shape[0] > 1 for a in learned for x in (a.query, a.key) if x.dim() == 2) else None
