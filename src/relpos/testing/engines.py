"""Which engines a suite runs, and what an engine cannot do for any mechanism.

An engine that is not named here takes every term in float64, float32 and bfloat16. What an engine lacks for one
mechanism alone is declared by that mechanism's suite (`MechanismSuite.lacks`).
"""

from __future__ import annotations

from typing import Any

import torch

from relpos.core import LineBias, Mask, Terms
from relpos.engines import backends
from relpos.position import Mechanism

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""The dtypes of comparisons, finest first."""

LIMITED: dict[str, tuple[torch.dtype, ...]] = {}
"""Engine to its dtypes, finest first, where it does not take all; it must refuse the others."""

SERVED = {"triton": ("LineBias", "Rotation", "QueryBias", "Scale", "Sinks")}
"""Engine to the terms it serves, where those are few."""

INTERPRETED = () if torch.cuda.is_available() else ("triton",)
"""Engines whose kernels only an interpreter can run on this machine, at 20 ms a tile."""


def engines() -> list[str]:
    """All registered engines but FlexAttention's, which compiles every call."""
    return [name for name in backends() if name != "flex"]


def dtypes(engine: str) -> tuple[torch.dtype, ...]:
    """The dtypes an engine takes, finest first."""
    return LIMITED.get(engine, DTYPES)


def finest(engine: str) -> torch.dtype:
    """The dtype in which results of one engine are compared with each other."""
    return dtypes(engine)[0]


def lacking(engine: str, position: Terms | Mechanism, *sides: Any, mask: Mask | None = None) -> str | None:
    """The word that the engine's NotImplementedError names under a position and a mask; None where it serves them.

    Args:
        engine: its name.
        position: terms, or a mechanism.
        sides: coordinates of queries and of keys, for a mechanism.
        mask: of the call.
    """
    if engine not in SERVED:
        return None
    if mask is not None and mask.has_globals:
        return "globals"
    if mask is not None and mask.blocks is not None:
        return "blocks"
    terms = position if isinstance(position, Terms) else position.terms(*sides)
    for term in terms:
        if type(term).__name__ not in SERVED[engine]:
            return type(term).__name__
    biases = terms.of(LineBias)
    if len(biases) > 1:
        return "several line biases"
    learned = [term.lines for term in biases if term.values.requires_grad and term.lines.layout.kind == "irregular"]
    return "irregular lines" if any(x.shape[0] > 1 for a in learned for x in (a.query, a.key) if x.dim() == 2) else None
