"""xPos: by loops, wherever the centre lies, and up to where numbers end; test_rotary has its cache of rotated keys."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.rotations import RotationSuite
from relpos import Mask, Positions, Sequence, Site, XPos, attention, rotate
from relpos.testing import oracle

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
        row = q.new_zeros(*q.shape[:2], len(keys))
        for p in range(width // 2):
            first, second = (p, p + width // 2) if layout == "half" else (2 * p, 2 * p + 1)
            turn = torch.tensor([(place - other) / 100.0 ** (2 * p / width) for other in at[1]], dtype=torch.float64)
            decay = q.new_tensor([factor(p, width, (place - other) / SCALE_BASE) for other in at[1]])
            a, b, c, d = q[:, :, i, None, first], q[:, :, i, None, second], k[..., first], k[..., second]
            cos, sin = turn.cos().to(q.dtype), turn.sin().to(q.dtype)
            row = row + ((a * c + b * d) * cos + (a * d - b * c) * sin) * decay
        rows.append(row)
    return torch.stack(rows, dim=-2)


class Decaying(RotationSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    causal = True
    layout: ClassVar[Any] = "half"
    centre: ClassVar[float | None] = None

    def takes(self, case: Any) -> bool:
        return super().takes(case) and case.queries.count < 20  # loops over pairs of tokens and pairs of dimensions

    def build(self, site: Site) -> XPos:
        return XPos(site.head_dim, base=100.0, layout=self.layout, scale_base=SCALE_BASE, centre=self.centre)

    def oracle_attention(self, mechanism, q, k, v, queries, keys, allowed):  # type: ignore[no-untyped-def]
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


def test_published_factors() -> None:
    """torchscale: scale = (arange(0, D, 2) + 0.4 D) / (1.4 D), to the power of place / 512."""
    own = XPos(16, centre=0.0)
    scale = (torch.arange(0, 16, 2, dtype=torch.float64) + 0.4 * 16) / (1.4 * 16)
    wanted = scale ** (torch.arange(0, 700, dtype=torch.float64) / 512)[:, None]
    torch.testing.assert_close(own.magnitudes(Sequence(700), "query")[0, 0], wanted, rtol=1e-13, atol=0)
    torch.testing.assert_close(own.magnitudes(Sequence(700), "key")[0, 0], 1 / wanted, rtol=1e-13, atol=0)
    about = XPos(16, centre=200.0).magnitudes(Sequence(500, start=200), "query")[0, 0]
    torch.testing.assert_close(about, wanted[:500], rtol=1e-13, atol=0)


def test_a_part_turns() -> None:
    """Two of four dimensions: z of their single pair is 0.4 / 1.4, and the rest is left alone."""
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64)
    own = XPos(4, rotary_dim=2, centre=0.0)
    magnitude = own.magnitudes(Sequence(3), "query")
    torch.testing.assert_close(magnitude[0, 0, 2, 0].item(), (0.4 / 1.4) ** (2 / 512))
    turned = rotate(x, own.angles(Sequence(3)), layout="half", magnitude=magnitude)
    assert torch.equal(turned[..., 2:], x[..., 2:])
    torch.testing.assert_close(turned[..., :2].norm(dim=-1), x[..., :2].norm(dim=-1) * magnitude[..., 0])


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_long_spans_in_float32(backend: str) -> None:
    """30,000 places apart in one call, each query beside a key a few places back: as the same tokens near place 0.

    The scores of the future are about 1e32 there, and the mask throws them away.
    """
    own = XPos(8)
    q, k, v = torch.randn(3, 1, 2, 6, 8)
    ends = torch.tensor([0, 3, 5, 29_995, 29_998, 30_000])
    far = Positions(ends, low=0, high=30_000)
    mask = Mask.packed(torch.tensor([0, 0, 0, 1, 1, 1])) & Mask.causal()
    output = attention(q, k, v, position=own, queries=far, mask=mask, backend=backend)
    assert output.isfinite().all()
    for part, start in ((slice(0, 3), 0), (slice(3, 6), 29_995)):
        near = Positions(ends[part] - start, low=0, high=5)
        qkv = (x[:, :, part] for x in (q, k, v))
        alone = attention(*qkv, position=own, queries=near, mask=Mask.causal(), backend=backend)
        torch.testing.assert_close(output[:, :, part], alone, rtol=1e-4, atol=1e-5)


def test_beyond_that_it_raises() -> None:
    own, fixed = XPos(8), XPos(8, centre=0.0)
    own.terms(Sequence(32_000))
    own.terms(Sequence(3, start=40_000))
    fixed.terms(Sequence(16_000))
    XPos(8, scale_base=1024.0).terms(Sequence(33_000))
    for call, says in (
        (lambda: own.terms(Sequence(33_000)), r"positions at most 16347 from the centre, 16499\.5"),
        (lambda: own.terms(Sequence(3, start=40_000, prefix=1)), "positions from 0 to 40002"),
        (lambda: fixed.terms(Sequence(1), Sequence(17_000)), "overflow"),
        (lambda: fixed.magnitudes(Sequence(1, start=-17_000), "query"), "overflow"),
    ):
        with pytest.raises(ValueError, match=says):
            call()
