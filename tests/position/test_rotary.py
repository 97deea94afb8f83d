"""Rotary positions: both layouts, partial rotation, one axis and several."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import (
    Grid,
    LinearScaling,
    Llama3Scaling,
    Mask,
    NTKScaling,
    Positions,
    RotaryEmbedding,
    Rotation,
    Sequence,
    Site,
    Terms,
    VisionTransformer,
    YaRN,
    attention,
    rotate,
)
from relpos.core import Coordinates
from relpos.position import find
from relpos.position.saved import is_settings
from relpos.testing import SuiteCase, oracle


class Rotary(LibrarySuite):
    layout: ClassVar[Any] = "half"
    counted: ClassVar[int] = 1
    rotary_dim: ClassVar[int | None] = None
    every: ClassVar[int] = 1  # of the cases

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        if self.counted == 1 and case.axes > 1 and case.irregular:
            return False  # those have no raster order
        return super().takes(case) and not (self.translation_invariant and case.prefix)

    def build(self, site: Site) -> RotaryEmbedding:
        return RotaryEmbedding(
            site.head_dim, axes=self.counted, base=100.0, layout=self.layout, rotary_dim=self.rotary_dim
        )

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        places = oracle.raster if self.counted == 1 else oracle.places
        pairs = (self.rotary_dim or q.shape[-1]) // (2 * self.counted)
        q, k = (
            oracle.rotated(x, places(side), self.counted, pairs, 100.0, self.layout)
            for x, side in ((q, queries), (k, keys))
        )
        return oracle.attention(q, k, v, allowed=allowed)[0]


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
    counted = 2
    axes = (2,)
    layout = "interleaved"
    preset = "rotary_2d"


class TestRotary2dWithoutPrefix(Rotary):
    alike = True
    row = "rotary_2d (half layout)"
    counted = 2
    axes = (2,)
    prefixes = False
    translation_invariant = True


def turned(mechanism: RotaryEmbedding, x: Tensor, coordinates: Coordinates) -> Tensor:
    return rotate(x, mechanism.angles(coordinates), layout=mechanism.layout)


# which dimensions turn, and by how much


def test_by_hand() -> None:
    """Width 4 at place 3: the first pair turns by 3, the second by 3/100."""
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64)
    c, s, cc, ss = math.cos(3), math.sin(3), math.cos(0.03), math.sin(0.03)
    for layout, wanted in {
        "interleaved": [c - 2 * s, s + 2 * c, 3 * cc - 4 * ss, 3 * ss + 4 * cc],
        "half": [c - 3 * s, 2 * cc - 4 * ss, s + 3 * c, 2 * ss + 4 * cc],
    }.items():
        mechanism = RotaryEmbedding(4, layout=layout)  # type: ignore[arg-type]
        assert turned(mechanism, x, Sequence(1, start=3)).flatten().tolist() == pytest.approx(wanted, abs=1e-15)
    first = turned(RotaryEmbedding(4, layout="half", rotary_dim=2), x, Sequence(1, start=3)).flatten().tolist()
    assert first == pytest.approx([c - 2 * s, s + 2 * c, 3, 4], abs=1e-15)


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


def test_prefix_and_rest_pass_through() -> None:
    x = torch.randn(2, 3, 8, 6)
    out = turned(RotaryEmbedding(6, axes=2, rotary_dim=4), x, Grid(2, 3, prefix=2))
    assert torch.equal(out[:, :, :2], x[:, :, :2])
    assert torch.equal(out[..., 4:], x[..., 4:])
    assert not torch.equal(out[:, :, 3:, :4], x[:, :, 3:, :4])


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_scores_depend_on_the_offset_alone(layout: Any) -> None:
    """One query and one key, everywhere: equal offsets give equal products, and lengths are kept."""
    mechanism = RotaryEmbedding(8, layout=layout)
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 30, 8)
    queries, keys = (turned(mechanism, x, Sequence(30)) for x in (q, k))
    scores = (queries @ keys.mT)[0, 0]
    for offset in range(-29, 30):
        line = scores.diagonal(offset)
        torch.testing.assert_close(line, line[:1].expand_as(line), rtol=0, atol=1e-13)
    assert (scores[0, 1:] - scores[0, :1]).abs().min() > 1e-6
    torch.testing.assert_close(queries.norm(dim=-1), q.norm(dim=-1))


def test_scores_with_a_prefix_token_depend_on_the_place() -> None:
    """A prefix token is not turned, so what it says to a token is no matter of offsets."""
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    mechanism = RotaryEmbedding(4)
    here, there = (
        attention(q, k, v, position=mechanism, queries=Sequence(4, start=start, prefix=1)) for start in (0, 3)
    )
    assert (here - there).abs().max() > 1e-3  # type: ignore[operator]


def test_frequencies_are_not_learned_and_rows_come_first() -> None:
    mechanism = RotaryEmbedding(8, axes=2, base=100.0)
    assert not list(mechanism.parameters())
    assert all(map(is_settings, mechanism.state_dict()))
    angles = mechanism.angles(Grid(2, 3))[0, 0]
    torch.testing.assert_close(angles[5], torch.tensor([1.0, 0.1, 2.0, 0.2], dtype=torch.float64))


def test_fractional_places() -> None:
    """What a larger grid squeezed onto the trained one has."""
    x = torch.randn(1, 1, 4, 4, dtype=torch.float64)
    places = Positions(torch.tensor([0.0, 0.5, 1.0, 1.5], dtype=torch.float64), low=0, high=2)
    wanted = oracle.rotated(x, oracle.places(places), 1, 2, 10000.0, "half")
    torch.testing.assert_close(turned(RotaryEmbedding(4), x, places), wanted, rtol=1e-14, atol=1e-14)


# a cache of rotated keys


def test_a_key_that_is_cached_rotated() -> None:
    """Turned once when written, met by later queries through a term without key angles."""
    mechanism = RotaryEmbedding(8, rotary_dim=6)
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64)
    whole = attention(q, k, v, position=mechanism, queries=Sequence(7), mask=Mask.causal())
    cache = torch.empty(2, 3, 0, 8, dtype=torch.float64)
    for t in range(7):
        here = Sequence(1, start=t)
        cache = torch.cat([cache, turned(mechanism, k[:, :, t : t + 1], here)], dim=2)
        step = attention(
            q[:, :, t : t + 1],
            cache,
            v[:, :, : t + 1],
            position=Terms(Rotation(mechanism.angles(here), None, layout=mechanism.layout)),
        )
        assert isinstance(whole, Tensor)
        torch.testing.assert_close(step, whole[:, :, t : t + 1])


# precision


def test_angles_do_not_move() -> None:
    """Not under autocast, not when the model is cast, and they are float64."""
    mechanism = RotaryEmbedding(8)
    plain = mechanism.angles(Sequence(5, start=1995))
    assert plain.dtype == torch.float64
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mechanism.angles(Sequence(5, start=1995)), plain)
    assert torch.equal(copy.deepcopy(mechanism).to(torch.bfloat16).angles(Sequence(5, start=1995)), plain)
    assert torch.equal(copy.deepcopy(mechanism).half().angles(Sequence(5, start=1995)), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_place_100_000_is_as_exact_as_place_1(dtype: torch.dtype) -> None:
    """In a bfloat16 model the error is that of one rounding of the result, wherever the token is."""
    mechanism = RotaryEmbedding(64).to(dtype)
    x = torch.randn(1, 1, 200, 64).to(dtype)
    for start in (1, 1995, 100_000):
        exact = turned(RotaryEmbedding(64), x.double(), Sequence(200, start=start))
        found = turned(mechanism, x, Sequence(200, start=start))
        assert found.dtype == dtype
        size = (x.double().unflatten(-1, (2, 32)).norm(dim=-2)).repeat(1, 1, 1, 2)  # of the pair: it is kept
        unit = torch.finfo(dtype).eps * (0.5 if dtype == torch.bfloat16 else 2)  # float32: product and sum round too
        slack = 1 + 1e-4  # bfloat16 is rounded from float32
        assert ((found.double() - exact).abs() <= size * unit * slack).all()


# a module like any other


def test_from_site_and_growth() -> None:
    own = RotaryEmbedding.from_site(Site(3, 8, 24, Grid(2, 2)), 2)
    assert (own.head_dim, own.axes, own.base, own.layout, own.rotary_dim) == (8, 2, 100.0, "interleaved", 8)
    line = RotaryEmbedding.from_site(Site(3, 8, 24, Grid(2, 2)))
    assert (line.axes, line.base, line.layout) == (1, 10000.0, "half")
    assert own.acts_in_attention
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")


# longer contexts than it was trained on


@pytest.mark.parametrize("beyond", ["as is", "linear", "ntk", "yarn", "llama3"])
def test_growth_by_rule(beyond: Any) -> None:
    """From 16 trained tokens to 40: stretched by 2.5 from the copy's first token on, and the mechanism left alone."""
    own = RotaryEmbedding(8, base=100.0, trained_length=16, beyond=beyond)
    plain = RotaryEmbedding(8, base=100.0)
    rest = [rule for rule in ("as is", "linear", "ntk", "yarn", "llama3") if rule != beyond]
    assert own.growth == (beyond, *rest)
    long = Sequence(30, start=10, prefix=1)  # up to place 39
    assert torch.equal(own.angles(long), plain.angles(long)), "it stretches nothing by itself"
    assert own.grow(long, "as is") is own
    for rule, scaling in (
        ("linear", LinearScaling(2.5)),
        ("ntk", NTKScaling(2.5)),
        ("yarn", YaRN(2.5, 16)),
        ("llama3", Llama3Scaling(2.5, 16)),
    ):
        grown = own.grow(long, rule)
        assert isinstance(grown, RotaryEmbedding)
        assert grown.growth == own.growth
        assert torch.equal(own.angles(long), plain.angles(long)), "itself left alone"
        (found,), (wanted,) = (
            one.terms(long).of(Rotation) for one in (grown, RotaryEmbedding(8, base=100.0, scaling=scaling))
        )
        assert torch.equal(found.query, wanted.query)
        assert found.magnitude == wanted.magnitude
        assert (found.magnitude == 1) == (rule != "yarn")
        again = grown.grow(Sequence(24), rule)
        assert isinstance(again, RotaryEmbedding)
        assert again.scaling == own.grow(Sequence(24), rule).scaling, "from the trained length, whatever came between"
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(long, "clipped")


@pytest.mark.parametrize("rule", ["linear", "ntk", "yarn", "llama3"])
@pytest.mark.parametrize("where", [Sequence(16), Sequence(3), Grid(4, 4, prefix=1), Grid(2, 3)], ids=repr)
def test_within_the_trained_length_all_rules_are_one(where: Coordinates, rule: str) -> None:
    own = RotaryEmbedding(8, trained_length=16)
    (found,), (wanted,) = (one.terms(where).of(Rotation) for one in (own.grow(where, rule), own))
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
        assert own.growth[0] == first
        (found,), (wanted,) = (one.terms(trained).of(Rotation) for one in (own, RotaryEmbedding(8)))
        assert torch.equal(found.query, wanted.query)
        assert found.magnitude == 1
        if name == "rotary_dynamic_ntk":
            assert own.growth == ("as is",)
            (found,) = own.terms(Sequence(36)).of(Rotation)
            (wanted,) = RotaryEmbedding(8, scaling=NTKScaling(4.0)).terms(Sequence(36)).of(Rotation)
            assert torch.equal(found.query, wanted.query)
        else:
            assert len(own.growth) == 5
            grown = own.grow(Sequence(36), "linear")
            assert isinstance(grown, RotaryEmbedding)
            assert grown.scaling == LinearScaling(4.0)
    across = find("rotary_1d").build(Site(2, 8, 16, Sequence(4), Sequence(12)))
    assert isinstance(across, RotaryEmbedding)
    assert across.trained_length == 12


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


def test_a_model_grows() -> None:
    """As it is it takes any image; each rule makes something else of a larger one, and nothing of its own size."""
    model = VisionTransformer(8, 2, 1, 3, embed_dim=16, depth=1, num_heads=2, position="rotary_1d").eval()
    with torch.no_grad():
        model.head.weight.normal_()
    large, small = torch.randn(2, 1, 12, 12), torch.randn(2, 1, 8, 8)
    outputs = [model(large)]
    assert model.growth() == ("as is", "linear", "ntk", "yarn", "llama3")
    torch.testing.assert_close(model.grow(12, "as is")(large), outputs[0])
    for rule in ("linear", "ntk", "yarn", "llama3"):
        assert rule in model.growth()
        outputs.append(model.grow(12, rule)(large))
        torch.testing.assert_close(model.grow(8, rule)(small), model(small))
    for one, other in itertools.combinations(outputs, 2):
        assert not torch.allclose(one, other, atol=1e-6)


def test_one_axis_reads_a_grid_in_raster_order() -> None:
    own = RotaryEmbedding(4)
    assert torch.equal(own.angles(Grid(2, 3, prefix=1)), own.angles(Sequence(6, prefix=1)))
