"""Clipped relative bias: a learned number for every distance up to R, one for all beyond on either side.

    score[h, i, j] += table[clip(i - j, -R, R) + R, h]

2 R + 1 numbers per head whatever the length: the simplest way for a table to be defined everywhere. Far on the left and
far on the right stay different. Prefix tokens get 0.

Source: the scalar form of Shaw et al. 2018, section 3.2 (k = R). Not to be confused with T5's buckets, which grow with
the distance before they end, or with `RelativePositionBias(beyond="clip")`, which clips at its window.
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Offsets, at_least_float32, lookup
from relpos.core.checks import require_int
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


class ClippedBias(OffsetBias):
    """A learned bias per clipped distance and head.

    `score[h, i, j] += table[clip(i - j, -R, R) + R, h]`: any length. A grid is read in raster order; prefix tokens get
    0.

    Source: Shaw et al. 2018, section 3.2, in scalar form.

    Args:
        num_heads: query heads, H.
        max_distance: R, the farthest distance with a number of its own.
        init_std: standard deviation that the table starts from; 0 for zeros.

    Attributes:
        relative_position_bias_table: `[2 R + 1, num_heads]`, from -R to R.

    Raises:
        ValueError: an argument out of its range.

    Examples:
        >>> bias = relpos.ClippedBias(num_heads=2, max_distance=3)
        >>> bias.relative_position_bias_table.shape  # -3 to 3
        torch.Size([7, 2])
        >>> q = k = v = torch.randn(1, 2, 100, 16)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Sequence(100)).shape
        torch.Size([1, 2, 100, 16])
    """

    growth = (AS_IS,)

    def __init__(self, num_heads: int, max_distance: int = 16, *, init_std: float = 0.02) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(max_distance, "max_distance", at_least=0)
        require_std(init_std)
        self.num_heads, self.max_distance, self.init_std = num_heads, max_distance, init_std
        self.relative_position_bias_table = nn.Parameter(torch.empty(2 * max_distance + 1, num_heads))
        start_table(self.relative_position_bias_table, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, init_std=site.init_std)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        reach = self.max_distance
        row = offsets.axes[:, 0].clamp(-reach, reach) + reach
        return lookup(at_least_float32(self.relative_position_bias_table), row).T


PRESETS = [
    Preset(
        name="clipped",
        title="Clipped relative bias",
        build=ClippedBias.from_site,
        summary="Each head learns one bias per distance up to 16 and one for everything farther, on either side. It "
        "is defined at any length; all far tokens look equally far.",
        source="Shaw et al. 2018, section 3.2, as a scalar; R = 16",
        token_axes=(1, 2),
        family="bias",
    )
]
