"""Log-spaced continuous position bias: a small network from the offset to the bias of each head.

    score[h, i, j] += 16 * sigmoid(mlp(x)[h]),    x = sign(c) * log2(1 + |c|) / log2(8),    c = 8 * offset / (W - 1)

per axis; mlp is Linear(A, 512), ReLU, Linear(512, H) without bias. W is the window trained on (`pretrained_window` in
Swin V2): a larger window only asks the network for farther offsets, which the logarithm keeps near. On an axis one cell
wide, c is 8 * offset (0 within that window), where published code divides by 0. Swin V2 has no prefix tokens. Here they
get 8, the output of a network at 0; a bias of 0, the least a token can get, would hide them.

Swin V2 uses it with cosine attention: queries and keys of length 1, and a learned scale per head, exp(min(s, log 100)),
from log 10. That belongs to the layer, not to position. timm's `cr` variant differs (signed log1p, no sigmoid).

Source: Liu et al. 2022 (Swin V2), section 3.3.
"""

from __future__ import annotations

import math
from typing import ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Grid, Offsets, at_least_float32, constant
from relpos.core.checks import fail, require_int
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.offset_bias import OffsetBias
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_window


class LogContinuousBias(OffsetBias):
    """Swin V2's network from log-spaced offsets to biases.

    `score[h, i, j] += 16 * sigmoid(mlp(x)[h])`, x the offsets on a logarithmic scale, as shares of the window. Any
    grid; prefix tokens get 8.

    Source: Liu et al. 2022 (Swin V2), section 3.3.

    Args:
        num_heads: query heads, H.
        window_size: cells along each axis of the window trained on.
        hidden_dim: width of the network.

    Attributes:
        cpb_mlp: the network, its layers numbered as in Swin V2's checkpoints.

    Raises:
        ValueError: an argument out of its range; in `terms`, coordinates with other axes.

    Examples:
        >>> bias = relpos.LogContinuousBias(num_heads=4, window_size=(8, 8))
        >>> q = k = v = torch.randn(1, 4, 144, 16)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Grid(12, 12)).shape  # a larger window, no resize
        torch.Size([1, 4, 144, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("window_size",)
    axes: ClassVar[int | None] = None

    def __init__(self, num_heads: int, window_size: tuple[int, ...], *, hidden_dim: int = 512) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(hidden_dim, "hidden_dim", at_least=1)
        self.sizes, self.num_heads, self.hidden_dim = require_window(window_size), num_heads, hidden_dim
        self.cpb_mlp = nn.Sequential(
            nn.Linear(len(self.sizes), hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, num_heads, bias=False)
        )

    @property
    def window_size(self) -> tuple[int, ...]:
        """Cells along each axis of its window."""
        return self.sizes

    @classmethod
    def from_site(cls, site: Site) -> Self:
        if not isinstance(site.queries, Grid):
            fail("a grid for a log-spaced continuous bias", repr(site.queries), "Build it with window_size=(length,).")
        return cls(site.num_heads, site.queries.sizes)

    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        if len(offsets.low) != len(self.sizes):
            fail(f"coordinates with {len(self.sizes)} axes", str(len(offsets.low)), "Build it for that many axes.")
        units = tuple(8 / max(size - 1, 1) for size in self.sizes)
        spread = offsets.axes.double() * constant(units, torch.float64, offsets.axes.device)
        first, _, last = self.cpb_mlp
        weight, bias, out = (at_least_float32(x) for x in (first.weight, first.bias, last.weight))  # type: ignore[arg-type]
        x = (spread.sign() * spread.abs().log1p() / math.log(8)).to(weight.dtype)
        return 16 * (out @ (x @ weight.T + bias).relu().T).sigmoid()

    def prefix_bias(self) -> Float[Tensor, "H 3"]:
        out = at_least_float32(self.cpb_mlp[2].weight)  # type: ignore[arg-type]
        return out.new_full((out.shape[0], 3), 8.0)


PRESETS = [
    Preset(
        name="log_cpb",
        title="Log-spaced continuous bias",
        build=LogContinuousBias.from_site,
        summary="A small network turns the logarithm of an offset into a bias for each head. It is smooth, so windows "
        "larger than the trained one get sensible values.",
        source="Liu et al. 2022 (Swin V2), section 3.3",
        token_axes=(2,),
        family="bias",
        aliases=("cpb",),
    )
]
