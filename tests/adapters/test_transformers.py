"""Retrofitted models of transformers in use: generation, caches, half precision, saving, training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from models_images import SMALL_BEIT
from models_text import T5, writer
from torch import nn

import relpos
from models import images, models, padding, tokens
from relpos.adapters.common import retrofitted
from relpos.adapters.common.libraries import imported
from relpos.adapters.common.retrofitted import is_swapped

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 3  # of each of its tests, in the fast part

IDS, WORDS = tokens(2, 9), tokens(2, 5, seed=1)


@pytest.mark.parametrize(
    ("how", "border"),
    [
        ({}, None),
        ({}, 0),
        ({"num_beams": 3}, 0),
        ({"do_sample": True, "top_k": 5}, 0),
        ({"use_cache": False}, 0),
        ({"prompt_lookup_num_tokens": 3}, 0),
    ],
)
def test_generation(how: dict[str, Any], border: int | None) -> None:
    model = writer()
    rows = 1 if "prompt_lookup_num_tokens" in how else 2
    inputs = {"input_ids": tokens(rows, 17), "attention_mask": padding(rows, 17), "min_new_tokens": 12}
    torch.manual_seed(1)
    published = model.generate(**inputs, **how, max_new_tokens=12)
    relpos.retrofit(model, border=border, verify=False)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **how, max_new_tokens=12), published)


@torch.no_grad()
@pytest.mark.parametrize(("border", "implementation"), [(0, "sdpa"), (None, "sdpa"), (0, "eager")])
def test_a_decoder_goes_on_from_a_cache_with_several_tokens(border: int | None, implementation: str) -> None:
    model = writer(attn_implementation=implementation).double()
    ids, words = tokens(2, 11), tokens(2, 9, seed=1)
    relpos.retrofit(model, border=border, verify=False)
    whole = model(input_ids=ids, decoder_input_ids=words).logits
    first = model(input_ids=ids, decoder_input_ids=words[:, :4], use_cache=True)
    rest = model(
        encoder_outputs=(first.encoder_last_hidden_state,),
        decoder_input_ids=words[:, 4:],
        past_key_values=first.past_key_values,
    ).logits
    assert float((torch.cat([first.logits, rest], 1) - whole).abs().max()) < 1e-6 * float(whole.abs().max())


@torch.no_grad()
def test_padding_is_never_ignored() -> None:
    """An attention function without its mask function would be given none."""
    model = writer()
    relpos.retrofit(model, border=0, verify=False)
    ids, mask = tokens(2, 15), padding(2, 15)
    before = model(input_ids=ids, attention_mask=mask, decoder_input_ids=WORDS).logits
    other = torch.where(mask.bool(), ids, tokens(2, 15, seed=2))
    assert torch.equal(model(input_ids=other, attention_mask=mask, decoder_input_ids=WORDS).logits, before)
    whole = model(input_ids=other, decoder_input_ids=WORDS).logits
    assert float((whole - before)[1].abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("name", "dtype", "factor"),
    [
        ("t5", torch.bfloat16, 1.2),
        ("t5", torch.float16, 1.2),
        *((name, torch.bfloat16, 1.5) for name in ("bloom", "mpt", "falcon", "parakeet", "wav2vec2_bert", "wavlm")),
    ],
)
@torch.no_grad()
def test_half_precision_is_no_further_off_than_published(name: str, dtype: torch.dtype, factor: float) -> None:
    model = models()[name]
    exact, module = model.called(model.made()), model.made(dtype)
    published = model.called(module)
    relpos.retrofit(module, border=0, verify=False)
    own = model.called(module)
    for x, y, wanted in zip(own, published, exact, strict=True):
        assert x.dtype == y.dtype
        assert float((x.double() - wanted).norm()) <= factor * float((y.double() - wanted).norm())


@torch.no_grad()
def test_autocast() -> None:
    model = models()["t5"]
    module = model.made(torch.float32)
    exact = model.called(module)
    with torch.autocast("cpu", torch.bfloat16):
        published = model.called(module)
        relpos.retrofit(module, border=0)
        own = model.called(module)
    for x, y, wanted in zip(own, published, exact, strict=True):
        assert x.dtype == y.dtype
        assert float((x - wanted).norm()) <= 1.2 * float((y - wanted).norm())


@torch.no_grad()
def test_weights_are_saved_and_loaded_plain(tmp_path: Path) -> None:
    model = writer()
    model.save_pretrained(tmp_path / "published")
    report = relpos.retrofit(model, border=0)
    assert "T5ForConditionalGeneration (transformers" in str(report)
    model.save_pretrained(tmp_path / "own")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "published" / name).read_bytes()
    for implementation in ("eager", "sdpa"):
        other = imported("transformers").T5ForConditionalGeneration.from_pretrained(
            tmp_path / "own", attn_implementation=implementation
        )
        assert not any(map(is_swapped, other.modules()))
        relpos.retrofit(other, border=0, verify=False)
        own, theirs = (one(input_ids=IDS, decoder_input_ids=WORDS).logits for one in (other, model))
        assert float((own - theirs).abs().max()) < 1e-5


def test_hooks_gradients_and_buffers_stay() -> None:
    model = writer()
    calls = []
    layer = model.encoder.block[0].layer[0].SelfAttention
    layer.register_forward_hook(lambda module, args, output: calls.append(output[0]))
    layer.q.weight.grad = torch.ones_like(layer.q.weight)
    relpos.retrofit(model, border=0)
    assert not calls, "a verification runs copies without hooks"
    model(input_ids=IDS, decoder_input_ids=WORDS)
    assert len(calls) == 1
    assert torch.equal(layer.q.weight.grad, torch.ones_like(layer.q.weight))


def _t5_and_texts() -> tuple[nn.Module, list[dict[str, torch.Tensor]]]:
    batches = [{"input_ids": tokens(1, 24, seed=i)[0], "labels": tokens(1, 10, seed=100 + i)[0]} for i in range(24)]
    return writer(dropout_rate=0.0), batches


def _beit_and_images() -> tuple[nn.Module, list[dict[str, Any]]]:
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.BeitConfig(**SMALL_BEIT, use_relative_position_bias=True, num_labels=2)
    batches = [{"pixel_values": picture, "labels": index % 2} for index, picture in enumerate(images(16, 32))]
    return transformers.BeitForImageClassification(config), batches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", [_t5_and_texts, _beit_and_images], ids=["t5", "beit"])
def test_a_trainer_run_has_the_published_losses(make: Any, tmp_path: Path) -> None:
    transformers = imported("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        learning_rate=1e-2, save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
    )  # fmt: skip
    losses = []
    for retrofit in (False, True):
        model, batches = make()
        if retrofit:
            relpos.retrofit(model, border=0, verify=False)
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
    assert len(losses[0]) == 6
    assert abs(losses[0][0] - losses[0][-1]) > 1e-3, "it learns"
    assert max(abs(x - y) for x, y in zip(*losses, strict=True)) < 2e-4


def test_training_drops_weights_with_the_probability_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def attend(*tensors: Any, dropout: float, **more: Any) -> Any:
        seen.append(dropout)
        return relpos.attention(*tensors, dropout=dropout, **more)

    monkeypatch.setattr(retrofitted, "attention", attend)
    model = writer(dropout_rate=0.25)
    relpos.retrofit(model, border=0, verify=False)
    for training in (False, True):
        model.train(training)
        model(input_ids=tokens(1, 60), decoder_input_ids=tokens(1, 5, seed=1))
        assert seen
        assert set(seen) == {0.25 * training}
        seen.clear()


@pytest.mark.parametrize("length", [200, 300, 520])
def test_reentrant_checkpointing_on_both_sides_of_the_border(length: int) -> None:
    transformers = imported("transformers")
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**T5, dropout_rate=0.0)).train()
    relpos.retrofit(model, verify=False)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(tokens(1, length))[0].sum().backward()


def test_a_decoder_of_one_token_keeps_the_gradient_of_its_bias() -> None:
    """It is 0, and not None, which DistributedDataParallel refuses: Chronos-Bolt decodes so."""
    model = writer()
    relpos.retrofit(model, border=0, verify=False)
    model(input_ids=tokens(2, 9), decoder_input_ids=tokens(2, 1)).logits.sum().backward()
    gradient = model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight.grad
    assert gradient is not None
    assert not gradient.any()
