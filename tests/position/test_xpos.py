"""xPos: by loops, wherever the centre lies, from a cache of rotated keys, and up to where numbers end."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Grid, Mask, Positions, RotaryEmbedding, Rotation, Sequence, Site, Terms, XPos, attention, rotate
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle

SCALE_BASE, GAMMA = 32.0, 0.4


def factor(p: int, width: int, power: float) -> float:
    """Sun et al. 2022, algorithm 1: z = (p / (d / 2) + gamma) / (1 + gamma)."""
    return float(((p / (width / 2) + GAMMA) / (1 + GAMMA)) ** power)


def scores(q: Tensor, k: Tensor, queries: list[Any], keys: list[Any], layout: str) -> Tensor:
    """Of each pair: the rotated product, pair p of dimensions times z^((i - j) / scale_base). Unscaled.

    A prefix token is at place 0.
    """
    width = q.shape[-1]
    at = [[0 if place is None else place[0] for place in side] for side in (queries, keys)]
    rows = []
    for i, place in enumerate(at[0]):
        row = []
        for j, other in enumerate(at[1]):
            total = q.new_zeros(q.shape[:2])
            for p in range(width // 2):
                first, second = (p, p + width // 2) if layout == "half" else (2 * p, 2 * p + 1)
                turn = torch.tensor((place - other) / 100.0 ** (2 * p / width), dtype=torch.float64)
                a, b, c, d = q[:, :, i, first], q[:, :, i, second], k[:, :, j, first], k[:, :, j, second]
                product = (a * c + b * d) * turn.cos() + (a * d - b * c) * turn.sin()
                total = total + product * factor(p, width, (place - other) / SCALE_BASE)
            row.append(total)
        rows.append(torch.stack(row, dim=-1))
    return torch.stack(rows, dim=-2)


class Decaying(LibrarySuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    causal = True
    layout: ClassVar[Any] = "half"
    centre: ClassVar[float | None] = None
    every: ClassVar[int] = 1

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        raster = not (case.axes == 2 and case.irregular)  # those have no raster order
        quick = case.queries.count < 20  # these loops go over pairs of tokens and pairs of dimensions
        return super().takes(case) and raster and quick and not (self.translation_invariant and case.prefix)

    def build(self, site: Site) -> XPos:
        return XPos(site.head_dim, base=100.0, layout=self.layout, scale_base=SCALE_BASE, centre=self.centre)

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
        """The content product of each pair stands where the bias stands, and none beside it."""
        k, v = oracle.heads_of(k, q.shape[1]), oracle.heads_of(v, q.shape[1])
        bias = scores(q, k, oracle.raster(queries), oracle.raster(keys), self.layout) * q.shape[-1] ** -0.5
        nothing = torch.zeros_like(q)
        return oracle.attention(nothing, k, v, bias=bias, allowed=allowed)[0]


class TestXPos(Decaying):
    interpreted = True
    preset = "xpos"
    every = 2


class TestXPosInterleavedWithoutPrefix(Decaying):
    """Scores depend on offsets alone."""

    alike = True
    axes = (1,)
    layout = "interleaved"
    prefixes = False
    translation_invariant = True
    every = 4
    row = "xpos (interleaved)"


class TestXPosAboutPlaceThree(Decaying):
    alike = True
    axes = (1,)
    centre = 3.0
    every = 4
    row = ""


# magnitudes


def test_published_factors() -> None:
    """torchscale: scale = (arange(0, D, 2) + 0.4 D) / (1.4 D), to the power of place / 512."""
    own = XPos(16, centre=0.0)
    scale = (torch.arange(0, 16, 2, dtype=torch.float64) + 0.4 * 16) / (1.4 * 16)
    wanted = scale ** (torch.arange(0, 700, dtype=torch.float64) / 512)[:, None]
    torch.testing.assert_close(own.magnitudes(Sequence(700), "query")[0, 0], wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(own.magnitudes(Sequence(700), "key")[0, 0], 1 / wanted, rtol=1e-13, atol=0)
    about = XPos(16, centre=200.0).magnitudes(Sequence(500, start=200), "query")[0, 0]
    torch.testing.assert_close(about, wanted[:500], rtol=1e-13, atol=0)


def test_angles_are_those_of_a_plain_rotation() -> None:
    (rotation,) = XPos(8).terms(Sequence(5)).of(Rotation)
    assert torch.equal(rotation.query, RotaryEmbedding(8).angles(Sequence(5)))
    assert rotation.magnitude == 1


def test_a_part_turns() -> None:
    """Two of four dimensions: z of their single pair is 0.4 / 1.4, and the rest is left alone."""
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    own = XPos(4, rotary_dim=2, centre=0.0)
    magnitude = own.magnitudes(Sequence(3), "query")
    torch.testing.assert_close(magnitude[0, 0, 2, 0].item(), (0.4 / 1.4) ** (2 / 512))
    turned = rotate(x, own.angles(Sequence(3)), layout="half", magnitude=magnitude)
    assert torch.equal(turned[..., 2:], x[..., 2:])
    torch.testing.assert_close(turned[..., :2].norm(dim=-1), x[..., :2].norm(dim=-1) * magnitude[..., 0])


def test_the_past_fades_and_the_future_grows() -> None:
    one = torch.ones(1, 1, 9, 4, dtype=torch.float64)
    (rotation,) = XPos(4, base=1e12, scale_base=8.0).terms(Sequence(9)).of(Rotation)
    flat = torch.zeros_like(rotation.query)
    assert rotation.query_magnitude is not None
    assert rotation.key_magnitude is not None
    q = rotate(one, flat, layout="half", magnitude=rotation.query_magnitude)
    k = rotate(one, flat, layout="half", magnitude=rotation.key_magnitude)
    row = (q @ k.mT)[0, 0, 4]
    assert (row.diff() > 0).all(), "key after key"
    assert row[4] == pytest.approx(4.0)


# caches


def test_a_cache_of_rotated_keys_wants_a_fixed_centre() -> None:
    """Written once with the key's magnitude, met by later queries with theirs; about any centre the same."""
    q, k, v = torch.randn(3, 2, 3, 7, 8, dtype=torch.float64)
    whole = attention(q, k, v, position=XPos(8, scale_base=8.0), queries=Sequence(7), mask=Mask.causal())
    assert isinstance(whole, Tensor)
    for centre in (0.0, 3.5, -20.0):
        own = XPos(8, scale_base=8.0, centre=centre)
        cache = torch.empty(2, 3, 0, 8, dtype=torch.float64)
        for t in range(7):
            here = Sequence(1, start=t)
            key = rotate(k[:, :, t : t + 1], own.angles(here), layout=own.layout, magnitude=own.magnitudes(here, "key"))
            cache = torch.cat([cache, key], dim=2)
            term = Rotation(own.angles(here), None, layout=own.layout, query_magnitude=own.magnitudes(here, "query"))
            step = attention(q[:, :, t : t + 1], cache, v[:, :, : t + 1], position=Terms(term))
            torch.testing.assert_close(step, whole[:, :, t : t + 1])


def test_a_prefix_stands_at_place_0() -> None:
    """So decoding after a prefix is the full pass too."""
    own = XPos(8, scale_base=8.0)
    q, k, v = torch.randn(3, 2, 3, 9, 8, dtype=torch.float64)
    order = torch.arange(9)
    whole = attention(q, k, v, position=own, queries=Sequence(7, prefix=2), mask=Mask.causal(order, order))
    assert isinstance(whole, Tensor)
    for t in range(7):
        so_far = [x[:, :, : t + 3] for x in (k, v)]
        here = {"queries": Sequence(1, start=t), "keys": Sequence(t + 1, prefix=2)}
        step = attention(q[:, :, t + 2 : t + 3], *so_far, position=own, **here)  # type: ignore[arg-type]
        torch.testing.assert_close(step, whole[:, :, t + 2 : t + 3])


def test_the_same_centre_on_both_sides() -> None:
    """Queries at places 50 to 53, keys at 0 to 99: the middle of all, 49.5, not of each."""
    (rotation,) = XPos(8, scale_base=8.0).terms(Sequence(4, start=50), Sequence(100)).of(Rotation)
    (fixed,) = XPos(8, scale_base=8.0, centre=49.5).terms(Sequence(4, start=50), Sequence(100)).of(Rotation)
    for side in ("query_magnitude", "key_magnitude"):
        assert torch.equal(getattr(rotation, side), getattr(fixed, side))


# where numbers end


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_long_spans_in_float32(backend: str) -> None:
    """30,000 places apart in one call, each query beside a key a few places back: as the same tokens near place 0.

    The scores of the future are about 1e32 there, and the mask throws them away.
    """
    own = XPos(8)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    ends = torch.tensor([0, 3, 5, 29_995, 29_998, 30_000])
    segments = torch.tensor([0, 0, 0, 1, 1, 1])
    far = Positions(ends, low=0, high=30_000)
    mask = Mask.packed(segments) & Mask.causal()
    output = attention(q, k, v, position=own, queries=far, mask=mask, backend=backend)
    assert isinstance(output, Tensor)
    assert output.isfinite().all()
    for part, start in ((slice(0, 3), 0), (slice(3, 6), 29_995)):
        near = Positions(ends[part] - start, low=0, high=5)
        own_part = attention(
            *(x[:, :, part] for x in (q, k, v)), position=own, queries=near, mask=Mask.causal(), backend=backend
        )
        torch.testing.assert_close(output[:, :, part], own_part, rtol=1e-4, atol=1e-5)


def test_beyond_that_it_raises() -> None:
    own = XPos(8)
    own.terms(Sequence(32_000))
    with pytest.raises(ValueError, match=r"positions at most 16347 from the centre, 16499\.5"):
        own.terms(Sequence(33_000))
    XPos(8, scale_base=1024.0).terms(Sequence(33_000))
    own.terms(Sequence(3, start=40_000))
    with pytest.raises(ValueError, match="positions from 0 to 40002"):
        own.terms(Sequence(3, start=40_000, prefix=1))
    XPos(8, centre=0.0).terms(Sequence(16_000))
    with pytest.raises(ValueError, match="overflow"):
        XPos(8, centre=0.0).terms(Sequence(1), Sequence(17_000))
    with pytest.raises(ValueError, match="overflow"):
        XPos(8, centre=0.0).magnitudes(Sequence(1, start=-17_000), "query")


# a module like any other


def test_from_site_and_growth() -> None:
    own = XPos.from_site(Site(3, 8, 24, Sequence(9), causal=True))
    assert (own.scale_base, own.gamma, own.centre, own.rotary_dim) == (512.0, 0.4, None, 8)
    assert own.growth == ("as is",)
    assert own.grow(Sequence(99), "as is") is own
    assert not list(own.parameters())
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Sequence(99), "yarn")
    (grid,), (line,) = (own.terms(where).of(Rotation) for where in (Grid(2, 3), Sequence(6)))
    assert grid.query_magnitude is not None
    assert line.query_magnitude is not None
    assert torch.equal(grid.query_magnitude, line.query_magnitude)
