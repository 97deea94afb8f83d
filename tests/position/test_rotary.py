"""Rotary positions: both layouts, partial rotation, one axis and several, caches of rotated keys, longer contexts."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.rotations import RotationSuite
from relpos import (
    Grid,
    LinearScaling,
    Llama3Scaling,
    Mask,
    NTKScaling,
    RotaryEmbedding,
    Rotation,
    Sequence,
    Site,
    Terms,
    XPos,
    YaRN,
    attention,
    rotate,
)
from relpos.core import Coordinates
from relpos.position import find
from relpos.testing import oracle


class Rotary(RotationSuite):
    layout: ClassVar[Any] = "half"
    rotary_dim: ClassVar[int | None] = None

    def build(self, site: Site) -> RotaryEmbedding:
        return RotaryEmbedding(
            site.head_dim, axes=self.along, base=100.0, layout=self.layout, rotary_dim=self.rotary_dim
        )

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        places = oracle.raster(side) if self.along == 1 else oracle.places(side)
        pairs = (self.rotary_dim or x.shape[-1]) // (2 * self.along)
        return oracle.rotated(x, places, self.along, pairs, 100.0, self.layout)


class TestRotary1d(Rotary):
    preset = "rotary_1d"


class TestRotary1dInterleavedPartial(Rotary):
    alike = True
    row = "rotary_1d (interleaved, partial)"
    layout = "interleaved"
    rotary_dim = 2
    axes = (1,)
    every = 2


class TestRotary1dWithoutPrefix(Rotary):
    """Only there nothing depends on more than offsets."""

    alike = True
    row = ""
    every = 2
    layout = "interleaved"
    axes = (1,)
    prefixes = False
    translation_invariant = True


class TestRotary2d(Rotary):
    along = 2
    axes = (2,)
    layout = "interleaved"
    preset = "rotary_2d"


class TestRotary2dWithoutPrefix(Rotary):
    alike = True
    row = "rotary_2d (half layout)"
    along = 2
    axes = (2,)
    prefixes = False
    translation_invariant = True


def turned(mechanism: RotaryEmbedding, x: Tensor, coordinates: Coordinates) -> Tensor:
    return rotate(x, mechanism.angles(coordinates), layout=mechanism.layout)


def test_by_hand() -> None:
    """Width 4 at place 3: the first pair turns by 3, the second by 3/100."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    c, s, cc, ss = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    for mechanism, wanted in (
        (RotaryEmbedding(4, layout="interleaved"), [c - 2 * s, s + 2 * c, 3 * cc - 4 * ss, 3 * ss + 4 * cc]),
        (RotaryEmbedding(4, layout="half"), [c - 3 * s, 2 * cc - 4 * ss, s + 3 * c, 2 * ss + 4 * cc]),
        (RotaryEmbedding(4, layout="half", rotary_dim=2), [c - 2 * s, s + 2 * c, 3, 4]),
    ):
        assert turned(mechanism, x, Sequence(1, start=3)).flatten().tolist() == pytest.approx(wanted, abs=1e-15)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(
    ("grid", "width", "rotary_dim"),
    [(Grid(3, 5, prefix=1), 8, 8), (Grid(4, 2), 12, 8), (Grid(2, 3, 2, prefix=2), 14, 12), (Grid(2, 3, 2), 6, 6)],
    ids=str,
)
def test_several_axes_of_several_pairs(grid: Grid, width: int, rotary_dim: int, layout: Any) -> None:
    x = torch.randn(2, 3, grid.count, width, dtype=torch.float64)
    mechanism = RotaryEmbedding(width, axes=grid.axes, base=100.0, layout=layout, rotary_dim=rotary_dim)
    pairs = rotary_dim // (2 * grid.axes)
    wanted = oracle.rotated(x, oracle.places(grid), grid.axes, pairs, 100.0, layout)
    torch.testing.assert_close(turned(mechanism, x, grid), wanted, rtol=1e-14, atol=1e-14)
    if width % (2 * grid.axes):
        assert RotaryEmbedding(width, axes=grid.axes).rotary_dim == rotary_dim, "the most there are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_place_100_000_is_as_exact_as_place_1(dtype: torch.dtype) -> None:
    """In a bfloat16 model the error is that of one rounding of the result, wherever the token is."""
    mechanism = RotaryEmbedding(64).to(dtype)
    x = torch.randn(1, 1, 200, 64).to(dtype)
    for start in (1, 100_000):
        here = Sequence(200, start=start)
        exact = oracle.rotated(x.double(), oracle.places(here), 1, 32, 10000.0, "half")
        found = turned(mechanism, x, here)
        assert found.dtype == dtype
        size = (x.double().unflatten(-1, (2, 32)).norm(dim=-2)).repeat(1, 1, 1, 2)  # of the pair: it is kept
        unit = torch.finfo(dtype).eps * (0.5 if dtype == torch.bfloat16 else 2)  # float32: product and sum round too
        slack = 1 + 1e-4  # bfloat16 is rounded from float32
        assert ((found.double() - exact).abs() <= size * unit * slack).all()


@pytest.mark.parametrize("centre", [None, 0.0, 3.5, -20.0], ids=lambda one: "plain" if one is None else f"xPos {one}")
def test_a_cache_of_rotated_keys(centre: float | None) -> None:
    """Turned once when written, met by later queries through a term without key angles. Of xPos each side carries its
    magnitude, about any centre that does not move."""
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64)
    plain = centre is None
    own = RotaryEmbedding(8, rotary_dim=6) if plain else XPos(8, scale_base=8.0, centre=centre)
    moving = own if plain else XPos(8, scale_base=8.0)
    whole = attention(q, k, v, position=moving, queries=Sequence(7), mask=Mask.causal())
    cache = torch.empty(2, 3, 0, 8, dtype=torch.float64)
    for t in range(7):
        one, here = slice(t, t + 1), Sequence(1, start=t)
        of_query, of_key = (None if plain else own.magnitudes(here, side) for side in ("query", "key"))
        key = rotate(k[:, :, one], own.angles(here), layout=own.layout, magnitude=1.0 if plain else of_key)
        cache = torch.cat([cache, key], dim=2)
        met = Terms(Rotation(own.angles(here), None, layout=own.layout, query_magnitude=of_query))
        step = attention(q[:, :, one], cache, v[:, :, : t + 1], position=met)
        torch.testing.assert_close(step, whole[:, :, one])


# longer contexts than it was trained on

LONGER: dict[str, Any] = {
    "linear": LinearScaling(2.5),
    "ntk": NTKScaling(2.5),
    "yarn": YaRN(2.5, 16),
    "llama3": Llama3Scaling(2.5, 16),
}
"""What each rule makes of 40 tokens after 16."""


def test_growth_without_a_trained_length() -> None:
    own = RotaryEmbedding(8)
    assert own.growth == ("as is",)
    assert own.grow(Sequence(99), "as is") is own


@pytest.mark.parametrize("beyond", ["as is", *LONGER])
def test_growth_by_rule(beyond: Any) -> None:
    """From 16 trained tokens to 40: stretched by 2.5 from the copy's first token on, and the mechanism left alone."""
    own = RotaryEmbedding(8, base=100.0, trained_length=16, beyond=beyond)
    untouched = RotaryEmbedding(8, base=100.0)
    assert own.growth == (beyond, *(rule for rule in ("as is", *LONGER) if rule != beyond))
    long = Sequence(30, start=10, prefix=1)  # up to place 39
    assert own.grow(long, "as is") is own
    for rule, scaling in LONGER.items():
        grown = own.grow(long, rule)
        assert grown.growth == own.growth
        assert torch.equal(own.angles(long), untouched.angles(long)), "itself left alone"
        found, wanted = (
            one.terms(long).one(Rotation) for one in (grown, RotaryEmbedding(8, base=100.0, scaling=scaling))
        )
        assert torch.equal(found.query, wanted.query)
        assert found.magnitude == wanted.magnitude
        assert (found.magnitude == 1) == (rule != "yarn")
        again = grown.grow(Sequence(24), rule)
        assert again.scaling == own.grow(Sequence(24), rule).scaling, "from the trained length, whatever came between"


@pytest.mark.parametrize("rule", LONGER)
@pytest.mark.parametrize("where", [Sequence(16), Grid(4, 4, prefix=1), Grid(2, 3)], ids=repr)
def test_within_the_trained_length_all_rules_are_one(where: Coordinates, rule: str) -> None:
    own = RotaryEmbedding(8, trained_length=16)
    found, wanted = (one.terms(where).one(Rotation) for one in (own.grow(where, rule), own))
    torch.testing.assert_close(found.query, wanted.query, rtol=1e-15, atol=0)
    assert found.magnitude == 1


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("rotary_1d", "as is"),
        ("rotary_linear", "linear"),
        ("rotary_ntk", "ntk"),
        ("rotary_yarn", "yarn"),
        ("rotary_llama3", "llama3"),
        ("rotary_dynamic_ntk", "as is"),
    ],
)
def test_presets_for_longer_contexts(name: str, first: str) -> None:
    """On the tokens that they are built for all turn alike; beyond them each as it is called."""
    for trained in (Sequence(9), Sequence(9, prefix=2), Grid(3, 3, prefix=1)):
        own = find(name).build(Site(2, 8, 16, trained))
        found, wanted = (one.terms(trained).one(Rotation) for one in (own, RotaryEmbedding(8)))
        assert torch.equal(found.query, wanted.query)
        assert found.magnitude == 1
        assert own.growth[0] == first
        if name == "rotary_dynamic_ntk":
            assert own.growth == ("as is",)
            longer = RotaryEmbedding(8, scaling=NTKScaling(4.0)).terms(Sequence(36)).one(Rotation)
            assert torch.equal(own.terms(Sequence(36)).one(Rotation).query, longer.query)
        else:
            assert len(own.growth) == 5
            assert own.grow(Sequence(36), "linear").scaling == LinearScaling(4.0)
    assert find("rotary_1d").build(Site(2, 8, 16, Sequence(4), Sequence(12))).trained_length == 12, "of both sides"


def test_a_sum_with_a_rotation_grows_by_its_rules() -> None:
    """A rotation whose first rule is "as is" goes on so while another part takes its own rule."""
    site = Site(2, 8, 16, Grid(3, 3))
    both = find("relative_2d+rotary_1d").build(site)
    assert both.growth == ("interpolated", "clipped", "linear", "ntk", "yarn", "llama3")
    table, rotary = both.grow(Grid(6, 6), "interpolated").parts()
    assert rotary is both.parts()[1]
    table, rotary = both.grow(Grid(6, 6), "yarn").parts()
    assert rotary.scaling == YaRN(4.0, 9)
    assert table.sizes == (6, 6), "the other part takes its first"
    table, rotary = find("relative_2d+rotary_ntk").build(site).grow(Grid(6, 6), "clipped").parts()
    assert rotary.scaling == NTKScaling(4.0)
    assert table.sizes == (3, 3)
