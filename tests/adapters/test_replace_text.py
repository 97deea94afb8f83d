"""`replace_position` in transformers' BERT, GPT-2 and Llama: padding, causal masks, caches, grouped heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replaced import by_hand, heads, linear, require_round_trips, require_same
from torch import Tensor, nn

import relpos
from models import padding, tokens
from relpos import DenseBias, LineBias, Sequence
from relpos.adapters.libraries import imported
from relpos.adapters.replacement.hf import PlacedEmbedding
from relpos.adapters.replacement.llama import NoRotation
from relpos.core.densify import written_out

FAST_CASES = 2  # of each of its tests, in the fast part

LENGTH = 12
IDS = tokens(3, LENGTH)
SMALL = {"vocab_size": 90, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
POSITIONS = ["relative_1d", "rotary_1d", "learned+t5", "sinusoidal_1d", "alibi", "shaw", "deberta", "xpos"]


def _made(kind: str, config: str, **more: Any) -> Any:
    transformers = imported("transformers")
    torch.manual_seed(0)
    settings = {"max_position_embeddings": 32, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0, **SMALL}
    model = getattr(transformers, kind)(getattr(transformers, config)(**{**settings, **more}))
    for name, x in model.named_parameters():
        if x.dim() > 1:
            nn.init.normal_(x, std=0.3)
        assert "positions" not in name
    return model.eval().double()


def bert(**more: Any) -> Any:
    return _made("BertModel", "BertConfig", intermediate_size=64, add_pooling_layer=False, **more).base_model


def gpt2(**more: Any) -> Any:
    return _made("GPT2LMHeadModel", "GPT2Config", **more)


def llama(**more: Any) -> Any:
    return _made("LlamaForCausalLM", "LlamaConfig", intermediate_size=64, num_key_value_heads=2, **more)


def eager_bert() -> Any:
    return bert(attn_implementation="eager")


def eager_gpt2() -> Any:
    return gpt2(attn_implementation="eager", scale_attn_by_inverse_layer_idx=True)


def eager_llama() -> Any:
    return llama(attn_implementation="eager")


MODELS = [bert, gpt2, llama, eager_bert, eager_gpt2, eager_llama]
DECODERS = [gpt2, llama, eager_gpt2, eager_llama]


def states(model: Any, ids: Tensor = IDS, mask: Tensor | None = None) -> Tensor:
    out = model.base_model(ids, attention_mask=mask)[0]
    assert isinstance(out, Tensor)
    return out


def expected(model: Any, ids: Tensor = IDS, mask: Tensor | None = None) -> Tensor:
    """The model by hand: what its mechanisms say, and nothing of its own."""
    model = model.base_model
    where, mechanisms = Sequence(ids.shape[1]), list(model.positions)
    order = torch.arange(ids.shape[1])
    allowed = None if mask is None else mask.bool()[:, None, None]
    if not hasattr(model, "encoder"):
        causal = (order <= order[:, None])[None, None]
        allowed = causal if allowed is None else causal & allowed
    if hasattr(model, "encoder"):
        words = model.embeddings.word_embeddings.weight[ids] + model.embeddings.token_type_embeddings.weight[0]
        x = model.embeddings.LayerNorm(mechanisms[0].embed(words, where))
    else:
        words = (model.wte if hasattr(model, "wte") else model.embed_tokens).weight[ids]
        x = mechanisms[0].embed(words, where)
    layers = model.encoder.layer if hasattr(model, "encoder") else model.h if hasattr(model, "h") else model.layers
    for number, layer in enumerate(layers):
        position = mechanisms[number % len(mechanisms)]
        if hasattr(model, "encoder"):
            attn = layer.attention.self
            q, k, v = (heads(linear(x, one), 4) for one in (attn.query, attn.key, attn.value))
            x = layer.attention.output(by_hand(q, k, v, position, where, allowed=allowed), x)
            x = layer.output(layer.intermediate(x), x)
        elif hasattr(model, "h"):
            y = layer.ln_1(x) @ layer.attn.c_attn.weight + layer.attn.c_attn.bias
            q, k, v = (heads(one, 4) for one in y.chunk(3, -1))
            own = layer.attn.scaling
            scale = None if own == 8**-0.5 else own
            out = by_hand(q, k, v, position, where, allowed=allowed, scale=scale)
            x = x + out @ layer.attn.c_proj.weight + layer.attn.c_proj.bias
            x = x + layer.mlp(layer.ln_2(x))
        else:
            attn, y = layer.self_attn, layer.input_layernorm(x)
            q, k, v = (
                heads(linear(y, attn.q_proj), 4),
                heads(linear(y, attn.k_proj), 2),
                heads(linear(y, attn.v_proj), 2),
            )
            x = x + linear(by_hand(q, k, v, position, where, allowed=allowed), attn.o_proj)
            x = x + layer.mlp(layer.post_attention_layernorm(x))
    norm: Any = getattr(model, "ln_f", getattr(model, "norm", nn.Identity()))
    normed: Tensor = norm(x)
    return normed


@pytest.mark.parametrize("build", MODELS)
@pytest.mark.parametrize("position", ["relative_1d+learned", "rotary_1d"])
def test_every_model_is_the_one_by_hand(build: Callable[[], Any], position: str) -> None:
    model = build()
    own = states(model)
    relpos.replace_position(model, position, init_std=0.5)
    replaced = states(model)
    assert not torch.allclose(replaced, own)
    require_same(model, replaced, expected(model))


@pytest.mark.parametrize("position", ["t5", "sinusoidal_1d", "alibi", "deberta", "transformer_xl", "none"])
@pytest.mark.parametrize("build", [bert, gpt2, llama])
def test_every_kind_of_mechanism(build: Callable[[], Any], position: str) -> None:
    model = build()
    relpos.replace_position(model, position, init_std=0.5, shared=True)
    assert len(model.base_model.positions) == 1
    require_same(model, states(model), expected(model))


@pytest.mark.parametrize("build", MODELS)
def test_padding(build: Callable[[], Any]) -> None:
    model, mask = build(), padding(3, LENGTH)
    relpos.replace_position(model, "relative_1d+learned", init_std=0.5)
    real = mask.bool()
    torch.testing.assert_close(states(model, mask=mask)[real], expected(model, mask=mask)[real], rtol=1e-9, atol=1e-9)
    if build in (bert, eager_bert):
        assert not torch.allclose(states(model, mask=mask)[real], states(model)[real])


@pytest.mark.parametrize("build", [bert, eager_bert])
def test_without_position_an_encoder_sees_a_bag(build: Callable[[], Any]) -> None:
    model, order = build(), torch.randperm(LENGTH)

    def moved() -> tuple[Tensor, Tensor]:
        return states(model, IDS[:, order]), states(model)[:, order]

    assert not torch.allclose(*moved())
    relpos.replace_position(model, "none")
    torch.testing.assert_close(*moved(), rtol=1e-9, atol=1e-9)
    relpos.restore(model)
    relpos.replace_position(model, "relative_1d", init_std=0.5)
    assert not torch.allclose(*moved())


@pytest.mark.parametrize("build", [gpt2, llama])
def test_without_position_one_causal_layer_sees_a_bag_of_the_past(build: Callable[..., Any]) -> None:
    """The last token sees the same bag in any order; of several layers the lower ones count what they see."""
    model = build(num_hidden_layers=1)
    order = torch.cat([torch.randperm(LENGTH - 1), torch.tensor([LENGTH - 1])])

    def last() -> tuple[Tensor, Tensor]:
        return states(model, IDS[:, order])[:, -1], states(model)[:, -1]

    assert not torch.allclose(*last())
    relpos.replace_position(model, None)
    torch.testing.assert_close(*last(), rtol=1e-9, atol=1e-9)
    changed = IDS.clone()
    changed[:, -1] = 5
    assert torch.equal(states(model, changed)[:, :-1], states(model)[:, :-1]), "and never the future"


@pytest.mark.parametrize("build", DECODERS)
@pytest.mark.parametrize("position", POSITIONS)
@torch.no_grad()
def test_decoding_with_a_cache_is_the_full_pass(build: Callable[[], Any], position: str) -> None:
    """A new token stands at the length of the cache; also where tokens come several at a time."""
    model = build()
    relpos.replace_position(model, position, init_std=0.5)
    made = model.generate(IDS, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert made.sequences.shape == (3, LENGTH + 8)
    full = model(made.sequences).logits
    torch.testing.assert_close(torch.stack(made.logits, 1).double(), full[:, LENGTH - 1 : -1], rtol=1e-4, atol=1e-4)
    first = model(made.sequences[:, :7], use_cache=True)
    second = model(made.sequences[:, 7:11], past_key_values=first.past_key_values)
    third = model(made.sequences[:, 11:], past_key_values=second.past_key_values)
    pieces = torch.cat([first.logits, second.logits, third.logits], dim=1)
    torch.testing.assert_close(pieces, full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", DECODERS)
@pytest.mark.parametrize("position", ["learned", "relative_1d", "rotary_1d+t5"])
@torch.no_grad()
def test_decoding_of_a_padded_batch(build: Callable[[], Any], position: str) -> None:
    """Padding on the left, as generation wants it: each text goes on as it would alone."""
    model, mask = build(), padding(3, LENGTH, left=True)
    relpos.replace_position(model, position, init_std=0.5)
    ids = torch.where(mask.bool(), IDS, 0)
    batch = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    for row in range(3):
        alone = model.generate(IDS[row : row + 1, 3 * row :], max_new_tokens=8, do_sample=False)
        assert torch.equal(batch[row, LENGTH:], alone[0, LENGTH - 3 * row :])


@torch.no_grad()
def test_packed_texts() -> None:
    """Positions that begin anew: transformers makes a mask of the documents."""
    model = llama()
    relpos.replace_position(model, "learned+relative_1d", init_std=0.5)
    ids, places = IDS[:1], torch.cat([torch.arange(5), torch.arange(7)])[None]
    packed = model(ids, position_ids=places, use_cache=False).logits
    alone = torch.cat([model(ids[:, :5]).logits, model(ids[:, 5:]).logits], dim=1)
    torch.testing.assert_close(packed, alone, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", MODELS)
def test_round_trips(build: Callable[[], Any]) -> None:
    require_round_trips(build, "relative_1d", states)
    require_round_trips(build, "learned+t5", states, shared=True)


def test_its_own_position_as_a_mechanism_is_the_model_itself() -> None:
    model = gpt2(add_cross_attention=True)
    others = torch.randn(3, 5, 32).double()
    mask = padding(3, 5)

    def decoded() -> Tensor:
        out = model(IDS, encoder_hidden_states=others, encoder_attention_mask=mask).logits
        assert isinstance(out, Tensor)
        return out

    own, words = decoded(), states(bert())
    relpos.replace_position(model, "learned")
    assert not torch.allclose(decoded(), own)
    model.transformer.positions[0].mechanisms[0].pos_embed.data.copy_(model.transformer.wpe.weight)
    torch.testing.assert_close(decoded(), own, rtol=1e-10, atol=1e-10)
    model = bert()
    relpos.replace_position(model, "learned")
    model.positions[0].mechanisms[0].pos_embed.data.copy_(model.embeddings.position_embeddings.weight)
    torch.testing.assert_close(states(model), words, rtol=1e-10, atol=1e-10)
    model = llama()
    own = states(model)
    relpos.replace_position(model, lambda site: relpos.RotaryEmbedding(site.head_dim, layout="half"))
    torch.testing.assert_close(states(model), own, rtol=1e-6, atol=1e-6)  # its cosines are float32


@pytest.mark.parametrize("build", [bert, gpt2, llama])
def test_planted_faults_are_seen(build: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Own position left on; the sign turned; the causal mask dropped."""
    model = build()
    relpos.replace_position(model, "relative_1d+learned", init_std=0.5)
    wanted = expected(model)

    def differs() -> bool:
        return not torch.allclose(states(model), wanted, rtol=1e-3, atol=1e-3)

    assert not differs()
    with monkeypatch.context() as patch:
        patch.delattr(NoRotation if build is llama else PlacedEmbedding, "forward")
        assert differs()
    layers = [x for x in model.modules() if hasattr(x, "attend_placed") and hasattr(x, "is_causal")]
    assert len(layers) == 2
    with monkeypatch.context() as patch:
        line = layers[0].place.terms(LENGTH, LENGTH).of(LineBias)[0]
        turned = relpos.Terms(DenseBias(written_out(line.values, line.lines).mT[None].detach()))
        patch.setattr(type(layers[0].place), "terms", lambda self, n, m: turned)
        assert differs()
    for layer in layers:
        layer.is_causal = not layer.is_causal
    assert differs()


@torch.no_grad()
def test_what_the_mechanism_was_not_built_for_is_one_line() -> None:
    model = gpt2()
    relpos.replace_position(model, "learned")
    with pytest.raises(ValueError, match="positions 0 to 31, as the mechanism was built for; got position 32"):
        model(tokens(1, 33))
    with pytest.raises(ValueError, match=r'cache_implementation="dynamic"; .* would put the model'):
        model.generate(IDS, max_new_tokens=3, cache_implementation="static")
    relpos.restore(model)
    relpos.replace_position(model, "learned", coordinates=Sequence(64))
    assert model(tokens(1, 33)).logits.shape == (1, 33, 90)
    relpos.restore(model)
    relpos.replace_position(model, "sinusoidal_1d")
    assert model(tokens(1, 40)).logits.shape == (1, 40, 90)
    with pytest.raises(
        ValueError, match=r"output_attentions=False .* Leave it out; .* put the model's own position back"
    ):
        model(IDS, output_attentions=True)
    model = llama()
    relpos.replace_position(model, "alibi")
    with pytest.raises(ValueError, match=r"got flex_attention\. Leave it; relpos\.restore\(model\) would put the mod"):
        model.set_attn_implementation("flex_attention")


def test_the_report_names_what_is_off() -> None:
    wanted = {
        bert: "off       embeddings.position_embeddings: absolute embedding of 32 positions",
        gpt2: "off       transformer.wpe: absolute embedding of 32 positions",
        llama: "off       model.rotary_emb: rotation of queries and keys, default, base 10000",
    }
    for build, line in wanted.items():
        report = relpos.replace_position(build(), "t5")
        assert line in str(report)
        assert "texts of at most 32 tokens" in str(report)
