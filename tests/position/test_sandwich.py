"""Sandwich: what remains of sinusoids when only position meets position."""

import math
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from parity import layers_agree
from position.published import DTYPES, attended, tokens
from position.suites import PositionSuite
from relpos import LineBias, Mask, Sandwich, Sequence, Site
from relpos.core import Coordinates, expand


class TestSandwich(PositionSuite):
    alike = True
    axes = (1, 2)
    raster = True
    translation_invariant = True
    preset = "sandwich"
    pairs: ClassVar[int] = 4  # at the published 64 one key has nearly all the weight
    base: ClassVar[float] = 10000.0

    def build(self, site: Site) -> Sandwich:
        return Sandwich(site.num_heads, width=2 * self.pairs, base=self.base)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Chi et al. 2023, section 5, by Python's floats: products of sinusoids, summed, times H / (8 h), h from 1."""
        waves = [self.base ** (-2 * p / (2 * self.pairs)) for p in range(self.pairs)]
        heads = mechanism.num_heads

        def met(query: Any, key: Any) -> float:
            m, n = (0, 0) if query is None or key is None else (query[0], key[0])  # a prefix is near to everything
            return math.fsum(math.sin(m * w) * math.sin(n * w) + math.cos(m * w) * math.cos(n * w) for w in waves)

        both = torch.tensor([[met(a, b) for b in self.places(keys)] for a in self.places(queries)], dtype=torch.float64)
        return torch.stack([both * heads / (8 * (h + 1)) for h in range(heads)]).float()


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


@pytest.mark.parametrize("heads", [1, 12])
def test_as_published(heads: int) -> None:
    (term,) = Sandwich(heads).terms(Sequence(300)).of(LineBias)
    ours = expand(term.values, term.lines)
    torch.testing.assert_close(ours, torch.from_numpy(published(heads, 300)).float(), rtol=1e-6, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("heads", [1, 12])
def test_attention_as_published(heads: int, dtype: torch.dtype) -> None:
    """Under a causal mask, as the paper has it."""
    n = 40
    q, k, v = (tokens(2, heads, n, 4, dtype=dtype) for _ in range(3))
    bias = torch.from_numpy(published(heads, n)).to(dtype)
    later = torch.ones(n, n, dtype=torch.bool).triu(1)
    theirs = (q @ k.mT / 2 + bias).masked_fill(later, -torch.inf).softmax(dim=-1) @ v
    ours = attended(Sandwich(heads), q, k, v, queries=Sequence(n), mask=Mask.causal())
    limit, why = (2e-6, "ours rounds its bias once, to float32") if dtype == torch.float64 else (2e-5, "")
    oracle = "Chi et al. 2023, the code of the appendix"
    layers_agree("sandwich", oracle, ours, theirs, {"q": q, "k": k, "v": v}, limit=limit, why=why)
