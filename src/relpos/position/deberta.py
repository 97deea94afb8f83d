"""DeBERTa's disentangled attention: content-to-position and position-to-content products, in log buckets.

    score[h, i, j] = ( <q[i], k[j]> + <q[i], K[h] p[b]> + <k[j], Q[h] p[b]> ) / sqrt(D * (1 + c2p + p2c))
    b = bucket(i - j) + span,   0 <= b < 2 span

p is a table of 2 span vectors as wide as a token, K and Q project them to every head. Published code indexes the second
product by the negative offset of (j, i) and then transposes, which is the same b. Distances up to half the span have a
bucket each; farther ones share logarithmic buckets that round up, unlike T5's, up to `max_distance`. Without buckets
(`max_distance=None`, DeBERTa v1) distances are clipped at the span.

With `share_att_key` (DeBERTa v2 and v3) K and Q are the layer's own key and query weights: give them their values, or
tie them after construction. Those models also share one table among their layers, behind a LayerNorm: give the table as
it comes out of that. Prefix tokens have no vector.

Source: He et al. 2021 (DeBERTa), section 3.1; buckets from DeBERTa v2's code. The logarithm is computed once, in
float32 as published, for every distance; only integers remain. Not to be confused with Transformer-XL.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core import Coordinates, Kind, LineVectors, Scale, Terms, at_least_float32, constant
from relpos.core.checks import fail, require_flag, require_int, without_autocast
from relpos.core.private import real_numbers
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


def _log_edges(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of bucket 1, 2, ..., `buckets`; the last lies beyond `max_distance`."""
    mid = buckets // 2
    cpu = torch.device("cpu")  # also where a model is built on the meta device
    distance = torch.arange(2 * max_distance, device=cpu)
    most = torch.tensor((max_distance - 1) / mid, dtype=torch.float32, device=cpu)
    ratio = torch.log(distance.clamp(min=mid).float() / mid) / torch.log(most)
    far = (torch.ceil(ratio * (mid - 1)) + mid).long()
    bucket = torch.where(distance <= mid, distance, far).clamp(max=buckets)
    return tuple(torch.searchsorted(bucket, torch.arange(1, buckets + 1, device=cpu)).tolist())


class DisentangledPosition(Mechanism):
    """DeBERTa's vectors on bucketed offsets, some multiplied with queries and others with keys.

    `score = (<q, k> + <q, K p[b]> + <k, Q p[b]>) / sqrt(3 D)` with `b` the bucket of i - j, of a table p of vectors as
    wide as a token: DeBERTa's content-to-position and position-to-content. It sets the scale. Prefix tokens have no
    vector.

    Source: He et al. 2021, section 3.1; buckets from DeBERTa v2's code.

    Args:
        num_heads: query heads, H.
        head_dim: width of a head, D.
        embed_dim: width of a token, and of the table's vectors, E.
        span: half the number of vectors: buckets on either side. Even, unless `max_distance` is None.
        max_distance: the farthest distance that buckets tell apart; None clips at the span (DeBERTa v1).
        c2p: whether there is a content-to-position term, of queries.
        p2c: whether there is a position-to-content term, of keys.
        init_std: standard deviation that the table starts from; 0 for zeros.

    Attributes:
        rel_embeddings: `[2 span, E]`.
        pos_key: `[E -> H D]`, or None without c2p.
        pos_query: `[E -> H D]`, or None without p2c.

    Raises:
        ValueError: an argument out of its range, or an odd span beside `max_distance`.

    Examples:
        >>> deberta = relpos.DisentangledPosition(num_heads=4, head_dim=16, embed_dim=64, span=8, max_distance=32)
        >>> deberta.rel_embeddings.shape
        torch.Size([16, 64])
        >>> q = k = v = torch.randn(1, 4, 50, 16)
        >>> relpos.attention(q, k, v, position=deberta, queries=relpos.Sequence(50)).shape  # scaled by 1/sqrt(3 D)
        torch.Size([1, 4, 50, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("num_heads", "max_distance")

    def __init__(
        self,
        num_heads: int,
        head_dim: int,
        embed_dim: int,
        *,
        span: int = 256,
        max_distance: int | None = 512,
        c2p: bool = True,
        p2c: bool = True,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        for name, x in (("num_heads", num_heads), ("head_dim", head_dim), ("embed_dim", embed_dim)):
            require_int(x, name, at_least=1)
        require_int(span, "span", at_least=4)
        if max_distance is not None:
            if span % 2:
                fail("an even span with max_distance", str(span), "Half of its buckets hold one distance each.")
            require_int(max_distance, "max_distance", at_least=span // 2 + 2)
        for name, flag in (("c2p", c2p), ("p2c", p2c)):
            require_flag(flag, name)
        require_std(init_std)
        self.num_heads, self.head_dim, self.embed_dim = num_heads, head_dim, embed_dim
        self.span, self.max_distance, self.c2p, self.p2c, self.init_std = span, max_distance, c2p, p2c, init_std
        self.rel_embeddings = nn.Parameter(torch.empty(2 * span, embed_dim))
        self.pos_key = nn.Linear(embed_dim, num_heads * head_dim) if c2p else None
        self.pos_query = nn.Linear(embed_dim, num_heads * head_dim) if p2c else None
        with real_numbers():
            self._edges = tuple(range(1, span + 1)) if max_distance is None else _log_edges(span, max_distance)
        start_table(self.rel_embeddings, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, site.head_dim, site.embed_dim, span=32, max_distance=128, init_std=site.init_std)

    def bucket(self, offsets: Int[Tensor, "*L"]) -> Int[Tensor, "*L"]:
        """The row of the table that each offset (query - key) reads."""
        edges = constant(self._edges, torch.int64, offsets.device)
        bucket = torch.bucketize(offsets.abs(), edges, right=True) * offsets.sign()
        return (bucket + self.span).clamp(0, 2 * self.span - 1)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        line = self._raster_lines(queries, keys)
        offsets = line.offsets()
        rows = torch.where(offsets.kind == int(Kind.TOKENS), self.bucket(offsets.axes[:, 0]), -1)
        parts = 1 + (self.pos_key is not None) + (self.pos_query is not None)
        terms = Terms(Scale(1 / math.sqrt(self.head_dim * parts)))
        if self.pos_key is not None:
            terms = terms + LineVectors(self._by_head(self.pos_key), rows, line, side="query")
        if self.pos_query is not None:
            terms = terms + LineVectors(self._by_head(self.pos_query), rows, line, side="key")
        return terms

    def _by_head(self, projection: nn.Linear) -> Float[Tensor, "H R D"]:
        with without_autocast(self.device):
            weight, bias = at_least_float32(projection.weight), at_least_float32(projection.bias)
            vectors = at_least_float32(self.rel_embeddings) @ weight.T + bias
        return torch.unflatten(vectors, -1, (self.num_heads, self.head_dim)).transpose(0, 1)


PRESETS = [
    Preset(
        name="deberta",
        title="DeBERTa, disentangled",
        build=DisentangledPosition.from_site,
        summary="Queries are multiplied by a vector of the distance, and so are keys, in addition to their own "
        "product; far distances share logarithmic buckets. What a distance means depends on both tokens.",
        source="He et al. 2021, section 3.1; 32 buckets per direction, up to 128",
        token_axes=(1, 2),
        family="vectors",
        aliases=("disentangled",),
    )
]
