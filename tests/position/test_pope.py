"""PoPE: magnitudes from content, angles from position, by loops over dimensions."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from position.published import Largest
from position.rotations import RotationSuite
from relpos import (
    MultiHeadAttention,
    PolarEmbedding,
    RotaryEmbedding,
    Sequence,
    ShawPosition,
    Site,
    attention,
    linear_attention,
)
from relpos.core import DenseBias, Term, Terms
from relpos.testing import oracle


def mapped(x: Tensor, tokens: list[Any], base: float, phase: Tensor | float) -> Tensor:
    """`softplus(x[c])` times cosine and sine of `place / base^(c / D) + phase[h, c]`, one dimension at a time."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    phase = torch.zeros(1, x.shape[-1]) if isinstance(phase, float) else phase
    columns: list[list[Tensor]] = [[], []]
    for c, column in enumerate(wide.unbind(-1)):
        places = [0.0 if place is None else place[0] / base ** (c / x.shape[-1]) for place in tokens]
        angles = torch.tensor(places, dtype=torch.float64) + phase[:, c, None].double()
        magnitude = torch.log1p(torch.exp(column))
        columns[0].append(magnitude * angles.cos().to(wide.dtype))
        columns[1].append(magnitude * angles.sin().to(wide.dtype))
    return torch.stack(columns[0] + columns[1], dim=-1).to(x.dtype)


class TestPoPE(RotationSuite):
    axes = (1, 2)
    preset = "pope"
    translation_invariant = False

    def build(self, site: Site) -> PolarEmbedding:
        mechanism = PolarEmbedding(site.num_heads, site.head_dim, base=100.0)
        nn.init.uniform_(mechanism.phase, -8.0, 1.0)
        return mechanism

    def oracle_attention(self, mechanism, q, k, v, queries, keys, allowed):  # type: ignore[no-untyped-def]
        k, v = (oracle.heads_of(x, q.shape[1]) for x in (k, v))
        q = mapped(q, oracle.raster(queries), 100.0, 0.0)
        phase = mechanism.phase
        phase = torch.where(phase > 0, 0.0, torch.where(phase < -2 * math.pi, -2 * math.pi, phase))
        k = mapped(k, oracle.raster(keys), 100.0, phase)
        return oracle.attention(q, k, v, allowed=allowed, scale=v.shape[-1] ** -0.5)[0]


def test_what_has_no_wider_queries_refuses_it() -> None:
    own, five = PolarEmbedding(2, 8), Sequence(5)
    with pytest.raises(ValueError, match="at most one Rotation; got two"):
        (RotaryEmbedding(8) + own).terms(five)
    with pytest.raises(NotImplementedError, match="got Polar, which linear attention lacks, for it maps queries"):
        linear_attention(*[torch.randn(1, 2, 5, 8)] * 3, position=own.terms(five))
    with pytest.raises(NotImplementedError, match="a line bias, a rotation or both as position; got Polar"):
        MultiHeadAttention(16, 2, kind="flash")(torch.randn(1, 5, 16), position=own.terms(five))


def test_no_scores_of_all_pairs_are_held() -> None:
    """PyTorch's kernel on the CPU, which holds none, takes values as wide as queries."""
    qkv = [torch.randn(1, 2, 600, 8, requires_grad=True) for _ in range(3)]
    with Largest() as largest:
        attention(*qkv, position=PolarEmbedding(2, 8), queries=Sequence(600), mask="causal").sum().backward()
    assert largest.numbers < 600 * 600 / 4


@pytest.mark.parametrize("written_out", [(), (DenseBias(torch.zeros(1, 1, 5, 5)),)], ids=["on a line", "dense"])
def test_vectors_meet_queries_as_wide_as_they_were(written_out: tuple[Term, ...]) -> None:
    five = Sequence(5)
    terms = PolarEmbedding(2, 8).terms(five) + ShawPosition(8, 2, init_std=1.0).terms(five) + Terms(*written_out)
    qkv = [torch.randn(1, 2, 5, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def gradients(backend: str) -> tuple[Tensor, ...]:
        return torch.autograd.grad(attention(*qkv, position=terms, backend=backend).square().sum(), qkv)

    for mine, other in zip(gradients("streaming"), gradients("reference"), strict=True):
        torch.testing.assert_close(mine, other)
