"""Attention over terms: one function and its engines. Imports the core only; never a mechanism."""

from relpos.engines.api import Explanation, attention, attention_weights, explain
from relpos.engines.flash import flash_attention
from relpos.engines.linear import linear_attention
from relpos.engines.selection import backends, require_backend

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
