"""Norms by loops, and that they leak nothing to a causal model; normalised queries and keys; grouped heads."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos import GroupNorm, LanguageModel, Mask, MultiHeadAttention, MultiQueryAttention, RMSNorm, RotaryEmbedding
from relpos.layers import KeyValueCache


def test_rms_norm_is_its_formula() -> None:
    x, norm = torch.randn(2, 3, 5, dtype=torch.float64), RMSNorm(5, eps=0.1).double()
    nn.init.normal_(norm.weight)
    torch.testing.assert_close(norm(x), x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * norm.weight)
    assert RMSNorm(5).eps == 1e-6


@pytest.mark.parametrize("across", [False, True])
def test_group_norm_is_its_formula(across: bool) -> None:
    """By default the statistics are of a token alone, which leaks nothing to a causal model."""
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    more = {"across_tokens": True} if across else {}
    norm = GroupNorm(6, num_groups=2, eps=0.1, **more).double()
    for parameter in norm.parameters():
        nn.init.normal_(parameter)
    weight, bias = norm.norm.weight, norm.norm.bias
    wanted = torch.zeros_like(x)
    for b in range(2):
        for group in range(2):
            channels = range(3 * group, 3 * group + 3)
            for n in range(3):
                pool = [x[b, t, c].item() for t in (range(3) if across else [n]) for c in channels]
                mean = sum(pool) / len(pool)
                variance = sum((value - mean) ** 2 for value in pool) / len(pool)
                for c in channels:
                    wanted[b, n, c] = (x[b, n, c] - mean) / math.sqrt(variance + 0.1) * weight[c] + bias[c]
    torch.testing.assert_close(norm(x), wanted)


@pytest.mark.parametrize("norm", ["rmsnorm", "layernorm"])
def test_normalised_queries_and_keys_by_hand(norm: Any) -> None:
    layer: Any = MultiHeadAttention(12, 3, num_kv_heads=1, qk_norm=norm).double()
    for parameter in layer.qk_norm.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).unflatten(-1, (5, 4)).transpose(1, 2).split([3, 1, 1], dim=1)

    def normed(y: Tensor, side: Any) -> Tensor:
        if norm == "rmsnorm":
            return y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * side.weight
        return (y - y.mean(-1, keepdim=True)) / (y.var(-1, False, keepdim=True) + 1e-5).sqrt() * side.weight + side.bias

    scores = normed(q, layer.qk_norm.query) @ normed(k, layer.qk_norm.key).mT / 2
    torch.testing.assert_close(layer(x), layer.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)))


def test_normalised_keys_go_through_the_cache() -> None:
    """Token by token as all at once, with a rotation."""
    torch.manual_seed(0)
    model = LanguageModel(7, 6, 16, 2, 4, num_kv_heads=2, qk_norm="rmsnorm", position="rotary_1d").double().eval()
    tokens = torch.randint(7, (1, 6))
    cache = KeyValueCache(2)
    steps = torch.cat([model(tokens[:, n : n + 1], cache=cache) for n in range(6)], dim=1)
    torch.testing.assert_close(steps, model(tokens))
    assert cache.bytes == 6 * model.cache_bytes == 6 * 2 * (2 * 2 * 4 * 8), "layers, keys and values, heads, width"


def test_multi_query_attention_is_one_head_of_keys() -> None:
    layer = MultiQueryAttention(12, 3, position=RotaryEmbedding(4)).double()
    other = MultiHeadAttention(12, 3, num_kv_heads=1, position=RotaryEmbedding(4)).double()
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert torch.equal(layer(x, mask=Mask.causal()), other(x, mask=Mask.causal()))
    assert layer.qkv.out_features == 12 + 4 + 4
    assert layer.cache_bytes * 3 == MultiHeadAttention(12, 3).double().cache_bytes


@pytest.mark.parametrize("bias", [False, True])
def test_equal_heads_are_grouped_without_a_change(bias: bool) -> None:
    layer = MultiHeadAttention(12, 6, qkv_bias=bias, qk_norm="rmsnorm").double()
    with torch.no_grad():
        for x in (layer.qkv.weight, layer.qkv.bias):
            if x is not None:
                heads = x.view(18, 2, -1)
                heads[6:] = heads[6:].clone()[torch.arange(12) // 3 * 3]  # keys, then values, in equal threes
    grouped = layer.grouped(2)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    torch.testing.assert_close(grouped(x), layer(x))
    assert grouped.qkv.weight.shape == (12 + 4 + 4, 12)
    assert grouped.qkv.out_features == 20
    assert layer.num_kv_heads == 6, "the layer itself is left alone"
    assert layer.qkv.weight.shape == (36, 12)
    MultiHeadAttention(12, 6, num_kv_heads=2, qkv_bias=bias, qk_norm="rmsnorm").load_state_dict(grouped.state_dict())


def test_other_heads_become_their_mean() -> None:
    layer = MultiHeadAttention(8, 4, num_kv_heads=2, qkv_bias=False)
    k = layer.qkv.weight.view(8, 2, 8)[4:6]
    v = layer.qkv.weight.view(8, 2, 8)[6:]
    one = layer.grouped(1).qkv.weight.view(6, 2, 8)
    torch.testing.assert_close(one[4], (k[0] + k[1]) / 2)
    torch.testing.assert_close(one[5], (v[0] + v[1]) / 2)
    assert torch.equal(one[:4], layer.qkv.weight.view(8, 2, 8)[:4])
    with pytest.raises(ValueError, match="num_kv_heads to divide the layer's; got 3 and 2"):
        layer.grouped(3)
