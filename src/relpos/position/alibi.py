"""ALiBi: attention with linear biases. The farther a key, the less it counts; a slope a head, nothing learned.

    score[h, i, j] -= slope[h] * distance(i, j)

On a sequence the distance is |i - j|: under a causal mask that is Press et al.'s i - j, and without one it does not
reward the future, as i - j would. On a grid it is the Euclidean or the Manhattan distance between two cells; prefix
tokens are at distance 0 from everything.

The slopes of H = 2^n heads are 2^(-8/H), 2^(-16/H), ..., 2^-8. For other H: those of the next lower power of two, then
every other slope of the doubled set, as published; the formula for powers of two applied to all H is a common mistake.
They are Python numbers, and a bias is rounded once, to float32, whatever the model's dtype.

Source: Press et al. 2022, section 3 and its code (`get_slopes`); BLOOM and MPT have the same slopes. On grids: Fuller
et al. 2023 (CROMA, 2D-ALiBi), Euclidean. Not to be confused with KERPLE, whose slopes are learned.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Offsets
from relpos.core.checks import require_choice, require_int
from relpos.position.mechanism import AS_IS, OffsetBias, Site
from relpos.position.preset import Preset


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The published slope of each head."""
    require_int(num_heads, "num_heads", at_least=1)
    lower = 2 ** math.floor(math.log2(num_heads))
    own = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-4 * (head + 1) / lower) for head in range(0, 2 * lower, 2)]
    return tuple(own + between[: num_heads - lower])


class ALiBi(OffsetBias):
    """A fixed penalty that grows with distance.

    Args:
        num_heads: query heads, H.
        distance: between cells of a grid: "euclidean" or "manhattan"; on a sequence they are the same.
    """

    growth = (AS_IS,)
    axes: ClassVar[int | None] = None

    def __init__(self, num_heads: int, *, distance: Literal["euclidean", "manhattan"] = "euclidean") -> None:
        super().__init__()
        require_choice(distance, "distance", ("euclidean", "manhattan"))
        self.slopes = alibi_slopes(num_heads)
        self.distance = distance

    @classmethod
    def from_site(cls, site: Site, distance: Literal["euclidean", "manhattan"] = "euclidean") -> Self:
        return cls(site.num_heads, distance=distance)

    def extra_repr(self) -> str:
        return f"{len(self.slopes)}, distance={self.distance!r}"

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        steps = offsets.axes.double()
        distance = steps.abs().sum(dim=1) if self.distance == "manhattan" else steps.square().sum(dim=1).sqrt()
        slopes = torch.tensor(self.slopes, dtype=torch.float64, device=distance.device)
        return (-slopes[:, None] * distance).float()


PRESETS = [
    Preset(
        name="alibi",
        title="ALiBi",
        build=ALiBi.from_site,
        summary="Every head fades with distance, each at its own fixed rate; nothing is learned, any length will do. "
        "On images the distance is Euclidean and knows no direction: left and right, above and below look alike.",
        source="Press et al. 2022, section 3; Fuller et al. 2023 (CROMA) on grids",
        token_axes=(1, 2),
    ),
    Preset(
        name="alibi_manhattan",
        title="ALiBi, Manhattan distance",
        build=lambda site: ALiBi.from_site(site, "manhattan"),
        summary="ALiBi with steps along rows and columns added up instead of the straight line between two patches. "
        "It knows no direction either.",
        source="Press et al. 2022, section 3, on two axes",
        token_axes=(2,),
    ),
]
