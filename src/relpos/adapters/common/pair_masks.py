"""Masks of all pairs, which speech toolkits hand to every layer, as the interval of keys that each query sees.

A toolkit makes one mask per model, of a byte per pair: padding of keys and queries, causality, a limited context or
chunks. In all of these a query sees consecutive keys. The mask is read once and the result kept on it for the layers
that follow.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from relpos.adapters.common.interface import mask_of
from relpos.core import Mask

_KEPT = "relpos_intervals"
"""An attribute of a mask: its version, and what `mask_of_pairs` returned."""


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
    version = None if hidden.is_inference() else hidden._version  # inference tensors count no changes
    kept = getattr(hidden, _KEPT, None)
    if kept is not None and version is not None and kept[0] == version:
        found: Mask | None = kept[1]
        return found
    made = _intervals(~hidden)
    if version is not None:
        setattr(hidden, _KEPT, (version, made))
    return made


def _intervals(seen: Tensor) -> Mask | None:
    first, count = seen.to(torch.uint8).argmax(-1), seen.sum(-1)
    starts = (seen[..., 1:] & ~seen[..., :-1]).sum(-1) + seen[..., 0]
    return Mask(low=first, high=first + count - 1) if bool((starts <= 1).all()) else None
