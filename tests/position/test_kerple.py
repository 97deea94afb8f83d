"""KERPLE: both kernels, where they start, and what they may not become."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.suites import OffsetSuite
from relpos import ALiBi, Kerple, LineBias, Sequence, Site


class TestKerpleLog(OffsetSuite):
    alike = True
    axes = (1, 2)
    raster = True
    translation_invariant = True
    preset = "kerple_log"
    kernel: ClassVar[Any] = "log"

    def build(self, site: Site) -> Kerple:
        own = Kerple(site.num_heads, self.kernel)
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter, std=0.7)
        return own

    def value(self, own: Any, *offset: int) -> Tensor:
        """Chi et al. 2022, section 4: -r1 log(1 + r2 |m - n|) and -r1 |m - n|^r2."""
        r1, apart = torch.exp(own.log_r1), abs(offset[0])
        if apart == 0:
            return torch.zeros_like(r1)
        if self.kernel == "log":
            return -r1 * torch.log(1 + torch.exp(own.raw_r2) * apart)
        return -r1 * torch.exp(2 / (1 + torch.exp(-own.raw_r2)) * math.log(apart))


class TestKerplePower(TestKerpleLog):
    preset = "kerple_power"
    kernel = "power"


@pytest.mark.parametrize("heads", [1, 8, 12])
def test_power_starts_as_alibi(heads: int) -> None:
    """r1 = the slopes and r2 = 1."""
    ours, theirs = (each.terms(Sequence(9)).of(LineBias)[0].values for each in (Kerple(heads, "power"), ALiBi(heads)))
    torch.testing.assert_close(ours.detach(), theirs, rtol=1e-6, atol=1e-6)


def test_log_starts_with_a_rate_a_head() -> None:
    own = Kerple(8)
    assert torch.equal(own.r1, torch.ones(8))
    assert own.r2.tolist() == pytest.approx([2.0**-n for n in range(1, 9)], rel=1e-6)


@pytest.mark.parametrize("size", [-30.0, 0.0, 3.0])
def test_the_exponent_stays_between_0_and_2(size: float) -> None:
    own = Kerple(2, "power").double()
    torch.nn.init.constant_(own.raw_r2, size)
    assert (own.r2 > 0).all()
    assert (own.r2 < 2).all()


@pytest.mark.parametrize("kernel", ["log", "power"])
def test_gradients_at_distance_0_are_0(kernel: Any) -> None:
    """0 ** r2 has the derivative 0 * log 0 in r2: never NaN."""
    own = Kerple(3, kernel)
    (term,) = own.terms(Sequence(4)).of(LineBias)
    near = torch.autograd.grad(term.values[:, 3].sum(), list(own.parameters()), retain_graph=True)
    assert not any(gradient.any() for gradient in near)
    whole = torch.autograd.grad(term.values.sum(), list(own.parameters()))
    assert all(gradient.isfinite().all() and gradient.any() for gradient in whole)
