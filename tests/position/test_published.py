"""Parity with published code: timm's BEiT, Swin and resampling. Never skipped: timm is part of the test extra."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from relpos import (
    Grid,
    LearnedPositionEmbedding,
    MultiHeadAttention,
    RelativePositionBias,
    attention,
    get_relative_position_index_2d,
)

WINDOWS = [(1, 1), (1, 5), (4, 8), (5, 3), (7, 7)]

pytestmark = pytest.mark.usefixtures("timm")


@pytest.mark.parametrize("window", WINDOWS)
def test_swins_index(timm: ModuleType, window: tuple[int, int]) -> None:
    theirs = timm.models.swin_transformer.get_relative_position_index(*window)
    assert torch.equal(get_relative_position_index_2d(window), theirs)
    assert torch.equal(RelativePositionBias(2, window).relative_position_index, theirs)
    layers = importlib.import_module("timm.layers.pos_embed_rel")
    assert torch.equal(get_relative_position_index_2d(window), layers.gen_relative_position_index(window))


@pytest.mark.parametrize("window", WINDOWS)
def test_beits_index_with_class_token(timm: ModuleType, window: tuple[int, int]) -> None:
    theirs = timm.models.beit.gen_relative_position_index(window)
    assert theirs.shape[0] == window[0] * window[1] + 1, "with the class token"
    assert torch.equal(RelativePositionBias(2, window, prefix=1).relative_position_index, theirs)
    layers = importlib.import_module("timm.layers.pos_embed_rel")
    assert torch.equal(layers.gen_relative_position_index(window, class_token=True), theirs)


def published(block: nn.Module, window: tuple[int, int], prefix: int, heads: int) -> RelativePositionBias:
    """Ours with the published table, loaded as a checkpoint that also carries the index."""
    ours = RelativePositionBias(heads, window, prefix=prefix).double()
    checkpoint = {name: x for name, x in block.named_parameters() if name.startswith("relative")}
    checkpoint["relative_position_index"] = block.relative_position_index  # type: ignore[assignment]
    ours.load_state_dict(checkpoint, strict=True)
    return ours


def assert_same_attention(
    block: Any, ours: RelativePositionBias, coordinates: Grid, x: Tensor, bias: Tensor | None, backend: str
) -> None:
    """Output and the gradients of tokens, projection and table, in float64."""
    heads = ours.num_heads
    theirs = block(x)
    leaves = [x, block.qkv.weight, block.relative_position_bias_table]
    upstream = torch.randn_like(theirs)
    wanted = torch.autograd.grad(theirs, leaves, upstream)

    qkv = nn.functional.linear(x, block.qkv.weight, bias).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    attended = attention(*qkv, position=ours, queries=coordinates, backend=backend)
    assert isinstance(attended, Tensor)
    output = block.proj(attended.transpose(1, 2).flatten(2))
    found = torch.autograd.grad(output, [x, block.qkv.weight, ours.relative_position_bias_table], upstream)
    torch.testing.assert_close(output, theirs, rtol=1e-12, atol=1e-12)
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [(4, 8), (5, 3)])
def test_beits_attention(timm: ModuleType, window: tuple[int, int], fused: bool, backend: str) -> None:
    block = timm.models.beit.Attention(24, num_heads=3, qkv_bias=True, window_size=window).double()
    block.fused_attn = fused
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = published(block, window, prefix=1, heads=3)
    x = torch.randn(2, window[0] * window[1] + 1, 24, dtype=torch.float64, requires_grad=True)
    bias = torch.cat([block.q_bias, block.k_bias, block.v_bias])
    assert_same_attention(block, ours, Grid(*window, prefix=1), x, bias, backend)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("window", [(4, 8), (7, 7)])
def test_swins_attention(timm: ModuleType, window: tuple[int, int], fused: bool, backend: str) -> None:
    block = timm.models.swin_transformer.WindowAttention(24, num_heads=3, window_size=window).double()
    block.fused_attn = fused
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = published(block, window, prefix=0, heads=3)
    x = torch.randn(2, window[0] * window[1], 24, dtype=torch.float64, requires_grad=True)
    assert_same_attention(block, ours, Grid(*window), x, block.qkv.bias, backend)


def test_swins_layer_with_all_its_weights(timm: ModuleType) -> None:
    """The whole published layer, its names as they are, in our multi-head layer."""
    block = timm.models.swin_transformer.WindowAttention(24, num_heads=3, window_size=(3, 5))
    nn.init.normal_(block.relative_position_bias_table)
    ours = MultiHeadAttention(24, 3, position=RelativePositionBias(3, (3, 5)))
    names = {name: name.replace("relative", "position.relative", 1) for name in block.state_dict()}
    ours.load_state_dict({names[name]: x for name, x in block.state_dict().items()}, strict=True)
    x = torch.randn(2, 15, 24)
    torch.testing.assert_close(ours(x, coordinates=Grid(3, 5)), block(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 7)), ((7, 5), (4, 9)), ((6, 6), (3, 3))])
def test_learned_positions_resampled(timm: ModuleType, old: tuple[int, int], new: tuple[int, int], prefix: int) -> None:
    ours = LearnedPositionEmbedding(6, grid_size=old, prefix=prefix, init_std=1.0)
    theirs = timm.layers.resample_abs_pos_embed(ours.pos_embed.detach(), list(new), list(old), num_prefix_tokens=prefix)
    torch.testing.assert_close(ours.resize(new).pos_embed.detach(), theirs, rtol=0, atol=0)


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("new", [(7, 7), (5, 9), (2, 3)])
def test_relative_table_resized(timm: ModuleType, new: tuple[int, int], prefix: int) -> None:
    """timm's bicubic function, which is Swin's way. (BEiT's own script spaces the old offsets unevenly.)"""
    layers = importlib.import_module("timm.layers.pos_embed_rel")
    ours = RelativePositionBias(3, (4, 4), prefix=prefix, init_std=1.0)
    grown = ours.resize(new).relative_position_bias_table.detach()
    theirs = layers.resize_rel_pos_bias_table_simple(
        ours.relative_position_bias_table.detach(), new_window_size=new, new_bias_shape=tuple(grown.shape)
    )
    torch.testing.assert_close(grown, theirs)
