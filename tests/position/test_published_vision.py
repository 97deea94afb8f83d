"""Parity with timm's sines, cosines and rotations on grids. Never skipped: timm is part of the test extra.

timm forms frequencies and angles in float32. Places on these grids are small, so that costs about 1e-6; what is learned
from is compared once more with float64 in its place (`published.running_in`).
"""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from parity import TIGHT, layers_agree
from position.published import DTYPES, random, running_in, tokens
from relpos import Grid, Positions, RotaryEmbedding, SinusoidalPositionEmbedding, attention, rotate

GRIDS = [(1, 1), (4, 8), (5, 3), (14, 14)]
LAYOUTS = pytest.mark.parametrize("layout", ["half", "interleaved"])
WIDTHS = pytest.mark.parametrize(("width", "base"), [(4, 10000.0), (24, 100.0)])

pytestmark = pytest.mark.usefixtures("timm")


def sincos() -> ModuleType:
    return importlib.import_module("timm.layers.pos_embed_sincos")


def named(layout: str) -> str:
    return "rotary_2d (half layout)" if layout == "half" else "rotary_2d"


@DTYPES
@WIDTHS
@pytest.mark.parametrize("layout", ["grouped", "half"])
@pytest.mark.parametrize("sizes", GRIDS)
def test_sincos_grids_added_to_tokens(
    sizes: tuple[int, int], layout: Any, width: int, base: float, dtype: torch.dtype
) -> None:
    x = tokens(2, sizes[0] * sizes[1], width, dtype=dtype)
    with running_in(dtype):
        theirs = x + sincos().build_sincos2d_pos_embed(
            list(sizes), dim=width, temperature=base, interleave_sin_cos=layout == "half", dtype=dtype
        )
    ours = SinusoidalPositionEmbedding(width, axes=2, base=base, layout=layout).embed(x, Grid(*sizes))
    name = "sinusoidal_2d" if layout == "half" else "sinusoidal_2d (grouped)"
    limit = {torch.float64: 1e-14, torch.float32: 1e-6}[dtype]
    layers_agree(name, "timm build_sincos2d_pos_embed", ours, theirs, {"x": x}, limit=limit)


@DTYPES
@WIDTHS
@LAYOUTS
@pytest.mark.parametrize("sizes", GRIDS)
def test_rotary_grids_of_tokens(
    sizes: tuple[int, int], layout: Any, width: int, base: float, dtype: torch.dtype
) -> None:
    """timm turns the first pairs with the row, the others with the column; rectangular grids show it."""
    x = tokens(2, 3, sizes[0] * sizes[1], width, dtype=dtype)
    with running_in(dtype):
        cat = sincos().RotaryEmbeddingCat(width, in_pixels=False, temperature=base, rotate_half=layout == "half")
        theirs = sincos().apply_rot_embed_cat(x, cat.get_embed(list(sizes)), half=layout == "half")
    ours = rotate(x, RotaryEmbedding(width, axes=2, base=base, layout=layout).angles(Grid(*sizes)), layout=layout)
    layers_agree(named(layout), "timm RotaryEmbeddingCat", ours, theirs, {"x": x}, limit=TIGHT[dtype])


@LAYOUTS
@pytest.mark.parametrize(("sizes", "reference"), [((6, 9), (4, 4)), ((5, 3), (14, 14)), ((4, 8), (4, 8))])
def test_rotary_grids_squeezed_onto_another(sizes: tuple[int, int], reference: tuple[int, int], layout: Any) -> None:
    """timm's `ref_feat_shape` (EVA): the same grid at fractional places."""
    cells = Grid(*sizes).tokens().double() * torch.tensor(reference) / torch.tensor(sizes)
    places = Positions(cells, low=(0, 0), high=reference)
    x = torch.randn(2, 3, len(cells), 8)
    ours = rotate(x, RotaryEmbedding(8, axes=2, layout=layout).angles(places), layout=layout)
    half, settings = layout == "half", {"in_pixels": False, "ref_feat_shape": list(reference)}
    waves = sincos().build_rotary_pos_embed(list(sizes), dim=8, temperature=10000.0, rotate_half=half, **settings)
    theirs = sincos().apply_rot_embed_cat(x, torch.cat(waves, dim=-1), half=half)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)


@DTYPES
@LAYOUTS
def test_rotary_attention_with_a_class_token(timm: ModuleType, layout: Any, dtype: torch.dtype) -> None:
    """The whole published layer (EVA's), its class token not turned, rectangular grid."""
    x, half = tokens(2, 21, 24, dtype=dtype), layout == "half"
    with running_in(dtype):
        block = timm.models.eva.EvaAttention(24, num_heads=3, scale_norm=False, rotate_half=half)
        block = random(block, dtype).eval()
        rope = sincos().RotaryEmbeddingCat(8, in_pixels=False, temperature=100.0, feat_shape=[4, 5], rotate_half=half)
        theirs = block(x, rope=rope.get_embed())
    bias = torch.cat([block.q_bias, block.k_bias, block.v_bias])
    q, k, v = torch.nn.functional.linear(x, block.qkv.weight, bias).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    own = RotaryEmbedding(8, axes=2, base=100.0, layout=layout)
    attended = attention(q, k, v, position=own, queries=Grid(4, 5, prefix=1))
    ours = block.proj(attended.transpose(1, 2).flatten(2))
    leaves = {"x": x, **dict(block.named_parameters())}
    layers_agree(named(layout), "timm EvaAttention", ours, theirs, leaves, limit=TIGHT[dtype])
