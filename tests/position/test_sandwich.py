"""Sandwich: what remains of sinusoids when only position meets position."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from parity import layers_agree
from position.published import DTYPES, tokens
from relpos import Grid, LineBias, Mask, Sandwich, Sequence, SinusoidalPositionEmbedding, Site, attention
from relpos.core import Coordinates, expand
from relpos.engines import attention_weights
from relpos.position.saved import is_settings
from relpos.testing import oracle


class TestSandwich(LibrarySuite):
    alike = True
    axes = (1, 2)
    translation_invariant = True
    preset = "sandwich"
    pairs: ClassVar[int] = 4  # at the published 64 one key has nearly all the weight
    base: ClassVar[float] = 10000.0

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> Sandwich:
        return Sandwich(site.num_heads, width=2 * self.pairs, base=self.base)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Chi et al. 2023, section 5, by Python's floats: products of sinusoids, summed, times H / (8 h), h from 1."""
        waves = [self.base ** (-2 * p / (2 * self.pairs)) for p in range(self.pairs)]
        heads = mechanism.num_heads
        bias = torch.zeros(heads, queries.count, keys.count, dtype=torch.float64)
        for i, query in enumerate(oracle.raster(queries)):
            for j, key in enumerate(oracle.raster(keys)):
                near = query is None or key is None  # a prefix token is near to everything
                m, n = (0, 0) if near else (query[0], key[0])  # type: ignore[index]
                both = [math.sin(m * w) * math.sin(n * w) + math.cos(m * w) * math.cos(n * w) for w in waves]
                for h in range(heads):
                    bias[h, i, j] = math.fsum(both) * heads / (8 * (h + 1))
        return bias.float()

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestSandwichOfOnePair(TestSandwich):
    sampled = 3
    pairs = 1
    base = 100.0


def published(heads: int, length: int, width: int = 128) -> np.ndarray[Any, Any]:
    """The computation of the paper's appendix: a matrix of sinusoids times itself, over a ratio a head."""
    positions = np.arange(length)[:, None]
    i = np.arange(width // 2)
    angles = positions / 1e4 ** (2 * i / width)
    vectors = np.concatenate([np.sin(angles), np.cos(angles)], axis=-1)
    ratio = np.arange(1, heads + 1) * 8 / heads
    bias: np.ndarray[Any, Any] = (vectors @ vectors.T)[None] / ratio[:, None, None]
    return bias


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_as_published(heads: int) -> None:
    (term,) = Sandwich(heads).terms(Sequence(300)).of(LineBias)
    ours = expand(term.values, term.lines)
    torch.testing.assert_close(ours, torch.from_numpy(published(heads, 300)).float(), rtol=1e-6, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("heads", [1, 8, 12])
def test_attention_as_published(heads: int, dtype: torch.dtype) -> None:
    """Under a causal mask, as the paper has it."""
    n = 40
    q, k, v = (tokens(2, heads, n, 4, dtype=dtype) for _ in range(3))
    bias = torch.from_numpy(published(heads, n)).to(dtype)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    theirs = (q @ k.mT / 2 + bias).masked_fill(later, -torch.inf).softmax(dim=-1) @ v
    ours = attention(q, k, v, position=Sandwich(heads), queries=Sequence(n), mask=Mask.causal())
    assert isinstance(ours, Tensor)
    limit, why = (2e-6, "ours rounds its bias once, to float32") if dtype == torch.float64 else (2e-5, "")
    oracle = "Chi et al. 2023, the code of the appendix"
    layers_agree("sandwich", oracle, ours, theirs, {"q": q, "k": k, "v": v}, limit=limit, why=why)


def test_by_hand() -> None:
    """Two pairs of base 100: cos(n) + cos(n / 10), at offsets 0 and 3, of heads 1 and 2 of 2: over 4 and over 8."""
    own = Sandwich(2, width=4, base=100.0)
    (term,) = own.terms(Sequence(1, start=3), Sequence(1)).of(LineBias)
    ripple = math.cos(3) + math.cos(0.3)
    assert term.values[:, 0].tolist() == pytest.approx([ripple / 4, ripple / 8], rel=1e-6)
    (term,) = own.terms(Sequence(1)).of(LineBias)
    assert term.values[:, 0].tolist() == [0.5, 0.25]


def test_it_is_the_product_of_relpos_own_sinusoids() -> None:
    """What sinusoidal positions say to each other, in either order, whatever the layout."""
    (term,) = Sandwich(8, width=16).terms(Sequence(9)).of(LineBias)
    ours = expand(term.values, term.lines)[0]  # of 8 heads the first has the ratio 1
    layouts: tuple[Literal["half", "interleaved"], ...] = ("half", "interleaved")
    for layout in layouts:
        added = SinusoidalPositionEmbedding(16, layout=layout)
        vectors = added.embed(torch.zeros(1, 9, 16, dtype=torch.float64), Sequence(9))[0]
        torch.testing.assert_close(ours.double(), vectors @ vectors.T, rtol=1e-6, atol=1e-6)
    assert torch.equal(ours, ours.T)


def test_it_falls_with_distance_and_the_first_head_most() -> None:
    (term,) = Sandwich(4).terms(Sequence(1, start=200), Sequence(201)).of(LineBias)
    lost = term.values[:, :1] - term.values  # line order: offsets from 0 up
    assert term.values[:, 0].tolist() == pytest.approx([32, 16, 32 / 3, 8], rel=1e-6)
    assert (lost[:, 1:] > 0).all()
    assert (lost[:, 150] > lost[:, 10]).all()
    torch.testing.assert_close(lost[0] / 4, lost[3], rtol=1e-5, atol=1e-5)


def test_values_are_exact_to_the_last_place_of_float32() -> None:
    """Also far away and in a bfloat16 model; it has nothing that a cast could round."""
    own = copy.deepcopy(Sandwich(3)).to(torch.bfloat16)
    for start in (1995, 100_000, 10_000_000):
        (term,) = own.terms(Sequence(1, start=start), Sequence(1)).of(LineBias)
        assert term.values.dtype == torch.float32
        ripple = math.fsum(math.cos(start * 10000 ** (-p / 64)) for p in range(64))
        wanted = torch.tensor([ripple * 3 / (8 * (h + 1)) for h in range(3)], dtype=torch.float64)
        torch.testing.assert_close(term.values[:, 0].double(), wanted, rtol=1e-7, atol=1e-7)


def test_prefix_tokens_are_near_to_everything() -> None:
    """At distance 0, where the bias is highest; with 0 instead, a class token would go unseen."""
    zeros = torch.zeros(1, 2, 7, 4)
    weights = attention_weights(zeros, zeros, position=Sandwich(2).terms(Sequence(6, prefix=1)))[0]
    torch.testing.assert_close(weights[:, 0], torch.full((2, 7), 1 / 7))
    for i in range(6):
        torch.testing.assert_close(weights[:, 1 + i, 0], weights[:, 1 + i, 1 + i])


def test_from_site_and_growth() -> None:
    own = Sandwich.from_site(Site(6, 4, 24, Grid(2, 2)))
    assert (own.num_heads, own.width, own.base) == (6, 128, 10000.0)
    assert all(map(is_settings, own.state_dict()))
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")
