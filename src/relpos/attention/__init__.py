"""Attention over terms: one function and its engines. Imports the core only; never a mechanism."""

from relpos.attention.api import Explanation, attention, attention_weights, backends, explain, require_backend

__all__ = ["Explanation", "attention", "attention_weights", "backends", "explain", "require_backend"]
