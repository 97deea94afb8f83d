"""Graphormer's spatial encoding: a learned number per head for every length of the shortest path between two nodes.

    score[h, i, j] += table[row(d(i, j)), h]        row(d) = d up to max_distance, then one row for all beyond
    score[h, i, j] += virtual[h]                    where i or j is a prefix token: the graph token

d(i, j) counts the edges on the shortest path from i to j. Pairs without a path read the row of those farther apart than
`max_distance`, as in the authors' code, where both have the distance 510. Nodes lie on no line: on a `Graph` the bias
is an `IndexedBias`, one or two bytes a pair. A sequence and a grid are graphs too, whose neighbours are joined: there d
is the sum of the distances along the axes, and the bias one number per offset, as for every other mechanism.

Source: Ying et al. 2021 ("Do Transformers Really Perform Bad for Graph Representation?"), section 3.1.2, equation 6;
the number of the graph token ("virtual distance") is in section 3.2. The authors' table begins with a row for padding:
`spatial_bias_table` is `spatial_pos_encoder.weight[1:]`, with max_distance = num_spatial - 3. Their centrality encoding
is added to tokens and theirs of edges is a bias of its own (`DenseBias`); neither is here. Their loader hides pairs at
`spatial_pos_max` or farther, which a mask does.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core import Coordinates, Graph, IndexedBias, Kind, Offsets, Terms, at_least_float32
from relpos.core.checks import fail, require_device, require_int, without_autocast
from relpos.core.tree import unchecked
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.table_bias import TableBias
from relpos.position.base.tables import require_std, start_table


class GraphormerBias(TableBias):
    """A learned bias per head and length of the shortest path, up to `max_distance`; one for all beyond or without one.

    On a `Graph` paths are its own. On a sequence, a grid and integer `Positions` neighbours are joined: the length is
    the sum of the distances along the axes. All pairs of a prefix token, the graph token, read one number a head.

    Source: Ying et al. 2021 (Graphormer), section 3.1.2, equation 6.

    Args:
        num_heads: query heads, H.
        max_distance: the longest path with a number of its own.
        init_std: standard deviation that both tables start from; 0 for zeros.

    Attributes:
        spatial_bias_table: `[max_distance + 2, H]`, by distance from 0; the last row is of pairs farther apart.
        graph_token_virtual_distance: `[1, H]`, of pairs of a prefix token.

    Raises:
        ValueError: an argument out of its range; in `terms`, a graph of queries and other keys.

    Examples:
        >>> graph = relpos.Graph.from_edges(torch.tensor([[0, 1, 2], [1, 2, 3]]), nodes=5, prefix=1)
        >>> bias = relpos.GraphormerBias(num_heads=2)
        >>> q = k = v = torch.randn(1, 2, 6, 16)  # a graph token and five nodes
        >>> relpos.attention(q, k, v, position=bias, queries=graph).shape
        torch.Size([1, 2, 6, 16])
    """

    axes = None
    growth = (AS_IS,)
    _covers_prefix = True

    def __init__(self, num_heads: int, max_distance: int = 20, *, init_std: float = 0.02) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        require_int(max_distance, "max_distance", at_least=0)
        require_std(init_std)
        self.num_heads, self.max_distance, self.init_std = num_heads, max_distance, init_std
        self.spatial_bias_table = nn.Parameter(torch.empty(max_distance + 2, num_heads))
        self.graph_token_virtual_distance = nn.Parameter(torch.empty(1, num_heads))
        start_table(self.spatial_bias_table, init_std)
        start_table(self.graph_token_virtual_distance, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, init_std=site.init_std)

    def _table(self) -> Float[Tensor, "R H"]:
        return torch.cat([self.spatial_bias_table, self.graph_token_virtual_distance])

    def _settings(self) -> Hashable:
        return self.max_distance

    def _row_of(self, offsets: Offsets) -> Int[Tensor, " L"]:
        far = self.max_distance + 1
        distance = offsets.axes.abs().sum(dim=1).clamp(max=far)
        return torch.where(offsets.kind == int(Kind.TOKENS), distance, far + 1)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        if not isinstance(queries, Graph) and not isinstance(keys, Graph):
            return super().terms(queries, keys)
        same = keys is None or (
            isinstance(queries, Graph)
            and isinstance(keys, Graph)
            and queries.distances is keys.distances
            and queries.prefix == keys.prefix
        )
        if not same:
            fail("keys that are the nodes of the queries' graph", f"{queries!r} and {keys!r}", "Leave out keys=.")
        assert isinstance(queries, Graph)
        far = self.max_distance + 1
        distances = queries.distances.to(torch.promote_types(queries.distances.dtype, torch.int32))
        require_device(distances, "Graph distances", self.device, "Move them to the device of the mechanism.")
        row = torch.where((distances < 0) | (distances >= far), far, distances)
        row = row.to(torch.uint8 if far < 2**8 - 1 else torch.int16 if far < 2**15 - 1 else torch.int32)
        index = F.pad(row, (queries.prefix, 0, queries.prefix, 0), value=far + 1).view(-1, queries.count, queries.count)
        with without_autocast(self.device):
            values = at_least_float32(self._table()).T
        return Terms(unchecked(IndexedBias, values=values, index=index))  # every number of the index is in the table


PRESETS = [
    Preset(
        name="graphormer",
        title="Graphormer, spatial",
        build=GraphormerBias.from_site,
        summary="Each head learns one bias per length of the shortest path between two nodes of a graph, up to 20. On "
        "sequences and grids, where neighbours are joined, it sees the distance alone, and no direction.",
        source="Ying et al. 2021 (Graphormer), section 3.1.2",
        token_axes=(1, 2, 0),
        family="bias",
    )
]
