"""Clipped RoPE: the slowest pairs tapered by half a cosine, by loops; of another scaling; saved with a model."""

import math

import pytest

from position.test_scaling import Scaled, Scaling, plain, yarn
from relpos import ClippedScaling, LanguageModel, ResonanceScaling, YaRN
from relpos.models import RotaryChoice
from relpos.models.settings import as_arguments, as_json


def clipped(d: int, base: float, length: int, trained: int, count: int | None = None) -> Scaled:
    """From 1 to 0 over those whose wavelength exceeds the trained length; a single one is kept."""
    bands = plain(d, base)
    slow = [p for p, theta in enumerate(bands) if 2 * math.pi / theta > trained]
    slow = slow if count is None else list(range(max(d // 2 - count, 0), d // 2))
    for step, p in enumerate(slow):
        bands[p] *= (1 + math.cos(math.pi * step / max(len(slow) - 1, 1))) / 2
    return bands, 1.0


class TestClipped(Scaling):
    """Both pairs, of wavelengths 6.3 and 62.8: the first is kept, the second does not rotate."""

    alike = True
    scaling = ClippedScaling
    loops = clipped
    arguments = (5,)
    preset = "rotary_clipped"
    every = 4


@pytest.mark.parametrize("base", [1e4, 5e5])
@pytest.mark.parametrize("count", [None, 0, 1, 2, 20, 99])
def test_of_yarn(base: float, count: int | None) -> None:
    """Which pairs are clipped follows from the plain frequencies."""
    bands, magnitude = ClippedScaling(2048, count, YaRN(4.0, 2048))(base, 64, 1)
    factors = [a / b for a, b in zip(clipped(128, base, 1, 2048, count)[0], plain(128, base), strict=True)]
    inner, of_yarn = yarn(128, base, 1, 4.0, 2048)
    assert list(bands) == pytest.approx([a * b for a, b in zip(factors, inner, strict=True)], rel=1e-12, abs=1e-18)
    assert magnitude == of_yarn


def test_a_scaling_of_another_is_saved_with_the_model() -> None:
    scaling = ClippedScaling(64, scaling=ResonanceScaling(YaRN(4.0, 16)))
    model = LanguageModel(7, context=8, embed_dim=8, depth=1, num_heads=2, position=RotaryChoice(100.0, scaling))
    assert as_arguments(as_json(model.arguments))["position"] == RotaryChoice(100.0, scaling)
    own = ResonanceScaling(lambda base, pairs, length: ((1.0,) * pairs, 1.0))
    assert as_json({"position": RotaryChoice(100.0, own)})["position"] == {"function": "<lambda>"}
