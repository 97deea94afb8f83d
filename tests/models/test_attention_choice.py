"""Kinds of attention and of norm in the models: what they compute, and that a causal model stays causal."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from relpos.core import Grid, Sequence
from relpos.layers import KeyValueCache, MultiHeadAttention
from relpos.layers.block import BlockConfig
from relpos.models import LanguageModel, VisionTransformer
from relpos.models.attention_choice import ATTENTIONS, AttentionChoice, pattern

SMALL: dict[str, Any] = {"embed_dim": 32, "depth": 2, "num_heads": 4, "vocab_size": 20, "context": 96}
VARIANTS: dict[str, dict[str, Any]] = {
    **{name: {"attention": name} for name in ATTENTIONS},
    "multi-query": {"num_kv_heads": 1},
    "grouped": {"num_kv_heads": 2},
    "layernorm": {"norm": "layernorm"},
    "groupnorm": {"norm": "groupnorm"},
    "qk-norm": {"qk_norm": "rmsnorm"},
}


def language(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(**{**SMALL, **options}).eval()


def images(**options: Any) -> VisionTransformer:
    torch.manual_seed(0)
    small = {"img_size": 16, "patch_size": 2, "in_chans": 1, "num_classes": 5, "embed_dim": 32, "depth": 1}
    own = {"num_heads": 4, "class_token": False, "global_pool": "max", "position": "rotary_2d"}
    return VisionTransformer(**{**small, **own, **options}).eval()


@pytest.mark.parametrize("name", VARIANTS)
def test_tokens_to_come_change_nothing_before_them(name: str) -> None:
    model, tokens = language(**VARIANTS[name]), torch.randint(20, (1, 96), generator=torch.Generator().manual_seed(1))
    before = model(tokens)
    for place in (1, 40, 95):
        changed = tokens.clone()
        changed[:, place:] = (changed[:, place:] + 1) % 20
        after = model(changed)
        assert torch.equal(after[:, :place], before[:, :place]) or (after - before)[:, :place].abs().max() < 1e-5
        assert (after - before)[:, place].abs().max() > 1e-3, "it sees itself"


@pytest.mark.parametrize("build", [language, images])
def test_flash_computes_what_full_attention_does(build: Any) -> None:
    full, flash = build(), build(attention="flash")
    flash.load_state_dict(full.state_dict())
    inputs = torch.randn(2, 1, 16, 16) if build is images else torch.randint(20, (2, 96))
    torch.testing.assert_close(flash(inputs), full(inputs), rtol=1e-4, atol=1e-4)


def allowed(name: AttentionChoice, tokens: Grid | Sequence) -> Tensor:
    mask = pattern(name, tokens)
    assert mask is not None
    return mask.dense(tokens.count, tokens.count).expand(1, 4, -1, -1)[0]


def test_local_attention_on_a_grid_reaches_the_rows_above_and_below() -> None:
    pairs = allowed("local", Grid(5, 6))
    for (row, column), (other, beside) in itertools.product(itertools.product(range(5), range(6)), repeat=2):
        near = abs(row - other) <= 1 and abs(column - beside) <= 1
        if near:
            assert pairs[:, row * 6 + column, other * 6 + beside].all()
    assert pairs.sum(dim=-1).max() == 15


def test_local_attention_in_a_sequence_sees_the_last_tokens() -> None:
    pairs = allowed("local", Sequence(80))
    rows, columns = torch.arange(80)[:, None], torch.arange(80)
    assert torch.equal(pairs[0], (columns <= rows) & (rows - columns < 32))


def test_a_longer_sequence_has_a_smaller_share_of_sparse_pairs() -> None:
    shares = [allowed("sparse", Sequence(n)).float().mean().item() for n in (128, 256, 512)]
    assert shares[0] > 1.5 * shares[1] > 2 * shares[2]
    shares = [allowed("sparse", Grid(n, n)).float().mean().item() for n in (8, 16, 32)]
    assert shares[0] > 1.5 * shares[1] > 2 * shares[2]


@pytest.mark.parametrize("name", ["linear", "flash"])
def test_decoding_with_a_cache_is_the_full_pass(name: AttentionChoice) -> None:
    model, tokens = language(attention=name), torch.randint(20, (1, 12))
    cache = KeyValueCache(2)
    one_by_one = torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(12)], dim=1)
    torch.testing.assert_close(one_by_one, model(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["local", "sparse"])
def test_patterns_say_that_they_have_no_cache(name: AttentionChoice) -> None:
    with pytest.raises(NotImplementedError, match=f"with a cache; got '{name}'"):
        language(attention=name).generate(torch.zeros(1, 3, dtype=torch.long), 2)


def test_a_pattern_of_a_grid_has_no_prefix() -> None:
    with pytest.raises(ValueError, match="got attention='local' and 1 of them"):
        images(attention="local", class_token=True)


def test_what_a_kind_lacks_is_named() -> None:
    tokens = torch.randn(1, 6, 32)
    linear = MultiHeadAttention(32, 4, kind="linear", attn_drop=0.5)
    with pytest.raises(NotImplementedError, match=r"no dropout of attention weights; got 0\.5"):
        linear(tokens)
    with pytest.raises(NotImplementedError, match="expected a causal mask or none; got another mask"):
        linear.eval()(tokens, mask=pattern("local", Sequence(6)))
    with pytest.raises(NotImplementedError, match="softmax attention to draw"):
        linear.weights(tokens)
    with pytest.raises(NotImplementedError, match="a rotation or both as position; got RowRule"):
        language(attention="flash", position="cope")(torch.zeros(1, 3, dtype=torch.long))


def test_every_argument_reaches_the_blocks() -> None:
    asked: dict[str, Any] = {
        "embed_dim": 24, "num_heads": 6, "num_kv_heads": 2, "mlp_ratio": 3.0, "norm": "groupnorm", "qkv_bias": False,
        "qk_norm": "layernorm", "proj_drop_rate": 0.1, "attn_drop_rate": 0.2, "backend": "reference",
        "attention": "flash",
    }  # fmt: skip
    config = BlockConfig(
        24, 6, 3.0, num_kv_heads=2, norm="groupnorm", qk_norm="layernorm", qkv_bias=False, proj_drop=0.1, attn_drop=0.2,
        backend="reference", kind="flash",
    )  # fmt: skip
    assert images(**asked).block_config == config
    assert language(**asked).block_config == replace(config, proj_bias=False, mlp="swiglu")
    for model in (images(**asked), language(**asked)):
        attn = model.blocks[0].attn
        assert isinstance(attn, MultiHeadAttention)
        assert (attn.num_heads, attn.num_kv_heads, attn.kind, attn.attn_drop) == (6, 2, "flash", 0.2)
        assert attn.backend == "reference"


@pytest.mark.parametrize("width", [16, 40, 48, 64])
def test_the_norm_by_the_name_of_groups_has_few_of_them(width: int) -> None:
    model = images(embed_dim=width, norm="groupnorm")
    norm = model.norm
    assert width % norm.num_groups == 0
    assert width // norm.num_groups >= min(width, 16)
