"""Running sums over keys, of what each of them contributes, and where queries stand among them.

Sums run over the keys in their order, each row of a batch for itself, prefix tokens left out. They are float64: at
32,768 tokens a sum may be 20,000, which float32 holds to 0.001 alone.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, LowRank, Positions
from relpos.core.checks import fail

THOUSANDS = 2048
"""Whole numbers below it, and its multiples by them, are exact in TF32."""


def running_sums(contributed: Float[Tensor, "B H M *r"]) -> Float[Tensor, "B H S *r"]:
    """The sums after each key, along the third axis, in float64; the first, 0, is before all keys: S is M + 1."""
    sums = contributed.cumsum(dim=2, dtype=torch.float64)
    return torch.cat([torch.zeros_like(sums[:, :, :1]), sums], dim=2)


def at_queries(
    sums: Float[Tensor, "B H S *r"], queries: Coordinates, keys: Coordinates, name: str
) -> Float[Tensor, "B H N *r"]:
    """The sums after the keys that each query has behind it, itself included. Prefix tokens have none."""
    count, total = queries.count - queries.prefix, keys.count - keys.prefix
    if isinstance(queries, Positions) or isinstance(keys, Positions):
        if queries.axes > 1 or count != total or queries.prefix != keys.prefix:
            came = f"{queries!r} and {keys!r}"
            fail(f"the same tokens as queries and keys of a {name}", came, "Give Sequence(n, start=t) of others.")
        return sums.narrow(2, 1, count)
    first = queries.raster().low[0] - keys.raster().low[0] + 1
    if first >= 0 and first + count <= total + 1:
        return sums.narrow(2, first, count)  # a slice of symbols would compile a graph for each length
    places = torch.arange(first, first + count, device=sums.device).clamp(0, total)
    return sums.index_select(2, places)


def whole_parts(sums: Float[Tensor, "B H S"]) -> tuple[Float[Tensor, "B H S"], ...]:
    """The multiples of `THOUSANDS`, the whole numbers and the rest that make up sums. The gradient is the rest's."""
    whole = sums.detach().round()
    thousands = (whole / THOUSANDS).round() * THOUSANDS
    return thousands, whole - thousands, sums - whole


def products(
    pairs: list[tuple[Float[Tensor, "B H N"], Float[Tensor, "B H M"]]], queries: Coordinates, keys: Coordinates
) -> LowRank:
    """The sum of products of numbers of queries and of keys; 0 for prefix tokens, which are not among the numbers."""
    query, key = (torch.stack(side, dim=-1) for side in zip(*pairs, strict=True))
    return LowRank(F.pad(query, (0, 0, queries.prefix, 0)), F.pad(key, (0, 0, keys.prefix, 0)))


def running_angles(
    steps: Float[Tensor, "B H M P"], queries: Coordinates, keys: Coordinates, name: str
) -> tuple[Float[Tensor, "B H N P"], Float[Tensor, "B H L P"]]:
    """Angles of queries and keys, in float64: the running sums of what each key turns by; 0 for prefix tokens."""
    sums = running_sums(steps)
    query, key = at_queries(sums, queries, keys, name), F.pad(sums[:, :, 1:], (0, 0, keys.prefix, 0))
    return key if keys is queries else F.pad(query, (0, 0, queries.prefix, 0)), key
