"""`replace_position` by mechanisms that are made from hidden states: by loops, trained, and kept in a cache."""

import importlib
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replaced_models import bert, encoder, gpt2, llama, timm_vit
from torch import Tensor

import relpos
from models import tokens
from relpos.adapters.replacements.states import LayerStates

IDS = tokens(3, 12)


def _by_loops(layer: Any, gate: Any, x: Tensor) -> Tensor:
    """A Llama's attention of 4 heads on 2 key heads that forgets, from weights, one query at a time."""
    q, k, v = (part(x).unflatten(-1, (-1, 8)).transpose(1, 2) for part in (layer.q_proj, layer.k_proj, layer.v_proj))
    k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    forgets = F.logsigmoid(x @ gate.weight.T + gate.bias).transpose(1, 2)  # [B, H, N]
    rows = []
    for i in range(x.shape[1]):
        scores = (q[:, :, i : i + 1] * k[:, :, : i + 1]).sum(dim=-1) / math.sqrt(8)
        between = [forgets[:, :, j + 1 : i + 1].sum(dim=-1) for j in range(i + 1)]
        weights = (scores + torch.stack(between, dim=-1)).softmax(dim=-1)
        rows.append((weights[..., None] * v[:, :, : i + 1]).sum(dim=2))
    out: Tensor = layer.o_proj(torch.stack(rows, dim=1).flatten(2))
    return out


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_llama_that_forgets_equals_loops(checkpointed: bool) -> None:
    """Logits and the gradient of every weight, in training: with a cache, which keeps gradients, or checkpointed."""
    model = llama().train()
    relpos.replace_position(model, "fox", init_std=0.5)
    weights = {name: x for name, x in model.named_parameters() if x.requires_grad}
    assert sum("fgate_proj" in name for name in weights) == 4
    if checkpointed:
        model.activation_checkpointing_enable()
    ours = model(IDS, use_cache=not checkpointed).logits
    found = torch.autograd.grad(ours.square().mean(), list(weights.values()))
    for number, layer in enumerate(model.model.layers):
        gate = model.model.positions[number].parts()[0].fgate_proj
        layer.self_attn.forward = lambda hidden_states, *_, own=layer.self_attn, gate=gate, **__: (
            _by_loops(own, gate, hidden_states),
            None,
        )
    wanted = model(IDS, use_cache=False).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-6, atol=1e-6)  # its norms are float32
    expected = torch.autograd.grad(wanted.square().mean(), list(weights.values()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("heads", [1, 4])
def test_a_cache_keeps_it_bit_for_bit(dtype: torch.dtype, heads: int) -> None:
    """Through the library's own reordering and cropping, beside values in half precision."""
    cache, wide = importlib.import_module("transformers").DynamicCache(), torch.promote_types(dtype, torch.float32)
    numbers, values = torch.randn(2, heads, 7, 3, dtype=wide), torch.randn(2, 2, 7, 6).to(dtype)

    def update(first: int, last: int) -> None:
        states = LayerStates(torch.zeros(2, last - first, 8), numbers[:, :, first:last])
        new = values[:, :, first:last]
        _, kept = states.kept_in(cache).update(new, new, 0)
        assert torch.equal(kept, values[:, :, :last])
        assert states.remembered is not None
        assert torch.equal(states.remembered, numbers[:, :, :last])

    update(0, 4)
    update(4, 6)
    cache.crop(-1)  # the last of them
    rows = torch.tensor([1, 1])
    cache.reorder_cache(rows)
    numbers, values = numbers[rows], values[rows]
    update(5, 7)


@torch.no_grad()
def test_padding_at_the_left_contributes_nothing() -> None:
    """Selective RoPE's convolution takes in earlier tokens: in a full pass, and in a cache."""
    model = llama()
    relpos.replace_position(model, "selective_rope", init_std=1.0)
    valid = torch.ones(1, 12, dtype=torch.long)
    valid[:, :4] = 0
    first = model(IDS[:1, :6], attention_mask=valid[:, :6], use_cache=True)
    then = model(IDS[:1, 6:], attention_mask=valid, past_key_values=first.past_key_values).logits
    full = model(IDS[:1], attention_mask=valid).logits[:, 4:]
    wanted = model(IDS[:1, 4:]).logits
    torch.testing.assert_close(full, wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(torch.cat([first.logits[:, 4:], then], dim=1), wanted, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_beams_go_on_as_without_a_cache() -> None:
    """The library copies and reorders rows of the cache."""
    model = gpt2()
    relpos.replace_position(model, "fox", init_std=1.0)
    how: dict[str, Any] = {"max_new_tokens": 6, "do_sample": False, "num_beams": 3}
    assert torch.equal(model.generate(IDS, **how), model.generate(IDS, **how, use_cache=False))


def test_it_begins_at_no_bias_and_learns() -> None:
    """`init_std=0`, the default: Inkling's bias is 0, and its curves still get a gradient."""
    model = bert()
    without = bert()
    relpos.replace_position(model, "inkling")
    relpos.replace_position(without, None)
    out = model(IDS).last_hidden_state
    torch.testing.assert_close(out, without(IDS).last_hidden_state, rtol=1e-9, atol=1e-9)
    out.square().mean().backward()
    assert all(layer.parts()[0].proj.grad.any() for layer in model.positions)


@torch.no_grad()
def test_autocast_does_not_round_what_is_kept() -> None:
    model = llama().float()
    relpos.replace_position(model, "fox")
    with torch.autocast("cpu", torch.bfloat16):
        kept = model.model.layers[0].self_attn.layer_position.remembered(torch.ones(1, 3, 32))
    assert kept.dtype == torch.float32


class QuantizedCache:
    """By its name alone the library's, which needs another package."""


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (lambda: relpos.replace_position(llama(), "fox", shared=True), "shared=False with ForgetGate; got True. Each"),
        (
            lambda: relpos.replace_position(encoder(), "fox", coordinates=relpos.Sequence(12)),
            "a position that needs no hidden states; got ForgetGate. GPT-2, Llama, T5, BERT and ViT of transformers",
        ),
        (
            lambda: relpos.replace_position(timm_vit(), lambda _: relpos.InklingBias(4, 32)),
            "a position that needs no hidden states; got InklingBias. GPT-2, ",
        ),
        (
            lambda: LayerStates(torch.zeros(1, 2, 8), torch.zeros(1, 4, 2, 1)).kept_in(QuantizedCache()),
            "a cache that keeps its numbers; got QuantizedCache. Use the default one, which grows.",
        ),
    ],
)
def test_what_cannot_be_is_one_line(wrong: Any, line: str) -> None:
    with pytest.raises(ValueError) as caught:
        wrong()
    assert line in str(caught.value)
