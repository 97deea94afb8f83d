"""KERPLE: both kernels, where they start, and what they may not become."""

from __future__ import annotations

import copy
import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import ALiBi, Grid, Kerple, LineBias, Mask, Sequence, Site, attention
from relpos.core import Coordinates
from relpos.engines import attention_weights
from relpos.position.saved import is_settings
from relpos.testing import oracle


class TestKerpleLog(LibrarySuite):
    alike = True
    axes = (1, 2)
    translation_invariant = True
    preset = "kerple_log"
    kernel: ClassVar[Any] = "log"

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> Kerple:
        own = Kerple(site.num_heads, self.kernel)
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        return own

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Chi et al. 2022, section 4: -r1 log(1 + r2 |m - n|) and -r1 |m - n|^r2."""
        r1 = torch.exp(mechanism.log_r1)
        r2 = torch.exp(mechanism.raw_r2) if self.kernel == "log" else 2 / (1 + torch.exp(-mechanism.raw_r2))
        entries = []
        for query in oracle.raster(queries):
            for key in oracle.raster(keys):
                apart = 0 if query is None or key is None else abs(query[0] - key[0])
                if apart == 0:
                    entries.append(torch.zeros_like(r1))
                elif self.kernel == "log":
                    entries.append(-r1 * torch.log(1 + r2 * apart))
                else:
                    entries.append(-r1 * torch.exp(r2 * math.log(apart)))
        return torch.stack(entries, dim=-1).view(-1, queries.count, keys.count)

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestKerplePower(TestKerpleLog):
    preset = "kerple_power"
    kernel = "power"


def made(kernel: Any, r1: list[float], r2: list[float]) -> Kerple:
    """With these values of r1 and r2, in float64."""
    own = Kerple(len(r1), kernel).double()
    with torch.no_grad():
        own.log_r1.copy_(torch.tensor(r1).double().log())
        scale = torch.tensor(r2).double()
        own.raw_r2.copy_(scale.log() if kernel == "log" else (scale / (2 - scale)).log())
    return own


def at(own: Kerple, distance: int) -> list[float]:
    (term,) = own.terms(Sequence(1, start=distance), Sequence(1)).of(LineBias)
    assert term.values.shape[1] == 1
    values: list[float] = term.values[:, 0].tolist()
    return values


# the formulas


@pytest.mark.parametrize("distance", [0, 1, 2, 7, 1000, 100_000])
def test_log_by_hand(distance: int) -> None:
    r1, r2 = [1.0, 0.5, 3.0], [1.0, 2.0, 0.01]
    wanted = [-a * math.log(1 + b * distance) for a, b in zip(r1, r2, strict=True)]
    own = made("log", r1, r2)
    assert at(own, distance) == pytest.approx(wanted, rel=1e-6)
    assert at(own, -distance) == at(own, distance)


@pytest.mark.parametrize("distance", [0, 1, 2, 7, 1000, 100_000])
def test_power_by_hand(distance: int) -> None:
    r1, r2 = [1.0, 0.5, 3.0, 0.1], [1.0, 1.5, 0.01, 0.5]
    wanted = [-a * distance**b for a, b in zip(r1, r2, strict=True)]
    own = made("power", r1, r2)
    assert at(own, distance) == pytest.approx(wanted, rel=1e-6)
    assert at(own, -distance) == at(own, distance)


@pytest.mark.parametrize("heads", [1, 3, 8, 12])
def test_power_starts_as_alibi(heads: int) -> None:
    """r1 = the slopes and r2 = 1, under a causal mask and without one."""
    own = Kerple(heads, "power")
    torch.testing.assert_close(own.r1.detach(), torch.tensor(ALiBi(heads).slopes))
    assert torch.equal(own.r2, torch.ones(heads))
    q, k, v = torch.randn(3, 1, heads, 9, 4, dtype=torch.float64)
    for mask in (None, Mask.causal()):
        ours, theirs = (
            attention(q, k, v, position=each, queries=Sequence(9), mask=mask) for each in (own, ALiBi(heads))
        )
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    exact = made("power", list(oracle.alibi_slopes(heads)), [1.0] * heads)
    bias = oracle.alibi(heads, oracle.places(Sequence(9)), oracle.places(Sequence(9)), "euclidean")
    theirs = oracle.attention(q, k, v, bias=bias[None])[0]
    torch.testing.assert_close(attention(q, k, v, position=exact, queries=Sequence(9)), theirs, rtol=1e-6, atol=1e-6)


def test_log_starts_with_a_rate_a_head() -> None:
    own = Kerple(8)
    assert torch.equal(own.r1, torch.ones(8))
    assert own.r2.tolist() == pytest.approx([2.0**-n for n in range(1, 9)], rel=1e-6)
    assert at(own, 2) == pytest.approx([-math.log(1 + 2 * 2.0**-n) for n in range(1, 9)], rel=1e-6)


# what training may do to it


@pytest.mark.parametrize("kernel", ["log", "power"])
@pytest.mark.parametrize("size", [-30.0, -3.0, 0.0, 3.0])
def test_never_rewards_distance(kernel: Any, size: float) -> None:
    """Whatever the parameters: r1 and r2 are above 0, r2 of power at most 2, and the bias falls."""
    own = Kerple(2, kernel).double()
    with torch.no_grad():
        for parameter in own.parameters():
            parameter.fill_(size)
    assert (own.r1 > 0).all()
    assert (own.r2 > 0).all()
    if kernel == "power":
        assert (own.r2 < 2).all()
    (term,) = own.terms(Sequence(1, start=50), Sequence(51)).of(LineBias)
    falling = term.values.diff(dim=1)
    assert term.values.max() == 0
    assert (falling <= 0).all()
    if size > -30:
        assert (falling < 0).all()


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_gradients_at_distance_0_are_0(kernel: Any) -> None:
    """0 ** r2 has the derivative 0 * log 0 in r2: never NaN."""
    own = Kerple(3, kernel)
    (term,) = own.terms(Sequence(4)).of(LineBias)
    near = torch.autograd.grad(term.values[:, 3].sum(), list(own.parameters()), retain_graph=True)
    assert not any(gradient.any() for gradient in near)
    whole = torch.autograd.grad(term.values.sum(), list(own.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in whole)


def test_bfloat16_parameters_compute_in_float32() -> None:
    own = copy.deepcopy(Kerple(3, "power")).to(torch.bfloat16)
    (term,) = own.terms(Sequence(1, start=1995), Sequence(1)).of(LineBias)
    assert term.values.dtype == torch.float32
    wanted = -own.log_r1.float().exp() * 1995
    torch.testing.assert_close(term.values[:, 0], wanted, rtol=1e-6, atol=0)


# a module like any other


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_prefix_tokens_are_near_to_everything(kernel: Any) -> None:
    zeros = torch.zeros(1, 2, 7, 4)
    weights = attention_weights(zeros, zeros, position=Kerple(2, kernel).terms(Sequence(6, prefix=1)))[0]
    torch.testing.assert_close(weights[:, 0], torch.full((2, 7), 1 / 7))
    for i in range(6):
        torch.testing.assert_close(weights[:, 1 + i, 0], weights[:, 1 + i, 1 + i])


def test_from_site_and_growth() -> None:
    own = Kerple.from_site(Site(6, 4, 24, Grid(2, 2)), "power")
    assert own.kernel == "power"
    shapes = {name: tuple(x.shape) for name, x in own.state_dict().items() if not is_settings(name)}
    assert shapes == {"log_r1": (6,), "raw_r2": (6,)}
    assert Kerple.from_site(Site(6, 4, 24, Grid(2, 2))).kernel == "log"
    assert not own.acts_on_tokens
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")
