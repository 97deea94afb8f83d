"""Sandwich: the inner product of two sinusoids, with the rest of the product left out.

    score[h, i, j] += (sum over p < P of cos((i - j) * base ** (-p / P))) * H / (8 (h + 1))

It is the product of positions with positions in sinusoidal embeddings: a bias that falls off like a logarithm of the
distance, with ripples. Nothing is learned; each head has its own strength, from H P / 8 at distance 0 to P / 8. Prefix
tokens are at distance 0 from everything, which is this highest value and not 0. A grid is seen in raster order.

Source: Chi et al. 2023 ("Dissecting Transformer Length Extrapolation"), section 5 and the code in its appendix, with
2 P = 128. Computed in float64 and rounded once. Not to be confused with sinusoidal positions added to tokens.
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Offsets
from relpos.core.checks import fail, require_int, require_number
from relpos.position.base.angles import frequencies, turned
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site


class Sandwich(OffsetBias):
    """A fixed sum of cosines of the distance.

    `score[h, i, j] += (sum over p of cos((i - j) * base ** (-p / P))) * H / (8 (h + 1))`. Any length; nothing is
    learned. A grid is read in raster order.

    Source: Chi et al. 2023, section 5.

    Args:
        num_heads: query heads, H.
        width: 2 P, the width of the sinusoids whose product it is.
        base: as in sinusoidal positions.

    Raises:
        ValueError: an argument out of its range, or an odd width.

    Examples:
        >>> bias = relpos.Sandwich(num_heads=4)
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 4, 10, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("num_heads", "width", "base")

    def __init__(self, num_heads: int, *, width: int = 128, base: float = 10000.0) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(width, "width", at_least=2)
        if width % 2:
            fail("an even width", str(width), "Each pair of sine and cosine adds one cosine.")
        require_number(base, "base", "above 0", "The published one is 10000.")
        self.num_heads, self.width, self.base = num_heads, width, base

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        return self._at(offsets.axes[:, :1].double())

    def prefix_bias(self) -> Float[Tensor, "H 3"]:
        return self._at(torch.zeros(3, 1, dtype=torch.float64, device=self.device))

    def _at(self, steps: Float[Tensor, "L 1"]) -> Float[Tensor, "H L"]:
        cosines = turned(steps, frequencies(self.width // 2, self.base)).cos().sum(dim=(1, 2))
        ratio = torch.arange(1, self.num_heads + 1, dtype=torch.float64, device=steps.device) * 8 / self.num_heads
        return (cosines / ratio[:, None]).float()


PRESETS = [
    Preset(
        name="sandwich",
        title="Sandwich",
        build=Sandwich.from_site,
        summary="The product of two sinusoids as a bias: it falls with distance and ripples, each head at its own "
        "strength. Nothing is learned and any length works.",
        source="Chi et al. 2023, section 5",
        token_axes=(1, 2),
        family="bias",
    )
]
