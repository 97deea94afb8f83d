"""The precisions of training, by name."""

from __future__ import annotations

import torch

from relpos.core.checks import fail

PRECISIONS = {"float32": "no", "bf16-mixed": "bf16", "fp16-mixed": "no"}
"""accelerate's `mixed_precision` for each. It refuses float16 on a CPU, so the loop scales those losses itself."""
AUTOCAST = {"float32": None, "bf16-mixed": torch.bfloat16, "fp16-mixed": torch.float16}
"""The autocast dtype of each precision; None for the weights' dtype."""


def require_precision(precision: str) -> None:
    """Raise unless `precision` is the name of a precision."""
    if precision not in PRECISIONS:
        fail(f"a precision among {', '.join(PRECISIONS)}", repr(precision), "Choose one of them.")
