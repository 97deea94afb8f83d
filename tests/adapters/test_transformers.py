"""Retrofitted models of transformers in use: generation, caches, half precision, compilers, adapters, Trainer."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from models_t5 import SMALL
from torch import nn

import relpos
from loaded import Loaded
from models import models, padding, tokens
from relpos.adapters import retrofitted as swapping
from relpos.adapters.libraries import imported
from relpos.adapters.retrofitted import is_swapped

pytestmark = pytest.mark.usefixtures("timm")


def _translator(**more: Any) -> Any:
    transformers = imported("transformers")
    torch.manual_seed(0)
    config = transformers.T5Config(**SMALL, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1, **more)
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(
    "how",
    [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 5}, {"use_cache": False}, {"prompt_lookup_num_tokens": 3}],
    ids=["greedy", "beams", "sampling", "no cache", "prompt lookup"],
)
@pytest.mark.parametrize("border", [0, None])
def test_generation(how: dict[str, Any], border: int | None) -> None:
    model = _translator()
    rows = 1 if "prompt_lookup_num_tokens" in how else 2
    inputs = {"input_ids": tokens(rows, 17), "attention_mask": padding(rows, 17), "min_new_tokens": 12}
    torch.manual_seed(1)
    published = model.generate(**inputs, **how, max_new_tokens=12)
    relpos.retrofit(model, border=border, verify=False)
    torch.manual_seed(1)
    assert torch.equal(model.generate(**inputs, **how, max_new_tokens=12), published)


@torch.no_grad()
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("border", [0, None])
def test_a_decoder_goes_on_from_a_cache_with_several_tokens(border: int | None, implementation: str) -> None:
    model = _translator(attn_implementation=implementation).double()
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
    model = _translator()
    relpos.retrofit(model, border=0, verify=False)
    ids, words, mask = tokens(2, 15), tokens(2, 5, seed=1), padding(2, 15)
    before = model(input_ids=ids, attention_mask=mask, decoder_input_ids=words).logits
    other = torch.where(mask.bool(), ids, tokens(2, 15, seed=2))
    assert torch.equal(model(input_ids=other, attention_mask=mask, decoder_input_ids=words).logits, before)
    whole = model(input_ids=other, decoder_input_ids=words).logits
    assert float((whole - before)[1].abs().max()) > 1e-3


@torch.no_grad()
def test_a_dense_mask_of_the_callers_is_served_with_a_warning() -> None:
    model = _translator()
    ids = tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(9, dtype=torch.bool)
    encode = lambda: model.encoder(ids, attention_mask=mask).last_hidden_state  # noqa: E731
    published = encode()
    relpos.retrofit(model, border=0, verify=False)
    with pytest.warns(RuntimeWarning, match=r"mask of shape \(2, 1, 9, 9\)"):
        own = encode()
    assert float((own - published).abs().max()) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@torch.no_grad()
def test_half_precision_is_no_further_off_than_published(dtype: torch.dtype) -> None:
    model = models()["t5"]
    exact = model.called(model.made())
    module = model.made(torch.float32).to(dtype)
    published = model.called(module)
    relpos.retrofit(module, border=0, verify=False)
    own = model.called(module)
    for x, y, wanted in zip(own, published, exact, strict=True):
        assert x.dtype == y.dtype
        assert float((x.double() - wanted).norm()) <= 1.2 * float((y.double() - wanted).norm())


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
    transformers = imported("transformers")
    model = _translator()
    model.save_pretrained(tmp_path / "published")
    report = relpos.retrofit(model, border=0)
    assert "T5ForConditionalGeneration (transformers" in str(report)
    model.save_pretrained(tmp_path / "own")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "published" / name).read_bytes()
    for implementation in ("eager", "sdpa"):
        other = transformers.T5ForConditionalGeneration.from_pretrained(
            tmp_path / "own", attn_implementation=implementation
        )
        assert not any(map(is_swapped, other.modules()))
        relpos.retrofit(other, border=0, verify=False)
        ids, words = tokens(2, 9), tokens(2, 5, seed=1)
        own, theirs = (one(input_ids=ids, decoder_input_ids=words).logits for one in (other, model))
        assert float((own - theirs).abs().max()) < 1e-5


def test_hooks_gradients_and_buffers_stay() -> None:
    model = _translator()
    calls = []
    layer = model.encoder.block[0].layer[0].SelfAttention
    layer.register_forward_hook(lambda module, args, output: calls.append(output[0]))
    layer.q.weight.grad = torch.ones_like(layer.q.weight)
    relpos.retrofit(model, border=0)
    assert not calls, "a verification runs copies without hooks"
    model(input_ids=tokens(1, 5), decoder_input_ids=tokens(1, 3))
    assert len(calls) == 1
    assert torch.equal(layer.q.weight.grad, torch.ones_like(layer.q.weight))


def test_low_rank_adapters_on_q_k_and_v() -> None:
    """What PEFT does: a linear layer is replaced by one with the same name."""

    class LowRankLinear(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base
            self.down = nn.Linear(base.in_features, 2, bias=False)
            self.up = nn.Linear(2, base.out_features, bias=False)
            self.weight = base.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.base(x) + self.up(self.down(x))
            return y

    model = _translator().double()
    for module in model.modules():
        if type(module).__name__ == "T5Attention":
            for name in "qkv":
                setattr(module, name, LowRankLinear(getattr(module, name)).double())
    inputs = {"input_ids": tokens(2, 9), "decoder_input_ids": tokens(2, 5, seed=1)}
    published = model(**inputs).logits
    relpos.retrofit(model, border=0, verify=False)
    own = model(**inputs).logits
    assert float((own - published).detach().abs().max()) <= 1e-6 * float(published.detach().abs().max())
    own.sum().backward()
    assert model.encoder.block[1].layer[0].SelfAttention.q.up.weight.grad is not None


COMPILED = """
import torch, relpos, sys
sys.path[:0] = {path!r}
from models import models
from relpos.adapters.retrofitted import is_swapped, route
for name in {names!r}:
    torch._dynamo.reset()
    model = models()[name]
    module = model.made(torch.float32)
    relpos.retrofit(module, border=0, verify=False)
    eager = model.called(module)
    routes = [route(one) for one in module.modules() if is_swapped(one)]
    for one in routes:
        one.forced = True
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    own = model.called(compiled)
    # compiled by torch 2.10 and 2.11, transformers adds a mask to BEiT's bias, which is dense then
    assert name == "beit" or sum(one.taken for one in routes) > 1, "relpos computes what is compiled"
    for x, y in zip(own, eager):
        assert float((x - y).detach().abs().max()) <= 1e-4 * float(y.detach().abs().max()), name
    sum(x.float().sum() for x in own).backward()
    print("compiled", name)
"""


@pytest.mark.traced
@pytest.mark.slow
def test_models_compile_as_one_graph(loaded: Loaded) -> None:
    names = ["t5 encoder, eager", "beit"]
    code = COMPILED.format(path=[str(Path(__file__).parent)], names=names)
    done = loaded.run("-c", code, needs=["compiler", "models"])
    assert done.stdout.splitlines()[-2:] == [f"compiled {name}" for name in names], done.stderr[-2000:]


def _losses(model: nn.Module, batches: list[dict[str, torch.Tensor]], folder: Path) -> list[float]:
    transformers = imported("transformers")
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=6, per_device_train_batch_size=4, logging_steps=1, report_to=[],
        learning_rate=1e-2, save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=batches)
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_trainer_run_has_the_published_losses(tmp_path: Path) -> None:
    batches = [{"input_ids": tokens(1, 24, seed=i)[0], "labels": tokens(1, 10, seed=100 + i)[0]} for i in range(24)]
    losses = []
    for retrofitted in (False, True):
        model = _translator(dropout_rate=0.0)
        if retrofitted:
            relpos.retrofit(model, border=0, verify=False)
        losses.append(_losses(model, batches, tmp_path / str(retrofitted)))
    assert len(losses[0]) == 6
    assert losses[0][0] - losses[0][-1] > 0.01, "it learns"
    assert max(abs(x - y) for x, y in zip(*losses, strict=True)) < 2e-4


def test_training_drops_weights_with_the_probability_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []

    def attend(*tensors: Any, dropout: float, **more: Any) -> Any:
        seen.append(dropout)
        return relpos.attention(*tensors, dropout=dropout, **more)

    monkeypatch.setattr(swapping, "attention", attend)
    model = _translator(dropout_rate=0.25)
    relpos.retrofit(model, border=0, verify=False)
    for training in (False, True):
        model.train(training)
        model(input_ids=tokens(1, 60), decoder_input_ids=tokens(1, 5, seed=1))
        assert seen
        assert set(seen) == {0.25 * training}
        seen.clear()


UNPICKLED = """
import pickle, sys
from relpos.adapters.libraries import imported
imported("transformers")
import torch
model = pickle.load(open({file!r}, "rb"))
print(float(model(torch.arange(3, 12)[None])[0].abs().sum()))
"""


@pytest.mark.slow
def test_a_pickled_model_runs_in_a_process_that_has_not_heard_of_it(tmp_path: Path, loaded: Loaded) -> None:
    model = models()["t5 encoder, eager"].made()
    relpos.retrofit(model, border=0, verify=False)
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps(model))
    done = loaded.run("-c", UNPICKLED.format(file=str(file)), needs=["models"])
    with torch.no_grad():
        wanted = float(model(torch.arange(3, 12)[None])[0].abs().sum())
    assert float(done.stdout) == pytest.approx(wanted), done.stderr[-2000:]


@pytest.mark.parametrize("tokens_", [200, 300, 520])
def test_reentrant_checkpointing_on_both_sides_of_the_border(tokens_: int) -> None:
    transformers = imported("transformers")
    torch.manual_seed(0)
    model = transformers.T5EncoderModel(transformers.T5Config(**SMALL, dropout_rate=0.0)).train()
    relpos.retrofit(model, verify=False)
    model.activation_checkpointing_enable({"use_reentrant": True})
    model.enable_input_require_grads()
    model(tokens(1, tokens_))[0].sum().backward()


def test_an_implementation_that_is_set_later() -> None:
    model = _translator()
    relpos.retrofit(model, border=0, verify=False)
    inputs = {"input_ids": tokens(1, 9), "decoder_input_ids": tokens(1, 5, seed=1)}
    with torch.no_grad():
        own = model(**inputs).logits
        model.set_attn_implementation("eager")
        assert float((model(**inputs).logits - own).abs().max()) < 1e-5
