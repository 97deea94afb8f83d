"""Sinusoidal absolute positions: on sequences and grids, in all three layouts."""

from typing import Any, ClassVar

import torch
from torch import Tensor

from position.suites import PositionSuite
from relpos import Sequence, SinusoidalPositionEmbedding, Site
from relpos.core import Coordinates
from relpos.testing import oracle


class Sinusoidal(PositionSuite):
    layout: ClassVar[Any] = "interleaved"
    counted: ClassVar[int] = 1
    sampled = 0  # in attention it says nothing

    def build(self, site: Site) -> SinusoidalPositionEmbedding:
        return SinusoidalPositionEmbedding(site.embed_dim, axes=self.counted, base=100.0, layout=self.layout)

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        width = x.shape[-1]
        rows = [oracle.sinusoid(at, width, self.counted, 100.0, self.layout) for at in self.places(coordinates)]
        return oracle.learned_absolute(x, torch.tensor(rows, dtype=x.dtype), range(len(rows)))


class TestSinusoidal1d(Sinusoidal):
    alike = True
    axes = (1, 2, 3)
    raster = True
    preset = "sinusoidal_1d"


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


def test_rounded_once_in_a_narrow_model() -> None:
    """In bfloat16 place 100,000 is as exact as place 1: half a unit in the last place, of numbers up to 1."""
    own = SinusoidalPositionEmbedding(16)

    def added(start: int, dtype: torch.dtype) -> Tensor:
        return own.embed(torch.zeros(1, 4, 16, dtype=dtype), Sequence(4, start=start))

    for start in (1, 1995, 100_000):
        wide = added(start, torch.float64)
        assert torch.equal(added(start, torch.bfloat16), wide.bfloat16())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.equal(added(start, torch.float64), wide)
