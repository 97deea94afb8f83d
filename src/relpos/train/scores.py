"""A model's output for a batch, for models of any library."""

from __future__ import annotations

from typing import Any

from torch import nn

from relpos.data.text import PackedTokens


def scores_of(model: nn.Module, inputs: Any) -> Any:
    """Scores `[B, classes]` or `[B, N, classes]`: the model's output, or its `logits` for transformers models.

    A model of packed documents gets `segments`, as relpos's `LanguageModel`.
    """
    packed = isinstance(inputs, PackedTokens)
    output = model(inputs.tokens, segments=inputs.segments) if packed else model(inputs)
    return getattr(output, "logits", output)
