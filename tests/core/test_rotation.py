"""Rotation: pairs turned one at a time, in both layouts."""

import math
from typing import Any

import pytest
import torch

from relpos import rotate
from relpos.core.rotation import turn
from relpos.testing import oracle
from relpos.testing.tolerance import assert_close

FAST_CASES = 4  # of each of its tests, in the fast part


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [1, 2, 4])
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 3), (2, 1)])
def test_by_loops(layout: Any, pairs: int, shape: tuple[int, int]) -> None:
    x = torch.randn(2, 3, 5, 8, dtype=torch.float64, requires_grad=True)
    angles = (torch.randn(*shape, 5, pairs, dtype=torch.float64) * 4).requires_grad_()
    for magnitude in (1.0, 1.3, torch.rand(*shape, 5, pairs, dtype=torch.float64) + 0.5):
        ours = rotate(x, angles, layout=layout, magnitude=magnitude)
        theirs = oracle.rotate(x, angles, layout, magnitude)
        torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
        assert torch.equal(ours[..., 2 * pairs :], x[..., 2 * pairs :]), "a partial rotation leaves the rest alone"
        upstream = torch.randn_like(ours)
        mine, other = (torch.autograd.grad(x_, (x, angles), upstream) for x_ in (ours, theirs))
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_one_pair_by_hand() -> None:
    """[1, 1] turned by 60 degrees is [-0.366, 1.366]; the layouts pair different numbers."""
    x, angle = torch.ones(1, 1, 1, 2), torch.full((1, 1, 1, 1), math.pi / 3)
    for layout, turned in (("half", [0, 0, 1, 0]), ("interleaved", [0, 1, 0, 0])):
        found = rotate(x, angle, layout=layout)
        torch.testing.assert_close(found.flatten(), torch.tensor([-0.3660254, 1.3660254]))
        first, right = torch.tensor([1.0, 0, 0, 0]).view(1, 1, 1, 4), torch.full((1, 1, 1, 2), math.pi / 2)
        assert rotate(first, right, layout=layout).flatten().round().tolist() == turned


def test_half_precision_keeps_the_angle() -> None:
    """In bfloat16 a position of 1995 would become 1992; here only x and the result are rounded."""
    x = torch.randn(1, 2, 64, 8).bfloat16()
    angles = torch.arange(1950.0, 2014.0)[None, None, :, None] * torch.tensor([1.0, 0.5, 0.1, 0.01])
    exact = oracle.rotate(x.double(), angles.double(), "half")
    yardstick = oracle.rotate(x.float(), angles, "half").bfloat16()
    turned = rotate(x, angles, layout="half")
    assert turned.dtype == torch.bfloat16
    assert_close(turned, exact, yardstick)
    assert torch.equal(turned, rotate(x.float(), angles, layout="half").bfloat16()), "rounded once, at the end"


@pytest.mark.parametrize(
    ("angles", "layout", "said"),
    [
        (torch.zeros(1, 1, 4, 2), "guess", "'half', 'interleaved'"),
        (torch.zeros(1, 1, 4, 2).half(), "half", "float32"),
        *((torch.zeros(shape), "half", "angles of shape") for shape in ((1, 1, 4, 4), (1, 1, 3, 2), (4, 2))),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors(angles: torch.Tensor, layout: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        rotate(torch.randn(1, 2, 4, 6), angles, layout=layout)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("into", ["half", "interleaved"])
@pytest.mark.parametrize("width", [8, 12])
@pytest.mark.parametrize("heads", [1, 3])
def test_turning_at_once_equals_turning_number_by_number(layout: Any, into: Any, width: int, heads: int) -> None:
    """Also of views that no complex number fits, into the other layout, and its gradient."""
    whole = torch.randn(2, 3, 5, width + 1, dtype=torch.float64)
    x = whole[..., 1:].detach().requires_grad_() if layout == "half" else whole[..., 1:]
    angles = torch.randn(2, heads, 5, 4, dtype=torch.float64)
    got = turn(x, torch.complex(angles.cos(), angles.sin()), layout, into)
    places = {"half": ([0, 1, 2, 3], [4, 5, 6, 7]), "interleaved": ([0, 2, 4, 6], [1, 3, 5, 7])}
    (a, b), (c, d) = places[layout], places[into]
    wanted = x.detach().clone()
    first, second = x.detach()[..., a], x.detach()[..., b]
    wanted[..., c] = first * angles.cos() - second * angles.sin()
    wanted[..., d] = first * angles.sin() + second * angles.cos()
    torch.testing.assert_close(got.detach(), wanted)
    inputs = torch.randn(1, 3, 2, width, dtype=torch.float64, requires_grad=True)  # few: each is moved, twice over
    by = torch.complex(angles.cos(), angles.sin())[:1, :, :2]
    assert torch.autograd.gradcheck(lambda own: turn(own, by, layout, into), inputs)
    assert torch.autograd.gradgradcheck(lambda own: turn(own, by, layout, into), inputs)
