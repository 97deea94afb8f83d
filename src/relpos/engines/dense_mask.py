"""A mask given as a tensor: what it costs, and which `Mask` of O(N) numbers is the same."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from relpos.core import Mask


def note_on(mask: Mask, queries: int, keys: int) -> str:
    """The note of `explain` on it."""
    assert mask.allowed is not None
    count = f"{queries:,} x {keys:,}"
    structure = _structure(mask.allowed.expand(-1, -1, queries, keys))
    known = "structured masks in O(N): Mask.causal(), window(...), packed(...), padding(...)"
    wanted = known if structure is None else f"it in O(N) as {structure}"
    return f"the mask is dense, {count} numbers. Every engine supports {wanted}"


def _structure(pairs: Bool[Tensor, "B H N M"]) -> str | None:
    """The `Mask` that allows the same pairs, if it is one of the common ones."""
    if 0 in pairs.shape or not torch.equal(pairs, pairs[:, :1].expand_as(pairs)):
        return None
    each = pairs[:, 0]
    n, m = each.shape[1:]
    if bool(each.all()):
        return "mask=None"
    if torch.equal(each, each[:, :1].expand_as(each)):
        return "Mask.padding(valid, queries=torch.ones(...))"
    if n != m:
        return None
    ahead = torch.arange(m, device=each.device) - torch.arange(n, device=each.device)[:, None]
    seen = ahead[each.any(dim=0)]
    left, right = -int(seen.min()), int(seen.max())
    band = (ahead >= -left) & (ahead <= right)
    if min(left, right) >= 0 and torch.equal(each, band.expand_as(each)):
        reach = (None if one == n - 1 else one for one in (left, right))
        return "Mask.causal()" if (left, right) == (n - 1, 0) else "Mask.window({}, {})".format(*reach)
    first = each.int().argmax(dim=2).masked_fill(~each.any(dim=2), -1)  # its first token identifies a document
    same = (first[:, :, None] == first[:, None]) & (first >= 0)[:, :, None]
    found = "padding(valid)" if all(len(one[one >= 0].unique()) <= 1 for one in first) else "packed(segments)"
    if torch.equal(each, same):
        return f"Mask.{found}"
    return f"Mask.causal() & Mask.{found}" if torch.equal(each, same & (ahead <= 0)) else None
