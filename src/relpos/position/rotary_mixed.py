"""Mixed rotary positions (RoPE-Mixed): every pair rotates with row and column together, by learned frequencies.

    angle[h, p] = row * frequencies[0, h, p] + column * frequencies[1, h, p]

There are two frequencies per head and pair. Together they give the direction on the grid along which the pair rotates,
so that diagonals count like rows and columns; the axial rotation has only those two. Scores depend on the offset alone.

They start as the axial frequencies base ** (-p / P) of P = D / 4 pairs per axis, one half of the pairs along some
direction and the other half at a right angle to it; each head draws its own direction at random. Use no weight decay:
it would pull all angles to 0, and timm leaves it off.

Source: Heo et al. 2024 (RoPE for ViT), section 3.2 ("RoPE-Mixed"), base 10; each layer has its own. Their `freqs[0]`
(and timm's) turn with the column, `freqs[1]` with the row: ours are `freqs.flip(0)`. Their layout is "interleaved".
Prefix tokens are not turned. Not to be confused with `rotary_2d`, whose frequencies are fixed.
"""

from __future__ import annotations

import math
from typing import Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Rotation, Terms, at_least_float32, require_coordinates
from relpos.core.checks import fail, require_int, require_number
from relpos.core.rotation import require_layout
from relpos.position.base.angles import frequencies, positions
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site


class RotaryMixed(Mechanism):
    """Rotation on a grid by learned frequencies.

    `angle[h, p] = row * frequencies[0, h, p] + column * frequencies[1, h, p]`. Any grid; prefix tokens are not rotated.
    Give the frequencies no weight decay.

    Source: Heo et al. 2024 (RoPE for ViT), section 3.2.

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D; a multiple of 4.
        base: the frequencies start between 1 and nearly 1 / base radians a cell.
        layout: "half" or "interleaved", see `relpos.rotate`.

    Attributes:
        frequencies: `[2, H, D / 2]`, radians per row and radians per column.

    Raises:
        ValueError: a width that is no multiple of 4; in `terms`, coordinates without rows and columns.

    Examples:
        >>> rotary = relpos.RotaryMixed(num_heads=4, head_dim=16)
        >>> rotary.frequencies.shape
        torch.Size([2, 4, 8])
        >>> q = k = v = torch.randn(1, 4, 49, 16)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Grid(7, 7)).shape
        torch.Size([1, 4, 49, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("layout",)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        *,
        base: float = 10.0,
        layout: Literal["half", "interleaved"] = "interleaved",
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(head_dim, "head_dim", at_least=4)
        if head_dim % 4:
            fail("head_dim to be a multiple of 4", str(head_dim), "Half the pairs start at a right angle to the rest.")
        require_number(base, "base", "above 0", "The published one is 10.")
        require_layout(layout)
        self.num_heads, self.head_dim, self.base = num_heads, head_dim, base
        self.layout: Literal["half", "interleaved"] = layout
        sizes = torch.tensor(frequencies(head_dim // 4, base))
        direction = 2 * math.pi * torch.rand(num_heads, 1)
        across = torch.cat([sizes * direction.cos(), sizes * (direction + math.pi / 2).cos()], dim=1)
        down = torch.cat([sizes * direction.sin(), sizes * (direction + math.pi / 2).sin()], dim=1)
        self.frequencies = nn.Parameter(torch.stack([down, across]))

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim)

    def angles(self, coordinates: Coordinates) -> Float[Tensor, "_ H N P"]:
        """The angles of each token in each head in radians, float64."""
        require_coordinates(coordinates, "coordinates")
        if coordinates.axes != 2:
            fail("coordinates with 2 axes", repr(coordinates), "Write Grid(rows, columns).")
        cells = positions(coordinates, self.device)[:, None, :, :, None]
        pace = at_least_float32(self.frequencies).double()[:, None, :, None]
        return cells[..., 0, :] * pace[0] + cells[..., 1, :] * pace[1]

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        query = self.angles(queries)
        key = query if keys is None else self.angles(keys)
        return Terms(Rotation(query, key, layout=self.layout, width=2 * self.frequencies.shape[2]))


PRESETS = [
    Preset(
        name="rotary_mixed",
        title="Rotary (RoPE), 2-D mixed",
        build=RotaryMixed.from_site,
        summary="Every pair of dimensions rotates along a learned direction on the grid, at a learned frequency. It "
        "covers diagonals as well as rows and columns, for two parameters per pair and head.",
        source="Heo et al. 2024, section 3.2; base 10, interleaved layout",
        token_axes=(2,),
        family="rotation",
    )
]
