"""ALiBi: slopes, distances, and what becomes of the future."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import ALiBi, DenseBias, Grid, LineBias, Mask, Positions, Sequence, Site, alibi_slopes, attention
from relpos.core import Coordinates
from relpos.engines import attention_weights
from relpos.position.saved import is_settings
from relpos.testing import SuiteCase, oracle


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


class TestAlibiLearned(LibrarySuite):
    alike = True
    translation_invariant = True
    preset = "alibi_learned"
    distance: ClassVar[Any] = "euclidean"

    def cases(self) -> list[SuiteCase]:
        return super().cases()[::2]

    def build(self, site: Site) -> ALiBi:
        own = ALiBi.from_site(site, self.distance, learned=True)
        assert own.log_slopes is not None
        torch.nn.init.normal_(own.log_slopes, std=0.7)
        return own

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """A slope a head times the distance, or a slope an axis and head times the steps along it."""
        slopes = torch.exp(mechanism.log_slopes)
        entries = []
        for a in oracle.places(queries):
            for b in oracle.places(keys):
                steps = [
                    0 if a is None or b is None else abs(x - y)
                    for x, y in zip(a or b or (0,), b or a or (0,), strict=True)
                ]
                if self.distance == "axes":
                    entries.append(-sum(slopes[axis] * step for axis, step in enumerate(steps)))
                else:
                    entries.append(-slopes[0] * math.sqrt(sum(step * step for step in steps)))
        return torch.stack(entries, dim=-1).view(-1, queries.count, keys.count)


class TestAlibiAxes(TestAlibiLearned):
    axes = (2, 3)
    preset = "alibi_axes"
    distance = "axes"


# slopes


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
def test_slopes_as_published(heads: int) -> None:
    assert len(alibi_slopes(heads)) == heads
    assert alibi_slopes(heads) == pytest.approx(oracle.alibi_slopes(heads), rel=1e-14)
    assert ALiBi(heads).slopes == alibi_slopes(heads)


def test_slopes_by_hand() -> None:
    assert alibi_slopes(1) == (2**-8,)
    assert alibi_slopes(2) == (2**-4, 2**-8)
    assert alibi_slopes(3) == (2**-4, 2**-8, 2**-2)
    assert alibi_slopes(8) == tuple(2**-n for n in range(1, 9))
    assert alibi_slopes(12) == (*alibi_slopes(8), *(2 ** -(n / 2) for n in (1, 3, 5, 7)))
    wrong = [2 ** (-8 * (head + 1) / 12) for head in range(12)]
    assert alibi_slopes(12) != pytest.approx(wrong, rel=0.1), "the formula for powers of two, for all"


@pytest.mark.parametrize("heads", [1, 6, 12])
def test_learned_slopes_start_where_the_published_ones_are(heads: int) -> None:
    for where, distance, same in (
        (Sequence(9), "euclidean", "euclidean"),
        (Grid(3, 4), "euclidean", "euclidean"),
        (Grid(3, 4), "manhattan", "manhattan"),
        (Grid(3, 4), "axes", "manhattan"),
    ):
        learned: Any = ALiBi(heads, distance=distance, learned=True)  # type: ignore[arg-type]
        fixed: Any = ALiBi(heads, distance=same)  # type: ignore[arg-type]
        ours, theirs = (each.terms(where).of(LineBias)[0].values for each in (learned, fixed))
        torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-6)
        assert learned.log_slopes.shape == (2 if distance == "axes" else 1, heads)


def test_an_axis_each_by_hand() -> None:
    """3 rows at a slope of 2 and 4 columns at a slope of 1/2 are 8; the other way round 9.5."""
    own = ALiBi(2, distance="axes", learned=True)
    assert own.log_slopes is not None
    with torch.no_grad():
        own.log_slopes.copy_(torch.tensor([[2.0, 0.5], [0.5, 2.0]]).log())
    corner = Grid(1, 1)
    for place in ((3, 4), (-3, 4), (3, -4)):
        far = Positions(torch.tensor([place]), low=(-3, -4), high=(3, 4))
        line = own.terms(corner, far).of(LineBias)[0]
        assert line.values[:, line.lines.index()[0, 0]].tolist() == pytest.approx([-8.0, -9.5])


def test_learned_slopes_never_reward_distance() -> None:
    """Whatever a step of training makes of them."""
    for size in (-30.0, 0.0, 3.0):
        own = ALiBi(2, learned=True)
        assert own.log_slopes is not None
        torch.nn.init.constant_(own.log_slopes, size)
        values = own.terms(Sequence(1, start=50), Sequence(51)).of(LineBias)[0].values
        assert values.max() == 0
        assert (values.diff(dim=1) < 0).all()


def test_learned_is_a_module_like_any_other() -> None:
    own = ALiBi.from_site(Site(6, 4, 24, Grid(2, 2)), "axes", learned=True)
    assert [name for name in own.state_dict() if not is_settings(name)] == ["log_slopes"]
    assert own.state_dict()["log_slopes"].shape == (2, 6)
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    video = ALiBi.from_site(Site(6, 4, 24, Grid(2, 2, 3)), "axes", learned=True)
    assert video.log_slopes is not None
    assert video.log_slopes.shape == (3, 6)
    half = copy.deepcopy(own).to(torch.bfloat16)
    assert half.terms(Grid(2, 2)).of(LineBias)[0].values.dtype == torch.float32
    with pytest.raises(ValueError, match="coordinates with 2 axes"):
        own.terms(Sequence(4))
    assert ALiBi.from_site(Site(6, 4, 24, Sequence(4)), learned=True).distance == "euclidean"


# the future


def published(heads: int, queries: int, keys: int) -> DenseBias:
    """-slope * (i - j), as Press et al. write it: it grows with j without end."""
    i, j = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
    slopes = torch.tensor(oracle.alibi_slopes(heads), dtype=torch.float64)
    return DenseBias((-slopes[:, None, None] * (i - j))[None])


@pytest.mark.parametrize("heads", [3, 8, 12])
def test_causal_is_the_published_form(heads: int) -> None:
    q, k, v = torch.randn(3, 2, heads, 9, 4, dtype=torch.float64)
    ours = attention(q, k, v, position=ALiBi(heads), queries=Sequence(9), mask=Mask.causal())
    theirs = attention(q, k, v, position=published(heads, 9, 9), mask=Mask.causal())
    slack = {"rtol": 1e-12, "atol": 1e-12} if heads == 8 else {"rtol": 1e-6, "atol": 1e-6}  # 2^-0.5 in float32
    torch.testing.assert_close(ours, theirs, **slack)  # type: ignore[arg-type]


def test_the_future_is_not_rewarded() -> None:
    """Equal content and no mask: ours falls on both sides of the query, the published form rises with every key."""
    zeros = torch.zeros(1, 2, 9, 4)
    weights = attention_weights(zeros, zeros, position=ALiBi(2).terms(Sequence(9)))[0]
    others = attention_weights(zeros, zeros, position=published(2, 9, 9))[0]
    for i in range(9):
        assert (weights[:, i, 1 : i + 1] > weights[:, i, :i]).all()
        assert (weights[:, i, i + 1 :] < weights[:, i, i:-1]).all()
        assert (others[:, i, 1:] > others[:, i, :-1]).all()
    torch.testing.assert_close(weights, weights.flip(-1).flip(-2))


# distances


def test_distances_by_hand() -> None:
    """From the corner of a grid: 3 down and 4 across are 5 in a straight line and 7 along the axes."""
    corner, far = Grid(1, 1), Positions(torch.tensor([[3, 4]]), low=(0, 0), high=(3, 4))
    for distance, wanted in (("euclidean", 5), ("manhattan", 7)):
        line = ALiBi(2, distance=distance).terms(corner, far).of(LineBias)[0]  # type: ignore[arg-type]
        bias = line.values[:, line.lines.index()[0, 0]]
        assert bias.tolist() == [-wanted * 2**-4, -wanted * 2**-8]


def test_both_are_one_on_a_sequence() -> None:
    one, other = (ALiBi(4, distance=name).terms(Sequence(9)).of(LineBias)[0] for name in ("euclidean", "manhattan"))
    assert torch.equal(one.values, other.values)


def test_prefix_tokens_are_near_to_everything() -> None:
    zeros = torch.zeros(1, 2, 7, 4)
    weights = attention_weights(zeros, zeros, position=ALiBi(2).terms(Sequence(6, prefix=1)))[0]
    torch.testing.assert_close(weights[:, 0], torch.full((2, 7), 1 / 7))
    for i in range(6):
        torch.testing.assert_close(weights[:, 1 + i, 0], weights[:, 1 + i, 1 + i])


def test_values_are_float32_and_exact_to_its_last_place() -> None:
    """Also in a bfloat16 model, where 1,995 would be 1,992, and 100,000 places on."""
    own = copy.deepcopy(ALiBi(12)).to(torch.bfloat16)
    for start in (1, 1995, 100_000):
        line = own.terms(Sequence(1, start=start), Sequence(1)).of(LineBias)[0]
        assert line.values.dtype == torch.float32
        wanted = torch.tensor([-slope * start for slope in alibi_slopes(12)], dtype=torch.float64).float()
        assert torch.equal(line.values[:, 0], wanted)


def test_from_site_and_growth() -> None:
    own = ALiBi.from_site(Site(6, 4, 24, Grid(2, 2)), "manhattan")
    assert (len(own.slopes), own.distance) == (6, "manhattan")
    assert all(map(is_settings, own.state_dict()))
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")
