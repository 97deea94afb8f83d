"""Mixed rotary positions: learned frequencies along both axes, by loops and as timm has them."""

import importlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from parity import layers_agree
from position.published import DTYPES, running_in, tokens
from position.rotations import RotationSuite
from relpos import Grid, RotaryMixed, Site, attention
from relpos.core import Coordinates
from relpos.testing import oracle


class Mixed(RotationSuite):
    axes = (2,)
    along = 2

    def build(self, site: Site) -> RotaryMixed:
        mechanism = RotaryMixed(site.num_heads, site.head_dim)
        nn.init.normal_(mechanism.frequencies)
        return mechanism

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        wide = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        down, across = mechanism.frequencies.to(wide)
        cells = [(0, 0) if place is None else place for place in oracle.places(side)]
        angles = torch.stack([row * down + column * across for row, column in cells], dim=1)[None]
        return oracle.rotate(x.to(wide), angles, "interleaved").to(x.dtype)


class TestMixed(Mixed):
    preset = "rotary_mixed"


class TestMixedWithoutPrefix(Mixed):
    """Only there nothing depends on more than offsets."""

    alike = True
    prefixes = False
    translation_invariant = True
    row = ""


def published() -> Any:
    return importlib.import_module("timm.layers.pos_embed_sincos")


@pytest.mark.usefixtures("timm")
@DTYPES
@pytest.mark.parametrize("shape", [(4, 4), (3, 5)], ids=str)
def test_parity_with_timm(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Attention in each of two blocks: the output, and the gradients of q, k, v and all frequencies."""
    with running_in(dtype):
        module = published().RotaryEmbeddingMixed(24, depth=2, num_heads=3).to(dtype)
        nn.init.normal_(module.freqs)
        embed = module.get_embed(list(shape))
    for block in range(2):
        leaves = {name: tokens(2, 3, shape[0] * shape[1], 8, dtype=dtype) for name in ("q", "k", "v")}
        q, k, v = leaves.values()
        turned = [published().apply_rot_embed_cat(x, embed[block]) for x in (q, k)]
        theirs = nn.functional.scaled_dot_product_attention(*turned, v)
        terms = RotaryMixed(3, 8).terms_from({"frequencies": module.freqs[:, block].flip(0)}, Grid(*shape))
        ours = attention(q, k, v, position=terms)
        layers_agree("rotary_mixed", "timm RotaryEmbeddingMixed", ours, theirs, {**leaves, "freqs": module.freqs})


@pytest.mark.usefixtures("timm")
@pytest.mark.parametrize("base", [10.0, 100.0])
def test_starts_as_timm_does(base: float) -> None:
    """The same numbers from the same directions, which both draw at random, one a head."""
    torch.manual_seed(3)
    theirs = published().init_random_2d_freqs(16, 1, 3, temperature=base)[:, 0].flip(0)
    torch.manual_seed(3)
    own = RotaryMixed(3, 16, base=base)
    torch.testing.assert_close(own.frequencies.data, theirs, rtol=1e-6, atol=1e-6)
    assert len({round(float(x), 4) for x in own.frequencies.detach()[0, :, 0]}) == 3, "each head its own"
    assert RotaryMixed(3, 16).base == 10
