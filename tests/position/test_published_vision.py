"""Parity with timm's sines, cosines and rotations on grids. Never skipped: timm is part of the test extra.

timm forms frequencies and angles in float32. Places on these grids are small, so that costs about 1e-6; whole layers
are compared once more with float64 in its place (`published.running_in`).
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from parity import TIGHT, layers_agree
from position.published import DTYPES, random, running_in, tokens
from relpos import Grid, Positions, RotaryEmbedding, SinusoidalPositionEmbedding, attention, rotate

GRIDS = [(1, 1), (4, 8), (5, 3), (14, 14)]
CLOSE = {"rtol": 0, "atol": 4e-6}

pytestmark = pytest.mark.usefixtures("timm")


def sincos() -> ModuleType:
    return importlib.import_module("timm.layers.pos_embed_sincos")


@pytest.mark.parametrize("width", [4, 8, 24])
@pytest.mark.parametrize("base", [10000.0, 100.0])
@pytest.mark.parametrize(("layout", "interleave"), [("grouped", False), ("half", True)])
@pytest.mark.parametrize("sizes", GRIDS)
def test_sincos_grids(sizes: tuple[int, int], layout: Any, interleave: bool, base: float, width: int) -> None:
    theirs = sincos().build_sincos2d_pos_embed(
        list(sizes), dim=width, temperature=base, interleave_sin_cos=interleave, dtype=torch.float32
    )
    own = SinusoidalPositionEmbedding(width, axes=2, base=base, layout=layout)
    grid = Grid(*sizes, prefix=1)
    ours = own.embed(torch.zeros(1, grid.count, width), grid)[0]
    assert not ours[0].any()
    torch.testing.assert_close(ours[1:], theirs, **CLOSE)  # type: ignore[arg-type]


@DTYPES
@pytest.mark.parametrize(("layout", "interleave"), [("grouped", False), ("half", True)])
@pytest.mark.parametrize("sizes", GRIDS)
def test_sincos_grids_added_to_tokens(
    sizes: tuple[int, int], layout: Any, interleave: bool, dtype: torch.dtype
) -> None:
    x = tokens(2, sizes[0] * sizes[1], 24, dtype=dtype)
    with running_in(dtype):
        theirs = x + sincos().build_sincos2d_pos_embed(list(sizes), dim=24, interleave_sin_cos=interleave, dtype=dtype)
    ours = SinusoidalPositionEmbedding(24, axes=2, layout=layout).embed(x, Grid(*sizes))
    name = "sinusoidal_2d" if interleave else "sinusoidal_2d (grouped)"
    limit = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    layers_agree(name, "timm build_sincos2d_pos_embed", ours, theirs, {"x": x}, limit=limit)


def test_moco_v3s_formula() -> None:
    """Chen et al. 2021, on their square grids: sines and cosines of the row, then of the column."""
    side, pairs = 7, 6
    frequency = 10000.0 ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    slow, fast = torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")
    row, column = (x.flatten()[:, None] * frequency for x in (slow, fast))
    theirs = torch.cat([row.sin(), row.cos(), column.sin(), column.cos()], dim=1)
    own = SinusoidalPositionEmbedding(4 * pairs, axes=2, layout="half")
    ours = own.embed(torch.zeros(1, side**2, 4 * pairs, dtype=torch.float64), Grid(side, side))[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("width", [4, 8, 24])
@pytest.mark.parametrize("base", [10000.0, 100.0])
@pytest.mark.parametrize("sizes", GRIDS)
def test_rotary_grids(sizes: tuple[int, int], base: float, width: int, layout: Any) -> None:
    """timm turns the first pairs with the row, the others with the column; rectangular grids show it."""
    own = RotaryEmbedding(width, axes=2, base=base, layout=layout)
    x = torch.randn(2, 3, sizes[0] * sizes[1], width)
    ours = rotate(x, own.angles(Grid(*sizes)), layout=layout)
    theirs = turned_by_timm(x, list(sizes), layout, base)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
    for embedding in (
        sincos().RotaryEmbeddingCat(
            width, in_pixels=False, temperature=base, feat_shape=list(sizes), rotate_half=layout == "half"
        ),
        sincos().RotaryEmbeddingCat(width, in_pixels=False, temperature=base, rotate_half=layout == "half"),
    ):
        cat = embedding.get_embed(list(sizes))
        again = sincos().apply_rot_embed_cat(x, cat, half=layout == "half")
        torch.testing.assert_close(ours, again, rtol=0, atol=2e-5)


def turned_by_timm(x: Tensor, sizes: list[int], layout: str, base: float, **arguments: Any) -> Tensor:
    sin, cos = sincos().build_rotary_pos_embed(
        sizes, dim=x.shape[-1], temperature=base, in_pixels=False, rotate_half=layout == "half", **arguments
    )
    turned: Tensor = sincos().apply_rot_embed_cat(x, torch.cat([sin, cos], dim=-1), half=layout == "half")
    return turned


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize(("sizes", "reference"), [((6, 9), (4, 4)), ((5, 3), (14, 14)), ((4, 8), (4, 8))])
def test_rotary_grids_squeezed_onto_another(sizes: tuple[int, int], reference: tuple[int, int], layout: Any) -> None:
    """timm's `ref_feat_shape` (EVA): the same grid at fractional places."""
    cells = Grid(*sizes).tokens().double() * torch.tensor(reference) / torch.tensor(sizes)
    places = Positions(cells, low=(0, 0), high=reference)
    x = torch.randn(2, 3, len(cells), 8)
    ours = rotate(x, RotaryEmbedding(8, axes=2, layout=layout).angles(places), layout=layout)
    theirs = turned_by_timm(x, list(sizes), layout, 10000.0, ref_feat_shape=list(reference))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@DTYPES
@pytest.mark.parametrize("rotate_half", [False, True])
@pytest.mark.parametrize("sizes", GRIDS)
def test_rotary_grids_of_tokens(sizes: tuple[int, int], rotate_half: bool, dtype: torch.dtype) -> None:
    """What RotaryEmbeddingCat turns, and the gradient."""
    x = tokens(2, 3, sizes[0] * sizes[1], 24, dtype=dtype)
    with running_in(dtype):
        cat = sincos().RotaryEmbeddingCat(24, in_pixels=False, temperature=100.0, rotate_half=rotate_half)
        theirs = sincos().apply_rot_embed_cat(x, cat.get_embed(list(sizes)), half=rotate_half)
    layout: Any = "half" if rotate_half else "interleaved"
    ours = rotate(x, RotaryEmbedding(24, axes=2, base=100.0, layout=layout).angles(Grid(*sizes)), layout=layout)
    layers_agree(named(rotate_half), "timm RotaryEmbeddingCat", ours, theirs, {"x": x}, limit=TIGHT[dtype])


def named(rotate_half: bool) -> str:
    return "rotary_2d (half layout)" if rotate_half else "rotary_2d"


@DTYPES
@pytest.mark.parametrize("rotate_half", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_rotary_attention_with_a_class_token(
    timm: ModuleType, rotate_half: bool, fused: bool, dtype: torch.dtype
) -> None:
    """The whole published layer (EVA's), its class token not turned, rectangular grid."""
    x = tokens(2, 21, 24, dtype=dtype)
    with running_in(dtype):
        block = timm.models.eva.EvaAttention(24, num_heads=3, scale_norm=False, rotate_half=rotate_half)
        block = random(block, dtype).eval()
        block.fused_attn = fused
        rope = sincos().RotaryEmbeddingCat(
            8, in_pixels=False, temperature=100.0, feat_shape=[4, 5], rotate_half=rotate_half
        )
        theirs = block(x, rope=rope.get_embed())
    bias = torch.cat([block.q_bias, block.k_bias, block.v_bias])
    q, k, v = torch.nn.functional.linear(x, block.qkv.weight, bias).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    own = RotaryEmbedding(8, axes=2, base=100.0, layout="half" if rotate_half else "interleaved")
    attended = attention(q, k, v, position=own, queries=Grid(4, 5, prefix=1))
    assert isinstance(attended, Tensor)
    ours = block.proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(named(rotate_half), "timm EvaAttention", ours, theirs, leaves, limit=TIGHT[dtype])
