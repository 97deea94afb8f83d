"""Sinusoidal absolute positions: sines and cosines of the position, added to the tokens before the first layer.

    x[n] = x[n] + [sin(position[n] * w[p]), cos(position[n] * w[p])],        w[p] = base ** (-p / P)

A sequence has P = E / 2 frequencies; a grid divides the width between its axes, P = E / (2 A) each, rows first. Prefix
tokens have no position and get nothing. No parameters.

Source: Vaswani et al. 2017, section 3.5 (1-D, base 10,000); Chen et al. 2021 (MoCo v3, sine-cosine in 2-D). The order
of sines and cosines differs between implementations, and weights trained with one do not fit another:

    interleaved   sin, cos, sin, cos, ...              Vaswani et al.
    half          an axis's sines, then its cosines    MoCo v3; MAE, columns first; timm, interleave_sin_cos=True
    grouped       all sines, then all cosines          timm's default; on a sequence Marian and RoFormer

Not to be confused with rotary positions, which turn queries and keys by the same angles instead of adding to tokens.
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, require_coordinates
from relpos.core.checks import fail, require_choice, require_int, require_number
from relpos.position.base.angles import WaveLayout, angles, frequencies, waves
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tokens import add_to_tokens


class SinusoidalPositionEmbedding(Mechanism):
    """Fixed sines and cosines of the position, added to tokens.

    Call `embed(x, coordinates)` before the first layer; it adds nothing in attention. Any length and size.

    Source: Vaswani et al. 2017, section 3.5; in 2-D Chen et al. 2021 (MoCo v3).

    Args:
        embed_dim: width of a token, E; a multiple of 2 for one axis, of 4 for two.
        axes: 1 for a sequence (a grid is then read in raster order), 2 for rows and columns.
        base: the longest wavelength is nearly 2 pi times it.
        layout: "interleaved", "half" or "grouped"; for one axis the last two are the same.

    Raises:
        ValueError: a width that cannot be divided so; in `embed`, tokens of another width, or other axes.

    Examples:
        >>> waves = relpos.SinusoidalPositionEmbedding(embed_dim=4)
        >>> waves.embed(torch.zeros(1, 2, 4), relpos.Sequence(2))
        tensor([[[0.0000, 1.0000, 0.0000, 1.0000],
                 [0.8415, 0.5403, 0.0100, 0.9999]]])
    """

    growth = (AS_IS,)
    saved_settings = ("axes", "base", "layout")

    def __init__(
        self,
        embed_dim: int,
        *,
        axes: int = 1,
        base: float = 10000.0,
        layout: WaveLayout = "interleaved",
    ) -> None:
        super().__init__()
        require_int(embed_dim, "embed_dim", at_least=1)
        require_int(axes, "axes", at_least=1)
        require_number(base, "base", "above 0", "The published one is 10000.")
        whose = (
            "Vaswani's is 'interleaved', that of MoCo v3 and MAE 'half', Marian's and timm's 'grouped': use the one "
            "that the weights were trained with."
        )
        require_choice(layout, "layout", ("interleaved", "half", "grouped"), whose)
        if embed_dim % (2 * axes):
            fail(
                f"embed_dim to be a multiple of {2 * axes}", str(embed_dim), "Every axis has pairs of sine and cosine."
            )
        self.embed_dim, self.axes, self.base, self.layout = embed_dim, axes, base, layout

    @classmethod
    def from_site(cls, site: Site, axes: int = 1) -> Self:
        return cls(site.embed_dim, axes=axes, layout="interleaved" if axes == 1 else "half")

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        """Tokens with the sinusoids of their position added."""
        if isinstance(x, Tensor):
            self.settle(x.device)
        return add_to_tokens(x, self.vectors(coordinates), coordinates)

    def vectors(self, coordinates: Coordinates) -> Float[Tensor, "_ N E"]:
        """The vectors to add, in float64, with a batch axis of 1 or B."""
        require_coordinates(coordinates, "coordinates")
        tokens = coordinates.raster() if self.axes == 1 else coordinates
        if tokens.axes != self.axes:
            fail(f"coordinates with {self.axes} axes", repr(coordinates), f"Build it with axes={coordinates.axes}.")
        bands = frequencies(self.embed_dim // (2 * self.axes), self.base)
        vectors = waves(angles(tokens, bands, self.device), self.layout)
        return torch.cat([torch.zeros_like(vectors[:, : tokens.prefix]), vectors[:, tokens.prefix :]], dim=1)


PRESETS = [
    Preset(
        name="sinusoidal_1d",
        title="Sinusoidal absolute, 1-D",
        build=SinusoidalPositionEmbedding.from_site,
        summary="Sines and cosines of a token's index, from fast to slow, are added to it before the first layer; "
        "nothing is learned. On images the index is the raster order, so the model must discover rows itself.",
        source="Vaswani et al. 2017, section 3.5; base 10,000",
        token_axes=(1, 2),
        family="absolute",
        aliases=("sincos",),
    ),
    Preset(
        name="sinusoidal_2d",
        title="Sinusoidal absolute, 2-D",
        build=lambda site: SinusoidalPositionEmbedding.from_site(site, 2),
        summary="Half of a token's width gets sines and cosines of its row, half of its column; nothing is learned. "
        "It is defined at any resolution, but positions outside training were never seen.",
        source="Chen et al. 2021 (MoCo v3); base 10,000",
        token_axes=(2,),
        family="absolute",
        aliases=("sincos",),
    ),
]
