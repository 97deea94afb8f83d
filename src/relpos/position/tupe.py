"""TUPE: positions correlate among themselves, apart from content, and the class token is untied from them.

    score[h, i, j] = ( <q[i], k[j]> + <p[i] U_Q[h], p[j] U_K[h]> ) / sqrt(2 D)

p is one learned vector per position, layer-normed; the two products share the scale, so that neither takes the variance
of the other. The second is of low rank: (N + M) D numbers per head. If a prefix token (class token) takes part, a
learned number per head replaces it: theta_1 if the prefix is the query, theta_2 if it is the key. As in the authors'
code, these are products of two separate vectors: <t_1 U_Q, t_1 U_K> and <t_2 U_Q, t_2 U_K>.

TUPE-A is this alone. TUPE-R adds a relative bias of tokens: `TUPEPosition(...) + T5Bias(..., scaled=True)`; the scale
is TUPE's. The authors share one among all layers. Other lengths and grids: the rules of `LearnedPositionEmbedding`,
which holds the vectors.

Source: Ke et al. 2021 ("Rethinking Positional Encoding in Language Pre-training"), sections 3.1 and 3.2; equations 7
and 9. Not to be confused with learned positions added to tokens, where positions interact with content too, or
with DeBERTa, where content interacts with offsets.
"""

from __future__ import annotations

import copy
import math
from typing import Any, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import (
    Coordinates,
    Grid,
    LineBias,
    LowRank,
    Scale,
    Terms,
    at_least_float32,
    require_coordinates,
)
from relpos.core.checks import require_int, without_autocast
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.offset_bias import spread
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.learned import LearnedPositionEmbedding

UNTIED = 2
"""The vectors before those of the positions: t_1 of a prefix as query, t_2 of a prefix as key."""


class TUPEPosition(Mechanism):
    """An untied product of learned positions, apart from content.

    `score = (<q[i], k[j]> + <p[i] U_Q, p[j] U_K>) / sqrt(2 D)`: it sets the scale. With a prefix token the second
    product is a learned number.

    Source: Ke et al. 2021, sections 3.1 and 3.2.

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D.
        embed_dim: width of the vectors, E.
        seq_len: positions of a sequence; or
        grid_size: positions of a grid, `(rows, columns)` or more axes.
        init_std: standard deviation that the vectors start from; 0 for zeros.

    Attributes:
        places: the vectors, `places.pos_embed` `[1, 2 + positions, E]`, of which the first two are t_1 and t_2.
        norm: the LayerNorm over E.
        pos_query: U_Q, `[E -> H D]`.
        pos_key: U_K, `[E -> H D]`.

    Raises:
        ValueError: both or neither of `seq_len` and `grid_size`; in `terms`, another grid, or a position beyond the
            last.

    Examples:
        >>> tupe = relpos.TUPEPosition(num_heads=4, head_dim=16, embed_dim=64, grid_size=(4, 4))
        >>> q = k = v = torch.randn(1, 4, 16, 16)
        >>> relpos.attention(q, k, v, position=tupe, queries=relpos.Grid(4, 4)).shape
        torch.Size([1, 4, 16, 16])
    """

    saved_settings = ("num_heads",)

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int,
        *,
        seq_len: int | None = None,
        grid_size: tuple[int, ...] | None = None,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        for name, x in (("num_heads", num_heads), ("head_dim", head_dim)):
            require_int(x, name, at_least=1)
        self.num_heads, self.head_dim = num_heads, head_dim
        self.places = LearnedPositionEmbedding(
            embed_dim, seq_len=seq_len, grid_size=grid_size, prefix=UNTIED, init_std=init_std
        )
        self.norm = nn.LayerNorm(embed_dim)
        self.pos_query = nn.Linear(embed_dim, num_heads * head_dim)
        self.pos_key = nn.Linear(embed_dim, num_heads * head_dim)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        widths = (site.num_heads, site.head_dim, site.embed_dim)
        if isinstance(site.queries, Grid):
            return cls(*widths, grid_size=site.queries.sizes, init_std=site.init_std)
        both = [site.queries] if site.keys is None else [site.queries, site.keys]
        return cls(*widths, seq_len=max(one.raster().high[0] for one in both) + 1, init_std=site.init_std)

    def _arguments(self) -> dict[str, Any]:
        built_with = self.places._arguments()
        of_places = {name: built_with[name] for name in ("embed_dim", "seq_len", "grid_size", "init_std")}
        return {**super()._arguments(), **of_places}

    @property
    def growth(self) -> tuple[str, ...]:
        """The same as for learned positions."""
        return self.places.growth

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        require_coordinates(queries, "queries")
        keys = queries if keys is None else keys
        require_coordinates(keys, "keys")
        query, key = self._projected(self.pos_query, queries), self._projected(self.pos_key, keys)
        theta = (query[0, :, :UNTIED] * key[0, :, :UNTIED]).sum(dim=-1)
        terms = Terms(
            Scale(1 / math.sqrt(2 * self.head_dim)),
            LowRank(*(F.pad(x[:, :, UNTIED:], (0, 0, c.prefix, 0)) for x, c in ((query, queries), (key, keys)))),
        )
        if not queries.prefix and not keys.prefix:
            return terms
        line = self._lines(queries.raster(), keys.raster())
        first, second = theta.unbind(dim=1)
        by_kind = torch.stack([torch.zeros_like(first), first, second, first], dim=1)
        with without_autocast(self.device):
            return terms + LineBias(spread(by_kind, line.offsets()), line)

    def _projected(self, projection: nn.Linear, coordinates: Coordinates) -> Float[Tensor, "_ H N D"]:
        """One factor of the product, for t_1, t_2 and every position. Each has the square root of 1/sqrt(2 D)."""
        with without_autocast(self.device):
            vectors, norm, weight, bias = (
                at_least_float32(x)
                for x in (self.places.vectors(coordinates), self.norm.weight, projection.weight, projection.bias)
            )
            normed = F.layer_norm(vectors, norm.shape, norm, at_least_float32(self.norm.bias), self.norm.eps)
            made = (normed @ weight.T + bias) * (2 * self.head_dim) ** -0.25
        return torch.unflatten(made, -1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def grow(self, queries: Coordinates, rule: str) -> TUPEPosition:
        if rule not in self.growth:
            super().grow(queries, rule)  # raises unless this one serves as it is
            return self
        return self._with(self.places.grow(queries, rule))

    def resize(self, size: int | tuple[int, ...]) -> TUPEPosition:
        """A copy for another grid or length, its vectors interpolated as learned positions are; t_1 and t_2 stay."""
        return self._with(self.places.resize(size))

    def extend(self, length: int) -> TUPEPosition:
        """A copy for a longer sequence, whose vectors repeat after the last one."""
        return self._with(self.places.extend(length))

    def _with(self, places: Mechanism) -> TUPEPosition:
        other = copy.deepcopy(self)
        assert isinstance(places, LearnedPositionEmbedding)
        other.places = places
        return other


PRESETS = [
    Preset(
        name="tupe",
        title="TUPE, untied absolute",
        build=TUPEPosition.from_site,
        summary="Products of learned position vectors are added to the scores, separately from content, and not to the "
        "tokens. The class token is excluded: no position is nearer to it than another.",
        source="Ke et al. 2021, sections 3.1 and 3.2 (TUPE-A)",
        token_axes=(1, 2),
        family="absolute",
    )
]
