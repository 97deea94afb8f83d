"""Shaw's relative positions: for every clipped distance a learned vector for queries, and another for values.

    score[h, i, j]  = scale * <q[i], k[j] + a[clip(i - j)]>
    output[h, i]    = sum over j of p[i, j] * (v[j] + b[clip(i - j)])

with clip to -k ... k: 2 k + 1 vectors of a head's width, the same for all heads. The value vectors are as much part of
it as the key vectors (the paper found them of little use; `values=False` leaves them out). Shaw et al. count key -
query; here it is query - key, so their row r is ours 2 k - r.

It never stores N x M x D numbers: queries are multiplied with the 2 k + 1 vectors first, and the products are read
along the line. The skew of Huang et al. 2018 (Music Transformer) is this reading for N = M and causal masks. Prefix
tokens have no vector.

Source: Shaw et al. 2018, sections 3.1 and 3.2. Not to be confused with Transformer-XL, whose vectors are projected
sinusoids, or with a bias, which does not depend on queries.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from relpos.core import Coordinates, Kind, Lines, LineVectors, Terms, at_least_float32
from relpos.core.checks import require_flag, require_int
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table


class ShawPosition(Mechanism):
    """Vectors on clipped offsets, for keys and for values.

    `score = scale * <q[i], k[j] + a[clip(i - j)]>` and `output = sum of p[i, j] (v[j] + b[clip(i - j)])`. Any length;
    the same vectors for all heads. Prefix tokens have none.

    Source: Shaw et al. 2018, sections 3.1 and 3.2.

    Args:
        head_dim: width of a head, D.
        max_distance: k, the farthest distance with vectors of its own.
        values: whether there are value vectors too.
        init_std: standard deviation that the vectors start from; 0 for zeros.

    Attributes:
        key_vectors: `[2 k + 1, D]`, from -k to k.
        value_vectors: `[2 k + 1, D]`, or None without `values`.

    Raises:
        ValueError: an argument out of its range; in attention, heads of another width.

    Examples:
        >>> shaw = relpos.ShawPosition(head_dim=16, max_distance=4)
        >>> shaw.key_vectors.shape
        torch.Size([9, 16])
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=shaw, queries=relpos.Sequence(10)).shape
        torch.Size([1, 2, 10, 16])
    """

    growth = (AS_IS,)

    def __init__(self, head_dim: int, max_distance: int = 16, *, values: bool = True, init_std: float = 0.02) -> None:
        super().__init__()
        require_int(head_dim, "head_dim", at_least=1)
        require_int(max_distance, "max_distance", at_least=0)
        require_std(init_std)
        require_flag(values, "values")
        self.head_dim, self.max_distance, self.values, self.init_std = head_dim, max_distance, values, init_std
        self.key_vectors = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim))
        self.value_vectors = nn.Parameter(torch.empty(2 * max_distance + 1, head_dim)) if values else None
        for vectors in (self.key_vectors, self.value_vectors):
            if vectors is not None:
                start_table(vectors, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.head_dim, init_std=site.init_std)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        line = self._raster_lines(queries, keys)
        rows = self._rows(line)
        terms = Terms(LineVectors(at_least_float32(self.key_vectors)[None], rows, line, side="query"))
        if self.value_vectors is not None:
            terms = terms + LineVectors(at_least_float32(self.value_vectors)[None], rows, line, side="value")
        return terms

    def _rows(self, line: Lines) -> Tensor:
        """The row of the vectors that each entry of the line reads; -1 where a prefix takes part."""
        offsets = line.offsets()
        rows = offsets.axes[:, 0].clamp(-self.max_distance, self.max_distance) + self.max_distance
        return torch.where(offsets.kind == int(Kind.TOKENS), rows, -1)


PRESETS = [
    Preset(
        name="shaw",
        title="Shaw vectors",
        build=ShawPosition.from_site,
        summary="One learned vector per distance up to 16 is added to the keys that a query sees, and another to the "
        "values. What a distance means depends on the query, which a bias cannot express.",
        source="Shaw et al. 2018, sections 3.1 and 3.2; k = 16",
        token_axes=(1, 2),
        family="vectors",
        near=(("music", "the vectors of Music Transformer differ from head to head and are not added to values"),),
    )
]
