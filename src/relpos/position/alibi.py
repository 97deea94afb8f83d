"""ALiBi: attention with linear biases. The farther a key, the less it counts, at a slope per head.

    score[h, i, j] -= slope[h] * distance(i, j)

On a sequence the distance is |i - j|: under a causal mask that is Press et al.'s i - j, and without one it does not
reward the future, as i - j would. On a grid it is the Euclidean or the Manhattan distance between two cells; prefix
tokens are at distance 0 from everything.

The slopes of H = 2^n heads are 2^(-8/H), 2^(-16/H), ..., 2^-8. For other H: those of the next lower power of two, then
every other slope of the doubled set, as published; the formula for powers of two applied to all H is a common mistake.
They are Python numbers, and a bias is rounded once, to float32, whatever the model's dtype.

With `learned=True`, learned slopes start from these. They are exponentials of the parameters, so that no head can
reward distance. With `distance="axes"` every axis has its own learned slopes, which start as the Manhattan distance:

    score[h, i, j] -= sum over axes a of slope[a, h] * |i_a - j_a|

Source: Press et al. 2022, section 3 and its code (`get_slopes`); BLOOM and MPT have the same slopes. Press et al. tried
learned slopes too (section 3, no better when extrapolating). On grids: Fuller et al. 2023 (CROMA, 2D-ALiBi), Euclidean.
Not to be confused with KERPLE, which takes a learned logarithm or power of the distance.
"""

from __future__ import annotations

import math
from typing import ClassVar, Literal, Self, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Offsets, at_least_float32, constant
from relpos.core.checks import NO_OTHER, fail, require_choice, require_flag, require_int
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.saved_settings import Settings, plain
from relpos.position.base.site import Site

Distance = Literal["euclidean", "manhattan", "axes"]


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """The published slope of each head.

    Args:
        num_heads: H.

    Returns:
        H numbers: 2^(-8/H), 2^(-16/H), ... for a power of two; for others those of the next lower one, then every other
        of the doubled set.

    Raises:
        ValueError: no integer of at least 1.

    Examples:
        >>> relpos.alibi_slopes(4)
        (0.25, 0.0625, 0.015625, 0.00390625)
        >>> relpos.alibi_slopes(6)[4:]  # then every other slope of eight heads
        (0.5, 0.125)
    """
    require_int(num_heads, "num_heads", at_least=1)
    lower = 2 ** math.floor(math.log2(num_heads))
    own = [2 ** (-8 * (head + 1) / lower) for head in range(lower)]
    between = [2 ** (-4 * (head + 1) / lower) for head in range(0, 2 * lower, 2)]
    return tuple(own + between[: num_heads - lower])


class ALiBi(OffsetBias):
    """A penalty that grows with distance, fixed or learned.

    `score[h, i, j] -= slope[h] * |i - j|`; on a grid by the distance between cells. Any length and size; prefix tokens
    are at distance 0.

    Source: Press et al. 2022, section 3; on grids Fuller et al. 2023.

    Args:
        num_heads: query heads, H.
        distance: between cells of a grid: "euclidean" or "manhattan", one slope per head, or "axes", one per head and
            axis; on a sequence they are the same.
        learned: whether the slopes are learned. "axes" needs it: with fixed slopes it would be "manhattan".
        num_axes: A, where the distance is "axes".

    Attributes:
        slopes: the published slopes. log_slopes: `[1, H]` or `[A, H]`, the logarithms of learned slopes; None if slopes
            are fixed.

    Raises:
        ValueError: an argument out of its range, "axes" without `learned`; in `terms`, coordinates with other axes.

    Examples:
        >>> alibi = relpos.ALiBi(num_heads=8)
        >>> alibi.slopes[:3]
        (0.5, 0.25, 0.125)
        >>> q = k = v = torch.randn(1, 8, 6, 16)
        >>> relpos.attention(q, k, v, position=alibi, queries=relpos.Sequence(6), mask=relpos.Mask.causal()).shape
        torch.Size([1, 8, 6, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("distance",)
    axes: ClassVar[int | None] = None

    def __init__(
        self, num_heads: int, *, distance: Distance = "euclidean", learned: bool = False, num_axes: int = 2
    ) -> None:
        super().__init__()
        require_choice(distance, "distance", get_args(Distance), NO_OTHER)
        require_flag(learned, "learned")
        require_int(num_axes, "num_axes", at_least=1)
        if distance == "axes" and not learned:
            fail("learned=True with distance='axes'", "False", "With fixed slopes it equals distance='manhattan'.")
        self.slopes = alibi_slopes(num_heads)
        self.num_heads, self.learned, self.num_axes = num_heads, learned, num_axes
        self.distance: Distance = distance
        start = torch.tensor([math.log(slope) for slope in self.slopes])
        self.log_slopes = nn.Parameter(start.repeat(num_axes if distance == "axes" else 1, 1)) if learned else None

    @classmethod
    def from_site(cls, site: Site, distance: Distance = "euclidean", learned: bool = False) -> Self:
        axes = {"num_axes": site.queries.axes} if distance == "axes" else {}
        return cls(site.num_heads, distance=distance, learned=learned, **axes)

    def _own_settings(self) -> Settings:
        slopes = {} if self.learned else {"slopes": plain(self.slopes)}
        return {**super()._own_settings(), **slopes}

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        steps = offsets.axes.double().abs()
        if self.distance == "axes":
            assert self.log_slopes is not None
            if steps.shape[1] != self.log_slopes.shape[0]:
                fail(
                    f"coordinates with {self.log_slopes.shape[0]} axes", str(steps.shape[1]), "Build it with num_axes=."
                )
            distances = steps.T
        elif self.distance == "manhattan":
            distances = steps.sum(dim=1)[None]
        else:
            distances = steps.square().sum(dim=1).sqrt()[None]
        if self.log_slopes is None:
            slopes = constant(self.slopes, torch.float64, steps.device)
            return (-slopes[:, None] * distances).float()
        slopes = at_least_float32(self.log_slopes).exp()
        return -(slopes[:, :, None] * distances[:, None].to(slopes.dtype)).sum(dim=0)  # no product that TF32 rounds


PRESETS = [
    Preset(
        name="alibi",
        title="ALiBi",
        build=ALiBi.from_site,
        summary="Each head subtracts a penalty that grows with distance, at its own fixed rate; nothing is learned "
        "and any length works. On images the distance is Euclidean and has no direction: left and right, "
        "above and below look alike.",
        source="Press et al. 2022, section 3; Fuller et al. 2023 (CROMA) on grids",
        token_axes=(1, 2),
        family="bias",
    ),
    Preset(
        name="alibi_manhattan",
        title="ALiBi, Manhattan distance",
        build=lambda site: ALiBi.from_site(site, "manhattan"),
        summary="ALiBi with the steps along rows and columns added up instead of the straight line between two "
        "patches. It has no direction either.",
        source="Press et al. 2022, section 3, on two axes",
        token_axes=(2,),
        family="bias",
    ),
    Preset(
        name="alibi_learned",
        title="ALiBi, learned slopes",
        build=lambda site: ALiBi.from_site(site, learned=True),
        summary="ALiBi with learned rates that start at the published values and always penalize distance. One "
        "parameter per head; it has no direction.",
        source="Press et al. 2022, section 3, where the slopes are learned",
        token_axes=(1, 2),
        family="bias",
    ),
    Preset(
        name="alibi_axes",
        title="ALiBi, learned slopes per axis",
        build=lambda site: ALiBi.from_site(site, "axes", learned=True),
        summary="ALiBi with separate learned rates for rows and for columns, so that a head can look along one of "
        "them. It starts as the Manhattan distance and does not tell left from right.",
        source="Press et al. 2022, section 3, an axis each",
        token_axes=(2,),
        family="bias",
    ),
]
