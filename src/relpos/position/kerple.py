"""KERPLE: a learned kernel of the distance, two numbers per head.

    log        score[h, i, j] -= r1[h] * log(1 + r2[h] * |i - j|)
    power      score[h, i, j] -= r1[h] * |i - j| ** r2[h]                 0 < r2 < 2

r1 and r2 are positive: they are exponentials of the parameters (for `power`, r2 is 2 sigmoid), where the authors' code
clamps to at least 0.01 (r2 of `power` to at most 2). The authors start from uniform random numbers. Here ALiBi's slopes
are the start: r1 = 1 and r2 = the slopes for log; r1 = the slopes and r2 = 1 for power, which is ALiBi while r2 = 1.
The bias is added after the scale of the scores. Prefix tokens are at distance 0 from everything.

Source: Chi et al. 2022, section 4, and its code (`ParallelKerpleLog`, `ParallelKerplePower`). Defined for causal
attention; |i - j| serves both ways. A grid is seen in raster order.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Offsets, at_least_float32
from relpos.core.checks import NO_OTHER, require_choice, require_int
from relpos.position.alibi import alibi_slopes
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site


class Kerple(OffsetBias):
    """A learned, monotone penalty on distance.

    "log": `score[h, i, j] -= r1[h] * log(1 + r2[h] |i - j|)`; "power": `score[h, i, j] -= r1[h] * |i - j| ** r2[h]`.
    Both start at ALiBi's slopes. Any length; a grid is read in raster order.

    Source: Chi et al. 2022, section 4.

    Args:
        num_heads: query heads, H.
        kernel: "log" or "power".

    Attributes:
        log_r1: `[num_heads]`, the logarithm of `r1`.
        raw_r2: `[num_heads]`, `r2` before its exponential or sigmoid.

    Raises:
        ValueError: an argument out of its range.

    Examples:
        >>> kerple = relpos.Kerple(num_heads=4, kernel="log")
        >>> sum(x.numel() for x in kerple.parameters())  # two numbers a head
        8
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> relpos.attention(q, k, v, position=kerple, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 4, 10, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("kernel",)

    def __init__(self, num_heads: int, kernel: Literal["log", "power"] = "log") -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_choice(kernel, "kernel", ("log", "power"), NO_OTHER)
        self.num_heads, self.kernel = num_heads, kernel
        slopes = torch.tensor([math.log(slope) for slope in alibi_slopes(num_heads)])
        self.log_r1 = nn.Parameter(torch.zeros(num_heads) if kernel == "log" else slopes)
        self.raw_r2 = nn.Parameter(slopes.clone() if kernel == "log" else torch.zeros(num_heads))

    @classmethod
    def from_site(cls, site: Site, kernel: Literal["log", "power"] = "log") -> Self:
        return cls(site.num_heads, kernel)

    @property
    def r1(self) -> Float[Tensor, " H"]:
        """The factor of each head."""
        return at_least_float32(self.log_r1).exp()

    @property
    def r2(self) -> Float[Tensor, " H"]:
        """The scale of the distance (log) or its exponent (power) of each head."""
        raw = at_least_float32(self.raw_r2)
        return raw.exp() if self.kernel == "log" else 2 * raw.sigmoid()

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        r1, r2 = self.r1[:, None], self.r2[:, None]
        distance = offsets.axes[:, 0].abs().to(r1.dtype)
        if self.kernel == "log":
            return -r1 * (r2 * distance).log1p()
        return -r1 * distance**r2


PRESETS = [
    Preset(
        name="kerple_log",
        title="KERPLE, logarithmic",
        build=Kerple.from_site,
        summary="Each head subtracts a penalty that grows with the logarithm of the distance, at a learned rate. It "
        "decays more slowly than ALiBi and extrapolates to any length as well.",
        source="Chi et al. 2022, section 4 (logarithmic)",
        token_axes=(1, 2),
        family="bias",
    ),
    Preset(
        name="kerple_power",
        title="KERPLE, power",
        build=lambda site: Kerple.from_site(site, "power"),
        summary="Each head subtracts a penalty that grows with a power of the distance; factor and exponent are "
        "learned. At exponent 1, where it starts, it is ALiBi with learned slopes.",
        source="Chi et al. 2022, section 4 (power)",
        token_axes=(1, 2),
        family="bias",
    ),
]
