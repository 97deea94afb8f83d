"""What follows from shapes alone, kept on the object that it follows from, so that it is made once.

Lines, offsets, row numbers and their order depend on where tokens are and never on a weight. They hang on the object
itself: nothing is global, a copy or a pickle starts with nothing, and what is kept goes when the object goes. Nothing
is kept, and nothing kept is read, while a compiler or a function transform traces, under a dispatch mode (fake
tensors), and while a CUDA graph is captured, which must own what it reads.
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
"""Per object; the oldest goes first."""
FEW_BYTES = 2**20
"""Of one entry at most: what is larger costs little to make beside what is done with it."""

TOKEN_BYTES = 128
"""About what lines and all that is kept on them take for each query and each key."""


class _Kept(dict[Hashable, Any]):
    """Entries that no copy takes along."""

    def __deepcopy__(self, memo: object) -> _Kept:
        return _Kept()


NOT_COPIED = ("_kept", "_held", "_whole", "_structure")
"""Attributes that follow from others; no copy and no file has them."""


def state_of(owner: object) -> dict[str, Any]:
    """What `__getstate__` is to return."""
    return {name: x for name, x in owner.__dict__.items() if name not in NOT_COPIED}


def may_keep(device: torch.device) -> bool:
    """Whether what is made now may be read again later."""
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode() or inside_transform() or inside_forward_mode():
        return False
    return device == CPU or device.type != "cuda" or not torch.cuda.is_current_stream_capturing()


def share(owner: object) -> _Kept:
    """Where `keep` keeps what follows from an object. A shallow copy made from now on keeps it in the same place."""
    kept: _Kept = owner.__dict__.setdefault("_kept", _Kept())  # a frozen data class has no other way
    return kept


def keep(
    owner: object, key: Hashable, device: torch.device, make: Callable[[], T], size: Callable[[], int] | None = None
) -> T:
    """What `make` returns, from the second time on what it returned the first time.

    Args:
        owner: what it follows from; it is kept there. key: of plain values, all else that it depends on.
        device: of the result. make: makes it, out of nothing that can change.
        size: its bytes; above `FEW_BYTES` it is not kept. Under a compiler it is not called, for a question about
            sizes would become a guard of the graph. None where what is made is small, or angles of sequences.
    """
    if not may_keep(device):
        return make()
    kept: _Kept = owner.__dict__.get("_kept") or share(owner)
    found = kept.get(key, kept)
    if found is not kept:
        return found  # type: ignore[no-any-return]
    if size is not None and size() > FEW_BYTES:
        return make()
    with torch.inference_mode(False):  # whoever asks first, autograd may save it later
        made = make()
    if len(kept) >= _ENTRIES:
        kept.pop(next(iter(list(kept))), None)  # another thread may have been first
    kept[key] = made
    return made
