"""Layers: attention modules, the block, the MLP and patches, against loops and against one another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import oracle
from relpos import (
    DenseBias,
    Grid,
    LineBias,
    Mask,
    Mlp,
    MultiHeadAttention,
    PatchEmbedding,
    RelativePositionBias,
    ScaledDotProductAttention,
    Sequence,
    TransformerBlock,
    lines,
)


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
    torch.testing.assert_close(layer(x, coordinates=grid), by_loops(layer, x, own().double()[None]))
    more = torch.randn(2, 1, 7, 7, dtype=torch.float64)
    torch.testing.assert_close(
        layer(x, coordinates=grid, position=DenseBias(more)), by_loops(layer, x, own().double()[None] + more)
    )
    line = MultiHeadAttention(12, 3, position=RelativePositionBias(3, seq_len=7))
    assert line(x.float()).shape == (2, 7, 12), "a plain sequence where coordinates are left out"
    with pytest.raises(ValueError, match="mechanism of its own"):
        MultiHeadAttention(12, 3)(x.float(), coordinates=grid)


def test_weights_are_those_it_attends_with() -> None:
    layer = MultiHeadAttention(12, 3)
    x = torch.randn(2, 5, 12)
    weights = layer.weights(x, mask=Mask.causal())
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, 5))
    assert not weights.triu(1).any()
    values = layer._heads(x)[2]
    torch.testing.assert_close(layer.proj((weights @ values).transpose(1, 2).flatten(2)), layer(x, mask=Mask.causal()))


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


def test_block_by_hand() -> None:
    block = TransformerBlock(12, 3, mlp_ratio=2.0, position=RelativePositionBias(3, seq_len=5, init_std=1.0)).double()
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(2, 5, 12, dtype=torch.float64)

    def norm(layer: nn.LayerNorm, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight + layer.bias

    bias = block.attn.position()[None]  # type: ignore[misc]
    wanted = x + by_loops(block.attn, norm(block.norm1, x), bias)
    hidden = norm(block.norm2, wanted) @ block.mlp.fc1.weight.T + block.mlp.fc1.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    wanted = wanted + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
    torch.testing.assert_close(block(x), wanted)
    assert block.mlp.fc1.out_features == 24


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
    assert layer.num_patches == len(tokens)
    assert layer.grid(size, prefix=2) == Grid(size[0] // patch[0], size[1] // patch[1], prefix=2)


def test_patches_take_any_size_they_divide() -> None:
    layer = PatchEmbedding(8, 4, 1, 6)
    assert layer(torch.randn(1, 1, 12, 20)).shape == (1, 15, 6)
    for images in (torch.randn(1, 1, 10, 8), torch.randn(1, 3, 8, 8)):
        with pytest.raises(ValueError, match=r"expected .*; got .*\. "):
            layer(images)


def test_under_autocast_dtypes_may_differ_but_for_float64() -> None:
    x, images = torch.randn(2, 5, 12), torch.randn(2, 1, 4, 4)
    layers = (MultiHeadAttention(12, 3), Mlp(12, 24), TransformerBlock(12, 3), PatchEmbedding(4, 2, 1, 12))
    for layer in layers:
        given = images if isinstance(layer, PatchEmbedding) else x
        exact = layer(given)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for cast in (given, given.bfloat16()):
                torch.testing.assert_close(layer(cast).float(), exact, rtol=0.1, atol=0.05)
            with pytest.raises(ValueError, match=r"expected .* in float32, as the layer's weights are; got .*float64"):
                layer(given.double())


DROPPING: dict[str, Any] = {
    "weights": lambda: MultiHeadAttention(12, 3, attn_drop=0.5),
    "projection": lambda: MultiHeadAttention(12, 3, proj_drop=0.5),
    "mlp": lambda: Mlp(12, 24, drop=0.5),
    "block": lambda: TransformerBlock(12, 3, attn_drop=0.3, proj_drop=0.3),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_in_training_alone(name: str) -> None:
    layer = DROPPING[name]()
    x = torch.randn(2, 5, 12)

    def run(seed: int) -> Tensor:
        torch.manual_seed(seed)
        output: Tensor = layer(x)
        return output

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))
    layer.eval()
    assert torch.equal(run(1), run(2))


def test_product_drops_in_training_alone() -> None:
    layer, x = ScaledDotProductAttention(dropout=0.5), torch.randn(1, 2, 5, 4)
    first, second = layer(x, x, x), layer(x, x, x)
    assert not torch.equal(first, second)
    layer.eval()
    assert torch.equal(layer(x, x, x), layer(x, x, x))


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
