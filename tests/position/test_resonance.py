"""Resonance RoPE: wavelengths rounded to whole tokens, by loops; of another scaling; what repeats."""

import math

import pytest

from position.test_scaling import Scaled, Scaling, plain, yarn
from relpos import DynamicNTK, ResonanceScaling, RotaryEmbedding, Sequence, YaRN


def resonance(d: int, base: float, length: int) -> Scaled:
    return [2 * math.pi / math.floor(2 * math.pi / theta + 0.5) for theta in plain(d, base)], 1.0


class TestResonance(Scaling):
    """Wavelengths of 6.28 and 62.8 tokens."""

    alike = True
    scaling = ResonanceScaling
    loops = resonance
    arguments = ()
    preset = "rotary_resonance"
    every = 4


@pytest.mark.parametrize("base", [1e4, 5e5])
def test_of_yarn(base: float) -> None:
    """As published: whatever frequencies there are, are rounded."""
    bands, magnitude = ResonanceScaling(YaRN(4.0, 2048))(base, 64, 1)
    inner, of_yarn = yarn(128, base, 1, 4.0, 2048)
    assert list(bands) == pytest.approx([2 * math.pi / round(2 * math.pi / theta) for theta in inner], rel=1e-13)
    assert magnitude == of_yarn


def test_the_length_is_handed_on() -> None:
    own = RotaryEmbedding(8, scaling=ResonanceScaling(DynamicNTK(1.0, 16)))
    assert own.bands(16) != own.bands(64)
    assert own.angles(Sequence(20)).shape == (1, 1, 20, 4)


def test_angles_repeat_after_a_wavelength() -> None:
    for theta in ResonanceScaling()(100.0, 4, 1)[0]:
        assert math.cos(theta * 3) == pytest.approx(math.cos(theta * (3 + round(2 * math.pi / theta))), abs=1e-12)
