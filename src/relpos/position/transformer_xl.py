"""Transformer-XL's relative positions: queries times a projected sinusoid of the distance, with two biases.

    score[h, i, j] = scale * ( <q[i] + u[h], k[j]> + <q[i] + v[h], W[h] r(i - j)> )

r(d) is the sinusoid of distance d, as wide as a token; W projects it to every head; u and v are learned. Both products
are scaled. Distances may be negative (bidirectional use, as in Conformer). Prefix tokens have no vector.

The line has about 2 N entries, so 2 N vectors per head are made, never N x M of them; the "relative shift" of the
authors' code is the reading along the line.

Source: Dai et al. 2019, section 3.3. The order of sines and cosines differs: the authors' code has all sines, then all
cosines ("grouped"); Conformer (Gulati et al. 2020, in fairseq and Hugging Face) interleaves them.
"""

from __future__ import annotations

from typing import Literal, Self

import torch
from torch import nn

from relpos.core import Coordinates, LineVectors, QueryBias, Terms, at_least_float32
from relpos.core.checks import fail, require_choice, require_int, require_number, without_autocast
from relpos.position.base.angles import WaveLayout, frequencies, turned, waves
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


class TransformerXLPosition(Mechanism):
    """Projected sinusoids of the distance, and the biases u and v.

    `score = scale * (<q[i] + u, k[j]> + <q[i] + v, W r(i - j)>)`, r the sinusoid of the distance. Any length; prefix
    tokens have no vector.

    Source: Dai et al. 2019, section 3.3.

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D.
        embed_dim: width of the sinusoid, E, even.
        layout: "grouped" or "interleaved".
        base: of the sinusoid.
        init_std: standard deviation that u and v start from; 0 for zeros.

    Attributes:
        u: `[H, D]`.
        v: `[H, D]`.
        projection: `[E -> H D]` without bias.

    Raises:
        ValueError: an argument out of its range, or an odd width.

    Examples:
        >>> xl = relpos.TransformerXLPosition(num_heads=4, head_dim=16, embed_dim=64)
        >>> q, k, v = torch.randn(1, 4, 5, 16), torch.randn(1, 4, 8, 16), torch.randn(1, 4, 8, 16)
        >>> relpos.attention(q, k, v, position=xl, queries=relpos.Sequence(5, start=3), keys=relpos.Sequence(8)).shape
        torch.Size([1, 4, 5, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("layout", "base")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int,
        *,
        layout: Literal["grouped", "interleaved"] = "grouped",
        base: float = 10000.0,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(head_dim, "head_dim", at_least=1)
        require_int(embed_dim, "embed_dim", at_least=2)
        if embed_dim % 2:
            fail("an even embed_dim", str(embed_dim), "Each frequency has a sine and a cosine.")
        whose = "The authors' is 'grouped', Conformer's 'interleaved': use the one that the weights were trained with."
        require_choice(layout, "layout", ("grouped", "interleaved"), whose)
        require_number(base, "base", "above 0", "The published one is 10000.")
        require_std(init_std)
        self.layout: WaveLayout = layout
        self.base = base
        self.num_heads, self.head_dim, self.embed_dim, self.init_std = num_heads, head_dim, embed_dim, init_std
        self.u = nn.Parameter(torch.empty(num_heads, head_dim))
        self.v = nn.Parameter(torch.empty(num_heads, head_dim))
        self.projection = nn.Linear(embed_dim, num_heads * head_dim, bias=False)
        for bias in (self.u, self.v):
            start_table(bias, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim, 2 * (site.embed_dim // 2), init_std=site.init_std)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        line = self._raster_lines(queries, keys)
        distance = line.offsets().axes[: line.layout.tokens].double()
        bands = frequencies(self.projection.in_features // 2, self.base)
        weight = at_least_float32(self.projection.weight)
        with without_autocast(self.device):
            vectors = waves(turned(distance, bands), self.layout).to(weight.dtype) @ weight.T
        heads, width = self.u.shape
        by_head = torch.unflatten(vectors, -1, (heads, width)).transpose(0, 1)
        query_vectors = LineVectors(by_head, None, line, side="query", bias=at_least_float32(self.v))
        return Terms(QueryBias(at_least_float32(self.u)), query_vectors)


PRESETS = [
    Preset(
        name="transformer_xl",
        title="Transformer-XL",
        build=TransformerXLPosition.from_site,
        summary="Queries are multiplied by a projected sinusoid of the distance in addition to the key itself, and "
        "two learned biases weigh keys and distances alike for all queries. It is smooth in distance and "
        "defined at any.",
        source="Dai et al. 2019, section 3.3",
        token_axes=(1, 2),
        family="vectors",
        aliases=("xl",),
    )
]
