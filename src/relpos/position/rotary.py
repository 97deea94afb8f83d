"""Rotary positions: queries and keys are turned by an angle proportional to their place, in pairs of dimensions.

    score[h, i, j] = scale * <R(place[i]) q[i], R(place[j]) k[j]>  =  a function of q, k and place[i] - place[j]

Pair p turns by place * w[p], w[p] = base ** (-p / P), P pairs an axis. On a grid ("axial") the rotated width is shared
out between the axes: the first pairs turn with the row, the next with the column. Prefix tokens are not turned. With
`rotary_dim` below the head's width the rest passes through (GPT-NeoX's `rotary_pct`). No parameters.

Which two dimensions are a pair is the layout, and weights trained with one do not fit the other: "half" (Hugging Face's
Llama, GPT-NeoX) pairs p with p + P, "interleaved" (RoFormer, Meta's Llama, timm) pairs 2p with 2p + 1.

Source: Su et al. 2021 (RoFormer), section 3.2, base 10,000; on grids Heo et al. 2024 (RoPE for ViT), section 3,
"axial", base 100 (their code turns the first pairs with the column; timm and this file with the row). Scores depend on
offsets alone between tokens; between a prefix token, which is not turned, and a token they depend on the token's place.
Not to be confused with sinusoidal positions, which are added to tokens; and a key that is cached rotated stays turned
by the base it was written with.
"""

from __future__ import annotations

from typing import Literal, Self

from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Rotation, Terms, require_coordinates
from relpos.core.checks import fail, require_choice, require_int, require_number
from relpos.position.angles import angles, frequencies
from relpos.position.mechanism import AS_IS, Mechanism, Site
from relpos.position.preset import Preset


class RotaryEmbedding(Mechanism):
    """Rotation of queries and keys by their place.

    Args:
        head_dim: width of a head, D.
        axes: 1 for a sequence (a grid is then read in raster order), 2 for rows and columns, ...
        base: the slowest pair turns by nearly 1 / base radians a place.
        layout: "half" or "interleaved".
        rotary_dim: how many dimensions turn, the first ones; a multiple of 2 * axes. Default: the most there are.

    Raises:
        ValueError: no multiple of 2 * axes, or more than `head_dim`.
    """

    growth = (AS_IS,)

    def __init__(
        self,
        head_dim: int,
        *,
        axes: int = 1,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        require_int(axes, "axes", at_least=1)
        require_int(head_dim, "head_dim", at_least=2 * axes)
        require_number(base, "base", "above 0", "RoFormer's is 10000.")
        require_choice(layout, "layout", ("half", "interleaved"))
        rotary_dim = head_dim - head_dim % (2 * axes) if rotary_dim is None else rotary_dim
        require_int(rotary_dim, "rotary_dim", at_least=2 * axes)
        if rotary_dim % (2 * axes) or rotary_dim > head_dim:
            wanted = f"rotary_dim to be a multiple of {2 * axes} and at most head_dim, {head_dim}"
            fail(wanted, str(rotary_dim), "Every axis turns pairs of dimensions.")
        self.head_dim, self.axes, self.base, self.rotary_dim = head_dim, axes, base, rotary_dim
        self.layout: Literal["half", "interleaved"] = layout

    @classmethod
    def from_site(cls, site: Site, axes: int = 1) -> Self:
        if axes == 1:
            return cls(site.head_dim)
        return cls(site.head_dim, axes=axes, base=100.0, layout="interleaved")

    def extra_repr(self) -> str:
        return (
            f"{self.head_dim}, axes={self.axes}, base={self.base}, layout={self.layout!r}, rotary_dim={self.rotary_dim}"
        )

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "_ 1 N P"]:
        """How far each token turns, in radians, float64; what `relpos.rotate` takes for keys that go into a cache."""
        require_coordinates(coordinates, "coordinates")
        places = coordinates.raster() if self.axes == 1 else coordinates
        if places.axes != self.axes:
            fail(f"coordinates with {self.axes} axes", repr(coordinates), "Build it with axes= as many.")
        bands = frequencies(self.rotary_dim // (2 * self.axes), self.base)
        return angles(places, bands, self.device).flatten(2)[:, None]

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        query = self.angles(queries)
        return Terms(Rotation(query, query if keys is None else self.angles(keys), layout=self.layout))


PRESETS = [
    Preset(
        name="rotary_1d",
        title="Rotary (RoPE), 1-D",
        build=RotaryEmbedding.from_site,
        summary="Queries and keys turn with their place, so that their product depends on the distance between them; "
        "nothing is learned. On images the place is the raster order, where a row below is as far as a row is wide.",
        source="Su et al. 2021, section 3.2; base 10,000, half layout",
        token_axes=(1, 2),
    ),
    Preset(
        name="rotary_2d",
        title="Rotary (RoPE), 2-D axial",
        build=lambda site: RotaryEmbedding.from_site(site, 2),
        summary="Half of each head turns with the row, half with the column, so that scores depend on both offsets. "
        "Nothing is learned about position itself: what an offset means comes from the queries and keys.",
        source="Heo et al. 2024, section 3; base 100, interleaved layout",
        token_axes=(2,),
    ),
]
