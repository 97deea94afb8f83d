"""Decoders with slopes, retrofitted: caches, padding at the left, masks of callers."""

import copy
from typing import Any

import pytest
import torch
from models_text import falcon, writer

import relpos
from models import at_tokens, models, padding, tokens
from relpos.adapters.common.libraries import imported

FAST_CASES = 1  # of each of its tests, in the fast part


@pytest.fixture(params=["bloom", "mpt", "falcon"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """A model as published, and retrofitted."""
    published = models()[request.param].made(torch.float32)
    own = copy.deepcopy(published)
    relpos.retrofit(own, border=0, verify=False)
    return published, own


def test_padding_at_the_left(pair: tuple[Any, Any], calls: list[tuple[int, int]]) -> None:
    inputs = {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=True)}
    published, own = (at_tokens(one(**inputs)[0], inputs["attention_mask"]) for one in pair)
    assert calls == [(21, 21)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.detach().abs().max()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_goes_on_with_several_tokens_and_with_one(
    pair: tuple[Any, Any], padded: bool, calls: list[tuple[int, int]]
) -> None:
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
    assert calls == [(12, 12)] * 2 + [(6, 18)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.detach().abs().max()))


@pytest.mark.parametrize("kind", ["Bloom", "Mpt", "Falcon"])
def test_generation(kind: str) -> None:
    model = writer(kind)
    inputs = {"input_ids": tokens(2, 9), "attention_mask": padding(2, 9, left=True)}
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "use_cache": True}
    published = model.generate(**inputs, **how)
    relpos.retrofit(model, border=0)
    assert torch.equal(model.generate(**inputs, **how), published)


@pytest.mark.parametrize("pair", ["mpt"], indirect=True)  # the others take none
def test_a_dense_mask_of_the_callers_runs_as_published(pair: tuple[Any, Any], calls: list[tuple[int, int]]) -> None:
    mask = torch.zeros(2, 1, 1, 12).expand(-1, -1, 12, -1).clone()
    mask[:, :, :, -3:] = torch.finfo(torch.float32).min
    for one in (mask, mask[:, :, :1]):
        published, own = (model(input_ids=tokens(2, 12), attention_mask=one)[0] for model in pair)
        assert torch.equal(own, published)
    assert not calls


@pytest.mark.parametrize("pair", ["bloom", "mpt"], indirect=True)  # that of a switched configuration sees no setting
def test_bidirectional_attention_runs_as_published(pair: tuple[Any, Any]) -> None:
    inputs = {"input_ids": tokens(2, 12), "attention_mask": padding(2, 12)}
    for one in pair:
        one.config.is_causal = False
    published, own = (model(**inputs)[0] for model in pair)
    assert torch.equal(own, published)


def test_falcon_without_slopes_is_left() -> None:
    with pytest.raises(ValueError, match="alibi=False: it uses a rotation"):
        relpos.retrofit(falcon(alibi=False))
