"""DeepSeek V4, retrofitted: sliding layers beside compressed ones, caches, generation; which calls relpos computes."""

import copy
from typing import Any

import pytest
import torch
from models_text import deepseek
from torch import nn

import relpos
from models import assert_same, assert_writes_the_same, at_tokens, padding, read_in_parts, tokens

WINDOW = 7
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"
MIXED = ("sliding_attention", CSA, "sliding_attention", HCA)


@pytest.fixture
def pair() -> tuple[Any, Any]:
    """A model as published, and retrofitted."""
    published = mixed()
    own = copy.deepcopy(published)
    report = relpos.retrofit(own, border=0, verify=False)
    assert [one.module for one in report.replaced] == ["layers.0.self_attn", "layers.2.self_attn"]
    compressed = [f"layers.{index}.self_attn{part}" for index in (1, 3) for part in ("", ".compressor")]
    assert [one.module for one in report.left] == compressed
    return published, own


def mixed(**more: Any) -> Any:
    """All kinds of layers, with weights that say something."""
    torch.manual_seed(0)
    model = deepseek(*MIXED, **more).eval()
    for x in model.parameters():
        nn.init.normal_(x, std=0.3)
    return model


def test_sliding_layers_beside_compressed_ones(pair: tuple[Any, Any], calls: list[tuple[int, int]]) -> None:
    """In float64, with padding at the left and gradients. Norms of theirs are computed in float32."""
    ids, mask, steps = tokens(3, 21), padding(3, 21, left=True), []
    for one in pair:
        out = at_tokens(one.double()(input_ids=ids, attention_mask=mask)[0], mask)
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=torch.float64).view_as(out))
        steps.append(((out.detach(),), {name: x.grad for name, x in one.named_parameters()}))
    assert calls == [(21, 21)] * 2
    assert_same(steps[1], steps[0], 1e-6)


def test_a_cache_goes_on_with_several_tokens_and_with_one(pair: tuple[Any, Any], calls: list[tuple[int, int]]) -> None:
    """Keys, which are the values too, come rotated from the cache."""
    published, own = map(read_in_parts, pair)
    assert calls == [(12, 12)] * 2 + [(6, 6 + WINDOW - 1)] * 2
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.abs().max()))


def test_generation(calls: list[tuple[int, int]]) -> None:
    """The model gets a mask that was made before it ran."""
    assert_writes_the_same(mixed(part="ForCausalLM", use_cache=True), eos_token_id=None, verify=False)
    assert calls == [(9, 9)] * 2


@pytest.mark.parametrize("how", ["documents in position_ids", "a mask of the caller's", "a bidirectional model"])
def test_other_masks_run_as_published(pair: tuple[Any, Any], how: str, calls: list[tuple[int, int]]) -> None:
    more: dict[str, Any] = {"input_ids": tokens(2, 12)}
    if how == "documents in position_ids":
        more["position_ids"] = torch.cat([torch.arange(5), torch.arange(7)])[None].expand(2, -1)
    elif how == "a mask of the caller's":
        more["attention_mask"] = torch.zeros(2, 1, 12, 12).masked_fill(torch.ones(12, 12).triu(2).bool(), -1e30)
    else:
        for one in pair:
            one.config.is_causal = False
    published, own = (one(**more)[0] for one in pair)
    assert torch.equal(own, published)
    assert not calls


def test_a_model_of_compressed_layers_alone_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Attention: a compressed layer.*, chosen by content; DeepseekV4HCA"):
        relpos.retrofit(deepseek(CSA, HCA))
