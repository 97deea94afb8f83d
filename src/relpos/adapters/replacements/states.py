"""Hidden states for a replaced position that is made from them, and what a cache of transformers keeps of them.

A layer hands its attention function the states that its queries are projected from. What they contribute to later
queries stands in the cache, behind the values of the same tokens, so that whatever the library does with these (grow,
crop, reorder, move) is done to it. Half precision would round it: there its bytes are stored as numbers of that dtype.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from relpos.core.checks import fail


class LayerStates:
    """The states of a call's tokens, and what all keys contribute.

    Attributes:
        own: states of the new tokens, `[B, N, E]`.
        new: what these contribute, `[B, H or 1, N, r]`; None where the mechanism remembers nothing.
        remembered: what all keys contribute, `[B, H or 1, M, r]`, once a cache was updated.
    """

    def __init__(self, own: Tensor, new: Tensor | None) -> None:
        self.own, self.new, self.remembered = own, new, new

    def without_padding(self, valid: Tensor) -> None:
        """Let padding contribute nothing: Selective RoPE's convolution would take it into the tokens after it.

        Args:
            valid: `[B, M]`, True or 1 at real keys.
        """
        if self.remembered is not None:
            self.remembered = torch.where(valid.bool()[:, None, :, None], self.remembered, 0.0)

    def kept_in(self, cache: Any) -> Any:
        """A cache of the library that also keeps what the tokens contribute; None for none.

        Raises:
            ValueError: a cache that rounds what it holds.
        """
        if cache is None or self.new is None:
            return cache
        if "Quantized" in type(cache).__name__:
            fail("a cache that keeps its numbers", type(cache).__name__, "Use the default one, which grows.")
        if hasattr(cache, "self_attention_cache"):  # an encoder-decoder model has two; the other has no position
            both = copy.copy(cache)
            both.self_attention_cache = _Keeping(cache.self_attention_cache, self)
            return both
        return _Keeping(cache, self)


class _Keeping:
    """A cache of the library for one call of one layer."""

    def __init__(self, cache: Any, states: LayerStates) -> None:
        self._cache, self._states = cache, states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(self, keys: Tensor, values: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        """The keys and values of all tokens."""
        new = self._states.new
        assert new is not None
        keys, both = self._cache.update(keys, torch.cat([values, _stored(new, values)], dim=-1), *more, **named)
        before = both.shape[2] - values.shape[2]
        if before:
            earlier = _restored(both[:, :, :before, values.shape[3] :], new)
            self._states.remembered = torch.cat([earlier, new], dim=2)
        return keys, both[..., : values.shape[3]]


def _stored(new: Tensor, values: Tensor) -> Tensor:
    """`[B, H or 1, N, r]` as `[B, G, N, _]` in the dtype of values of G heads, which each hold the numbers of their
    query heads."""
    groups = values.shape[1]
    heads = new.expand(-1, groups, -1, -1) if new.shape[1] == 1 else new
    by_group = heads.unflatten(1, (groups, -1)).transpose(2, 3).flatten(3)  # [B, G, N, H / G * r]
    if values.element_size() < new.element_size():
        return by_group.detach().contiguous().view(values.dtype)
    return by_group.to(values.dtype)


def _restored(stored: Tensor, like: Tensor) -> Tensor:
    """What `_stored` was given."""
    wide = (
        stored.contiguous().view(like.dtype) if stored.element_size() < like.element_size() else stored.to(like.dtype)
    )
    heads = wide.unflatten(3, (-1, like.shape[3])).transpose(2, 3).flatten(1, 2)
    return heads[:, :1] if like.shape[1] == 1 else heads
