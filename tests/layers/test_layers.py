"""Layers: attention modules, the block, the MLP and patches, against loops and against one another."""

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import relpos
from relpos import (
    ALiBi,
    DenseBias,
    GatedMlp,
    Grid,
    KeyValueCache,
    LineBias,
    Mask,
    Mlp,
    MultiHeadAttention,
    PatchEmbedding,
    RelativePositionBias,
    RotaryEmbedding,
    ScaledDotProductAttention,
    Sequence,
    TransformerBlock,
    lines,
)
from relpos.layers import LayerCache
from relpos.layers.block import BlockConfig
from relpos.layers.mlp import gated_width
from relpos.testing import oracle


def by_loops(layer: MultiHeadAttention, x: Tensor, bias: Tensor | None = None, allowed: Tensor | None = None) -> Tensor:
    """The layer's own weights, head by head."""
    heads, groups, width = layer.num_heads, layer.num_kv_heads, layer.head_dim
    projected = x @ layer.qkv.weight.T + (0 if layer.qkv.bias is None else layer.qkv.bias)
    columns = projected.split(width, dim=-1)  # H queries, G keys, G values, in this order
    q, k, v = columns[:heads], columns[heads : heads + groups], columns[heads + groups :]
    output, _ = oracle.attention(*(torch.stack(part, dim=1) for part in (q, k, v)), bias=bias, allowed=allowed)
    joined = torch.cat([output[:, h] for h in range(heads)], dim=-1)
    return joined @ layer.proj.weight.T + (0 if layer.proj.bias is None else layer.proj.bias)


@pytest.mark.parametrize("groups", [None, 4, 2, 1])
@pytest.mark.parametrize("biased", [True, False])
def test_multi_head_by_loops(groups: int | None, biased: bool) -> None:
    layer = MultiHeadAttention(12, 4, num_kv_heads=groups, qkv_bias=biased, proj_bias=biased).double()
    assert layer.qkv.weight.shape == (12 + 2 * 3 * (groups or 4), 12)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    dense = torch.randn(1, 4, 5, 5, dtype=torch.float64)
    torch.testing.assert_close(layer(x), by_loops(layer, x))
    masked = layer(x, position=DenseBias(dense), mask=Mask.causal())
    torch.testing.assert_close(masked, by_loops(layer, x, dense, torch.ones(1, 1, 5, 5).tril()))


def test_a_mechanism_of_its_own_and_terms_from_outside() -> None:
    own = RelativePositionBias(3, (2, 3), prefix=1, init_std=1.0)
    layer = MultiHeadAttention(12, 3, position=own).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    grid = Grid(2, 3, prefix=1)
    more = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(layer(x, coordinates=grid), by_loops(layer, x, own()[None]))
    both = layer(x, coordinates=grid, position=DenseBias(more))
    torch.testing.assert_close(both, by_loops(layer, x, own()[None] + more))
    line = MultiHeadAttention(12, 3, position=RelativePositionBias(3, seq_len=7))
    assert line(x.float()).shape == (2, 7, 12), "a plain sequence where coordinates are left out"


def test_weights_are_those_it_attends_with() -> None:
    layer = MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    weights = layer.weights(x, mask=Mask.causal())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert not weights.triu(1).any()
    values = layer._heads(x)[2]
    torch.testing.assert_close(layer.proj((weights @ values).transpose(1, 2).flatten(2)), layer(x, mask=Mask.causal()))


def random(module: Any) -> Any:
    """In float64, every parameter from a normal."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    return module.double()


def normed(norm: Any, x: Tensor) -> Tensor:
    if isinstance(norm, nn.LayerNorm):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight + norm.bias
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


@pytest.mark.parametrize(
    ("more", "bias"),
    [
        ({}, True),
        ({"norm": "rmsnorm", "qkv_bias": False, "proj_bias": False}, False),
        ({"norm": "rmsnorm", "mlp": "swiglu"}, True),
    ],
    ids=str,
)
def test_block_by_hand(more: dict[str, Any], bias: bool) -> None:
    """Norms before attention and MLP, of numbers so small that the epsilon shows."""
    own = RelativePositionBias(3, seq_len=5, init_std=1.0) if bias else None
    block = random(TransformerBlock(12, 3, mlp_ratio=2.0, position=own, **more))
    x = torch.randn(2, 5, 12, dtype=torch.float64) / 1000
    dense = block.attn.position()[None] if bias else None
    middle = x + by_loops(block.attn, normed(block.norm1, x), dense)
    torch.testing.assert_close(block(x), middle + block.mlp(normed(block.norm2, middle)))
    assert isinstance(block.mlp, GatedMlp if "mlp" in more else Mlp)
    assert block.mlp.fc2.in_features == (16 if "mlp" in more else 24)


def test_norms_after_attention_and_mlp_by_hand() -> None:
    block = random(TransformerBlock(12, 3, post_norm=True, layer_scale=0.5, mlp_hidden=7, norm_eps=0.1))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    assert block.mlp.fc1.out_features == 7
    assert block.norm1.eps == block.norm2.eps == 0.1
    y = x + block.ls1.gamma * normed(block.norm1, by_loops(block.attn, x))
    torch.testing.assert_close(block(x), y + block.ls2.gamma * normed(block.norm2, block.mlp(y)))


def test_mlp_by_hand() -> None:
    layer = random(Mlp(12, 24))
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    hidden = x @ layer.fc1.weight.T + layer.fc1.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    torch.testing.assert_close(layer(x), hidden @ layer.fc2.weight.T + layer.fc2.bias)


def test_cosines_of_queries_and_keys_by_hand() -> None:
    """Swin V2's attention, with grouped heads; its keys have no bias, and no scale passes 100."""
    layer: Any = random(MultiHeadAttention(12, 3, num_kv_heads=1, qk_norm="cosine"))
    assert layer.qkv.bias is None
    scales = torch.tensor([0.3, 2.0, 9.0], dtype=torch.float64)
    layer.qk_norm.logit_scale.data = scales.view(3, 1, 1)
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    q, k, v = (x @ layer.qkv.weight.T).split([12, 4, 4], dim=-1)
    q, v = q + layer.q_bias, v + layer.v_bias
    rows = []
    for own, factor in zip(q.split(4, dim=-1), (*scales[:2].exp(), 100.0), strict=True):
        cosine = (own @ k.mT) / (own.norm(dim=-1)[..., None] * k.norm(dim=-1)[:, None])
        rows.append((factor * cosine).softmax(-1))
    weights = torch.stack(rows, dim=1)
    torch.testing.assert_close(layer.weights(x), weights)
    torch.testing.assert_close(layer(x), layer.proj((weights @ v[:, None]).transpose(1, 2).flatten(2)))
    whole: Any = random(MultiHeadAttention(12, 3, qk_norm="cosine"))
    fewer: Any = whole.grouped(1)
    assert fewer(x).shape == x.shape
    torch.testing.assert_close(fewer.v_bias, whole.v_bias.view(3, 4).mean(0))


@pytest.mark.parametrize("groups", [3, 1])
def test_product_with_a_dense_bias_is_the_one_with_terms(groups: int) -> None:
    q = torch.randn(2, 3, 6, 4, dtype=torch.float64)
    k, v = torch.randn(2, 2, groups, 6, 4, dtype=torch.float64)
    bias = RelativePositionBias(3, seq_len=6, init_std=1.0).double()
    product = ScaledDotProductAttention()
    dense = product(q, k, v, bias())
    torch.testing.assert_close(dense, product(q, k, v, position=bias.terms(Sequence(6))))
    torch.testing.assert_close(dense, oracle.attention(q, k, v, bias=bias()[None])[0])
    unscaled = ScaledDotProductAttention(scale=False)(q, k, v, mask=Mask.causal())
    torch.testing.assert_close(unscaled, oracle.attention(q, k, v, scale=1.0, allowed=torch.ones(1, 1, 6, 6).tril())[0])
    with pytest.raises(ValueError, match="both"):
        product(q, k, v, bias(), position=bias.terms(Sequence(6)))


@pytest.mark.parametrize("width", [24, 7])
def test_gated_mlp_by_hand(width: int) -> None:
    """SwiGLU of Shazeer 2020: (x W, gated by the Swish of x V) times W2, without biases."""
    layer = GatedMlp(12, width).double()
    assert sorted(layer.state_dict()) == ["fc1.weight", "fc2.weight"]
    x = torch.randn(2, 5, 12, dtype=torch.float64)
    gate, value = x @ layer.fc1.weight[:width].T, x @ layer.fc1.weight[width:].T
    torch.testing.assert_close(layer(x), (gate * torch.sigmoid(gate) * value) @ layer.fc2.weight.T)


def test_the_gated_width_is_two_thirds_in_eights() -> None:
    widths = {(96, 4.0): 256, (768, 4.0): 2048, (64, 4.0): 168, (128, 4.0): 344, (16, 2.0): 24, (8, 0.1): 8}
    assert {sizes: gated_width(*sizes) for sizes in widths} == widths


def test_the_configuration_of_a_block_is_its_arguments() -> None:
    arguments = inspect.signature(TransformerBlock).parameters.values()
    fields = {one.name: one.default for one in dataclasses.fields(BlockConfig)}
    wanted = {one.name: one.default for one in arguments if one.name != "position"}
    assert {name: inspect.Parameter.empty if x is dataclasses.MISSING else x for name, x in fields.items()} == wanted
    config = BlockConfig(12, 3, mlp="swiglu", kind="linear")
    first, second = config.blocks(2)
    assert isinstance(first, TransformerBlock)
    assert isinstance(first.mlp, GatedMlp)
    assert first.attn.kind == "linear"
    assert first.config == second.config == config
    with pytest.raises(ValueError, match="mlp_ratio to be a number above 0"):
        dataclasses.replace(config, mlp_ratio=0.0)
    assert not torch.equal(first.attn.qkv.weight, second.attn.qkv.weight)  # type: ignore[union-attr,arg-type]


@pytest.mark.parametrize("own", [None, "alibi", "rotary"])
def test_cached_layers_are_the_causal_whole(own: str | None) -> None:
    """Prefill, several tokens, one: values and gradients through the cache as those of the whole."""
    mechanism = {None: None, "alibi": ALiBi(4), "rotary": RotaryEmbedding(6)}[own]
    layer = MultiHeadAttention(24, 4, num_kv_heads=2, position=mechanism).double()
    x = torch.randn(2, 7, 24, dtype=torch.float64, requires_grad=True)
    cache, parts = KeyValueCache(1), []
    for part in (slice(0, 3), slice(3, 6), slice(6, 7)):
        order = torch.arange(part.stop)
        mask = Mask.causal(order[part], order)
        parts.append(layer(x[:, part], mask=mask, cache=cache.layers[0]))
    assert (cache.length, cache.bytes) == (7, 2 * 2 * 2 * 7 * 6 * 8)
    stepwise, whole = torch.cat(parts, dim=1), layer(x, mask=Mask.causal())
    torch.testing.assert_close(stepwise, whole)
    leaves, upstream = [x, *layer.parameters()], torch.randn_like(whole)
    for a, b in zip(*(torch.autograd.grad(y, leaves, upstream) for y in (stepwise, whole)), strict=True):
        torch.testing.assert_close(a, b)


def test_a_cache_keeps_keys_as_they_were_projected() -> None:
    layer, x, cache = MultiHeadAttention(12, 3, position=RotaryEmbedding(4)), torch.randn(2, 5, 12), LayerCache()
    assert (cache.length, cache.bytes, cache.keys) == (0, 0, None)
    layer(x, cache=cache)
    _, k, v = layer._heads(x)
    assert torch.equal(cache.keys, k)  # type: ignore[arg-type]
    assert torch.equal(cache.values, v)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="another batch"):
        cache.extend(k[:1], v[:1])
    assert cache.length == 5, "a call that fails leaves it as it was"


@pytest.mark.parametrize(("patch", "size"), [((2, 2), (4, 6)), ((3, 2), (6, 2)), ((1, 1), (2, 3)), ((4, 4), (4, 4))])
def test_patches_by_loops(patch: tuple[int, int], size: tuple[int, int]) -> None:
    layer = PatchEmbedding(size, patch, in_chans=3, embed_dim=5).double()
    images = torch.randn(2, 3, *size, dtype=torch.float64)
    tokens = []
    for row in range(size[0] // patch[0]):
        for column in range(size[1] // patch[1]):
            cut = images[:, :, row * patch[0] : (row + 1) * patch[0], column * patch[1] : (column + 1) * patch[1]]
            tokens.append((cut[:, None] * layer.proj.weight).sum((2, 3, 4)) + layer.proj.bias)
    torch.testing.assert_close(layer(images), torch.stack(tokens, dim=1))
    assert PatchEmbedding(12, patch, in_chans=3, embed_dim=5)(images.float()).shape == (2, len(tokens), 5), "any size"
    assert layer.num_patches == len(tokens)
    assert layer.grid(size, prefix=2) == Grid(size[0] // patch[0], size[1] // patch[1], prefix=2)


def test_under_autocast_dtypes_may_differ_but_for_float64() -> None:
    x, images = torch.randn(2, 5, 12), torch.randn(2, 1, 4, 4)
    block = TransformerBlock(12, 3)
    for layer in (MultiHeadAttention(12, 3), Mlp(12, 24), GatedMlp(12, 16), block, PatchEmbedding(4, 2, 1, 12)):
        given = images if isinstance(layer, PatchEmbedding) else x
        exact = layer(given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for cast in (given, given.bfloat16()):
                torch.testing.assert_close(layer(cast).float(), exact, rtol=0.1, atol=0.05)
            with pytest.raises(ValueError, match=r"expected .* in float32, as the layer's weights are; got .*float64"):
                layer(given.double())


@pytest.mark.parametrize(
    "layer",
    [
        MultiHeadAttention(12, 3, attn_drop=0.5),
        MultiHeadAttention(12, 3, proj_drop=0.5),
        Mlp(12, 24, drop=0.5),
        GatedMlp(12, 24, drop=0.5),
        TransformerBlock(12, 3, attn_drop=0.3, proj_drop=0.3),
        ScaledDotProductAttention(dropout=0.5),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_dropout_in_training_alone(layer: nn.Module) -> None:
    x = [torch.randn(2, 5, 12)] if not isinstance(layer, ScaledDotProductAttention) else [torch.randn(1, 2, 5, 4)] * 3

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        output: Tensor = layer(*x)
        return output

    layer.train()
    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


def test_layers_serve_the_engine_asked_for() -> None:
    x = torch.randn(1, 4, 12)
    line = lines(Sequence(4))
    for make in (lambda **a: MultiHeadAttention(12, 3, **a), lambda **a: TransformerBlock(12, 3, **a)):
        torch.manual_seed(0)
        reference = make(backend="reference")
        torch.manual_seed(0)
        other = make(backend="sdpa")
        bias = LineBias(torch.randn(3, line.length), line)
        torch.testing.assert_close(reference(x, position=bias), other(x, position=bias))
        with pytest.raises(ValueError, match="backend"):
            make(backend="nothing")(x)


@pytest.mark.parametrize("layer", [relpos.LocalAttention, relpos.SparseAttention, relpos.LinearAttention])
def test_grouped_heads_in_every_kind_of_layer(layer: Any) -> None:
    """As a layer of as many key heads as query heads, in which those of a group are the same."""
    grouped, whole = layer(16, 4, num_kv_heads=2), layer(16, 4)
    own, full = (x if layer is relpos.LinearAttention else x.attn for x in (grouped, whole))
    heads = [*range(4), 4, 4, 5, 5, 6, 6, 7, 7]  # four of queries, then those of keys and of values, each twice
    rows = torch.tensor([4 * head + n for head in heads for n in range(4)])
    with torch.no_grad():
        full.qkv.weight.copy_(own.qkv.weight[rows])
        full.qkv.bias.copy_(own.qkv.bias[rows])
    full.proj.load_state_dict(own.proj.state_dict())
    x = torch.randn(2, 9, 16)
    torch.testing.assert_close(grouped(x), whole(x))
