"""A cache on the object itself, for results that depend on shapes alone.

Lines, offsets, row numbers and their order depend on where tokens are and never on a weight. They are stored on the
object: nothing is global, a copy or a pickle starts empty, and the cache is freed with the object. The cache is neither
written nor read while a compiler or a function transform traces, under a dispatch mode (fake tensors), and while a CUDA
graph is captured, which must own what it reads.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core.checks import CPU
from relpos.core.private import inside_forward_mode, inside_transform

T = TypeVar("T")

_ENTRIES = 16
"""Maximum entries per object; the oldest is dropped first."""
FEW_BYTES = 2**20
"""Maximum size of an entry; making a larger one costs little relative to its use."""

TOKEN_BYTES = 128
"""Approximate size of lines and their cache, per query and per key."""


class _ShapeCache(dict[Hashable, Any]):
    """Entries that copies do not take along."""

    def __deepcopy__(self, memo: object) -> _ShapeCache:
        return _ShapeCache()


NOT_COPIED = ("_shape_cache", "_decoding_terms", "_whole", "_structure")
"""Derived attributes, neither copied nor saved."""


def state_of(owner: object) -> dict[str, Any]:
    """The result of `__getstate__`."""
    return {name: x for name, x in owner.__dict__.items() if name not in NOT_COPIED}


def may_cache(device: torch.device) -> bool:
    """Whether the cache may be used now."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or inside_transform() or inside_forward_mode():
        return False
    return device == CPU or device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def cache_of(owner: object) -> _ShapeCache:
    """The cache of an object, which `cached` uses. Shallow copies made from now on share it."""
    # A frozen data class has no other way.
    cache: _ShapeCache = owner.__dict__.setdefault("_shape_cache", _ShapeCache())
    return cache


def cached(
    owner: object, key: Hashable, device: torch.device, make: Callable[[], T], size: Callable[[], int] | None = None
) -> T:
    """The result of `make`, cached by the first call.

    Args:
        owner: the object it depends on, which holds the cache. key: plain values, all else that it depends on.
        device: of the result. make: makes the result from nothing that can change.
        size: bytes of the result; above `FEW_BYTES` it is not cached. Not called under a compiler, where a question
            about sizes would become a guard of the graph. None if the result is small, or angles of sequences.
    """
    if not may_cache(device):
        return make()
    cache: _ShapeCache = owner.__dict__.get("_shape_cache") or cache_of(owner)
    found = cache.get(key, cache)
    if found is not cache:
        return found  # type: ignore[no-any-return]
    if size is not None and size() > FEW_BYTES:
        return make()
    with torch.inference_mode(False):  # autograd may save it later
        result = make()
    keep(owner, key, result)
    return result


def keep(owner: object, key: Hashable, result: object) -> None:
    """Put a result into the cache of an object, in place of an earlier one; the oldest goes where there are many."""
    cache = cache_of(owner)
    if len(cache) >= _ENTRIES:
        cache.pop(next(iter(list(cache))), None)  # another thread may have been first
    cache[key] = result
