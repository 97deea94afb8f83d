"""Where tokens are."""

import pytest
import torch

from relpos import Grid, Positions, Sequence
from relpos.testing import oracle

COORDINATES = [
    Sequence(1),
    Sequence(7, start=3),
    Sequence(5, start=-2, prefix=2),
    Sequence(0, prefix=1),
    Grid(1, 1),
    Grid(1, 5),
    Grid(4, 8, prefix=3),
    Grid(2, 3, 4),
    Positions(torch.tensor([4, 0, 2]), low=0, high=4),
    Positions(torch.tensor([[1, 2], [0, 5], [1, 0]]), low=(0, 0), high=(1, 5), prefix=1),
]


@pytest.mark.parametrize("coordinates", COORDINATES, ids=str)
def test_tokens_by_loops(coordinates: Sequence | Grid | Positions) -> None:
    places = oracle.places(coordinates)
    assert coordinates.count == len(places)
    rest = [place for place in places if place is not None]
    assert len(places) - len(rest) == coordinates.prefix
    assert [tuple(row) for row in coordinates.tokens().tolist()] == rest
    for axis in range(coordinates.axes):
        numbers = [place[axis] for place in rest] or [coordinates.low[axis]]
        assert coordinates.low[axis] == min(numbers)
        assert coordinates.high[axis] == max(numbers)


def test_batched_positions() -> None:
    positions = Positions(torch.tensor([[0, 1, 2], [5, 4, 3]]), low=0, high=5)
    assert positions.count == 3
    assert positions.axes == 1
    assert positions.tokens().shape == (2, 3, 1)
    grids = Positions(torch.zeros(2, 3, 2, dtype=torch.long), low=(0, 0), high=(4, 4))
    assert grids.axes == 2
    assert grids.count == 3


def test_raster() -> None:
    assert Sequence(4, start=2).raster() == Sequence(4, start=2)
    assert Grid(3, 4, prefix=2).raster() == Sequence(12, prefix=2)
    line = Positions(torch.tensor([3, 1]), low=0, high=3)
    assert line.raster() is line
    with pytest.raises(ValueError, match="one axis"):
        Positions(torch.zeros(2, 2, dtype=torch.long), low=(0, 0), high=(0, 0)).raster()


def test_grids_compare_and_print() -> None:
    assert Grid(2, 3) == Grid(2, 3)
    assert Grid(2, 3) != Grid(2, 3, prefix=1)
    assert hash(Grid(2, 3)) == hash(Grid(2, 3))
    assert repr(Grid(2, 3)) == "Grid(2, 3)"
    assert repr(Grid(2, 3, prefix=1)) == "Grid(2, 3, prefix=1)"
