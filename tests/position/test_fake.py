"""Mechanisms under FakeTensorMode, in which memory and shapes of a model are estimated: built, and used."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import relpos
from relpos.position import Preset, presets
from relpos.testing.calls import states_of

FAST_CASES = 10
SIDES = {1: relpos.Sequence(5), 2: relpos.Grid(2, 3), 3: relpos.Grid(1, 2, 3)}


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize("preset", presets().values(), ids=lambda preset: preset.name)
def test_a_mechanism_is_built_and_attends(preset: Preset) -> None:
    queries = SIDES[preset.token_axes[0]]
    site = relpos.Site(num_heads=2, head_dim=8, embed_dim=16, queries=queries, init_std=0.5)
    with FakeTensorMode():
        mechanism = preset.make(site)
        assert all(isinstance(x, FakeTensor) for x in mechanism.parameters())
        q, k, v = torch.randn(3, 1, 2, queries.count, 8)
        if mechanism.acts_in_attention:
            states = states_of(mechanism, q, k)
            assert relpos.attention(q, k, v, position=mechanism, queries=queries, states=states).shape == q.shape
        assert mechanism.embed(torch.randn(1, queries.count, 16), queries).shape == (1, queries.count, 16)
    real = preset.make(site)
    assert {name: x.shape for name, x in real.named_parameters()} == {
        name: x.shape for name, x in mechanism.named_parameters()
    }
    for mine, other in zip(real.parts(), mechanism.parts(), strict=True):
        assert getattr(mine, "_edges", None) == getattr(other, "_edges", None)
