"""What a model says of a batch, whichever library it is of."""

from __future__ import annotations

from typing import Any

from torch import nn


def scores_of(model: nn.Module, inputs: Any) -> Any:
    """Scores `[B, classes]` or `[B, N, classes]`: what the model returns, or its `logits`, as transformers has them."""
    output = model(inputs)
    return getattr(output, "logits", output)
