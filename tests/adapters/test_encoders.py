"""Encoders that are replaced for what they hand on, a mask or a position, are verified with it.

A fault is planted in what the layers of the retrofitted copy are handed, and the published copy is left alone: the
attention inside, which is verified by itself, knows nothing of it.
"""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import relpos
from models import models
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped
from relpos.adapters.retrofits import parakeet

FAST_CASES = 2  # of each of its tests, in the fast part
_BEIT = ("beit.modeling_beit.BeitLayer", "BeitModel")
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
    "beit": _BEIT,
    "beit, one table for all layers": _BEIT,
}
"""A model of the tests to the class of its layers, and to the encoder that the error names."""

FAULTS: list[tuple[str, str, Callable[[Any], Any]]] = [
    *((name, "attention_mask", lambda mask: None) for name in ("parakeet", "nemotron_asr_streaming")),
    *((name, "attention_mask", lambda mask: None) for name in ("seamless_m4t_v2", "speecht5", "vits")),
    ("beit", "padding", lambda mask: None),
    ("beit", "resolution", lambda size: size[::-1]),
    # positions off by one
    ("parakeet", "position_embeddings", lambda x: x.roll(1, 1)),
    ("nemotron_asr_streaming", "position_embeddings", lambda x: x.roll(1, 1)),
    ("speecht5", "position_bias", lambda x: x.roll(1, 0)),
    ("beit, one table for all layers", "attention_mask", lambda x: x.roll(1, -1)),
    # chunks off by one, and without their first key
    ("nemotron_asr_streaming", "attention_mask", lambda x: (x + 1).clamp(max=23)),
    ("nemotron_asr_streaming", "attention_mask", lambda x: x * x.new_tensor([0, 1])),
]
"""A model, an argument of its layers, and what becomes of it."""


@pytest.mark.parametrize(("name", "argument", "change"), FAULTS)
def test_verification_catches_what_an_encoder_hands_on(
    name: str, argument: str, change: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
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
