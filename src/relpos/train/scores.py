"""A model's output for a batch, for models of any library."""

from __future__ import annotations

from typing import Any

from torch import nn


def scores_of(model: nn.Module, inputs: Any) -> Any:
    """Scores `[B, classes]` or `[B, N, classes]`: the model's output, or its `logits` for transformers models."""
    output = model(inputs)
    return getattr(output, "logits", output)
