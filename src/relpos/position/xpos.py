"""xPos: rotary positions under which queries shrink and keys grow with position, so that near counts more than far.

    q[i] turns by i w[p] and is multiplied by z[p] ** ( (i - c) / scale_base)
    k[j] turns by j w[p] and is multiplied by z[p] ** (-(j - c) / scale_base)
    z[p] = (2 p / D + gamma) / (1 + gamma),    gamma = 0.4,    D dimensions turn

so pair p of a score is multiplied by z[p] ** ((i - j) / scale_base): it decays for the past (i > j), fast pairs first,
and grows for the future. It is meant for causal attention; this file does not check the mask.

The centre c cancels if queries and keys have the same one. By default it is the middle of all given positions,
which keeps the powers small; a decoding step then equals the full pass, since cached keys are unrotated. A key that is
cached rotated needs a fixed `centre`, and its queries need the same. Implementations that centre queries and keys, each
on its own length, differ between decoding and the full pass.

Engines also compute scores of the future before the mask removes them, and these grow as z[0] ** (-span / scale_base).
So positions may span 32,000 in float32 and bfloat16, and beyond that it raises; float16 bears about 4,000. Prefix
tokens are at position 0, for both angle and power.

Source: Sun et al. 2022 ("A Length-Extrapolatable Transformer"), section 3 and algorithm 1; scale_base 512 as in their
code (torchscale). Not to be confused with ALiBi, which subtracts a term from the scores.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Rotation, Terms, constant
from relpos.core.checks import fail, require_choice, require_number, shape_of
from relpos.position.base.angles import positions
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.rotary import RotaryEmbedding

LARGEST_LOGARITHM = 40.0
"""Of a magnitude. A score multiplies two of them, and float32 ends at e ** 88.7."""


class XPos(RotaryEmbedding):
    """Rotation with a decay, along one axis; a grid is read in raster order.

    Pair p of a score is multiplied by `z[p] ** ((i - j) / scale_base)`: less for the past. Meant for causal attention.

    Source: Sun et al. 2022, section 3.

    Args:
        head_dim: width of a head, D.
        base: as `RotaryEmbedding` takes it.
        layout: "half" or "interleaved".
        rotary_dim: how many dimensions are rotated, the first ones. Default: all.
        scale_base: positions over which pair p decays by its z[p].
        gamma: the larger, the nearer all z[p] are to 1.
        centre: the position at which magnitudes are 1; None for the middle of the given positions.

    Raises:
        ValueError: an argument out of its range; in `terms`, positions that span over 32,000, whose powers overflow.

    Examples:
        >>> xpos = relpos.XPos(head_dim=16)
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=xpos, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 2, 10, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("scale_base", "gamma", "centre")

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
        scale_base: float = 512.0,
        gamma: float = 0.4,
        centre: float | None = None,
    ) -> None:
        super().__init__(head_dim, base=base, layout=layout, rotary_dim=rotary_dim)
        require_number(scale_base, "scale_base", "above 0", "The published one is 512.")
        require_number(gamma, "gamma", "above 0", "The published one is 0.4.")
        if centre is not None and (not isinstance(centre, int | float) or not abs(centre) <= sys.float_info.max):
            fail("centre to be a number or None", shape_of(centre), "It is a position, for example 0.")
        self.scale_base, self.gamma, self.centre = scale_base, gamma, centre

    @classmethod
    def from_site(cls, site: Site) -> Self:  # type: ignore[override]
        return cls(site.head_dim)

    def magnitudes(
        self, coordinates: Coordinates, side: Literal["query", "key"], centre: float | None = None
    ) -> Float[Tensor, "_ 1 N P"]:
        """The factor on each pair of each token, float64; `relpos.rotate` takes it together with the angles.

        Args:
            coordinates: where the tokens are.
            side: "query" or "key".
            centre: the position at which it is 1; the mechanism's own by default.
        """
        require_choice(side, "side", ("query", "key"))
        own, centre = self._checked(coordinates, "coordinates"), self.centre if centre is None else centre
        if centre is None:
            fail("a centre", "None", "For keys cached after rotation, build it with centre=0, for example.")
        self._require_span(own, own, centre)
        steps = positions(own, self.device)[:, None] - centre  # [_, 1, N, 1]
        exponent = steps / self.scale_base * (1 if side == "query" else -1)
        return constant(self._decay(), torch.float64, steps.device) ** exponent

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        rotation = super().terms(queries, keys).one(Rotation)
        assert rotation is not None
        keys = queries if keys is None else keys
        both = self._checked(queries, "queries"), self._checked(keys, "keys")
        low, high = _reach(*both)
        centre = (low + high) / 2 if self.centre is None else self.centre
        self._require_span(*both, centre)
        grown = replace(
            rotation,
            query_magnitude=self.magnitudes(queries, "query", centre),
            key_magnitude=self.magnitudes(keys, "key", centre),
        )
        return Terms(grown)

    def _decay(self) -> tuple[float, ...]:
        """z of each pair."""
        width = self.rotary_dim
        return tuple((2 * p / width + self.gamma) / (1 + self.gamma) for p in range(width // 2))

    def _require_span(self, queries: Coordinates, keys: Coordinates, centre: float) -> None:
        low, high = _reach(queries, keys)
        slope = -math.log(self._decay()[0]) / self.scale_base
        if max(high - centre, centre - low) * slope > LARGEST_LOGARITHM:
            most = math.floor(LARGEST_LOGARITHM / slope)
            fail(
                f"positions at most {most} from the centre, {centre}",
                f"positions from {low} to {high}",
                "Farther away, scores overflow: use a shorter range, or train with a larger scale_base.",
            )


def _reach(queries: Coordinates, keys: Coordinates) -> tuple[int, int]:
    """The lowest and the highest position of queries and keys; of a prefix, 0."""
    prefix = (0,) if queries.prefix or keys.prefix else ()
    return min(queries.low[0], keys.low[0], *prefix), max(queries.high[0], keys.high[0], *prefix)


PRESETS = [
    Preset(
        name="xpos",
        title="xPos",
        build=XPos.from_site,
        summary="Rotary positions with a decay: the farther back a key is, the smaller its pairs become. It is "
        "made for causal attention, to extrapolate to longer inputs.",
        source="Sun et al. 2022, section 3; gamma 0.4, scale base 512",
        token_axes=(1,),
        family="rotation",
    )
]
