"""`replace_position` in transformers' T5: two stacks, cross-attention, a scale of 1."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_t5 import SMALL
from replaced import by_hand, heads, linear, require_round_trips, require_same
from torch import Tensor, nn

import relpos
from models import padding, tokens
from relpos import Sequence
from relpos.adapters.libraries import imported
from relpos.adapters.replacement.placed import Placed
from relpos.adapters.replacement.t5 import PlacedT5Attention

FAST_CASES = 2  # of each of its tests, in the fast part

IDS, TARGETS = tokens(3, 9), tokens(3, 6, seed=1)
MASK = padding(3, 9)


def t5(**more: Any) -> Any:
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(**{**SMALL, "decoder_start_token_id": 0, "eos_token_id": None, **more})
    model = transformers.T5ForConditionalGeneration(config)
    for x in model.parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=0.2)
    return model.eval().double()


def eager_t5() -> Any:
    return t5(attn_implementation="eager")


def states(model: Any, ids: Tensor = IDS, mask: Tensor | None = MASK, targets: Tensor = TARGETS) -> Tensor:
    out = model(input_ids=ids, attention_mask=mask, decoder_input_ids=targets).logits
    assert isinstance(out, Tensor)
    return out


def expected(model: Any) -> Tensor:
    """The model by hand: what its mechanisms say, and nothing of its own."""
    count = model.config.num_heads
    keys = MASK.bool()[:, None, None]
    order = torch.arange(TARGETS.shape[1])
    encoded = None
    for stack, ids, allowed in (
        (model.encoder, IDS, keys),
        (model.decoder, TARGETS, (order <= order[:, None])[None, None]),
    ):
        where, mechanisms = Sequence(ids.shape[1]), list(stack.positions)
        x = mechanisms[0].embed(model.shared.weight[ids], where)
        for number, block in enumerate(stack.block):
            attn, y = block.layer[0].SelfAttention, block.layer[0].layer_norm(x)
            q, k, v = (heads(linear(y, one), count) for one in (attn.q, attn.k, attn.v))
            position = mechanisms[number % len(mechanisms)]
            x = x + linear(by_hand(q, k, v, position, where, allowed=allowed, scale=1.0), attn.o)
            if encoded is not None:
                attn, y = block.layer[1].EncDecAttention, block.layer[1].layer_norm(x)
                q, k, v = (
                    heads(linear(y, attn.q), count),
                    *(heads(linear(encoded, one), count) for one in (attn.k, attn.v)),
                )
                x = x + linear(by_hand(q, k, v, None, where, allowed=keys, scale=1.0), attn.o)
            x = block.layer[-1](x)
        encoded = stack.final_layer_norm(x)
    model_dim = model.config.d_model**-0.5 if model.config.tie_word_embeddings else 1.0
    out: Tensor = model.lm_head(encoded * model_dim)
    return out


@pytest.mark.parametrize("build", [t5, eager_t5])
@pytest.mark.parametrize("position", ["relative_1d", "rotary_1d+learned", "alibi", "sinusoidal_1d", "none"])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_the_model_by_hand(build: Callable[[], Any], position: str, shared: bool) -> None:
    model = build()
    own = states(model)
    report = relpos.replace_position(model, position, init_std=0.5, shared=shared)
    table = "block.0.layer.0.SelfAttention.relative_attention_bias"
    assert [one.name for one in report.own] == [f"encoder.{table}", f"decoder.{table}"]
    replaced = states(model)
    assert not torch.allclose(replaced, own)
    require_same(model, replaced, expected(model))


def test_without_position_the_encoder_sees_a_bag() -> None:
    model, order = t5(), torch.randperm(9)

    def both() -> tuple[Tensor, Tensor]:
        return states(model, IDS[:, order], None), states(model, mask=None)

    assert not torch.allclose(*both())
    relpos.replace_position(model, None)
    torch.testing.assert_close(*both(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [t5, eager_t5])
def test_its_own_table_as_a_mechanism_is_the_model_itself(build: Callable[[], Any]) -> None:
    model = build()
    own = states(model)
    relpos.replace_position(model, "t5", shared=True)
    assert not torch.allclose(states(model), own)
    for stack in (model.encoder, model.decoder):
        table = stack.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        mechanism = relpos.T5Bias(
            table.shape[1], num_buckets=table.shape[0], bidirectional=not stack.is_decoder,
            max_distance=model.config.relative_attention_max_distance,
        )  # fmt: skip
        mechanism.relative_attention_bias.data = table.data
        stack.positions[0].mechanisms[0] = mechanism
    torch.testing.assert_close(states(model), own, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", ["relative_1d", "learned", "rotary_1d", "t5"])
@torch.no_grad()
def test_decoding_is_the_full_pass(position: str) -> None:
    model = t5()
    relpos.replace_position(model, position, init_std=0.5)
    made = model.generate(
        input_ids=IDS, attention_mask=MASK, max_new_tokens=8, do_sample=False, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    full = states(model, targets=made.sequences)
    torch.testing.assert_close(torch.stack(made.logits, 1).double(), full[:, :-1], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match='cache_implementation="dynamic"'):
        model.generate(input_ids=IDS, max_new_tokens=3, cache_implementation="static")


def test_round_trips() -> None:
    require_round_trips(t5, "relative_1d", states)
    require_round_trips(eager_t5, "learned+kerple_log", states, shared=True)


def test_planted_faults_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mechanism left out; its own bias left on; the sign turned; the causal mask dropped."""
    model = t5()
    relpos.replace_position(model, "relative_1d", init_std=0.5)
    wanted = expected(model)
    assert torch.allclose(states(model), wanted)
    with monkeypatch.context() as patch:
        patch.setattr(Placed, "attend_placed", None)
        nothing = states(model)
        for kind in (type(model.decoder.block[0].layer[0].SelfAttention), PlacedT5Attention):
            patch.delattr(kind, "forward")
        for wrong in (nothing, states(model)):
            assert not torch.allclose(wrong, wanted, rtol=1e-3, atol=1e-3)
        assert not torch.allclose(nothing, states(model), rtol=1e-3, atol=1e-3), "the second has its own bias"
    table = next(model.decoder.positions.parameters())
    table.data = table.data.flip(0)
    assert not torch.allclose(states(model), wanted, rtol=1e-3, atol=1e-3)
    table.data = table.data.flip(0)
    assert torch.allclose(states(model), wanted)
    model.decoder.block[0].layer[0].SelfAttention.is_causal = False
    assert not torch.allclose(states(model), wanted, rtol=1e-3, atol=1e-3)
