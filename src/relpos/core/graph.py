"""Tokens that are the nodes of a graph: no axes tell how far apart two of them are, but the paths between them do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NoReturn, Self

import torch
from jaxtyping import Integer, Shaped
from torch import Tensor

from relpos.core.checks import WHOLE, fail, known_value, require_flag, require_int, require_tensor, shape_of


@dataclass(frozen=True, eq=False)
class Graph:
    """`prefix` tokens without a position, then the N nodes of a graph, with the length of the path between any two.

    Both queries and keys are its nodes. Mechanisms that see distances in a graph read it (`GraphormerBias`); others
    raise.

    Args:
        distances: `[N, N]`, or `[B, N, N]` for a batch of graphs: edges on the shortest path from node i, the query, to
            node j, the key, as integers. A negative one says that no path leads there. One byte is enough for paths of
            up to 127 edges. Of a padded node any number will do: hide it by `Mask.padding`.
        prefix: tokens before the nodes that have no place in the graph: Graphormer's graph token.

    Raises:
        ValueError: no integers, no square; in a mechanism that reads other coordinates alone.

    Examples:
        >>> graph = relpos.Graph.from_edges(torch.tensor([[0, 1], [1, 2]]), nodes=4, prefix=1)  # 0 - 1 - 2, and 3 alone
        >>> graph.count
        5
        >>> graph.distances.tolist()
        [[0, 1, 2, -1], [1, 0, 1, -1], [2, 1, 0, -1], [-1, -1, -1, 0]]
    """

    distances: Integer[Tensor, "*B N N"]
    prefix: int = 0

    axes: ClassVar[int] = 0

    def __post_init__(self) -> None:
        x = self.distances
        require_tensor(x, "Graph distances", dims=(2, 3))
        if x.dtype not in WHOLE:
            fail("integers as Graph distances", shape_of(x), "Count the edges between two nodes, -1 without a path.")
        if x.shape[-1] != x.shape[-2] or not x.shape[-1]:
            fail("Graph distances of shape [N, N] or [B, N, N]", shape_of(x), "Give one row and one column per node.")
        require_int(self.prefix, "Graph prefix", at_least=0)

    @classmethod
    def from_edges(cls, edges: Integer[Tensor, "2 E"], nodes: int, *, directed: bool = False, prefix: int = 0) -> Self:
        """The graph with these edges, its distances computed in a time of `nodes ** 3` (Floyd and Warshall).

        Args:
            edges: `[2, E]`, the nodes that each edge leaves and reaches, numbered from 0 (PyTorch Geometric's
                `edge_index`).
            nodes: how many there are, N.
            directed: whether an edge leads one way alone.
            prefix: tokens before the nodes that have no place in the graph.

        Raises:
            ValueError: another shape, or a node that there is not.
        """
        require_int(nodes, "nodes", at_least=1)
        require_flag(directed, "directed")
        require_tensor(edges, "edges", dims=2)
        if edges.dtype not in WHOLE or edges.shape[0] != 2:
            fail("edges as integers [2, E]", shape_of(edges), "Give the nodes that edges leave, then those they reach.")
        known = known_value(edges, lambda x: torch.stack(x.aminmax())) if edges.numel() else None
        if known is not None and (known[0] < 0 or known[1] >= nodes):
            fail(f"edges between nodes 0 to {nodes - 1}", f"{known[0]} to {known[1]}", "Number the nodes from 0.")
        start, end = edges.long()
        far = nodes  # no path has as many edges
        apart = torch.full((nodes, nodes), far, dtype=torch.int32, device=edges.device)
        apart[start, end] = 1
        if not directed:
            apart[end, start] = 1
        apart.fill_diagonal_(0)
        for via in range(nodes):
            torch.minimum(apart, apart[:, via, None] + apart[via], out=apart)
        return cls(apart.masked_fill_(apart >= far, -1), prefix)

    def __repr__(self) -> str:
        return f"Graph(distances of shape {tuple(self.distances.shape)}, prefix={self.prefix})"

    @property
    def count(self) -> int:
        """How many tokens, prefix included."""
        return self.prefix + self.distances.shape[-1]

    @property
    def low(self) -> tuple[int, ...]:
        """Raises: nodes have no coordinates."""
        self._has_no_axes()

    @property
    def high(self) -> tuple[int, ...]:
        """Raises: nodes have no coordinates."""
        self._has_no_axes()

    def tokens(self, device: torch.device | None = None) -> Shaped[Tensor, "*B N A"]:
        """Raises: nodes have no coordinates."""
        self._has_no_axes()

    def raster(self) -> NoReturn:
        """Raises: nodes have no order."""
        self._has_no_axes()

    def _has_no_axes(self) -> NoReturn:
        fail("coordinates on axes (Sequence, Grid or Positions)", repr(self), "Use a mechanism that reads graphs.")
