"""Decoders with slopes, retrofitted: caches, padding at the left, masks of callers."""

from typing import Any

import pytest
import torch
from models_text import falcon, writer

import relpos
from models import assert_writes_the_same, at_tokens, padding, pair_of, read_in_parts, tokens

FAST_CASES = 1  # of each of its tests, in the fast part


@pytest.fixture(params=["bloom", "mpt", "falcon"])
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair_of(request.param)


def test_padding_at_the_left(pair: tuple[Any, Any], calls: list[tuple[int, int]]) -> None:
    inputs = {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=True)}
    published, own = (at_tokens(one(**inputs)[0], inputs["attention_mask"]) for one in pair)
    assert calls == [(21, 21)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.detach().abs().max()))


@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_goes_on_with_several_tokens_and_with_one(
    pair: tuple[Any, Any], padded: bool, calls: list[tuple[int, int]]
) -> None:
    published, own = (read_in_parts(one, padded=padded) for one in pair)
    assert calls == [(12, 12)] * 2 + [(6, 18)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.abs().max()))


@pytest.mark.parametrize("kind", ["Bloom", "Mpt", "Falcon"])
def test_generation(kind: str) -> None:
    assert_writes_the_same(writer(kind), max_new_tokens=6, use_cache=True)


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
