"""PoPE: content decides the magnitude of each dimension of queries and keys, position its angle.

    score[h, i, j] = scale * sum over c of softplus(q[i, c]) softplus(k[j, c]) cos((i - j) w[c] - phase[h, c])

with w[c] = base ** (-c / D) for each of the D dimensions of a head, twice as many frequencies as RoPE has. In RoPE the
content of a pair of dimensions has an angle of its own, which adds to that of the position; here there is none: what a
token is and where it is do not interfere. The learned phase is the offset at which a dimension prefers a key. It starts
at 0 and is limited to -2 pi to 0, as published; beyond the limits it has no gradient.

Queries and keys become twice as wide in attention (`core.Polar`), values do not; the scale stays 1 / sqrt(D). Caches
hold keys as they were. Prefix tokens have angle 0, and a grid is read in raster order. A pair of tokens takes 3 D
multiplications forward and 8 D backward, where RoPE takes 2 D and 5 D: 1.6 times the products of a step.

Source: Gopalakrishnan et al. 2025 ("Decoupling the 'What' and 'Where' With Polar Coordinate Positional Embeddings"),
and `PolarEmbedding` of x-transformers: its `learned_bias[h, 0]` is `phase[h]`. Not to be confused with RoPE, which
rotates pairs of dimensions.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import (
    Coordinates,
    Polar,
    Positions,
    Rotation,
    Terms,
    at_least_float32,
    constant,
    may_cache,
    require_coordinates,
)
from relpos.core.checks import require_int, require_number
from relpos.position.base.angles import frequencies, positions
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.rotary import LONGEST_CACHED, context_length, kept


class PolarEmbedding(Mechanism):
    """PoPE: magnitudes from content, angles from position, along one axis; a grid is read in raster order.

    `score = scale * sum over c of softplus(q[c]) softplus(k[c]) cos((i - j) base ** (-c / D) - phase[c])`. Any length;
    prefix tokens have angle 0.

    Source: Gopalakrishnan et al. 2025 (PoPE).

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D.
        base: the slowest dimension turns by nearly 1 / base radians per position.

    Attributes:
        phase: `[H, D]`, radians; read between -2 pi and 0.

    Raises:
        ValueError: an argument out of its range; in attention, heads of another width.

    Examples:
        >>> pope = relpos.PolarEmbedding(num_heads=4, head_dim=16)
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> relpos.attention(q, k, v, position=pope, queries=relpos.Sequence(10)).shape
        torch.Size([1, 4, 10, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("base",)

    def __init__(self, num_heads: int, head_dim: int, *, base: float = 10000.0) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(head_dim, "head_dim", at_least=1)
        require_number(base, "base", "above 0", "The published one is 10000.")
        self.num_heads, self.head_dim, self.base = num_heads, head_dim, base
        self.phase = nn.Parameter(torch.zeros(num_heads, head_dim))

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim)

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "_ 1 N D"]:
        """The angles of each token in radians, float64, without the phase."""
        bands = constant(frequencies(self.head_dim, self.base), torch.float64, self.device)
        return (positions(_raster(coordinates, "coordinates"), self.device) * bands)[:, None]

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        both = [_raster(queries, "queries")] + ([] if keys is None else [_raster(keys, "keys")])
        irregular = any(isinstance(one, Positions) for one in both)
        if irregular or not may_cache(self.device) or context_length(*both) > LONGEST_CACHED:
            rotation = self._rotation(both)
        else:
            rotation = kept(self, both, None, 2 * self.head_dim, self._rotation)
        phase = at_least_float32(self.phase).clamp(-2 * math.pi, 0.0)
        return Terms(Polar.of(rotation, phase, self.head_dim))

    def _rotation(self, both: list[Coordinates]) -> Rotation:
        turns = [self.angles(one) for one in both]
        return Rotation(turns[0], turns[-1], layout="half")


def _raster(coordinates: Coordinates, name: str) -> Coordinates:
    require_coordinates(coordinates, name)
    return coordinates.raster()


PRESETS = [
    Preset(
        name="pope",
        title="PoPE, polar",
        build=PolarEmbedding.from_site,
        summary="Each number of queries and keys becomes a magnitude, whose angle is the position times a frequency: "
        "what a token is and where it is are kept apart. Each head learns the offset that each dimension prefers.",
        source="Gopalakrishnan et al. 2025; base 10,000",
        token_axes=(1,),
        family="rotation",
        aliases=("polar",),
    )
]
