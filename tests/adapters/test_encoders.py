"""Encoders that are replaced for what they hand on, a mask or a position, are verified with it.

A fault is planted in what the layers of the retrofitted copy are handed, and the published copy is left alone: the
attention inside, which is verified by itself, knows nothing of it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import relpos
from models import models
from relpos.adapters import parakeet
from relpos.adapters.kinds import path_of, verified_classes
from relpos.adapters.libraries import imported
from relpos.adapters.retrofitted import is_swapped, published_class

FAST_CASES = 2  # of each of its tests, in the fast part
pytestmark = [
    pytest.mark.usefixtures("timm"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:Support for mismatched key_padding_mask:UserWarning"
    ),
]

_LAYERS = {
    "parakeet": ("parakeet.modeling_parakeet.ParakeetEncoderBlock", "ParakeetEncoder"),
    "nemotron_asr_streaming": (
        "nemotron_asr_streaming.modeling_nemotron_asr_streaming.NemotronAsrStreamingEncoderBlock",
        "NemotronAsrStreamingEncoder",
    ),
    "seamless_m4t_v2": (
        "seamless_m4t_v2.modeling_seamless_m4t_v2.SeamlessM4Tv2ConformerEncoderLayer",
        "SeamlessM4Tv2ConformerEncoder",
    ),
    "speecht5": ("speecht5.modeling_speecht5.SpeechT5EncoderLayer", "SpeechT5Encoder"),
    "vits": ("vits.modeling_vits.VitsEncoderLayer", "VitsEncoder"),
    "beit": ("beit.modeling_beit.BeitLayer", "BeitModel"),
    "beit, one table for all layers": ("beit.modeling_beit.BeitLayer", "BeitModel"),
}
"""A model of the tests to the class of its layers, and to the encoder that the error names."""

_NO_MASK = ("attention_mask", lambda mask: None)
FAULTS: dict[str, tuple[str, tuple[str, Callable[[Any], Any]]]] = {
    "parakeet, no padding": ("parakeet", _NO_MASK),
    "parakeet, positions off by one": ("parakeet", ("position_embeddings", lambda x: x.roll(1, 1))),
    "nemotron, no mask": ("nemotron_asr_streaming", _NO_MASK),
    "nemotron, chunks off by one": ("nemotron_asr_streaming", ("attention_mask", lambda x: (x + 1).clamp(max=23))),
    "nemotron, no first key": ("nemotron_asr_streaming", ("attention_mask", lambda x: x * x.new_tensor([0, 1]))),
    "nemotron, positions off by one": ("nemotron_asr_streaming", ("position_embeddings", lambda x: x.roll(1, 1))),
    "seamless, no padding": ("seamless_m4t_v2", _NO_MASK),
    "speecht5, no padding": ("speecht5", _NO_MASK),
    "speecht5, positions off by one": ("speecht5", ("position_bias", lambda x: x.roll(1, 0))),
    "vits, no padding": ("vits", _NO_MASK),
    "beit, no padding": ("beit", ("padding", lambda mask: None)),
    "beit, rows for columns": ("beit", ("resolution", lambda size: size[::-1])),
    "beit, positions off by one": (
        "beit, one table for all layers",
        ("attention_mask", lambda x: x.roll(1, -1)),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_verification_catches_what_an_encoder_hands_on(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, (argument, change) = FAULTS[fault]
    module = models()[name].made(torch.float32)
    path, encoder = _LAYERS[name]
    file, _, layer = f"transformers.models.{path}".rpartition(".")
    kind = getattr(imported(file), layer)
    right = kind.forward
    damaged = []

    def wrong(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(right).bind(self, *args, **kwargs)
        given = call.arguments if argument in call.arguments else call.kwargs
        if any(map(is_swapped, self.modules())) and given.get(argument) is not None:
            kwargs[argument] = change(given[argument])
            damaged.append(self)
        return right(self, *args, **kwargs)

    monkeypatch.setattr(kind, "forward", wrong)
    with pytest.raises(RuntimeError, match=rf"\({encoder}\): .* in float64.*The model is restored"):
        relpos.retrofit(module, border=0)
    assert damaged
    assert not any(map(is_swapped, module.modules()))


def test_verification_catches_chunks_that_are_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The attention is verified with these chunks on both sides, and cannot tell."""
    right = parakeet._chunks
    monkeypatch.setattr(parakeet, "_chunks", lambda *args: (right(*args) - 1).clamp(min=0))
    module = models()["nemotron_asr_streaming"].made(torch.float32)
    with pytest.raises(RuntimeError, match=r"\(NemotronAsrStreamingEncoder\): output differs"):
        relpos.retrofit(module, border=0)


@pytest.mark.parametrize("name", sorted(models()))
def test_whatever_is_replaced_is_verified(name: str) -> None:
    module = models()[name].made(torch.float32)
    relpos.retrofit(module, border=0, verify=False)
    verified = {
        id(part)
        for one in module.modules()
        if path_of(published_class(one)) in verified_classes()
        for part in one.modules()
    }
    for path, one in module.named_modules():
        assert not is_swapped(one) or id(one) in verified, path


@pytest.mark.parametrize("name", ["seamless_m4t_v2", "vits"])
def test_an_encoder_whose_layers_have_no_position_is_left(name: str) -> None:
    module: Any = models()[name].made(torch.float32)
    config = module.config if name == "seamless_m4t_v2" else module.encoder.config
    setting, value = ("position_embeddings_type", "none") if name == "seamless_m4t_v2" else ("window_size", 0)
    setattr(config, setting, value)
    for one in module.modules():
        if hasattr(one, setting):
            setattr(one, setting, value)
    with pytest.raises(ValueError, match="Encoder: it has no position"):
        relpos.retrofit(module)


def test_a_mask_that_the_library_drops_is_dropped() -> None:
    """A VITS encoder that is built by itself has no implementation of attention, and ignores padding."""
    model = models()["vits"]
    module: Any = model.made()
    module.encoder.config._attn_implementation_internal = None
    (published,) = model.called(module)
    relpos.retrofit(module, border=0)
    (own,) = model.called(module)
    assert float((own - published).detach().abs().max()) <= 1e-9 * float(published.detach().abs().max())
