"""Angles: coordinates times frequencies, in float64 whatever the model's dtype."""

import math

import pytest
import torch

from relpos import Grid, Positions, Sequence
from relpos.core import Coordinates
from relpos.position.base.angles import angles, frequencies
from relpos.testing import oracle

CPU = torch.device("cpu")
CELLS = Positions(torch.tensor([[1, 0], [0, 2], [1, 2]]), low=(0, 0), high=(1, 2))


@pytest.mark.parametrize(("count", "base"), [(1, 100.0), (3, 2.0), (32, 500000.0)])
def test_frequencies(count: int, base: float) -> None:
    bands = frequencies(count, base)
    assert bands == pytest.approx([math.exp(-math.log(base) * 2 * p / (2 * count)) for p in range(count)], rel=1e-15)
    assert bands[0] == 1.0, "the fastest turns a radian a place"
    assert bands[-1] > 1 / base


@pytest.mark.parametrize(
    "coordinates",
    [
        Sequence(5),
        Sequence(3, start=-2, prefix=2),
        Sequence(0, prefix=2),
        Grid(2, 3, prefix=1),
        Grid(2, 3, 2),
        CELLS,
        Positions(torch.tensor([1 / 3, 2.25], dtype=torch.float64), low=0, high=3),
    ],
    ids=repr,
)
def test_values(coordinates: Coordinates) -> None:
    found = angles(coordinates, frequencies(3, 100.0), CPU)
    assert found.dtype == torch.float64
    assert found.shape == (1, coordinates.count, coordinates.axes, 3)
    wanted = oracle.angles(oracle.places(coordinates), coordinates.axes, 3, 100.0)
    torch.testing.assert_close(found[0].flatten(1), wanted, rtol=1e-15, atol=0)


def test_one_row_an_element_of_the_batch() -> None:
    places = torch.tensor([[0, 1, 2], [5, 2, 0]])
    found = angles(Positions(places, low=0, high=5, prefix=1), frequencies(2, 100.0), CPU)
    assert found.shape == (2, 4, 1, 2)
    for b in range(2):
        alone = angles(Positions(places[b], low=0, high=5, prefix=1), frequencies(2, 100.0), CPU)
        assert torch.equal(found[b : b + 1], alone)


def test_a_far_place_is_exact() -> None:
    """To a few units in float64's last place; products formed in float32 are off by thousandths of a radian."""
    exact = [100_000 / 10000 ** (p / 32) for p in range(32)]
    found = angles(Sequence(1, start=100_000), frequencies(32, 10000.0), CPU).flatten()
    assert found.tolist() == pytest.approx(exact, rel=1e-15)
    single = torch.tensor(100_000.0) * torch.tensor(frequencies(32, 10000.0), dtype=torch.float32)
    assert 1e-3 < (single.double() - found).abs().max() < 1e-2
