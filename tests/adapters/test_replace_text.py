"""`replace_position` in decoders: caches, padding at the left, packed texts, and what a cache cannot be."""

from typing import Any

import pytest
import torch
from replaced_models import ALL, gpt2, llama, smollm3, t5

import relpos
from models import padding, tokens
from relpos import Sequence

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 2  # of each of its tests, in the fast part
LENGTH = 12
IDS = tokens(3, LENGTH)
DECODERS = ["GPT-2", "Llama", "GPT-2, eager", "Llama, eager"]


@pytest.mark.parametrize(
    ("name", "position"),
    [
        *(("GPT-2", one) for one in ("relative_1d", "rotary_1d", "learned+t5", "sinusoidal_1d", "deberta")),
        *(("Llama", one) for one in ("learned+relative_1d", "alibi", "shaw", "xpos")),
        ("GPT-2, eager", "learned+relative_1d"),
        ("Llama, eager", "rotary_1d+t5"),
        ("GPT-2", "fox"),
        ("Llama", "fox+rotary_1d~inkling"),
    ],
)
@torch.no_grad()
def test_decoding_with_a_cache_is_the_full_pass(name: str, position: str) -> None:
    """A new token stands at the length of the cache; also where tokens come several at a time."""
    model = ALL[name].published()
    relpos.replace_position(model, position, init_std=0.5)
    made = model.generate(IDS, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    assert made.sequences.shape == (3, LENGTH + 8)
    full = model(made.sequences).logits
    torch.testing.assert_close(torch.stack(made.logits, 1).double(), full[:, LENGTH - 1 : -1], rtol=1e-4, atol=1e-4)
    pieces, cache = [], None
    for start, stop in ((0, 7), (7, 11), (11, LENGTH + 8)):
        out = model(made.sequences[:, start:stop], past_key_values=cache, use_cache=True)
        pieces.append(out.logits)
        cache = out.past_key_values
    torch.testing.assert_close(torch.cat(pieces, dim=1), full, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("position", ["relative_1d", "learned", "rotary_1d", "t5", "fox"])
@torch.no_grad()
def test_decoding_of_t5_is_the_full_pass(position: str) -> None:
    model = t5()
    relpos.replace_position(model, position, init_std=0.5)
    inputs = {"input_ids": IDS, "attention_mask": padding(3, LENGTH)}
    made = model.generate(**inputs, max_new_tokens=8, do_sample=False, output_logits=True, return_dict_in_generate=True)
    full = model(**inputs, decoder_input_ids=made.sequences).logits
    torch.testing.assert_close(torch.stack(made.logits, 1).double(), full[:, :-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "position"),
    [
        ("GPT-2", "learned"),
        ("Llama", "rotary_1d+t5"),
        ("GPT-2, eager", "relative_1d"),
        ("Llama, eager", "learned"),
        ("Llama", "fox+rotary_1d"),
    ],
)
@torch.no_grad()
def test_decoding_of_a_padded_batch(name: str, position: str) -> None:
    """Padding on the left, as generation wants it: each text goes on as it would alone."""
    model, mask = ALL[name].published(), padding(3, LENGTH, left=True)
    relpos.replace_position(model, position, init_std=0.5)
    batch = model.generate(torch.where(mask.bool(), IDS, 0), attention_mask=mask, max_new_tokens=8, do_sample=False)
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


@torch.no_grad()
def test_a_text_beyond_the_longest() -> None:
    model = gpt2()
    relpos.replace_position(model, "learned")
    with pytest.raises(ValueError, match="positions 0 to 31, for which the mechanism was built; got position 32"):
        model(tokens(1, 33))
    for position, options in (("learned", {"coordinates": Sequence(64)}), ("sinusoidal_1d", {})):
        relpos.restore(model)
        relpos.replace_position(model, position, **options)
        assert model(tokens(1, 40)).logits.shape == (1, 40, 90)


STATIC: dict[str, Any] = {"max_new_tokens": 3, "cache_implementation": "static"}


@pytest.mark.parametrize(
    ("build", "call", "line"),
    [
        (gpt2, lambda model: model.generate(IDS, **STATIC), r'cache_implementation="dynamic"; .* would put the model'),
        (t5, lambda model: model.generate(IDS, **STATIC), 'cache_implementation="dynamic"'),
        (
            gpt2,
            lambda model: model(IDS, output_attentions=True),
            r"output_attentions=False .* Leave it out; .* put the model's own position back",
        ),
        (
            llama,
            lambda model: model.set_attn_implementation("flex_attention"),
            r"got flex_attention\. Leave it; relpos\.restore\(model\) would put the mod",
        ),
    ],
)
def test_what_a_replaced_position_has_not_is_one_line(build: Any, call: Any, line: str) -> None:
    model = build()
    relpos.replace_position(model, "sinusoidal_1d")
    with pytest.raises(ValueError, match=line):
        call(model)


@torch.no_grad()
def test_a_schedule_over_layers_is_that_of_smollm3() -> None:
    """A Llama whose every fourth layer has no rotation is a SmolLM3, with its cache."""
    settings = {"num_hidden_layers": 5, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    wanted, model = smollm3(**settings), llama(**settings, tie_word_embeddings=False)
    assert wanted.config.no_rope_layers == [1, 1, 1, 0, 1]
    model.load_state_dict(wanted.state_dict())
    report = relpos.replace_position(model, "rope~rope~rope~none")
    assert report.position == "rotary_1d~rotary_1d~rotary_1d~none"
    torch.testing.assert_close(model(IDS).logits, wanted(IDS).logits, rtol=1e-4, atol=1e-4)  # its angles are float32
    how = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(IDS)}
    assert torch.equal(model.generate(IDS, **how), wanted.generate(IDS, **how))
