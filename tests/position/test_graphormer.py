"""Graphormer's spatial encoding, on graphs by loops over their table and paths, and as a line where neighbours join."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import agree, with_gradients
from position.suites import PositionSuite
from relpos import Graph, GraphormerBias, IndexedBias, Site, attention, reading_once
from relpos.core import Coordinates
from relpos.testing import oracle


class TestGraphormer(PositionSuite):
    alike = True
    translation_invariant = True
    preset = "graphormer"

    def build(self, site: Site) -> GraphormerBias:
        return GraphormerBias(site.num_heads, max_distance=3, init_std=1.0)  # so that some cases go beyond

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """A table's row per number of steps between neighbours, the last for more than 3; prefixes have their own."""
        table, virtual = mechanism.spatial_bias_table, mechanism.graph_token_virtual_distance[0]
        rows = self.by_offset(queries, keys, lambda *offset: table[min(sum(map(abs, offset)), 4)], virtual)
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


EDGES = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (2, 6), (6, 7), (8, 9)]
"""A ring of six with a tail of two, and a pair apart."""
NODES = 11


def walked(edges: list[tuple[int, int]], far: int) -> Tensor:
    """Steps from each node to each other one, a neighbour at a time; `far` where no path leads."""
    rows = []
    for start in range(NODES):
        reached, border = {start: 0}, [start]
        while border:
            node = border.pop(0)
            for end in (b for a, b in edges if a == node and b not in reached):
                reached[end] = reached[node] + 1
                border.append(end)
        rows.append([reached.get(end, far) for end in range(NODES)])
    return torch.tensor(rows)


@pytest.mark.parametrize("directed", [False, True])
def test_distances_by_walking(directed: bool) -> None:
    edges = EDGES if directed else EDGES + [(b, a) for a, b in EDGES]
    graph = Graph.from_edges(torch.tensor(EDGES).T, NODES, directed=directed, prefix=2)
    assert torch.equal(graph.distances.long(), walked(edges, -1))
    assert graph.count == dataclasses.replace(graph).count == NODES + 2  # as FSDP rebuilds what enters a block
    assert torch.equal(Graph.from_edges(torch.empty(2, 0).long(), 2).distances, torch.tensor([[0, -1], [-1, 0]]))


@pytest.mark.parametrize("engine", ["reference", "sdpa", "streaming"])
@pytest.mark.parametrize("spaces", [6, 512])
def test_a_batch_of_graphs_is_the_published_code(engine: str, spaces: int) -> None:
    """Equation 6 as `GraphAttnBias` has it: distances plus 1, 510 without a path, one number for the graph token.

    A small table stands for the loader's limit: what is farther reads the row of what has no path.
    """
    torch.manual_seed(0)
    weight, virtual = torch.randn(spaces, 3).double(), torch.randn(1, 3).double()
    own = GraphormerBias(3, max_distance=spaces - 3).double()
    own.load_state_dict({**own.state_dict(), "spatial_bias_table": weight[1:], "graph_token_virtual_distance": virtual})
    weight.requires_grad_()
    virtual.requires_grad_()
    both = [walked(EDGES + [(b, a) for a, b in EDGES], -1), walked(EDGES, -1)]  # the second one way alone
    q, k, v, upstream = torch.randn(4, 2, 3, NODES + 1, 4).double().unbind()

    graph = Graph(torch.stack(both).to(torch.int8), prefix=1)
    (term,) = own.terms(graph)
    assert isinstance(term, IndexedBias)
    assert term.index.dtype == (torch.uint8 if spaces == 6 else torch.int16)
    ours = attention(q, k, v, position=own, queries=graph, backend=engine)
    assert isinstance(ours, Tensor)
    found = with_gradients(ours, dict(own.named_parameters()), upstream)

    bias = virtual.T[None, :, :, None].expand(2, 3, NODES + 1, NODES + 1).clone()
    for b, distances in enumerate(both):
        for i in range(NODES):
            for j in range(NODES):
                steps = int(distances[i, j])
                bias[b, :, i + 1, j + 1] = weight[min(steps if steps >= 0 else 510, spaces - 2) + 1]
    theirs, _ = oracle.attention(q, k, v, bias=bias)
    wanted = with_gradients(theirs, {"spatial": weight, "graph_token_virtual_distance": virtual}, upstream)
    wanted["spatial_bias_table"] = wanted.pop("spatial")[1:]
    agree("graphormer", "a loop over the pairs of two graphs", found, wanted)


def test_layers_read_a_graph_once_until_it_changes() -> None:
    class Layers(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = GraphormerBias(2, init_std=1.0)

        def forward(self, graph: Graph) -> list[Any]:
            found = [self.position.terms(graph) for _ in range(2)]
            graph.distances[0, 1] = 5
            return [*found, self.position.terms(graph)]

    model, graph = Layers(), Graph.from_edges(torch.tensor([[0], [1]]), 2)
    with reading_once(model):
        first, again, changed = model(graph)
    assert first is again
    assert changed is not first
    assert changed.items[0].index[0, 0, 1] == 5
