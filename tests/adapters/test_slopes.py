"""Decoders with slopes, retrofitted: caches, padding at the left, half precision."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models_slopes import _bloom, _falcon, _mpt
from torch import nn

import relpos
from models import at_tokens, padding, tokens
from relpos.adapters import retrofitted
from relpos.adapters.libraries import imported

pytestmark = [pytest.mark.usefixtures("timm"), pytest.mark.filterwarnings("ignore::DeprecationWarning")]


@pytest.fixture(params=[_bloom, _mpt, _falcon], ids=["bloom", "mpt", "falcon"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model as published, and retrofitted."""
    return _pair(request.param)


def _pair(build: Any, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    torch.manual_seed(0)
    published: nn.Module = build().eval().to(dtype)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    return published, own


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What `relpos.attention` is called with from now on."""
    seen: list[dict[str, Any]] = []
    right = retrofitted.attention

    def noted(q: Any, k: Any, v: Any, **call: Any) -> Any:
        seen.append(call | {"queries": q.shape[2], "keys": k.shape[2]})
        return right(q, k, v, **call)

    monkeypatch.setattr(retrofitted, "attention", noted)
    return seen


def test_padding_at_the_left(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _calls(monkeypatch)
    inputs = {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=True)}
    published, own = (at_tokens(one(**inputs)[0], inputs["attention_mask"]) for one in pair)
    assert len(seen) == 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.detach().abs().max()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_goes_on_with_several_tokens_and_with_one(
    pair: tuple[Any, Any], padded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = _calls(monkeypatch)
    ids, mask = tokens(3, 21), padding(3, 21, left=True)
    results = []
    for one in pair:
        cache = imported("transformers").DynamicCache(config=one.config)
        parts = []
        for start, stop in ((0, 12), (12, 18), (18, 19), (19, 20)):
            more = {"attention_mask": mask[:, :stop]} if padded else {}
            parts.append(one(input_ids=ids[:, start:stop], past_key_values=cache, use_cache=True, **more)[0])
        results.append(torch.cat(parts, 1)[:, 6:])
    published, own = results
    assert [(call["queries"], call["keys"]) for call in seen] == [(12, 12)] * 2 + [(6, 18)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.detach().abs().max()))


@pytest.mark.parametrize("kind", ["Bloom", "Mpt", "Falcon"])
def test_generation(kind: str) -> None:
    transformers = imported("transformers")
    build = {"Bloom": _bloom, "Mpt": _mpt, "Falcon": _falcon}[kind]
    torch.manual_seed(0)
    base = build()
    published = getattr(transformers, f"{kind}ForCausalLM")(base.config).eval()
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0)
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, left=True)}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    assert torch.equal(own.generate(**inputs, **how), published.generate(**inputs, **how))


@pytest.mark.parametrize("build", [_bloom, _mpt, _falcon])
def test_half_precision_is_no_further_off_than_published(build: Any) -> None:
    inputs = {"input_ids": tokens(2, 40), "attention_mask": padding(2, 40)}
    published, own = _pair(build, torch.bfloat16)
    exact = copy.deepcopy(published).float()
    with torch.no_grad():
        wanted, theirs, ours = (at_tokens(x(**inputs)[0], inputs["attention_mask"]) for x in (exact, published, own))
    assert float((ours - wanted).abs().max()) <= 2 * float((theirs - wanted).abs().max())


def test_no_mask_of_all_pairs_is_made(pair: tuple[Any, Any]) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Sizes(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() >= 2 and out.shape[-1] == out.shape[-2] == 600:
                Sizes.largest = max(Sizes.largest, out.untyped_storage().nbytes())
            return out

    inputs = {"input_ids": tokens(2, 600), "attention_mask": padding(2, 600)}
    pair[1].config.max_seq_len = 600
    with torch.no_grad(), Sizes():
        pair[1](**inputs)
    assert Sizes.largest == 0


def test_a_dense_mask_of_the_callers_runs_as_published(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if hasattr(pair[0], "word_embeddings"):
        pytest.skip("the published model takes none")
    seen = _calls(monkeypatch)
    mask = torch.zeros(2, 1, 1, 12).expand(-1, -1, 12, -1).clone()
    mask[:, :, :, -3:] = torch.finfo(torch.float32).min
    for one in (mask, mask[:, :, :1]):
        published, own = (model(input_ids=tokens(2, 12), attention_mask=one)[0] for model in pair)
        assert torch.equal(own, published)
    assert not seen


def test_bidirectional_attention_runs_as_published(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"input_ids": tokens(2, 12), "attention_mask": padding(2, 12)}
    for one in pair:
        one.config.is_causal = False
    if not hasattr(pair[0], "build_alibi_tensor") and not hasattr(pair[0], "build_mpt_alibi_tensor"):
        pytest.skip("the function of a switched configuration sees no such setting")
    published, own = (model(**inputs)[0] for model in pair)
    assert torch.equal(own, published)


def test_falcon_without_slopes_is_left() -> None:
    with pytest.raises(ValueError, match="alibi=False: it rotates"):
        relpos.retrofit(_falcon(alibi=False))


@pytest.mark.parametrize("architecture", ["Bloom", "Mpt"])
def test_a_cache_of_fixed_size_runs_as_published(architecture: str) -> None:
    transformers = imported("transformers")
    sizes = {"Bloom": ("hidden_size", "n_head", "n_layer"), "Mpt": ("d_model", "n_heads", "n_layers")}[architecture]
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=99, **dict(zip(sizes, (32, 4, 2), strict=True)), pad_token_id=0
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "cache_implementation": "static"}
    published = model.generate(input_ids=tokens(2, 7), **how)
    relpos.retrofit(model, border=0, verify=False)
    assert torch.equal(model.generate(input_ids=tokens(2, 7), **how), published)
