"""Calls of a retrofitted model that run as published, whatever their size: for attention weights, static caches and
masks of the caller's; and what is set on the model later."""

import copy
import gc
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_text import bloom, writer
from replaced_models import gpt2
from torch import Tensor

import relpos
from models import models, padding, tokens
from relpos.adapters.common import retrofitted
from relpos.adapters.common.retrofitted import is_swapped, published_class

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 2  # of each of its tests, in the fast part
pytestmark = pytest.mark.filterwarnings("ignore:a mask of shape:RuntimeWarning")


def _pair(name: str, implementation: str) -> tuple[Any, Any, dict[str, Any]]:
    """A model as published, the same retrofitted, and what they are called with."""
    published: Any = models()[name].made(torch.float32)
    logging.disable()  # some models have one implementation, and say so
    if hasattr(published, "set_attn_implementation"):
        published.set_attn_implementation(implementation)
    logging.disable(logging.NOTSET)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    inputs = models()[name].inputs()
    return published, own, {"pixel_values": inputs} if isinstance(inputs, Tensor) else inputs


def _tensors(outputs: Any, name: str = "") -> dict[str, Tensor]:
    """All tensors that a model returns, by name."""
    if isinstance(outputs, Tensor):
        return {name: outputs}
    if not isinstance(outputs, dict | tuple | list):
        return {}
    parts = outputs.items() if isinstance(outputs, dict) else enumerate(outputs)
    return {key: x for part, value in parts for key, x in _tensors(value, f"{name}.{part}").items()}


def _require_equal(got: Any, wanted: Any, weights: bool = True) -> None:
    """Every bit of all that is returned; attention weights are among it."""
    ours, theirs = _tensors(got), _tensors(wanted)
    assert any("attentions" in key for key in theirs) == weights
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], x) for key, x in theirs.items())


@torch.no_grad()
@pytest.mark.parametrize("name", [
    "t5", "umt5", "switch_transformers", "pix2struct", "mpnet", "udop", "layoutlmv3", "deberta", "deberta_v2", "sew_d",
    "sam", "vitdet", "seggpt", "bloom", "mpt", "falcon", "wav2vec2_conformer", "seamless_m4t_v2", "wav2vec2_bert",
    "wavlm", "speecht5", "vits", "granite_speech", "swin", "swinv2", "beit, both tables, eager, another resolution",
    "data2vec-vision, both tables, eager",
])  # fmt: skip
def test_attention_weights_are_the_published_ones(name: str) -> None:
    published, own, inputs = _pair(name, "eager")
    got, wanted = (model(**inputs, output_attentions=True) for model in (own, published))
    _require_equal(got, wanted, weights=name != "sam")  # which has none but by its own class


MASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "two documents": lambda seen: seen,
    "two documents, numbers": lambda seen: torch.where(seen, 0.0, torch.finfo(torch.float32).min),
    "two documents, integers": lambda seen: seen.long(),
    "keys": lambda seen: seen[:, :, -1:],
    "keys, numbers": lambda seen: torch.where(seen[:, :, -1:], 0.0, -3.0),
    "keys, integers": lambda seen: seen[:, :, -1:].long(),
    "queries": lambda seen: seen[..., :1],
    "too few tokens": lambda seen: torch.ones_like(seen[:, 0, 0, :-2]),
    "too few tokens, padded": lambda seen: seen[:, 0, -1].flip(1)[:, :-2],
    "too many tokens": lambda seen: torch.ones_like(torch.cat((seen, seen), 3)[:, 0, 0]),
}
"""Masks from the pairs `[B, 1, N, N]` that see one another in two documents, none the future: of four dimensions, or
of other than N tokens."""


@torch.no_grad()
@pytest.mark.parametrize(("name", "implementation", "argument", "count"), [
    ("t5", "sdpa", "attention_mask", 21),
    ("t5", "sdpa", "decoder_attention_mask", 13),
    ("t5 encoder, eager", "eager", "attention_mask", 21),
    ("umt5", "eager", "decoder_attention_mask", 13),
    ("switch_transformers", "eager", "decoder_attention_mask", 13),
    ("longt5", "eager", "decoder_attention_mask", 13),
    ("pix2struct", "sdpa", "attention_mask", 21),
    ("mpnet", "sdpa", "attention_mask", 21),
    ("udop encoder, eager, a prefix, few buckets", "eager", "attention_mask", 21),
    ("layoutlmv3", "eager", "attention_mask", 21),
    ("deberta", "eager", "attention_mask", 21),
    ("deberta_v2, clipped", "eager", "attention_mask", 21),
    ("bloom", "eager", "attention_mask", 21),
    ("mpt", "eager", "attention_mask", 21),
    ("falcon", "sdpa", "attention_mask", 21),
    ("seamless_m4t_v2", "sdpa", "attention_mask", 24),
    ("vits", "eager", "attention_mask", 21),
    ("granite_speech5", "sdpa", "attention_mask", 21),
    ("beit", "sdpa", "attention_mask", 17),
])  # fmt: skip
def test_a_mask_of_the_callers_is_what_the_published_model_makes_of_it(
    name: str, implementation: str, argument: str, count: int
) -> None:
    """The same numbers, or the same kind of error; for a mask of too few tokens it may be ours, which says so."""
    published, own, inputs = _pair(name, implementation)
    batch = next(iter(inputs.values())).shape[0]
    second = torch.arange(count) >= count // 2
    seen = (second[:, None] == second).tril().expand(batch, 1, -1, -1)
    for kind, change in MASKS.items():
        call = inputs | {argument: change(seen)}
        try:
            wanted = published(**call)[0]
        except Exception as error:
            with pytest.raises((type(error), ValueError) if kind.startswith("too few") else type(error)):
                own(**call)
            continue
        torch.testing.assert_close(
            own(**call)[0], wanted, rtol=0, atol=2e-5, equal_nan=True, msg=lambda line, kind=kind: f"{kind}: {line}"
        )


@torch.no_grad()
def test_a_dense_mask_of_the_callers_is_served_with_a_warning() -> None:
    model, ids = writer(), tokens(2, 9)
    mask = torch.rand(2, 1, 9, 9, generator=torch.Generator().manual_seed(0)) > 0.3
    mask |= torch.eye(9, dtype=torch.bool)
    published = model.encoder(ids, attention_mask=mask).last_hidden_state
    relpos.retrofit(model, border=0, verify=False)
    with pytest.warns(RuntimeWarning, match=r"mask of shape \(2, 1, 9, 9\)"):
        own = model.encoder(ids, attention_mask=mask).last_hidden_state
    assert float((own - published).abs().max()) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ["bloom", "mpt", "falcon"])
@pytest.mark.parametrize("queries", [1, 3])
def test_a_mask_of_the_callers_beside_a_cache(name: str, queries: int) -> None:
    """A single query has a mask that looks like one of keys."""
    published, own, _ = _pair(name, "sdpa")
    ids = tokens(2, 6 + queries)
    seen = torch.ones(2, 1, queries, 6 + queries, dtype=torch.bool).tril(5)
    seen[:, :, :, 1:3] = False
    results: list[Any] = []
    for model in (published, own):
        cache = model(input_ids=ids[:, :6], use_cache=True).past_key_values
        try:
            results.append(model(input_ids=ids[:, 6:], attention_mask=seen, past_key_values=cache)[0])
        except ValueError as error:
            results.append(str(error))
    if isinstance(results[0], str):
        assert results[0] == results[1]
    else:
        torch.testing.assert_close(results[1], results[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("kind", "border"), [("T5", 0), ("T5", None), ("UMT5", 0), ("UMT5", None), ("Bloom", 0), ("Mpt", 0)]
)
def test_a_static_cache(kind: str, border: int | None) -> None:
    model = writer(kind)
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    inputs = {"input_ids": tokens(2, 9)} | ({"attention_mask": padding(2, 9)} if "T5" in kind else {})
    published = model.generate(**inputs, **how)
    relpos.retrofit(model, border=border, verify=False)
    assert torch.equal(model.generate(**inputs, **how), published)


@pytest.mark.parametrize("how", [{"num_beams": 2}, {}, {"assistant_model": True}], ids=["beams", "greedy", "assisted"])
def test_generation_that_returns_weights(how: dict[str, Any]) -> None:
    model = writer(attn_implementation="eager")
    if "assistant_model" in how:
        how = {"assistant_model": writer(attn_implementation="eager")}
    call = {"input_ids": tokens(1, 9), "max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    call |= {"return_dict_in_generate": True, "output_attentions": True, "output_scores": True, **how}
    wanted = model.generate(**call)
    relpos.retrofit(model, border=0, verify=False)
    _require_equal(model.generate(**call), wanted)


@torch.no_grad()
@pytest.mark.parametrize("build", [lambda: writer(attn_implementation="eager"), bloom], ids=["t5", "bloom"])
def test_a_configuration_that_asks_for_weights_in_every_call(build: Callable[[], Any], tmp_path: Any) -> None:
    torch.manual_seed(0)
    model = build().eval()
    for one in model.modules():
        if hasattr(one, "config"):
            one.config.output_attentions = True
    call = {"input_ids": tokens(1, 9)} | ({"decoder_input_ids": tokens(1, 5)} if hasattr(model, "decoder") else {})
    wanted = model(**call)
    report = relpos.retrofit(model, border=0)
    assert report.verified
    assert "config.output_attentions=True: all calls run as published" in str(report)
    _require_equal(model(**call), wanted)
    model.save_pretrained(tmp_path)
    model.set_attn_implementation("eager") if hasattr(model, "decoder") else None
    model.save_pretrained(tmp_path)


@torch.no_grad()
def test_an_implementation_that_is_set_later_stands_behind_relpos(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    right = retrofitted.attention
    monkeypatch.setattr(retrofitted, "attention", lambda *x, **call: seen.append(1) or right(*x, **call))
    model = writer()
    relpos.retrofit(model, border=0, verify=False)
    model = copy.deepcopy(model)
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9), "decoder_input_ids": tokens(2, 5, seed=1)}
    wanted = model(**inputs).logits
    calls = len(seen)
    for name in ("eager", "sdpa", {"": "eager"}):
        seen.clear()
        model.set_attn_implementation(name)
        torch.testing.assert_close(model(**inputs).logits, wanted, rtol=0, atol=1e-5)
        assert len(seen) == calls > 0, name
        if name == "eager":
            assert model(**inputs, output_attentions=True).encoder_attentions[0].shape == (2, 4, 9, 9)
    for name, line in (
        ("flex_attention", r"relpos has changed this model; got flex_attention\. Call relpos\.restore"),
        ("foo", "foo"),
    ):
        with pytest.raises(ValueError, match=line):
            model.set_attn_implementation(name)
        torch.testing.assert_close(model(**inputs).logits, wanted, rtol=0, atol=1e-5)
    relpos.restore(model)
    assert model.config._attn_implementation == "eager"
    assert "set_attn_implementation" not in vars(model)
    model.set_attn_implementation("flex_attention")
    assert model.config._attn_implementation == "flex_attention"


@torch.no_grad()
def test_an_implementation_that_is_set_later_does_not_take_a_replaced_position_away() -> None:
    model = gpt2()
    relpos.replace_position(model, "alibi")
    wanted = model(tokens(1, 9)).logits
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model(tokens(1, 9)).logits, wanted)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(ValueError, match=r"selects relpos's attention; got sdpa\. Call set_attn_impl"):
        model(tokens(1, 9))


@pytest.mark.parametrize("name", ["t5", "falcon", "beit", "speecht5", "parakeet", "layoutlmv3"])
def test_a_forward_says_what_the_published_one_takes(name: str) -> None:
    """`Trainer` and pipelines leave out what a forward does not name."""
    model = models()[name].made(torch.float32)
    relpos.retrofit(model, border=0, verify=False)
    for one in filter(is_swapped, model.modules()):
        own, published = (inspect.signature(kind.forward).parameters for kind in (type(one), published_class(one)))
        if any(x.kind is x.VAR_KEYWORD for x in published.values()):
            assert list(own) == list(published)


def test_umt5_layers_say_whether_they_have_a_table() -> None:
    """The library initialises tables where they do."""
    model = writer("UMT5")
    relpos.retrofit(model, border=0, verify=False)
    model(input_ids=tokens(1, 5), decoder_input_ids=tokens(1, 3))
    layers: list[Any] = [one for one in model.modules() if type(one).__name__ == "UMT5Attention"]
    said = [one.has_relative_attention_bias for one in layers]
    assert said == [hasattr(one, "relative_attention_bias") for one in layers]
    assert not all(said)
    for one in layers:
        model._init_weights(one)


@pytest.mark.parametrize("name", ["t5", "umt5", "falcon"])
def test_a_retrofitted_model_is_freed_with_its_last_name(name: str) -> None:
    """Without waiting for a collection of cycles, until which its memory would stay."""
    model = models()[name].made(torch.float32)
    relpos.retrofit(model, border=0, verify=False)
    twin = copy.deepcopy(model)
    twin.set_attn_implementation("eager")
    known = [weakref.ref(one) for one in (model, twin)]
    gc.collect()
    gc.disable()
    try:
        del model, twin
        assert [one() for one in known] == [None, None]
    finally:
        gc.enable()
