"""Parity with published code: timm's BEiT, Swin and resampling. Never skipped: timm is part of the test extra.

Whole layers run in float64 and in float32; nothing in them is float32 by itself.
"""

import importlib
import math
from types import ModuleType

import pytest
import torch
from torch import nn

from parity import TIGHT, agree, layers_agree
from position.published import DTYPES, random, tokens
from relpos import (
    Grid,
    LearnedPositionEmbedding,
    MultiHeadAttention,
    Positions,
    RelativePositionBias,
    attention,
    get_relative_position_index_2d,
)

WINDOWS = [(1, 1), (1, 5), (4, 8), (5, 3), (7, 7)]

pytestmark = pytest.mark.usefixtures("timm")


@pytest.mark.parametrize("window", [(1, 1), (1, 5), (4, 8), (5, 3), (7, 7)])
def test_index_of_swin_and_with_a_class_token_of_beit(timm: ModuleType, window: tuple[int, int]) -> None:
    swin = timm.models.swin_transformer.get_relative_position_index(*window)
    beit = timm.models.beit.gen_relative_position_index(window)
    assert torch.equal(get_relative_position_index_2d(window), swin)
    assert torch.equal(RelativePositionBias(2, window).relative_position_index, swin)
    assert torch.equal(RelativePositionBias(2, window, prefix=1).relative_position_index, beit)


@DTYPES
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("window", [(4, 8), (5, 3), (7, 7)])
@pytest.mark.parametrize("name", ["BEiT Attention", "Swin WindowAttention"])
def test_attention(timm: ModuleType, name: str, window: tuple[int, int], backend: str, dtype: torch.dtype) -> None:
    """Output and the gradients of tokens, projections and table, ours loaded from a checkpoint that also carries the
    index."""
    beit = name.startswith("BEiT")
    kind, more = (
        (timm.models.beit.Attention, {"qkv_bias": True}) if beit else (timm.models.swin_transformer.WindowAttention, {})
    )
    block = random(kind(24, num_heads=3, window_size=window, **more), dtype)
    ours = RelativePositionBias(3, window, prefix=int(beit)).to(dtype)
    checkpoint = {name: x for name, x in block.named_parameters() if name.startswith("relative")}
    checkpoint["relative_position_index"] = block.relative_position_index
    ours.load_state_dict(checkpoint, strict=True)
    grid = Grid(*window, prefix=int(beit))
    x = tokens(2, grid.count, 24, dtype=dtype)
    bias = torch.cat([block.q_bias, block.k_bias, block.v_bias]) if beit else block.qkv.bias
    qkv = nn.functional.linear(x, block.qkv.weight, bias).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    attended = attention(*qkv, position=ours, queries=grid, backend=backend)
    output = block.proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    own = {"relative_position_bias_table": ours.relative_position_bias_table}
    layers_agree("relative_2d", f"timm {name}", output, block(x), leaves, own, limit=TIGHT[dtype])


@DTYPES
@pytest.mark.parametrize("size", [(2, 3, 4), (1, 3, 4), (2, 2, 3)], ids=["the window", "less depth", "less of each"])
def test_attention_of_swin3d(timm: ModuleType, size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Video Swin's layer on one window, and on inputs that are smaller: there the published layer reads the first cells
    of the whole window."""
    swin3d = importlib.import_module("torchvision.models.video.swin_transformer")
    window, n = (2, 3, 4), math.prod(size)
    block = random(swin3d.ShiftedWindowAttention3d(24, list(window), [0, 0, 0], num_heads=3), dtype)
    ours = RelativePositionBias(3, window).to(dtype)
    checkpoint = {name: x for name, x in block.state_dict().items() if name.startswith("relative")}
    ours.load_state_dict(checkpoint, strict=True)
    assert torch.equal(ours.relative_position_index, block.relative_position_index)
    cells = Positions(Grid(*window).tokens()[:n], low=(0, 0, 0), high=(1, 2, 3))
    x = tokens(2, n, 24, dtype=dtype)
    qkv = block.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    attended = attention(*qkv, position=ours, queries=Grid(*size) if size[1:] == window[1:] else cells)
    output = block.proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    own = {"relative_position_bias_table": ours.relative_position_bias_table}
    theirs = block(x.unflatten(1, size)).flatten(1, 3)
    name = "torchvision ShiftedWindowAttention3d"
    layers_agree("relative_2d (3-D)", name, output, theirs, leaves, own, limit=TIGHT[dtype])


def test_swins_layer_with_all_its_weights(timm: ModuleType) -> None:
    """The whole published layer, its names as they are, in our multi-head layer."""
    block = timm.models.swin_transformer.WindowAttention(24, num_heads=3, window_size=(3, 5))
    nn.init.normal_(block.relative_position_bias_table)
    ours = MultiHeadAttention(24, 3, position=RelativePositionBias(3, (3, 5)))
    names = {name: name.replace("relative", "position.relative", 1) for name in block.state_dict()}
    ours.load_state_dict({names[name]: x for name, x in block.state_dict().items()}, strict=True)
    x = torch.randn(2, 15, 24)
    torch.testing.assert_close(ours(x, coordinates=Grid(3, 5)), block(x), rtol=1e-5, atol=1e-6)


@DTYPES
@pytest.mark.parametrize("class_token", [False, True])
def test_learned_positions_of_a_vision_transformer(timm: ModuleType, class_token: bool, dtype: torch.dtype) -> None:
    """What timm's adds to patches, its class token in front."""
    sizes = {"img_size": (8, 12), "patch_size": 4, "in_chans": 1, "embed_dim": 6, "depth": 0, "num_heads": 1}
    pool = "token" if class_token else "avg"
    block = timm.models.VisionTransformer(**sizes, class_token=class_token, global_pool=pool, fc_norm=False)
    block = random(block, dtype)
    x = tokens(2, 6, 6, dtype=dtype)
    theirs = block._pos_embed(x)
    ours = LearnedPositionEmbedding(6, grid_size=(2, 3), prefix=int(class_token)).to(dtype)
    ours.load_state_dict({"pos_embed": block.pos_embed})
    leaves = {"x": x, "pos_embed": block.pos_embed}
    whole = x
    if class_token:
        leaves["cls_token"] = block.cls_token
        whole = torch.cat([block.cls_token.expand(2, -1, -1), x], dim=1)
    output = ours.embed(whole, Grid(2, 3, prefix=int(class_token)))
    layers_agree("learned", "timm VisionTransformer", output, theirs, leaves, {"pos_embed": ours.pos_embed}, limit=0)


@DTYPES
@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize(("old", "new"), [((4, 4), (7, 7)), ((7, 5), (4, 9)), ((6, 6), (3, 3))])
def test_learned_positions_resampled(
    timm: ModuleType, old: tuple[int, int], new: tuple[int, int], prefix: int, dtype: torch.dtype
) -> None:
    """timm's in float32 whatever the table is, and so are ours."""
    ours = LearnedPositionEmbedding(6, grid_size=old, prefix=prefix, init_std=1.0).to(dtype)
    theirs = timm.layers.resample_abs_pos_embed(ours.pos_embed.detach(), list(new), list(old), num_prefix_tokens=prefix)
    grown = ours.resize(new).pos_embed.detach()
    torch.testing.assert_close(grown, theirs, rtol=0, atol=0)
    agree("learned", "timm resample_abs_pos_embed", {"output": grown}, {"output": theirs}, limit=0)


@DTYPES
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("new", [(7, 7), (5, 9), (2, 3)])
def test_relative_table_resized(timm: ModuleType, new: tuple[int, int], prefix: int, dtype: torch.dtype) -> None:
    """timm's bicubic function, which is Swin's way. (BEiT's own script spaces the old offsets unevenly.)"""
    layers = importlib.import_module("timm.layers.pos_embed_rel")
    ours = RelativePositionBias(3, (4, 4), prefix=prefix, init_std=1.0).to(dtype)
    grown = ours.resize(new).relative_position_bias_table.detach()
    theirs = layers.resize_rel_pos_bias_table_simple(
        ours.relative_position_bias_table.detach(), new_window_size=new, new_bias_shape=tuple(grown.shape)
    )
    if dtype == torch.float32:
        torch.testing.assert_close(grown, theirs)
    found, wanted = {"output": grown}, {"output": theirs}
    agree("relative_2d", "timm resize_rel_pos_bias_table_simple", found, wanted)
