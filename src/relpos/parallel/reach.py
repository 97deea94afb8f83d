"""Which stretches of keys the queries of a stretch see: what need not be sent, and what needs no mask.

Of a causal mask or a window this follows from plain numbers. Other structure (segments, explicit orders, globals) is
read from the mask's tensors once for each mask, which on a GPU waits for them.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch

from relpos.core import Mask, cached
from relpos.core.visibility import visible_tokens
from relpos.parallel.layout import Stretch


class Reach(enum.IntEnum):
    """How many pairs of two stretches a mask allows."""

    NONE = 0
    SOME = 1
    ALL = 2


class SeenPart(NamedTuple):
    """One pair of stretches, and how many of its pairs are allowed."""

    queries: Stretch
    keys: Stretch
    reach: Reach


def reach_of(mask: Mask | None, queries: Stretch, keys: Stretch) -> Reach:
    """How many pairs a mask by index, of `left` and `right` alone, allows."""
    if mask is None:
        return Reach.ALL
    (first, stop), (first_key, stop_key) = queries, keys
    last, last_key = stop - 1, stop_key - 1
    left, right = mask.left, mask.right
    if (right is not None and first_key > last + right) or (left is not None and last_key < first - left):
        return Reach.NONE
    whole = (right is None or last_key <= first + right) and (left is None or first_key >= last - left)
    return Reach.ALL if whole else Reach.SOME


def reach_table(
    mask: Mask | None, queries: list[Stretch], keys: list[Stretch], device: torch.device
) -> dict[tuple[Stretch, Stretch], Reach]:
    """The reach of every pair of some stretches; the same on every rank.

    Args:
        mask: of all tokens.
        queries, keys: the stretches, in order; the last ends with the sequence.
    """
    if mask is None or mask.is_interval:
        return {(one, other): reach_of(mask, one, other) for one in queries for other in keys}
    return cached(mask, ("reach", tuple(queries), tuple(keys)), device, lambda: _read(mask, queries, keys, device))


def _read(
    mask: Mask, queries: list[Stretch], keys: list[Stretch], device: torch.device
) -> dict[tuple[Stretch, Stretch], Reach]:
    count = queries[-1][1]
    found = {}
    for one in queries:
        own = mask.narrow(slice(*one), slice(0, count), device)
        seen = visible_tokens(own, one[1] - one[0], count, device)[1].flatten(0, 1).any(dim=0)
        for other, some in zip(keys, torch.stack([seen[a:b].any() for a, b in keys]).tolist(), strict=True):
            found[one, other] = Reach.SOME if some else Reach.NONE
    return found


def narrowed(mask: Mask | None, queries: Stretch, keys: Stretch, device: torch.device) -> Mask | None:
    """The mask of two stretches."""
    return None if mask is None else mask.narrow(slice(*queries), slice(*keys), device)
