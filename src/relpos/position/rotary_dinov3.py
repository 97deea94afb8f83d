"""DINOv3's rotation: by row and column as fractions of the image, so that an image rotates alike at every resolution.

    place[axis] = 2 * (cell + 1/2) / size - 1                     the centre of a patch, between -1 and 1
    angle[p]    = 2 pi * place[axis(p)] / period[p]               the first pairs follow the row, the next the column
    period[p]   = base ** (p / P)                                 P = D / 4 pairs an axis; or from `periods`

The size of an axis is the largest coordinate among the given queries and keys, plus 1 (for `Positions`, their `high`):
queries that are a part of an image rotate as in the whole image if the keys are all of it. `normalize` divides both
axes by one of the two sizes instead, which keeps the shape of a cell. Scores depend on more than the offset in cells:
in an image of twice the resolution, one cell is half as far. Prefix tokens (class token, registers) are not rotated.

In training, the whole image is shifted, stretched along each axis and scaled, at random and anew in each forward:

    place = (place + U[-shift, shift]) * jitter ** U[-1, 1] * rescale ** U[-1, 1]       the last of both axes alike

The published models were trained with rescale 2. Numbers are drawn in float32 on the mechanism's device, in the order
and the shapes of published code, so that the same seed has the same draws (timm draws on the CPU). Models of relpos
with `shared_position=True` draw once for all layers, as DINOv3 does; otherwise each layer draws its own.

The layout is "half": pair p is (p, p + D / 2), as in DINOv3, in transformers and in timm's DINOv3, whose EVA models
otherwise have "interleaved" pairs. Weights of one layout load into the other without an error, and give other features
(timm pull request 2692).

Source: Siméoni et al. 2025 (DINOv3), section 3.2, and its code (`RopePositionEmbedding`). Published checkpoints store
periods in bfloat16; here they are exact, as in transformers and timm. Not to be confused with `rotary_2d`, which counts
cells.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Rotation, Terms, constant, require_coordinates
from relpos.core.checks import fail, require_choice, require_int, require_number, shape_of
from relpos.core.rotation import require_layout
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site

Normalize = Literal["separate", "min", "max"]


class RotaryDINOv3(Mechanism):
    """Rotation by row and column as fractions of the image, from -1 to 1.

    `angle[p] = 2 pi * place / base ** (p / P)`, with P = D / 4 pairs per axis: rows, then columns. Any grid; prefix
    tokens are not rotated. It has no parameters.

    Source: Siméoni et al. 2025 (DINOv3), section 3.2, and its code.

    Args:
        head_dim: width of a head, D; a multiple of 4.
        base: the longest period is nearly `base`, the shortest is 1; an image is 2 wide.
        periods: the shortest and the longest period instead, with all others between them in a geometric sequence.
        normalize: "separate" divides rows by the number of rows and columns by that of columns; "min" and "max" divide
            both by the smaller or larger of the two.
        layout: "half" as published, or "interleaved"; see `relpos.rotate`.
        shift: in training, places move by up to this much along each axis. None for not at all.
        jitter: in training, each axis is stretched by a factor between 1 / jitter and jitter; at least 1.
        rescale: in training, both axes together, likewise; 2 in the published models.

    Raises:
        ValueError: a width that is no multiple of 4, or a number out of its range; in `terms`, coordinates without rows
            and columns.

    Examples:
        >>> rotary = relpos.RotaryDINOv3(head_dim=16, rescale=2.0).eval()
        >>> q = k = v = torch.randn(1, 4, 49 + 5, 16)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Grid(7, 7, prefix=5)).shape
        torch.Size([1, 4, 54, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("base", "periods", "normalize", "layout")

    def __init__(
        self,
        head_dim: int,
        *,
        base: float = 100.0,
        periods: tuple[float, float] | None = None,
        normalize: Normalize = "separate",
        layout: Literal["half", "interleaved"] = "half",
        shift: float | None = None,
        jitter: float | None = None,
        rescale: float | None = None,
    ) -> None:
        super().__init__()
        require_int(head_dim, "head_dim", at_least=4)
        if head_dim % 4:
            fail("head_dim to be a multiple of 4", str(head_dim), "Rows and columns have as many pairs each.")
        require_number(base, "base", "above 0", "The published one is 100.")
        if periods is not None:
            if not isinstance(periods, tuple | list) or len(periods) != 2:
                fail("periods to be (shortest, longest), or None", shape_of(periods), "Leave them out for the base's.")
            for one in periods:
                require_number(one, "each of periods", "above 0", "Use the checkpoint's min_period and max_period.")
        whose = "The published models have 'separate'."
        require_choice(normalize, "normalize", ("separate", "min", "max"), whose)
        require_layout(layout)
        if shift is not None:
            require_number(shift, "shift", "of at least 0", "Leave it out for no shift.")
        for name, factor in (("jitter", jitter), ("rescale", rescale)):
            if factor is not None:
                require_number(factor, name, "above 0", "1 changes nothing; DINOv3 was trained with rescale 2.")
                if factor < 1:
                    fail(f"{name} of at least 1", str(factor), "1 changes nothing; DINOv3 was trained with rescale 2.")
        self.head_dim, self.base = head_dim, base
        self.periods = None if periods is None else tuple(periods)
        self.normalize: Normalize = normalize
        self.layout: Literal["half", "interleaved"] = layout
        self.shift, self.jitter, self.rescale = shift, jitter, rescale

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.head_dim)

    def bands(self) -> tuple[float, ...]:
        """The frequency of each pair of an axis: radians per unit of place, `2 pi / period`."""
        pairs = self.head_dim // 4
        if self.periods is None:
            return tuple(2 * math.pi * self.base ** (-p / pairs) for p in range(pairs))
        shortest, longest = self.periods
        ratio = longest / shortest
        return tuple(2 * math.pi / (shortest * ratio ** (p / max(pairs - 1, 1))) for p in range(pairs))

    def angles(self, coordinates: Coordinates, sizes: tuple[int, int] | None = None) -> Float[Tensor, "_ 1 N P"]:
        """The angles of each token in radians, float64, without what training adds.

        Args:
            coordinates: where the tokens are.
            sizes: rows and columns of the image; by default up to the largest of these coordinates.
        """
        _require_grid(coordinates, "coordinates")
        return self._angles(coordinates, _sizes(coordinates) if sizes is None else sizes, None)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        _require_grid(queries, "queries")
        if keys is not None:
            _require_grid(keys, "keys")
        sizes = _sizes(queries, *(() if keys is None else (keys,)))
        drawn = self._drawn() if self.training else None
        query = self._angles(queries, sizes, drawn)
        key = query if keys is None else self._angles(keys, sizes, drawn)
        return Terms(Rotation(query, key, layout=self.layout, width=self.head_dim))

    def _angles(
        self, coordinates: Coordinates, sizes: tuple[int, int], drawn: tuple[Tensor, Tensor] | None
    ) -> Float[Tensor, "_ 1 N P"]:
        cells = coordinates.tokens(self.device).double()
        cells = cells if cells.dim() == 3 else cells[None]
        lengths = {"separate": sizes, "min": (min(sizes),) * 2, "max": (max(sizes),) * 2}[self.normalize]
        places = torch.stack([2 * (cells[..., axis] + 0.5) / length - 1 for axis, length in enumerate(lengths)], dim=-1)
        if drawn is not None:
            shift, factor = drawn
            places = (places + shift) * factor
        angles = places[..., None] * constant(self.bands(), torch.float64, self.device)
        return torch.nn.functional.pad(angles.flatten(2), (0, 0, coordinates.prefix, 0))[:, None]

    def _drawn(self) -> tuple[Tensor, Tensor] | None:
        """The shift and the factor of each axis for one forward; None where nothing is drawn."""
        if self.shift is self.jitter is self.rescale is None:
            return None
        shift, factor = (torch.full((2,), x, dtype=torch.float64, device=self.device) for x in (0.0, 1.0))
        if self.shift is not None:
            shift = self._uniform(2, self.shift).double()
        if self.jitter is not None:
            factor = factor * self._uniform(2, math.log(self.jitter)).exp().double()
        if self.rescale is not None:
            factor = factor * self._uniform(1, math.log(self.rescale)).exp().double()
        return shift, factor

    def _uniform(self, count: int, reach: float) -> Float[Tensor, " _"]:
        return torch.empty(count, dtype=torch.float32, device=self.device).uniform_(-reach, reach)


def _require_grid(coordinates: Coordinates, name: str) -> None:
    require_coordinates(coordinates, name)
    if coordinates.axes != 2:
        fail(f"{name} with 2 axes", repr(coordinates), "Write Grid(rows, columns).")


def _sizes(*coordinates: Coordinates) -> tuple[int, int]:
    """Rows and columns up to the largest coordinate."""
    rows, columns = (max(1, *(1 + one.high[axis] for one in coordinates)) for axis in range(2))
    return rows, columns


PRESETS = [
    Preset(
        name="rotary_dinov3",
        title="Rotary (RoPE), 2-D of DINOv3",
        build=RotaryDINOv3.from_site,
        summary="Half of the pairs rotate with the row, half with the column, both as fractions of the image: an image "
        "rotates alike at every resolution. Nothing is learned; what training adds (shift, jitter, rescale) is off.",
        source="Siméoni et al. 2025 (DINOv3), section 3.2; base 100, half layout",
        token_axes=(2,),
        family="rotation",
    )
]
