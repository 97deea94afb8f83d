"""Retrofitted Inkling and Inkling 2 in use: the whole models, which also see and hear, and dropout in training."""

from typing import Any

import pytest
import torch
from models_text import inkling, inkling2
from torch import Tensor, nn

import relpos
from models import padding, tokens
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped

FAST_CASES = 1  # of each of its tests, in the fast part
BUILT = {"inkling": inkling, "inkling2": inkling2}
SEES = {"patch_size": 8, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
OWN: dict[str, dict[str, Any]] = {
    "Inkling": {"vision_config": SEES, "audio_config": {"n_mel_bins": 5, "mel_vocab_size": 7}, "audio_token_id": 95},
    "Inkling2": {"vision_config": {**SEES, "projection_hidden_dim": 16, "text_hidden_size": 32}},
}


def whole(name: str) -> Any:
    """The model for conditional generation around the small text model."""
    torch.manual_seed(0)
    library = imported(f"transformers.models.{name.lower()}.modeling_{name.lower()}")
    text = BUILT[name.lower()]("ForCausalLM", use_cache=True, eos_token_id=None).config.to_dict()
    config = getattr(library, f"{name}Config")(text_config=text, image_token_id=97, **OWN[name])
    model = getattr(library, f"{name}ForConditionalGeneration")(config)
    if name == "Inkling2":
        for layer in model.model.language_model.layers:
            layer.mlp = nn.Linear(32, 32)  # in place of its experts
    for x in model.parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=0.3)
    return model.eval()


def prompts(name: str) -> dict[str, Tensor]:
    """Two prompts, one padded at the left, with an image of four tokens each; for Inkling also two frames of audio."""
    given = {"input_ids": tokens(2, 21).clamp(max=90), "attention_mask": padding(2, 21, left=True)}
    given["input_ids"][:, 12:16] = 97
    if name == "Inkling2":
        return given | {"pixel_values": torch.randn(8, 16, 16, 3), "image_grid_thw": torch.tensor([[1, 2, 2]] * 2)}
    given["input_ids"][:, 17:19] = 95
    frames = {"audio_input_ids": torch.randint(7, (2, 3, 5)), "audio_input_ids_mask": torch.tensor([[1, 1, 0]] * 2)}
    return given | {"pixel_values": torch.randn(8, 2, 8, 8, 3)} | frames


def read(model: Any, given: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """The logits at tokens, and the gradients of all weights by the loss at those that a token comes before."""
    model.zero_grad()
    unread = given["attention_mask"].cumsum(1) < 2
    out = model(**given, labels=given["input_ids"].masked_fill(unread, -100))
    out.loss.backward()
    gradients = {key: x.grad for key, x in model.named_parameters()}
    return out.logits[given["attention_mask"].bool()].detach(), gradients


@pytest.mark.parametrize("name", OWN)
def test_the_whole_model_writes_the_same_text(name: str) -> None:
    """From prompts with images and audio, with its cache."""
    model, given = whole(name), prompts(name)
    logits, gradients = read(model, given)
    how = {"max_new_tokens": 6, "do_sample": False}
    written = model.generate(**given, **how)
    relpos.retrofit(model, border=0, verify=False)
    assert all(is_swapped(layer.self_attn) for layer in model.model.language_model.layers)
    own, own_gradients = read(model, given)
    assert torch.allclose(own, logits, rtol=0, atol=2e-5 * float(logits.abs().max()))
    assert not torch.equal(own, logits)  # relpos computed them
    for key, wanted in gradients.items():
        scale = float(wanted.abs().max())
        assert scale > 0, key
        assert torch.allclose(own_gradients[key], wanted, rtol=0, atol=2e-5 * scale), key
    assert torch.equal(model.generate(**given, **how), written)


@pytest.mark.parametrize("name", BUILT)
@torch.no_grad()
def test_dropout_has_the_mean_of_no_dropout(name: str) -> None:
    """Each layer in training mode, on 1,000 equal rows that drop other weights; sinks are never dropped."""
    torch.manual_seed(0)
    rows, model = 1000, BUILT[name](attention_dropout=0.4).eval()
    for x in model.parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=0.3)
    relpos.retrofit(model, border=0, verify=False)
    calls: list[tuple[Any, Any, Any, Tensor]] = []

    def note(module: Any, args: Any, kwargs: Any, out: Any) -> None:
        calls.append((module, args, kwargs, out[0]))

    hooks = [layer.self_attn.register_forward_hook(note, with_kwargs=True) for layer in model.layers]  # type: ignore[union-attr]
    model(input_ids=tokens(1, 11))
    for hook in hooks:
        hook.remove()
    for module, args, kwargs, wanted in calls:
        module.train()
        named = {key: repeat(one, rows) for key, one in kwargs.items()}
        out, _ = module(*(repeat(one, rows) for one in args), **named)
        spread = out.std(dim=0)
        assert (spread[1:] > 0).any(), "something was dropped"
        assert ((out.mean(dim=0) - wanted[0]).abs() <= 6 * spread / rows**0.5 + 1e-5).all()


def repeat(x: Any, rows: int) -> Any:
    """A tensor of one row as one of many."""
    return x.expand(rows, *x.shape[1:]) if isinstance(x, Tensor) and x.dim() > 1 and x.shape[0] == 1 else x
