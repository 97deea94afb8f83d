"""The rotation's kernel against multiplication of complex numbers, forward and back."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos.testing.tolerance import assert_close, yardstick_dtype

FAST_SHARE = 12  # of its tests, in the fast part

rotation = importlib.import_module("relpos.engines.triton.rotation")
HERE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
B, H, N, D = 2, 3, 37, 10
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def turned(x: Tensor, angles: Tensor, layout: str, magnitude: Tensor | float, dtype: torch.dtype) -> Tensor:
    """In `dtype`, pair by pair as complex numbers."""
    pairs = angles.shape[-1]
    own = x.to(dtype)
    pair = own[..., : 2 * pairs].unflatten(-1, (2, pairs) if layout == "half" else (pairs, 2))
    real, imaginary = pair.unbind(-2 if layout == "half" else -1)
    made = torch.complex(real, imaginary) * (torch.polar(torch.ones_like(angles), angles) * magnitude).to(
        torch.complex128 if dtype == torch.float64 else torch.complex64
    )
    pair = torch.stack([made.real, made.imag], dim=-2 if layout == "half" else -1)
    return torch.cat([pair.flatten(-2), own[..., 2 * pairs :]], dim=-1)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("shape", "pairs"), [((1, 1), 5), ((B, H), 3), ((1, H), 4)], ids=str)
def test_forward_and_back(shape: tuple[int, int], pairs: int, layout: Any, dtype: torch.dtype) -> None:
    x, upstream = torch.randn(2, B, N, H, D, dtype=dtype).transpose(2, 3)  # as projections leave them
    angles = 50 * torch.randn(*shape, N, pairs, dtype=torch.float64)
    magnitude = torch.rand(1, 1, N, pairs, dtype=torch.float64) + 0.5
    leaf = x.to(HERE).requires_grad_()
    ours = rotation.rotate(leaf, angles.to(HERE), layout=layout, magnitude=magnitude.to(HERE))
    assert ours.dtype == dtype
    (back,) = torch.autograd.grad(ours, leaf, upstream.to(HERE))
    narrow = yardstick_dtype(dtype)
    for what, mine, given, sign in (("output", ours, x, 1), ("gradient", back, upstream, -1)):
        exact = turned(given, sign * angles, layout, magnitude, torch.float64)
        wide = torch.promote_types(narrow, torch.float32)
        yardstick = turned(given, sign * angles, layout, magnitude, wide).to(narrow)  # nothing is summed
        assert_close(mine.cpu(), exact, yardstick, what=what)


def test_learned_angles_get_their_gradient() -> None:
    x = torch.randn(1, 1, 4, 6, device=HERE)
    angles = torch.randn(1, 1, 4, 2, device=HERE, requires_grad=True)
    (found,) = torch.autograd.grad(rotation.rotate(x, angles, layout="half")[..., :4].pow(3).sum(), angles)
    assert found.abs().min() > 0


@pytest.mark.traced
def test_the_operator_is_sound() -> None:
    x = torch.randn(B, H, N, D, device=HERE, requires_grad=True)
    cos, sin = torch.randn(2, 1, 1, N, 4, device=HERE)
    torch.library.opcheck(rotation._rotate, (x, cos, sin, True, False))
