"""What Conformers and their kin are for: long audio, in O(N) numbers, masks included."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from models_transformer_xl import sounds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import relpos
from models import Model, models, padding, tokens

FAST_CASES = 2  # of each of its tests, in the fast part
pytestmark = [
    pytest.mark.usefixtures("timm"),
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore:Support for mismatched key_padding_mask:UserWarning"
    ),
]
N = 800  # from 2 ** 20 scores of all heads on nothing dense is chosen
LONG: dict[str, dict[str, Any]] = {
    "parakeet": {"input_features": sounds(1, 2 * N, 8), "attention_mask": padding(1, 2 * N)},
    "nemotron_asr_streaming": {"input_features": sounds(1, 2 * N, 8), "attention_mask": padding(1, 2 * N)},
    "wav2vec2_conformer": {"input_values": sounds(1, 8 * N)},
    "wav2vec2_bert": {"input_features": sounds(1, N, 10), "attention_mask": padding(1, N)},
    "seamless_m4t_v2": {"input_features": sounds(1, N, 10), "attention_mask": padding(1, N)},
    "fastspeech2_conformer": {"input_ids": tokens(1, N, 30), "attention_mask": padding(1, N)},
    "vits": {"input_ids": tokens(1, N, 30), "padding_mask": torch.ones(1, N, 1), "attention_mask": padding(1, N)},
    "wavlm": {"input_values": sounds(1, 8 * N)},
}


class _Largest(TorchDispatchMode):
    """How many numbers the largest tensor has that PyTorch makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                self.numbers = max(self.numbers, x.untyped_storage().nbytes() // x.element_size())
        return out


def _largest(model: Model, inputs: dict[str, Any], *, retrofitted: bool) -> int:
    module = model.made(torch.float32)
    if retrofitted:
        relpos.retrofit(module, border=0, verify=False)
    with _Largest() as largest:
        module(**inputs)[0].sum().backward()
    return largest.numbers


@pytest.mark.slow
@pytest.mark.parametrize("name", LONG)
def test_long_audio_takes_no_numbers_for_pairs(name: str) -> None:
    assert _largest(models()[name], LONG[name], retrofitted=True) < N * N


def test_published_it_does() -> None:
    assert _largest(models()["parakeet"], LONG["parakeet"], retrofitted=False) >= N * N


@pytest.mark.parametrize("name", ["parakeet", "nemotron_asr_streaming"])
def test_weights_and_hidden_states_are_recorded_as_published(name: str) -> None:
    model = models()[name]
    module = model.made()
    inputs = {key: x.double() if x.is_floating_point() else x for key, x in model.inputs().items()}
    published = module(**inputs, output_attentions=True, output_hidden_states=True)
    hidden = module(**inputs, output_hidden_states=True).hidden_states
    relpos.retrofit(module, border=0, verify=False)
    own = module(**inputs, output_attentions=True, output_hidden_states=True)
    real = published.attention_mask.bool()
    assert len(own.attentions) == len(published.attentions)
    assert len(own.hidden_states) == len(published.hidden_states)
    assert torch.equal(own[0][real], published[0][real])
    own_hidden = module(**inputs, output_hidden_states=True).hidden_states
    for x, y in zip(own_hidden, hidden, strict=True):
        assert torch.allclose(x[real], y[real], rtol=0, atol=1e-9 * float(y.detach().abs().max()))


def test_streaming_with_a_cache_runs_as_published() -> None:
    module = models()["nemotron_asr_streaming"].made(torch.float32)
    frames = sounds(1, 24, 8)
    published = module(input_features=frames, use_cache=True)
    published = module(
        input_features=frames, past_key_values=published.past_key_values, padding_cache=published.padding_cache
    )
    relpos.retrofit(module, border=0, verify=False)
    own = module(input_features=frames, use_cache=True)
    own = module(input_features=frames, past_key_values=own.past_key_values, padding_cache=own.padding_cache)
    assert torch.equal(own[0], published[0])


def test_dropout_of_positions_that_differs_in_a_batch_runs_as_published() -> None:
    model = models()["parakeet"]
    module = model.made(torch.float32)
    module.config.dropout_positions = module.dropout_positions = 0.5
    for layer in module.layers:
        layer.self_attn.attention_dropout = 0.0
    module.train()
    torch.manual_seed(1)
    published = model.called(module)
    relpos.retrofit(module, border=0, verify=False)
    torch.manual_seed(1)
    assert all(torch.equal(x, y) for x, y in zip(model.called(module), published, strict=True))


@pytest.mark.parametrize("name", ["parakeet", "wav2vec2_bert", "wavlm"])
def test_bfloat16_is_as_near_as_published(name: str) -> None:
    model = models()[name]
    with torch.no_grad():
        exact = model.called(model.made())
        module = model.made(torch.bfloat16)
        published = model.called(module)
        relpos.retrofit(module, border=0, verify=False)
        own = model.called(module)
    for x, y, z in zip(own, published, exact, strict=True):
        assert float((x - z).abs().mean()) <= 1.5 * float((y - z).abs().mean())
