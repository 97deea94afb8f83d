"""FIRE: a small network of the distance, relative to the query's own position.

    score[h, i, j] += mlp( log(1 + |c| |i - j|) / log(1 + |c| max(i, L)) )[h]

so that keys before a query give inputs in [0, 1], however long the sequence. c and L are learned (L as a multiple of
its start value), mlp is Linear(1, 32), ReLU, Linear(32, H). Up to position L the bias depends on the offset alone.
Beyond it, the same offset counts for less the later the query is, so this is not a bias of the offset. Positions are
the tokens' coordinates and count from the start of a document, also for a cached, shifted or packed query; a sequence
that starts elsewhere gives other biases. Prefix tokens have no position and get 0.

The network takes the distance of every pair: for n query rows and M keys it makes n x M x 32 numbers, for all heads at
once, and once for the whole batch if its elements share their positions.

Source: Li et al. 2024 ("Functional Interpolation for Relative Positions Improves Long Context Transformers"), section
3.2 and the code in its appendix, whose 1e-6 in the denominator is here too. Defined for causal attention; |i - j|, as
in that code, works both ways, but a key after its query may give an input above 1. Not to be confused with Swin V2's
network (`log_cpb`), which takes the offset alone, or with KERPLE, whose function is fixed up to two numbers.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from relpos.core import Coordinates, RowRule, Terms, at_least_float32, require_coordinates
from relpos.core.checks import fail, require_int, require_number
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site

EPS = 1e-6


class FIREBias(Mechanism):
    """A learned function of the distance over the query's position.

    `score[h, i, j] += mlp(log(1 + c |i - j|) / log(1 + c max(i, L)))[h]`: positions count from 0 at the start of a
    document. Any length; meant for causal attention. Prefix tokens get 0.

    Source: Li et al. 2024, section 3.2.

    Args:
        num_heads: query heads, H.
        hidden_dim: width of the network.
        c: start value of the factor inside the logarithms.
        threshold: L, start value of the learned threshold; smaller positions count as L.

    Attributes:
        c: `[1]`.
        multiplier: `[1]`, multiplies `threshold`.
        mlp: `[1 -> hidden_dim -> H]`.

    Raises:
        ValueError: an argument out of its range; in `terms`, floating-point positions.

    Examples:
        >>> fire = relpos.FIREBias(num_heads=4)
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> relpos.attention(q, k, v, position=fire, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 4, 10, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("threshold",)

    def __init__(self, num_heads: int, *, hidden_dim: int = 32, c: float = 0.1, threshold: float = 512.0) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(hidden_dim, "hidden_dim", at_least=1)
        require_number(c, "c", "above 0", "The published one is 0.1.")
        require_number(threshold, "threshold", "above 0", "The published one is 512.")
        self.num_heads, self.hidden_dim, self.threshold = num_heads, hidden_dim, float(threshold)
        self._start = float(c)
        self.c = nn.Parameter(torch.tensor([float(c)]))  # with an axis: fully_shard takes no scalars
        self.multiplier = nn.Parameter(torch.ones(1))
        self.mlp = nn.Sequential(nn.Linear(1, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_heads))

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads)

    def _arguments(self) -> dict[str, Any]:
        return {**super()._arguments(), "c": self._start}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in ("c", "multiplier"):  # older checkpoints have scalars
            x = state_dict.get(prefix + name)
            if x is not None and x.dim() == 0:
                state_dict[prefix + name] = x.reshape(1)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        require_coordinates(queries, "queries")
        keys = queries if keys is None else keys
        require_coordinates(keys, "keys")
        reach = at_least_float32(self.multiplier).abs() * self.threshold
        network = (x for layer in (self.mlp[0], self.mlp[2]) for x in (layer.weight, layer.bias))
        learned = (at_least_float32(self.c).abs(), reach, *(at_least_float32(x) for x in network))  # type: ignore[arg-type]
        return Terms(RowRule(_rule, (*_positions(queries, self.device), *_positions(keys, self.device), *learned)))


def _positions(coordinates: Coordinates, device: torch.device) -> tuple[Int[Tensor, "_ N"], Bool[Tensor, " N"]]:
    """The position of every token, 0 for a prefix, and whether it has one."""
    positions = coordinates.raster().tokens(device)[..., 0]
    if positions.is_floating_point():
        fail("integer coordinates", "floating-point Positions", "Only rotations support floating-point positions.")
    positions = F.pad(positions if positions.dim() == 2 else positions[None], (coordinates.prefix, 0))
    return positions, torch.arange(positions.shape[1], device=device) >= coordinates.prefix


def _rule(
    q: Tensor, k: Tensor, allowed: Tensor, rows: slice, query: Tensor, is_query: Tensor, key: Tensor, is_key: Tensor,
    c: Tensor, threshold: Tensor, in_weight: Tensor, in_bias: Tensor, out_weight: Tensor, out_bias: Tensor,
) -> Float[Tensor, "B H n M"]:  # fmt: skip
    c, threshold, in_weight, in_bias, out_weight, out_bias = (
        at_least_float32(x) for x in (c, threshold, in_weight, in_bias, out_weight, out_bias)
    )
    position = query[:, rows, None]
    distance = (position - key[:, None, :]).abs().to(c.dtype)
    reach = torch.maximum(position.to(c.dtype), threshold)
    share = (c * distance).log1p() / ((c * reach).log1p() + EPS)
    hidden = F.relu(share[..., None] * in_weight[:, 0] + in_bias)
    bias = hidden @ out_weight.T + out_bias
    tokens = is_query[rows, None] & is_key
    return torch.where(tokens[..., None], bias, 0.0).movedim(-1, 1)


PRESETS = [
    Preset(
        name="fire",
        title="FIRE",
        build=FIREBias.from_site,
        summary="A small network turns the distance, relative to the position of the query, into a bias for each "
        "head. However long the sequence, its input stays within the range it was trained on.",
        source="Li et al. 2024, section 3.2",
        token_axes=(1,),
        family="bias",
    )
]
