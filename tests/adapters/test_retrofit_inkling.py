"""Inkling and Inkling 2, retrofitted: caches, padding at the left, packed rows, beams, which calls relpos computes."""

from typing import Any

import pytest
import torch
from models_text import inkling, inkling2

import relpos
from models import assert_writes_the_same, at_tokens, padding, pair_of, read_in_parts, tokens
from relpos.adapters.common.libraries import imported

FAST_SHARE = 2  # of its tests, in the fast part
FAST_CASES = 2  # of each of its tests, in the fast part

WINDOW = 7
BUILT = {"inkling": inkling, "inkling2": inkling2}


@pytest.fixture(params=BUILT)
def pair(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    return pair_of(request.param)


@pytest.mark.parametrize(("name", "implementation"), [("inkling", "sdpa"), ("inkling", "eager"), ("inkling2", "eager")])
@pytest.mark.parametrize("border", [0, 1000])
def test_padding_at_the_left(name: str, implementation: str, border: int, calls: list[tuple[int, int]]) -> None:
    """Below the border the published layers get the mask of their window."""
    inputs = {"input_ids": tokens(3, 21), "attention_mask": padding(3, 21, left=True)}
    torch.manual_seed(0)
    model = BUILT[name](attn_implementation=implementation).eval()
    published = at_tokens(model(**inputs)[0].detach(), inputs["attention_mask"])
    relpos.retrofit(model, border=border, verify=False)
    own = at_tokens(model(**inputs)[0].detach(), inputs["attention_mask"])
    assert calls == ([(21, 21)] * len(model.layers) if border == 0 else [])  # type: ignore[arg-type]
    assert torch.allclose(own, published, rtol=0, atol=(0 if border else 2e-5) * float(published.abs().max()))


PACKED = torch.tensor([[*range(5), *range(11), *range(3)], [*range(19)]])


@pytest.mark.parametrize(("name", "implementation"), [("inkling", "sdpa"), ("inkling", "eager"), ("inkling2", "eager")])
def test_documents_in_one_row(name: str, implementation: str, calls: list[tuple[int, int]]) -> None:
    """Which the library finds by their positions: outputs, and the gradients of all weights."""
    torch.manual_seed(0)
    model: Any = BUILT[name](attn_implementation=implementation).eval()
    results: list[dict[str, torch.Tensor]] = []
    for _ in range(2):
        model.zero_grad()
        out = model(input_ids=tokens(2, 19), position_ids=PACKED)[0]
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append({key: x.grad for key, x in model.named_parameters()} | {"output": out.detach()})
        if not calls:
            relpos.retrofit(model, border=0, verify=False)
    assert calls == [(19, 19)] * len(model.layers)
    for key, published in results[0].items():
        assert torch.allclose(results[1][key], published, rtol=0, atol=2e-5 * float(published.abs().max())), key


@pytest.mark.parametrize("of_windows", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_a_cache_goes_on_with_several_tokens_and_with_one(
    pair: tuple[Any, Any], padded: bool, of_windows: bool, calls: list[tuple[int, int]]
) -> None:
    """A cache of the configuration drops what a window hides; one that knows of no windows keeps all."""
    results = []
    for one in pair:
        cache = imported("transformers").DynamicCache(config=one.config)
        if not of_windows:
            kinds = imported("transformers.cache_utils")
            cache.layers[0] = kinds.LinearAttentionAndFullAttentionLayer(number_of_states=4)
        results.append(read_in_parts(one, cache, padded=padded))
    published, own = results
    full = len(pair[1].layers) - 1
    first = [(12, 12)] * (1 + full)
    assert calls == [*first, (6, 6 + WINDOW - 1 if of_windows else 18), *[(6, 18)] * full]
    assert torch.allclose(own, published, rtol=0, atol=2e-5 * float(published.abs().max()))


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_generation(name: str, how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    assert_writes_the_same(BUILT[name]("ForCausalLM", use_cache=True).eval(), eos_token_id=None, **how)


@torch.no_grad()
def test_a_static_cache_is_refused(pair: tuple[Any, Any]) -> None:
    """The library makes the mask of full layers by the sizes of sliding ones: published layers fail or ignore it."""
    cache = imported("transformers").StaticCache(config=pair[1].config, max_cache_len=20)
    with pytest.raises(ValueError, match=r"^expected a cache that grows.*; got StaticCache\. Generate with"):
        pair[1](input_ids=tokens(2, 12), past_key_values=cache, use_cache=True)


def test_a_bidirectional_one_and_a_mask_of_the_callers_run_as_published(
    pair: tuple[Any, Any], calls: list[tuple[int, int]]
) -> None:
    ids = tokens(2, 12)
    hidden = torch.zeros(2, 1, 12, 12).masked_fill(torch.ones(12, 12, dtype=torch.bool).triu(1), -1e30)
    masks = {"full_attention": hidden, "sliding_attention": hidden, "linear_attention": None}
    published, own = (one(input_ids=ids, attention_mask=masks)[0] for one in pair)
    assert torch.equal(own, published)
    for one in pair:
        one.config.is_causal = False
    published, own = (one(input_ids=ids, attention_mask=padding(2, 12))[0] for one in pair)
    assert torch.equal(own, published)
    assert not calls
