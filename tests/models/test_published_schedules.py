"""A model of alternating layers, Gemma 4, whose schedule of rotations and windows is relpos's: the same logits and
gradients."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from parity import layers_agree
from position.published import model, random, running_in
from relpos.models import RotaryChoice

pytestmark = [pytest.mark.usefixtures("timm"), pytest.mark.slow]  # transformers imports torchvision as timm does

LOCAL, GLOBAL = RotaryChoice(1e4), RotaryChoice(1e6, relpos.ProportionalScaling(0.25))
"""Gemma 4's rotations. The schedule here has two layers of a window before a full one, where Gemma 4 has five."""
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]
IDS = torch.arange(34).view(2, 17) * 5 % 31


def gemma4() -> Any:
    library = importlib.import_module("transformers")
    settings = library.Gemma4TextConfig(
        vocab_size=31, hidden_size=32, intermediate_size=24, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, global_head_dim=16, hidden_size_per_layer_input=4,
        vocab_size_per_layer_input=31, sliding_window=5, layer_types=KINDS * 2,
        attn_implementation="eager", pad_token_id=None,
    )  # fmt: skip
    with running_in(torch.float64):  # its frequencies, too
        return random(library.Gemma4ForCausalLM(settings), torch.float64)


def test_gemma_4(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers attend by `relpos.attention` to the keys of each window, under each layer's rotation."""
    theirs, file = gemma4(), model("gemma4")
    with running_in(torch.float64):
        wanted = theirs(IDS, use_cache=False).logits
    settings = {"embed_dim": 32, "num_heads": 2, "depth": 6}
    schedule = relpos.LanguageModel(
        **settings, position=(LOCAL, LOCAL, GLOBAL), window=(5, 5, None), shared_position=True
    )
    attended = []

    def attention(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **_: Any) -> tuple[Tensor, None]:
        layer = module.layer_idx
        position, window = schedule.attention_position[layer % 3], schedule.windows[layer]
        pairs = relpos.Mask.causal() if window is None else relpos.patterns.local(window, causal=True)
        attended.append(layer)
        out = relpos.attention(
            q, k, v, position=position, queries=relpos.Sequence(17), mask=pairs, scale=module.scaling
        )
        return out.transpose(1, 2), None

    unrotated = (torch.ones(1, 1, 1, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.float64))
    monkeypatch.setattr(file, "eager_attention_forward", attention)
    monkeypatch.setattr(file.Gemma4TextRotaryEmbedding, "forward", lambda *_: unrotated)
    with running_in(torch.float64):
        found = theirs(IDS, use_cache=False).logits
    assert attended == list(range(6))
    layers_agree("Gemma 4's schedule", "transformers", found, wanted, dict(theirs.named_parameters()))
