"""What an engine cannot do, for whatever mechanism: declared here, in one place, when the engine is registered.

An engine that is not named can do everything in float64, float32 and bfloat16. What one mechanism needs and an engine
lacks is declared by that mechanism's test instead (`MechanismSuite.lacks`).
"""

from __future__ import annotations

import torch

import relpos

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
"""The dtypes of comparisons, finest first."""

LIMITED: dict[str, tuple[torch.dtype, ...]] = {}
"""Engine to the dtypes it takes, finest first, where it does not take all; others it must refuse."""


def dtypes(engine: str) -> tuple[torch.dtype, ...]:
    """The dtypes an engine takes, finest first."""
    return LIMITED.get(engine, DTYPES)


def finest(engine: str) -> torch.dtype:
    """The dtype in which an engine is compared with itself."""
    return dtypes(engine)[0]


def engines() -> list[str]:
    """All registered engines."""
    return list(relpos.backends())
