"""What is kept for good does not grow with the lengths that are met."""

import importlib
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from relpos import DynamicNTK, Grid, LongRoPE, RotaryEmbedding, Sequence
from relpos.position import presets
from relpos.position.base.site import Site
from relpos.position.base.states import terms_at_rest
from relpos.position.scaling import Scaled

constant: Any = importlib.import_module("relpos.core.constants")
rotary: Any = importlib.import_module("relpos.position.rotary")
META = torch.device("meta")
"""Stands for a GPU: it is not the CPU."""


def own_scaling(base: float, pairs: int, length: int) -> Scaled:
    """A user's: frequencies of no known form, others at every length."""
    return tuple(base ** (-p / pairs) * 0.9 ** (p * length / 7000) for p in range(pairs)), 1.0


SCALINGS = {
    "dynamic": DynamicNTK(1.0, 8),
    "dynamic, one pair": DynamicNTK(2.0, 8),
    "longrope": LongRoPE((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 8, 4.0),
    "a user's": own_scaling,
}


def mechanism(name: str) -> RotaryEmbedding:
    return RotaryEmbedding(2 if "one pair" in name else 8, scaling=SCALINGS[name])


def kept() -> int:
    count: int = constant._cached.cache_info().currsize
    return count


@pytest.mark.slow
@pytest.mark.usefixtures("unchecked")  # three times as fast
@pytest.mark.parametrize("name", SCALINGS)
def test_many_lengths_leave_a_few_entries(name: str) -> None:
    own, before = mechanism(name).to(META), kept()
    for length in range(1, 301):
        own.angles(Sequence(1, start=length - 1))
    assert kept() - before <= 2


@pytest.mark.parametrize("name", presets())
def test_no_mechanism_keeps_numbers_of_a_length(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = presets()[name]
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())  # which does not know this device
    grids = 1 not in preset.token_axes
    places = [Grid(3, n) if grids else Sequence(n) for n in (2, 40, 3, 17, 39)]
    built = preset.build(Site(num_heads=4, head_dim=16, embed_dim=64, queries=places[1])).to(META)
    fixed = built.growth != ("as is",)  # by tables of one size
    counts = []
    for where in places:
        terms_at_rest(built, places[1] if fixed else where)
        counts.append(kept())
    assert counts[1:] == counts[1:2] * 4


@pytest.mark.parametrize("name", SCALINGS)
def test_other_devices_turn_as_the_cpu_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cosines of float32 are the same to the last digit; float64's frequencies differ by one rounding at most."""
    own = mechanism(name)
    lengths = (1, 8, 9, 10, 500, 2001, 100_000)
    wanted = [own.angles(Sequence(3, start=length - 3)) for length in lengths]
    for module in (constant, rotary):
        monkeypatch.setattr(module, "caches_constants", lambda device: True)
    before = kept()
    for length, angles in zip(lengths, wanted, strict=True):
        found = own.angles(Sequence(3, start=length - 3))
        assert found.dtype == torch.float64
        torch.testing.assert_close(found, angles, rtol=3 * torch.finfo(torch.float64).eps, atol=0)
        assert torch.equal(found.cos().float(), angles.cos().float())
    assert kept() > before or name == "a user's", "that path was taken"


@pytest.mark.parametrize("name", SCALINGS)
def test_a_new_length_copies_nothing_from_the_host(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a CUDA graph may meet one while it is captured."""
    own = mechanism(name).to(META)
    for length in (5, 9):
        own.terms(Sequence(length))

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("numbers of the host were copied")

    monkeypatch.setattr(torch, "tensor", refused)
    for length in (10, 4000, 3):
        own.terms(Sequence(length))
