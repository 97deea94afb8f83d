"""Programs that are recorded from a retrofitted model are the published ones: traced, scripted, fx-traced, exported."""

import copy
from typing import Any

import pytest
import torch
from replaced_models import FAMILIES
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import relpos
from models import models
from relpos.adapters.common.retrofitted import is_swapped, route

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 2  # of each of its tests, in the fast part

pytestmark = [
    pytest.mark.usefixtures("unchecked"),  # traced sizes are tensors
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.traced,
]

OF_EACH_KIND = [
    "t5", "umt5", "mpnet", "udop encoder, eager, a prefix, few buckets", "layoutlmv3",
    "deberta_v2", "sam", "mvitv2", "bloom", "mpt", "falcon", "wav2vec2_conformer",
    "parakeet", "nemotron_asr_streaming", "wav2vec2_bert", "speecht5", "vits", "granite_speech", "granite_speech5",
    "wavlm", "swin", "timm swin_transformer", "beit", "data2vec-vision", "timm beit", "timm gcvit", "levit",
]  # fmt: skip
TRACED = ("t5 encoder, eager", "falcon", "timm swin_transformer_v2_cr")
SCRIPTED = ("timm swin_transformer", "timm tiny_vit", "timm maxxvit")  # tiny_vit's class says of what type a cache is
TRACED_BY_FX = ("timm swin_transformer", "timm beit", "timm maxxvit")
EXPORTED = (("t5 encoder, eager", True), ("swin", False), ("timm maxxvit", False))


class _Tensors(nn.Module):
    """A model with tensors for arguments, in their order, and for results."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        super().__init__()
        self.model, self.names = model, None if isinstance(inputs, Tensor) else list(inputs)

    def forward(self, *given: Any) -> tuple[Tensor, ...]:
        out = self.model(*given) if self.names is None else self.model(**dict(zip(self.names, given, strict=True)))
        leaves = pytree.tree_leaves(dict(out) if hasattr(out, "keys") else out)
        return tuple(one for one in leaves if torch.is_tensor(one))


def _made(name: str) -> tuple[_Tensors, _Tensors, tuple[Any, ...]]:
    """A model as published, the same retrofitted, and its arguments."""
    published = models()[name].made(torch.float32).requires_grad_(False)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    inputs = models()[name].inputs()
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs.values())
    return _Tensors(published, inputs), _Tensors(own, inputs), given


def _equal(ours: Any, published: Any) -> None:
    """Equal in every bit: one number that relpos computed would differ in its last digit."""
    for one, other in zip(ours, published, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", OF_EACH_KIND)
def test_while_a_program_is_recorded_a_model_runs_as_published(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    published, own, given = _made(name)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    _equal(own(*given), published(*given))


@pytest.mark.parametrize("name", TRACED)
def test_a_traced_model_is_the_published_one(name: str) -> None:
    published, own, given = _made(name)
    wanted, program = (torch.jit.trace(one, given, check_trace=False, strict=False) for one in (published, own))
    _equal(program(*given), wanted(*given))


@pytest.mark.parametrize("name", SCRIPTED)
def test_a_scripted_model_is_the_published_one_and_stays_retrofitted(name: str) -> None:
    published, own, given = _made(name)
    own.model._forward_pre_hooks.clear()  # a test's, which jit cannot read
    eager, before = own(*given), [(module, type(module)) for module in own.modules()]
    _equal([torch.jit.script(own.model)(*given)], published(*given))
    assert [(module, type(module)) for module in own.modules()] == before
    routes = [route(module) for module in own.modules() if is_swapped(module)]
    for one in routes:
        one.forced = True
    _equal(own(*given), eager)
    assert all(one.forced_calls for one in routes)


@pytest.mark.parametrize("name", TRACED_BY_FX)
def test_a_model_traced_by_fx_is_the_published_one(name: str) -> None:
    published, own, given = _made(name)
    program, wanted = (torch.fx.symbolic_trace(one.model) for one in (own, published))
    assert program.code == wanted.code
    _equal([program(*given)], published(*given))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strict"), EXPORTED)
def test_an_exported_model_is_the_published_one_for_every_batch(name: str, strict: bool) -> None:
    published, own, given = _made(name)
    sizes = tuple({0: torch.export.Dim("batch", min=1, max=64)} if torch.is_tensor(one) else None for one in given)
    program = torch.export.export(own, given, dynamic_shapes=(sizes,), strict=strict).module()
    three = tuple(torch.cat([one, one[:1]]) if torch.is_tensor(one) else one for one in given)
    for one in (given, three):
        for mine, wanted in zip(program(*one), published(*one), strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_a_replaced_position_is_recorded_with_the_model(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is published of it: what is recorded must not be the model without a position."""
    family = FAMILIES[name]
    model = family.replaced()
    wanted = family.called(model)
    assert not torch.allclose(family.called(family.published()), wanted)
    monkeypatch.setattr(torch.jit, "is_tracing", lambda: True)
    torch.testing.assert_close(family.called(model), wanted, rtol=1e-9, atol=1e-9)
    if "T5" in name or "timm" in name:
        with pytest.raises(ValueError, match=r"one whose position was replaced\. Export it with torch\.export"):
            torch.jit.script(model)
