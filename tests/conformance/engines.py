"""What an engine cannot do, for whatever mechanism: declared here, in one place, when the engine is registered.

An engine that is not named can do everything in float64, float32 and bfloat16. What one mechanism needs and an engine
lacks is declared by that mechanism's test instead (`MechanismSuite.lacks`).
"""

from __future__ import annotations

import os
import zlib
from typing import Any

import torch

import relpos

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""The dtypes of comparisons, finest first."""

LIMITED: dict[str, tuple[torch.dtype, ...]] = {}
"""Engine to the dtypes it takes, finest first, where it does not take all; others it must refuse."""


SERVED = {"triton": ("LineBias", "Rotation", "QueryBias", "Scale", "Sinks")}
"""Engine to the terms it serves, where those are few."""


def lacking(
    engine: str, position: relpos.Terms | relpos.Mechanism, *sides: Any, mask: relpos.Mask | None = None
) -> str | None:
    """What the engine's NotImplementedError names, where it does not serve what a position says on these sides."""
    if engine not in SERVED:
        return None
    if mask is not None and mask.has_globals:
        return "globals"
    if mask is not None and mask.blocks is not None:
        return "blocks"
    terms = position if isinstance(position, relpos.Terms) else position.terms(*sides)
    for term in terms:
        if type(term).__name__ not in SERVED[engine]:
            return type(term).__name__
    biases = terms.of(relpos.LineBias)
    if len(biases) > 1:
        return "several line biases"
    learned = [term.lines for term in biases if term.values.requires_grad and term.lines.layout.kind == "irregular"]
    return "irregular lines" if any(x.shape[0] > 1 for a in learned for x in (a.query, a.key) if x.dim() == 2) else None


def dtypes(engine: str) -> tuple[torch.dtype, ...]:
    """The dtypes an engine takes, finest first."""
    return LIMITED.get(engine, DTYPES)


def finest(engine: str) -> torch.dtype:
    """The dtype in which an engine is compared with itself."""
    return dtypes(engine)[0]


def engines() -> list[str]:
    """All registered engines but FlexAttention's, which wants a GPU, compiles every call and has tests of its own."""
    return [name for name in relpos.backends() if name != "flex"]


INTERPRETED = () if torch.cuda.is_available() else ("triton",)
"""Engines whose kernels an interpreter runs, 20 ms a tile."""
INTERPRETED_SHARE = int(os.environ.get("RELPOS_INTERPRETED_SHARE", "10"))
"""One in so many of the suites runs them, always the same ones: they know terms, and not whose terms they are."""


def engines_of(suite: type) -> list[str]:
    """The engines that a mechanism's suite runs."""
    left_out = INTERPRETED if zlib.crc32(suite.__name__.encode()) % INTERPRETED_SHARE else ()
    return [name for name in engines() if name not in left_out]
