"""Sums that have a name, and others that are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.suite import LibrarySuite
from relpos import (
    ALiBi,
    Grid,
    LearnedPositionEmbedding,
    LineBias,
    Mechanism,
    RelativePositionBias,
    RotaryEmbedding,
    Rotation,
    SinusoidalPositionEmbedding,
    Site,
    T5Bias,
    VisionTransformer,
    attention,
)
from relpos.core import Coordinates
from relpos.position import Sum, find, presets
from relpos.position.sums import PRESETS
from relpos.testing import oracle


def window(site: Site) -> Any:
    """The smallest window whose table holds every offset of the site."""
    keys = site.queries if site.keys is None else site.keys
    return tuple(max(a, b) + 1 for a, b in zip(site.queries.high, keys.high, strict=True))


class TestRotaryAndRelative(LibrarySuite):
    axes = (2,)
    preset = "rotary_2d+relative_2d"

    def build(self, site: Site) -> Mechanism:
        prefix = max(site.queries.prefix, 0 if site.keys is None else site.keys.prefix)
        rotary = RotaryEmbedding(site.head_dim, axes=2, base=100.0, layout="interleaved")
        return rotary + RelativePositionBias(site.num_heads, window(site), prefix=prefix, init_std=1.0)

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
        table, sizes = mechanism.mechanisms[1].relative_position_bias_table, mechanism.mechanisms[1].sizes
        sides = oracle.places(queries), oracle.places(keys)
        q, k = (oracle.rotated(x, side, 2, 1, 100.0, "interleaved") for x, side in zip((q, k), sides, strict=True))
        return oracle.attention(q, k, v, bias=oracle.relative_bias(table, *sides, sizes)[None], allowed=allowed)[0]


class TestLearnedAndRelative(LibrarySuite):
    axes = (2,)
    cross = False
    irregular = False
    preset = "learned+relative_2d"

    def build(self, site: Site) -> Mechanism:
        assert isinstance(site.queries, Grid)
        sizes, prefix = site.queries.sizes, site.queries.prefix
        learned = LearnedPositionEmbedding(site.embed_dim, grid_size=sizes, prefix=prefix, init_std=1.0)
        return learned + RelativePositionBias(site.num_heads, window(site), prefix=prefix, init_std=1.0)

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        return oracle.learned_absolute(x, mechanism.mechanisms[0].pos_embed[0], range(x.shape[1]))

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        bias = mechanism.mechanisms[1]
        return oracle.relative_bias(
            bias.relative_position_bias_table, oracle.places(queries), oracle.places(keys), bias.sizes
        )


# by name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_named_sum_is_found_with_its_own_title(preset: Any) -> None:
    found = find(preset.name)
    assert found is preset
    assert found.title != " + ".join(find(name).title for name in preset.name.split("+"))
    built = found.build(Site(2, 4, 8, Grid(2, 3)))
    assert isinstance(built, Sum)
    parts = [find(name).build(Site(2, 4, 8, Grid(2, 3))) for name in preset.name.split("+")]
    assert [str(part) for part in built.parts()] == [str(part) for part in parts]


def test_any_other_sum_is_written() -> None:
    found = find("sinusoidal_2d+alibi+t5")
    assert found.name not in presets()
    assert found.title == "Sinusoidal absolute, 2-D + ALiBi + T5 bias"
    assert found.token_axes == (2,)
    built = found.build(Site(2, 4, 8, Grid(2, 3)))
    assert [type(part) for part in built.parts()] == [SinusoidalPositionEmbedding, ALiBi, T5Bias]
    assert built.acts_on_tokens
    assert built.acts_in_attention
    assert built.growth == ("as is",)
    assert find("t5 + alibi").name == "t5+alibi"
    assert find("relative_2d+learned").title.endswith(" + Learned absolute"), "in another order it has no name"


def test_biases_of_a_sum_add_up() -> None:
    parts = [ALiBi(3), T5Bias(3, scaled=True, init_std=1.0), RelativePositionBias(3, (2, 3), init_std=1.0)]
    q, k, v = torch.randn(3, 2, 3, 6, 4, dtype=torch.float64)
    total = sum(parts[1:], parts[0])
    bias = torch.zeros(3, 6, 6, dtype=torch.float64)
    for part in parts:
        (line,) = part.terms(Grid(2, 3)).of(LineBias)
        bias = bias + line.values[:, line.lines.index()]
    wanted = oracle.attention(q, k, v, bias=bias[None])[0]
    torch.testing.assert_close(attention(q, k, v, position=total, queries=Grid(2, 3)), wanted)


def test_two_rotations_are_one_too_many() -> None:
    with pytest.raises(ValueError, match="Rotation"):
        (RotaryEmbedding(4) + RotaryEmbedding(4)).terms(Grid(2, 3))


def test_growth_of_named_sums() -> None:
    """A rotation goes on as it is while the table beside it grows."""
    built = find("rotary_2d+relative_2d").build(Site(2, 4, 8, Grid(3, 3)))
    assert built.growth == ("interpolated", "clipped")
    rotary, table = built.grow(Grid(5, 4), "interpolated").parts()
    assert rotary is built.parts()[0]
    assert isinstance(table, RelativePositionBias)
    assert table.sizes == (5, 4)
    assert len(built.grow(Grid(5, 4), "clipped").terms(Grid(5, 4)).of(Rotation)) == 1
    both = find("learned+relative_2d").build(Site(2, 4, 8, Grid(3, 3)))
    assert both.growth == ("interpolated", "clipped")
    grown = both.grow(Grid(5, 4), "clipped")
    grown.embed(torch.randn(1, 20, 8), Grid(5, 4))
    grown.terms(Grid(5, 4))


# training


def left_or_right(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Images of a 1 and a 2, and which of them is farther left: without positions there is nothing to see."""
    cells = torch.stack([torch.randperm(16, generator=generator)[:2] for _ in range(count)])
    while (same := cells[:, 0] % 4 == cells[:, 1] % 4).any():
        cells[same, 1] = torch.randint(16, (int(same.sum()),), generator=generator)
    images = torch.zeros(count, 16)
    images[torch.arange(count), cells[:, 0]] = 1.0
    images[torch.arange(count), cells[:, 1]] = 2.0
    return images.view(count, 1, 4, 4), (cells[:, 0] % 4 < cells[:, 1] % 4).long()


def by_hand(site: Site) -> Mechanism:
    """One line in a user's own code."""
    return RotaryEmbedding(site.head_dim, axes=2, base=100.0) + RelativePositionBias(site.num_heads, (4, 4))


@pytest.mark.slow
@pytest.mark.parametrize(
    "position",
    ["learned+relative_2d", "rotary_2d+relative_2d", by_hand, "none"],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_sums_train(position: str | Callable[[Site], Mechanism]) -> None:
    """The loss falls, every position parameter gets a gradient and moves; without positions it stays at log 2."""
    torch.manual_seed(2)
    model = VisionTransformer(
        4, 1, 1, 2, "max", embed_dim=16, depth=2, num_heads=2, mlp_ratio=2.0, class_token=False, position=position
    )
    before = [x.detach().clone() for x in model.position_parameters()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    losses: list[float] = []
    for _ in range(60):
        images, labels = left_or_right(64, generator)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        if not losses:
            for x in model.position_parameters():
                assert x.grad is not None
                assert x.grad.isfinite().all()
                assert x.grad.any()
        optimizer.step()
        losses.append(float(loss.detach()))
    last = sum(losses[-10:]) / 10
    if position == "none":
        assert last > 0.68
    else:
        assert last < 0.55, f"the loss stays at {last:.3f}"
        assert before
        for old, new in zip(before, model.position_parameters(), strict=True):
            assert not torch.equal(old, new)
