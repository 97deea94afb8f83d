"""Sinusoidal absolute positions: on sequences and grids, in all three layouts."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Grid, Positions, Sequence, SinusoidalPositionEmbedding, Site
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle

LAYOUTS = ("interleaved", "half", "grouped")


class Sinusoidal(LibrarySuite):
    layout: ClassVar[Any] = "interleaved"
    counted: ClassVar[int] = 1
    sampled = 0  # in attention it says nothing
    every: ClassVar[int] = 1  # of the cases: a variant is the same code around one other line

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def build(self, site: Site) -> SinusoidalPositionEmbedding:
        return SinusoidalPositionEmbedding(site.embed_dim, axes=self.counted, base=100.0, layout=self.layout)

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        tokens = oracle.raster(coordinates) if self.counted == 1 else oracle.places(coordinates)
        rows = [oracle.sinusoid(place, x.shape[-1], self.counted, 100.0, self.layout) for place in tokens]
        return oracle.learned_absolute(x, torch.tensor(rows, dtype=x.dtype), range(len(rows)))


class TestSinusoidal1d(Sinusoidal):
    alike = True
    axes = (1, 2, 3)
    preset = "sinusoidal_1d"

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes > 1 and case.irregular)  # those have no raster order


class TestSinusoidal1dGrouped(TestSinusoidal1d):
    row = "sinusoidal_1d (grouped)"
    every = 4
    layout = "grouped"


class TestSinusoidal2d(Sinusoidal):
    axes = (2,)
    counted = 2
    layout = "half"
    preset = "sinusoidal_2d"


class TestSinusoidal2dInterleaved(TestSinusoidal2d):
    alike = True
    row = "sinusoidal_2d (interleaved)"
    every = 2
    layout = "interleaved"


class TestSinusoidal2dGrouped(TestSinusoidal2d):
    alike = True
    row = "sinusoidal_2d (grouped)"
    every = 2
    layout = "grouped"


class TestSinusoidal3d(Sinusoidal):
    alike = True
    row = "sinusoidal_2d (three axes)"
    axes = (3,)
    counted = 3
    layout = "half"


def added(mechanism: SinusoidalPositionEmbedding, coordinates: Coordinates, dtype: torch.dtype) -> Tensor:
    return mechanism.embed(torch.zeros(1, coordinates.count, mechanism.embed_dim, dtype=dtype), coordinates)[0]


def test_by_hand() -> None:
    """Width 4 at place 2: the frequencies are 1 and 1/100."""
    sin, cos = (f(2.0) for f in (math.sin, math.cos))
    slow = math.sin(0.02), math.cos(0.02)
    for layout, wanted in {
        "interleaved": [sin, cos, *slow],
        "half": [sin, slow[0], cos, slow[1]],
        "grouped": [sin, slow[0], cos, slow[1]],
    }.items():
        vector = added(SinusoidalPositionEmbedding(4, layout=layout), Sequence(1, start=2), torch.float64)[0]  # type: ignore[arg-type]
        assert vector.tolist() == pytest.approx(wanted, abs=1e-16)


def test_by_hand_on_a_grid() -> None:
    """Row 1, column 2 of width 4: one frequency an axis, rows first."""
    s1, c1, s2, c2 = math.sin(1), math.cos(1), math.sin(2), math.cos(2)
    cell = Positions(torch.tensor([[1, 2]]), low=(0, 0), high=(1, 2))
    for layout, wanted in {
        "interleaved": [s1, c1, s2, c2],
        "half": [s1, c1, s2, c2],
        "grouped": [s1, s2, c1, c2],
    }.items():
        mechanism = SinusoidalPositionEmbedding(4, axes=2, layout=layout)  # type: ignore[arg-type]
        assert added(mechanism, cell, torch.float64)[0].tolist() == pytest.approx(wanted, abs=1e-16)
        assert torch.equal(added(mechanism, Grid(2, 3), torch.float64)[5], added(mechanism, cell, torch.float64)[0])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_product_of_two_depends_on_the_offset(layout: Any) -> None:
    """Vaswani et al. 2017: the vector of n + k is a rotation of that of n, so their product is a function of k."""
    mechanism = SinusoidalPositionEmbedding(8, layout=layout)
    vectors = added(mechanism, Sequence(20), torch.float64)
    products = vectors @ vectors.T
    for k in range(20):
        line = products.diagonal(k)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=0, atol=1e-13)


def test_prefix_tokens_get_nothing() -> None:
    mechanism = SinusoidalPositionEmbedding(8, axes=2)
    x = torch.randn(2, 8, 8)
    out = mechanism.embed(x, Grid(2, 3, prefix=2))
    assert torch.equal(out[:, :2], x[:, :2])
    assert torch.equal(out[:, 2:], mechanism.embed(x[:, 2:], Grid(2, 3)))


def test_rounded_once_in_a_narrow_model() -> None:
    """In bfloat16 place 100,000 is as exact as place 1: half a unit in the last place, of numbers up to 1."""
    mechanism = SinusoidalPositionEmbedding(16)
    for start in (1, 1995, 100_000):
        wide = added(mechanism, Sequence(4, start=start), torch.float64)
        narrow = added(mechanism.to(torch.bfloat16), Sequence(4, start=start), torch.bfloat16)
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, wide.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(added(mechanism, Sequence(4, start=start), torch.float64), wide)


def test_says_nothing_in_attention_and_grows_as_it_is() -> None:
    mechanism = SinusoidalPositionEmbedding.from_site(Site(3, 4, 12, Grid(2, 2)), 2)
    assert (mechanism.axes, mechanism.layout, mechanism.base) == (2, "half", 10000.0)
    assert mechanism.acts_on_tokens
    assert not mechanism.acts_in_attention
    assert not list(mechanism.parameters())
    assert mechanism.growth == ("as is",)
    assert mechanism.grow(Grid(9, 9), "as is") is mechanism
    mechanism.embed(torch.randn(1, 81, 12), Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        mechanism.grow(Grid(9, 9), "interpolated")
    line = SinusoidalPositionEmbedding.from_site(Site(3, 4, 12, Grid(2, 2)))
    assert (line.axes, line.layout) == (1, "interleaved")
