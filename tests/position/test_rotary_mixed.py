"""Mixed rotary positions: learned frequencies along both axes, by loops and as timm has them."""

from __future__ import annotations

import importlib
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import parity
from conformance.suite import LibrarySuite
from position.widened import in_float64
from relpos import Grid, RotaryMixed, Rotation, Sequence, Site, attention, rotate
from relpos.core import Coordinates
from relpos.position.saved import with_settings
from relpos.testing import oracle


class Mixed(LibrarySuite):
    axes = (2,)

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (self.translation_invariant and case.prefix)

    def build(self, site: Site) -> RotaryMixed:
        mechanism = RotaryMixed(site.num_heads, site.head_dim)
        nn.init.normal_(mechanism.frequencies)
        return mechanism

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        wide = q.dtype if q.dtype in (torch.float32, torch.float64) else torch.float32
        down, across = mechanism.frequencies.to(wide)

        def turned(x: Tensor, places: list[Any]) -> Tensor:
            cells = [(0, 0) if place is None else place for place in places]
            angles = torch.stack([row * down + column * across for row, column in cells], dim=1)[None]
            return oracle.rotate(x.to(wide), angles, "interleaved").to(x.dtype)

        k, v = oracle.heads_of(k, q.shape[1]), oracle.heads_of(v, q.shape[1])
        q, k = turned(q, oracle.places(queries)), turned(k, oracle.places(keys))
        return oracle.attention(q, k, v, allowed=allowed)[0]


class TestMixed(Mixed):
    preset = "rotary_mixed"


class TestMixedWithoutPrefix(Mixed):
    """Only there nothing depends on more than offsets."""

    alike = True
    prefixes = False
    translation_invariant = True
    row = ""


# as published


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(4, 4), (3, 5)], ids=str)
def test_parity_with_timm(timm: Any, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Attention in each of two blocks: the output, and the gradients of q, k, v and all frequencies."""
    published = importlib.import_module("timm.layers.pos_embed_sincos")
    n = shape[0] * shape[1]
    with in_float64() if dtype == torch.float64 else nullcontext():
        module = published.RotaryEmbeddingMixed(24, depth=2, num_heads=3).to(dtype)
        nn.init.normal_(module.freqs)
        embed = module.get_embed(list(shape))
    for layer in range(2):
        q, k, v, upstream = torch.randn(4, 2, 3, n, 8, dtype=dtype)
        leaves = {"q": q.requires_grad_(), "k": k.requires_grad_(), "v": v.requires_grad_()}
        turned = [published.apply_rot_embed_cat(x, embed[layer]) for x in (q, k)]
        theirs = nn.functional.scaled_dot_product_attention(*turned, v)
        wanted = parity.with_gradients(theirs, {**leaves, "freqs": module.freqs}, upstream)
        wanted["freqs"] = wanted["freqs"][:, layer].flip(0)
        embed = module.get_embed(list(shape)) if dtype == torch.float32 else _again(module, shape)

        own = RotaryMixed(3, 8).to(dtype)
        own.load_state_dict(with_settings(own, {"frequencies": module.freqs[:, layer].flip(0)}))
        output = attention(q, k, v, position=own, queries=Grid(*shape))
        assert isinstance(output, Tensor)
        found = parity.with_gradients(output, {**leaves, "freqs": own.frequencies}, upstream)
        parity.agree("rotary_mixed", "timm RotaryEmbeddingMixed", found, wanted, dtype=dtype)


def _again(module: Any, shape: tuple[int, int]) -> Tensor:
    """The embedding with a new graph."""
    with in_float64():
        embed = module.get_embed(list(shape))
    assert isinstance(embed, Tensor)
    return embed


def test_starts_as_timm_does(timm: Any) -> None:
    """The same numbers from the same directions, which both draw at random, one a head."""
    published = importlib.import_module("timm.layers.pos_embed_sincos")
    torch.manual_seed(3)
    theirs = published.init_random_2d_freqs(16, 1, 3, temperature=10.0)[:, 0].flip(0)
    torch.manual_seed(3)
    own = RotaryMixed(3, 16)
    torch.testing.assert_close(own.frequencies.data, theirs, rtol=1e-6, atol=1e-6)
    assert len({round(float(x), 4) for x in own.frequencies.detach()[0, :, 0]}) == 3, "each head its own"


def test_starts_along_two_directions_at_a_right_angle() -> None:
    down, across = RotaryMixed(2, 16, base=10.0).frequencies.detach().double()
    sizes = torch.tensor([10 ** (-p / 4) for p in range(4)], dtype=torch.float64)
    torch.testing.assert_close((down**2 + across**2).sqrt(), sizes.repeat(2, 2), rtol=1e-6, atol=0)
    inner = down[:, :4] * down[:, 4:] + across[:, :4] * across[:, 4:]
    torch.testing.assert_close(inner, torch.zeros_like(inner), rtol=0, atol=1e-6)


def test_by_hand() -> None:
    """Row 1, column 2 with frequencies 0.3 a row and 0.5 a column: 1.3 radians."""
    own = RotaryMixed(1, 4)
    own.frequencies.data = torch.tensor([[[0.3, 0.0]], [[0.5, 0.0]]], dtype=torch.float64)
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0]]]], dtype=torch.float64).expand(1, 1, 6, 4)
    out = rotate(x, own.angles(Grid(2, 3)), layout="interleaved")[0, 0, 5].tolist()
    c, s = math.cos(1.3), math.sin(1.3)
    assert out == pytest.approx([c - 2 * s, s + 2 * c, 3, 4], abs=1e-15)


# a module like any other


def test_angles_do_not_move() -> None:
    """float64 whatever the parameters' dtype, and a bfloat16 parameter is only rounded itself."""
    own = RotaryMixed(2, 8).bfloat16()
    found = own.angles(Grid(50, 50))
    assert found.dtype == torch.float64
    cells = Grid(50, 50).tokens().double()
    wanted = torch.einsum("na,ahp->hnp", cells, own.frequencies.double())
    torch.testing.assert_close(found[0], wanted, rtol=1e-14, atol=1e-14)


def test_from_site_and_growth() -> None:
    own = RotaryMixed.from_site(Site(3, 8, 24, Grid(2, 2)))
    assert own.frequencies.shape == (2, 3, 4)
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    assert own.acts_in_attention
    assert not own.acts_on_tokens
    (rotation,) = own.terms(Grid(9, 9), Grid(2, 2, prefix=1)).of(Rotation)
    assert rotation.query.shape == (1, 3, 81, 4)
    assert rotation.key is not None
    assert not rotation.key[:, :, 0].any()
    with pytest.raises(ValueError, match="2 axes"):
        own.terms(Sequence(4))
