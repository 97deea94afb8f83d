"""Inkling's bias: each token's hidden state is projected to a few numbers a head, which mix learned curves of distance.

    r[h, i]        = the h-th part, `width` numbers, of r_proj x[i]
    score[h, i, j] += <r[h, i], proj[:, i - j]>      where 0 <= i - j < extent; 0 elsewhere

x are the hidden states that q, k and v are projected from. The curves `proj` are shared by all heads, and neither the
attention's scale nor queries take part. A distance of `extent` or more has no bias, at any length.

It is Shaw's product of queries and vectors, with vectors 16 wide and queries of its own for them. Keys contribute
nothing but their place, so that a cache keeps nothing more. Prefix tokens have no bias.

Source: Thinking Machines, Inkling (July 2026), as in transformers' `InklingRelativeLogits`, where `r_proj` is a layer
of the attention. Its full layers also multiply all scores by a factor of the query's place: that is a `QueryScale`.
"""

from __future__ import annotations

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Kind, Lines, LineVectors, Terms, at_least_float32
from relpos.core.checks import require_int
from relpos.position.base.from_states import FromStates, projected
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


def distance_curves(relative: Float[Tensor, "B H N w"], proj: Float[Tensor, "w extent"], line: Lines) -> LineVectors:
    """The term that adds `<relative[h, i], proj[:, i - j]>` where `0 <= i - j < extent`, between tokens alone."""
    offsets = line.offsets()
    distance = offsets.axes[:, 0]
    has_bias = (distance >= 0) & (distance < proj.shape[1]) & (offsets.kind == int(Kind.TOKENS))
    rows = torch.where(has_bias, distance, -1)
    vectors = at_least_float32(proj).mT[None]
    return LineVectors(vectors, rows, line, side="query", scaled=False, content=at_least_float32(relative))


class InklingBias(FromStates):
    """A bias of the distance that each token chooses: `<r[h, i], proj[:, i - j]>`, r projected from hidden states.

    0 where a key is after the query, or `extent` or more before it. The states are those that q, k and v are projected
    from, `states=` of attention.

    Source: Inkling (Thinking Machines, 2026); `InklingRelativeLogits` of transformers.

    Args:
        num_heads: query heads, H.
        embed_dim: width of a hidden state, E.
        width: the numbers that a state is projected to, a head.
        extent: distances that have a bias: 0 to `extent - 1`.
        init_std: standard deviation that both weights start from; 0 for curves of 0, which still learn.

    Attributes:
        r_proj: `[E -> H * width]`, without a bias, named as published.
        proj: `[width, extent]`, the curves.

    Raises:
        ValueError: an argument out of its range; in `terms`, no states.

    Examples:
        >>> bias, x = relpos.InklingBias(num_heads=2, embed_dim=16, width=4, extent=8), torch.randn(1, 10, 16)
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> tokens = relpos.Sequence(10)
        >>> relpos.attention(q, k, v, position=bias, queries=tokens, states=x, mask="causal").shape
        torch.Size([1, 2, 10, 8])
    """

    growth = (AS_IS,)
    _silent_at_zero = True

    def __init__(
        self, num_heads: int, embed_dim: int, width: int = 16, extent: int = 1024, *, init_std: float = 0.02
    ) -> None:
        super().__init__()
        for name, value in (("num_heads", num_heads), ("embed_dim", embed_dim), ("width", width), ("extent", extent)):
            require_int(value, name, at_least=1)
        require_std(init_std)
        self.num_heads, self.embed_dim, self.width, self.extent = num_heads, embed_dim, width, extent
        self.init_std = init_std
        self.r_proj = nn.Linear(embed_dim, num_heads * width, bias=False)
        self.proj = nn.Parameter(torch.empty(width, extent))
        for name, weight in self.named_parameters():  # if both were 0, neither would get a gradient
            start_table(weight, init_std if name == "proj" else init_std or 0.02)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        """With the published extent, or half of the tokens where that is less: training then sees what lies beyond."""
        extent = min(1024, max(1, site.queries.count // 2))
        return cls(site.num_heads, site.embed_dim, extent=extent, init_std=site.init_std)

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        relative = projected(states, self.r_proj.weight).unflatten(-1, (self.num_heads, self.width))
        line = self._raster_lines(queries, None if keys is queries else keys)
        return Terms(distance_curves(relative.transpose(1, 2), self.proj, line))


PRESETS = [
    Preset(
        name="inkling",
        title="Inkling bias",
        build=InklingBias.from_site,
        summary="Each token is projected to 16 numbers a head, which mix 16 learned curves of the distance: a token "
        "chooses by its content how far back it looks. Beyond the curves' extent there is no position.",
        source="Inkling (Thinking Machines, 2026); transformers' InklingRelativeLogits; at most 1,024 tokens back",
        token_axes=(1,),
        family="vectors",
    )
]
