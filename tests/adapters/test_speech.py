"""Retrofitted encoders of speech in use: recorded weights, a streaming cache, dropout of positions."""

import pytest
import torch

import relpos
from models import models, sounds


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
    frames, results = sounds(1, 24, 8), []
    for retrofitted in (False, True):
        if retrofitted:
            relpos.retrofit(module, border=0, verify=False)
        out = module(input_features=frames, use_cache=True)
        caches = {"past_key_values": out.past_key_values, "padding_cache": out.padding_cache}
        results.append(module(input_features=frames, **caches)[0])
    assert torch.equal(*results)


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


def test_a_mask_that_the_library_drops_is_dropped() -> None:
    """A VITS encoder that is built by itself has no implementation of attention, and ignores padding."""
    model = models()["vits"]
    module = model.made()
    module.encoder.config._attn_implementation_internal = None
    (published,) = model.called(module)
    relpos.retrofit(module, border=0)
    (own,) = model.called(module)
    assert float((own - published).detach().abs().max()) <= 1e-9 * float(published.detach().abs().max())


@pytest.mark.parametrize("name", ["seamless_m4t_v2", "vits"])
def test_an_encoder_whose_layers_have_no_position_is_left(name: str) -> None:
    module = models()[name].made(torch.float32)
    config = module.config if name == "seamless_m4t_v2" else module.encoder.config
    setting, value = ("position_embeddings_type", "none") if name == "seamless_m4t_v2" else ("window_size", 0)
    setattr(config, setting, value)
    for one in module.modules():
        if hasattr(one, setting):
            setattr(one, setting, value)
    with pytest.raises(ValueError, match="Encoder: it has no position"):
        relpos.retrofit(module)


@torch.no_grad()
@pytest.mark.parametrize("name", ["parakeet", "nemotron_asr_streaming"])
def test_positions_beyond_the_librarys_cap(name: str) -> None:
    """The published model refuses them, or did in earlier versions."""
    model = models()[name]
    module = model.made()
    (wanted,) = model.called(module)
    module.encode_positions.max_position_embeddings = 8
    if name == "nemotron_asr_streaming":
        with pytest.raises(ValueError, match="max_position_embeddings 8"):
            model.called(module)
    relpos.retrofit(module, border=0, verify=False)
    (own,) = model.called(module)
    assert float((own - wanted).abs().max()) <= 1e-10 * float(wanted.abs().max())
    assert module.encode_positions.max_position_embeddings == 8
