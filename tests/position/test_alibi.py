"""ALiBi: slopes and distances. What becomes of the future is in test_published_language.py."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from position.suites import OffsetSuite
from relpos import ALiBi, Grid, LineBias, Sequence, Site, alibi_slopes
from relpos.core import Coordinates
from relpos.testing import oracle


class TestAlibi(LibrarySuite):
    translation_invariant = True
    preset = "alibi"
    distance: ClassVar[Any] = "euclidean"

    def build(self, site: Site) -> ALiBi:
        return ALiBi(site.num_heads, distance=self.distance)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        heads = len(mechanism.slopes)
        return oracle.alibi(heads, oracle.places(queries), oracle.places(keys), self.distance)


class TestAlibiManhattan(TestAlibi):
    alike = True
    axes = (2, 3)
    distance = "manhattan"
    preset = "alibi_manhattan"


class TestAlibiLearned(OffsetSuite):
    alike = True
    translation_invariant = True
    preset = "alibi_learned"
    distance: ClassVar[Any] = "euclidean"
    every = 2

    def build(self, site: Site) -> ALiBi:
        own = ALiBi.from_site(site, self.distance, learned=True)
        assert own.log_slopes is not None
        torch.nn.init.normal_(own.log_slopes, std=0.7)
        return own

    def value(self, own: Any, *offset: int) -> Tensor:
        """A slope a head times the distance, or a slope an axis and head times the steps along it."""
        slopes = torch.exp(own.log_slopes)
        if self.distance == "axes":
            return -(slopes * torch.tensor(offset).abs()[:, None]).sum(dim=0)
        return -slopes[0] * math.hypot(*offset)


class TestAlibiAxes(TestAlibiLearned):
    axes = (2, 3)
    preset = "alibi_axes"
    distance = "axes"


def test_slopes_by_hand() -> None:
    """Of powers of two a geometric sequence; between them every other slope of the next one follows."""
    assert alibi_slopes(1) == (2**-8,)
    assert alibi_slopes(2) == (2**-4, 2**-8)
    assert alibi_slopes(3) == (2**-4, 2**-8, 2**-2)
    assert alibi_slopes(8) == tuple(2**-n for n in range(1, 9))
    assert alibi_slopes(12) == (*alibi_slopes(8), *(2 ** -(n / 2) for n in (1, 3, 5, 7)))
    assert ALiBi(12).slopes == alibi_slopes(12)


@pytest.mark.parametrize(
    ("where", "distance", "same"),
    [
        (Sequence(9), "euclidean", "euclidean"),
        (Grid(3, 4), "euclidean", "euclidean"),
        (Grid(3, 4), "manhattan", "manhattan"),
        (Grid(3, 4), "axes", "manhattan"),
    ],
)
def test_learned_slopes_start_where_the_published_ones_are(where: Any, distance: Any, same: Any) -> None:
    learned, fixed = ALiBi(6, distance=distance, learned=True), ALiBi(6, distance=same)
    ours, theirs = (each.terms(where).of(LineBias)[0].values for each in (learned, fixed))
    torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-6)


def test_both_distances_are_one_on_a_sequence() -> None:
    one, other = (ALiBi(4, distance=name).terms(Sequence(9)).of(LineBias)[0] for name in ("euclidean", "manhattan"))
    assert torch.equal(one.values, other.values)
