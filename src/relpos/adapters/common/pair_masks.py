"""Masks of all pairs, which libraries hand to every layer, as what they say of each token.

A speech toolkit makes one mask per model, of a byte per pair: padding of keys and queries, causality, a limited context
or chunks. In all of these a query sees consecutive keys. transformers makes one of the documents in a row, which it
finds by `position_ids`. A mask is read once and the result kept on it for the layers that follow.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool
from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.core import Mask

_KEPT = "relpos_read"
"""An attribute of a mask: its version, and what was read from it."""


def mask_of_pairs(hidden: Bool[Tensor, "#B #N M"], queries: int) -> Mask | None:
    """The mask of `hidden`, True where a pair may not attend; None if the keys of a query are not consecutive.

    None, too, while `torch.compile` records, because the answer depends on numbers; a mask of keys, `[B, 1, M]`, is
    always served. A query that sees no key gets zeros, as in the toolkits.
    """
    keys = hidden.shape[-1]
    if hidden.shape[1] == 1:
        return mask_of(~hidden[:, 0], queries, keys)
    if hidden.shape[1] != queries or torch.compiler.is_compiling():
        return None
    return _once(hidden, lambda: _intervals(~hidden))


def mask_of_documents(mask: Tensor, window: int | None) -> Mask | None:
    """The mask of documents packed in rows, `[B, 1, N, N]`, which transformers makes from `position_ids`; None for any
    other, and while `torch.compile` records.

    Args:
        mask: True where a pair may attend; or 0 there, and the lowest number of its dtype elsewhere.
        window: beside itself a query sees at most `window - 1` tokens before it; None for all of its document.
    """
    if mask.shape[1:] != (1, mask.shape[-1], mask.shape[-1]) or torch.compiler.is_compiling():
        return None
    return _once(mask, lambda: _documents(mask[:, 0], window))


def _once(mask: Tensor, read: Callable[[], Mask | None]) -> Mask | None:
    """What `read` returns of a mask that has not changed since."""
    version = None if mask.is_inference() else mask._version  # inference tensors count no changes
    kept = getattr(mask, _KEPT, None)
    if kept is not None and version is not None and kept[0] == version:
        found: Mask | None = kept[1]
        return found
    made = read()
    if version is not None:
        setattr(mask, _KEPT, (version, made))
    return made


def _intervals(seen: Tensor) -> Mask | None:
    first, count = seen.to(torch.uint8).argmax(-1), seen.sum(-1)
    starts = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0]
    return Mask(low=first, high=first + count - 1) if bool((starts <= 1).all()) else None


def _documents(mask: Tensor, window: int | None) -> Mask | None:
    seen = mask if mask.dtype == torch.bool else mask == 0
    if mask.dtype != torch.bool and not bool((seen | (mask == torch.finfo(mask.dtype).min)).all()):
        return None
    n = mask.shape[-1]
    order = torch.arange(n, device=mask.device)
    first, last = seen.to(torch.uint8).argmax(-1), n - 1 - seen.flip(-1).to(torch.uint8).argmax(-1)
    begins = first == order
    low = torch.where(begins, order, 0).cummax(-1).values
    left = None if window is None or window >= n else window - 1
    low = low if left is None else torch.maximum(low, order - left)
    if not bool(((first == low) & (last == order) & (seen.sum(-1) == order - low + 1)).all()):
        return None
    return Mask.packed(begins.cumsum(-1)) & Mask(left, 0)
