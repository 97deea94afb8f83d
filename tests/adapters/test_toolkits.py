"""Retrofitted models of ESPnet, NeMo and SpeechBrain, and Chronos-Bolt: the published outputs and gradients.

The published code is that of the wheels in the package index (`wheels.py`). Where they cannot be downloaded, these
tests are skipped; in CI that is an error.
"""

import importlib
from collections.abc import Iterator
from typing import Any

import models_toolkits
import pytest
import torch
import wheels
from test_retrofit import FAULTS
from torch import nn

import relpos
from models import Model, assert_same, sounds, step
from relpos.adapters.common import retrofitted
from relpos.adapters.common.retrofitted import is_swapped

pytestmark = pytest.mark.slow
MODELS = {model.name: model for model in models_toolkits.MODELS}


class _InFloat64:
    """`torch.nn.functional` whose softmax stays in the dtype of its input, for SpeechBrain, whose asks for float32."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.nn.functional, name)

    @staticmethod
    def softmax(x: torch.Tensor, dim: int, dtype: object = None) -> torch.Tensor:
        return torch.softmax(x, dim)


@pytest.fixture(autouse=True, scope="module")
def _importable() -> Iterator[None]:
    from relpos.adapters.common.libraries import imported

    imported("timm")  # where torchvision is broken, too
    try:
        opened = wheels.importable()
        opened.__enter__()
    except wheels.Unavailable as error:
        if wheels.MUST:
            raise
        pytest.skip(str(error))
    attention: Any = importlib.import_module("speechbrain.nnet.attention")
    attention.F = _InFloat64()
    yield
    attention.F = torch.nn.functional
    opened.__exit__(None, None, None)


@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_the_published_ones(name: str, calls: list[tuple[int, int]]) -> None:
    model = MODELS[name]
    module = model.made()
    published = step(model, module)
    report = relpos.retrofit(module, border=0)
    assert report.verified
    calls.clear()
    assert_same(step(model, module), published, model.exact)
    assert len(calls) >= (1 if name == "chronos bolt" else 2)  # of every layer, or of both kinds of mask
    relpos.restore(module)
    again = model.called(module)
    assert all(torch.equal(x, y) for x, y in zip(again, published[0], strict=True))


@pytest.mark.parametrize("name", [name for name, model in MODELS.items() if "alike" not in model.tags])
def test_verification_catches_planted_faults(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, right = MODELS[name].made(torch.float32), retrofitted.attention
    for fault in ("off by one", "padding"):

        def wrong(q: Any, k: Any, v: Any, fault: str = fault, **call: Any) -> Any:
            call["k"] = k
            FAULTS[fault](call)
            return right(q, v=v, **call)

        monkeypatch.setattr(retrofitted, "attention", wrong)
        with pytest.raises(RuntimeError, match="The model is restored"):
            relpos.retrofit(module, border=0)
        assert not any(map(is_swapped, module.modules()))


def _retrofitted(name: str) -> tuple[Model, Any]:
    model = MODELS[name]
    module = model.made()
    relpos.retrofit(module, border=0, verify=False)
    return model, module


@torch.no_grad()
def test_espnets_weights_are_read_by_a_hook(calls: list[tuple[int, int]]) -> None:
    """`calculate_all_attentions` does so; without one the weights of an earlier call are not left behind."""
    model, module = _retrofitted("espnet")
    attention, read = module.encoders[0].self_attn, []
    handle = attention.register_forward_hook(lambda module, inputs, output: read.append(module.attn))
    model.called(module)
    assert len(calls) == 1  # the other layer
    assert read[0].shape[:2] == (3, 4)
    assert torch.allclose(read[0][0].sum(-1), torch.ones(()).double())
    handle.remove()
    model.called(module)
    assert attention.attn is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["espnet legacy, chunks", "espnet transducer", "nemo"])
def test_calls_that_run_as_published(name: str, calls: list[tuple[int, int]]) -> None:
    """With a mask whose queries see keys apart from each other, with a cache, or with other keys."""
    model = MODELS[name]
    module: Any = model.made()
    x, positions = sounds(2, 25, 32).double(), sounds(1, 25 if "legacy" in name else 49, 32).double()
    apart = torch.rand(2, 25, 25, generator=torch.Generator().manual_seed(0)) > 0.4
    apart |= torch.eye(25, dtype=torch.bool)
    layer: Any = module.layer
    if name == "nemo":
        layer.cache_drop_size = 0
        asked = [(x, x, x, ~apart, positions), (x, x, x, None, positions, x[:, :0])]  # the first of a stream
    elif "transducer" in name:
        none = torch.zeros(2, 25, dtype=torch.bool)
        asked = [(x, x, x, positions, none, ~apart[0]), (x[:, 20:], x, x, positions[:, 20:], none, None, 20)]
    else:
        asked = [(x, x, x, positions, apart)]
    wanted = [layer(*one) for one in asked]
    relpos.retrofit(module, border=0, verify=False)
    got = [layer(*one) for one in asked]
    assert calls == []
    for one, other in zip(got, wanted, strict=True):
        pairs = zip(one, other, strict=True) if isinstance(one, tuple) else [(one, other)]
        assert all(torch.equal(a, b) for a, b in pairs)


@torch.no_grad()
def test_speechbrains_weights_are_returned_to_who_reads_them(calls: list[tuple[int, int]]) -> None:
    """A model that decodes discards them; an encoder by itself returns them."""
    model = MODELS["speechbrain"]
    module: Any = model.made()
    x, positions = sounds(2, 25, 32).double(), sounds(1, 49, 32).double()
    wanted = module.model.encoder(x, pos_embs=positions)
    frames = sounds(2, 25, 12).double()
    alone = module.model(frames, None)
    relpos.retrofit(module, border=0, verify=False)
    got = module.model.encoder(x, pos_embs=positions)
    assert torch.equal(got[0], wanted[0])
    assert all(torch.equal(a, b) for a, b in zip(got[1], wanted[1], strict=True))
    assert torch.equal(module.model(frames, None)[1][0], alone[1][0])
    assert calls == []
    module.model.encode(frames)
    assert len(calls) == 2
    attention = module.model.encoder.layers[0].mha_layer
    assert isinstance(attention(x, x, x, positions, return_attn_weights=False), torch.Tensor)
    assert len(calls) == 3


def test_another_source_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = MODELS["espnet legacy"].made()
    kind: Any = type(module.encoders[0].self_attn)
    monkeypatch.setattr(kind, "rel_shift", lambda self, x: x)
    with pytest.raises(
        ValueError, match=r"rel_shift of espnet 202511 differs from the source tested \(espnet 202511\)"
    ):
        relpos.retrofit(module)


def test_local_attention_is_refused_by_name() -> None:
    file: Any = importlib.import_module("nemo.collections.asr.parts.submodules.multi_head_attention")
    module = nn.Sequential(file.RelPositionMultiHeadAttentionLongformer(4, 32, 0.0, None, None, [4, 4]))
    with pytest.raises(ValueError, match="Longformer: it attends within a sliding window"):
        relpos.retrofit(module)


def test_copies(tmp_path: Any) -> None:
    """After a step, which leaves ESPnet's weights with their graph on the module; saved and loaded, too."""
    model = MODELS["espnet"]
    module = model.made()
    step(model, module)
    report = relpos.retrofit(module, border=0)
    assert report.verified
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    wanted = model.called(module)
    other = model.build().double().eval()
    other.load_state_dict(torch.load(tmp_path / "weights.pt"))
    relpos.retrofit(other, border=0, verify=False)
    assert all(torch.equal(x, y) for x, y in zip(model.called(other), wanted, strict=True))
