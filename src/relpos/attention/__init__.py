"""Attention over terms: one function and its engines. Imports the core only; never a mechanism."""

from relpos.attention.api import Explanation, attention, attention_weights, backends, explain, require_backend
from relpos.attention.linear import linear_attention
from relpos.attention.tiled import flash_attention

__all__ = [
    "Explanation",
    "attention",
    "attention_weights",
    "backends",
    "explain",
    "flash_attention",
    "linear_attention",
    "require_backend",
]
