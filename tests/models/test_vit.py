"""The vision transformer: every kind of pooling, prefix and position, and where its parameters are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from small import image as small
from torch import Tensor, nn

from covering import pairwise
from relpos import (
    Grid,
    LearnedPositionEmbedding,
    Mechanism,
    Mlp,
    MultiHeadAttention,
    OffsetBias,
    RelativePositionBias,
    Site,
    TransformerBlock,
    VisionTransformer,
    count_parameters,
)
from relpos.core import Offsets
from relpos.position import presets

FAST_SHARE = 4  # of its tests, in the fast part

IMAGES = (2, 1, 6, 8)


def by_hand(model: VisionTransformer, images: Tensor, mechanism: Any) -> Tensor:
    """Step by step, with the blocks' own (tested) arithmetic and dense biases."""
    grid = Grid(images.shape[2] // 2, images.shape[3] // 2, prefix=model.prefix)
    x = model.patch_embed(images)
    if model.prefix_tokens is not None:
        x = torch.cat([model.prefix_tokens.expand(len(x), -1, -1), x], dim=1)
    for part in mechanism[0]:
        if isinstance(part, LearnedPositionEmbedding):
            x = x + part.pos_embed
    for layer, block in enumerate(model.blocks):
        parts = mechanism[0 if model.shared_position else layer]
        relative = [part.terms(grid) for part in parts if isinstance(part, RelativePositionBias)]
        x = block(x, position=relative[0] if relative else None)
    x = model.norm(x)
    pooled = {"token": x[:, 0], "avg": x[:, model.prefix :].mean(1), "max": x[:, model.prefix :].max(1).values}
    scores: Tensor = model.head(pooled[model.global_pool])
    return scores


@pytest.mark.parametrize(
    ("pooled", "registers", "position", "shared"),
    pairwise(
        ("token", "avg", "max", "avg, no class token", "max, no class token"),
        (0, 2),
        ("none", "learned", "relative_1d", "relative_2d", "learned+relative_2d", None),
        (False, True),
    ),
)
def test_forward(pooled: str, registers: int, position: str | None, shared: bool) -> None:
    pool, _, none = pooled.partition(", ")
    token = not none
    model = small(
        global_pool=pool, class_token=token, reg_tokens=registers, position=position, shared_position=shared
    ).double()
    assert model.prefix == token + registers
    images = torch.randn(IMAGES, dtype=torch.float64)
    scores = model(images)
    assert scores.shape == (2, 5)
    tokens = list(model.token_position.parts())
    layers = [[*tokens, *each.parts()] for each in model.attention_position]  # type: ignore[union-attr, operator]
    assert len(layers) == (1 if shared else 2)
    torch.testing.assert_close(scores, by_hand(model, images, layers))
    scores.sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
    relative = sum(isinstance(m, RelativePositionBias) for m in model.modules())
    assert relative == ("relative" in (position or "")) * (1 if shared else 2)
    assert sum(isinstance(m, LearnedPositionEmbedding) for m in model.modules()) == ("learned" in (position or ""))


def test_any_image_that_patches_divide() -> None:
    """Without a position; with a table one that lies within it, and with learned vectors that of their grid alone."""
    assert small(position="none")(torch.randn(1, 1, 10, 12)).shape == (1, 5)
    assert small(position="relative_2d")(torch.randn(1, 1, 4, 6)).shape == (1, 5)
    for position, size, remedy in (
        ("none", (7, 8), "divisible"),
        ("relative_2d", (10, 12), "Resize"),
        ("learned", (4, 8), "Resize"),
    ):
        with pytest.raises(ValueError, match=remedy):
            small(position=position)(torch.randn(1, 1, *size))


class Leaning(OffsetBias):
    """Acts on tokens and in attention, each with a parameter of its own."""

    growth = ("as is", "halved")

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.randn(site.num_heads, 1))
        self.shift = nn.Parameter(torch.randn(site.embed_dim))

    def bias(self, offsets: Offsets) -> Tensor:
        return self.slope * offsets.axes[:, 0]

    def embed(self, x: Tensor, coordinates: Any) -> Tensor:
        return x + self.shift

    def grow(self, queries: Any, rule: str) -> Leaning:
        grown = copy.deepcopy(self)
        if rule == "halved":
            grown.slope.data /= 2
        return grown


@pytest.mark.parametrize("shared", [False, True])
def test_a_mechanism_that_acts_on_tokens_and_in_attention_is_held_once(shared: bool) -> None:
    def build(site: Site) -> Mechanism:
        return LearnedPositionEmbedding.from_site(site) + Leaning(site)

    model, images = small(position=build, shared_position=shared), torch.randn(IMAGES)
    layers = [position.parts() for position in model.attention_position]
    assert [[type(part) for part in parts] for parts in layers] == [[Leaning]] * (1 if shared else 2)
    learned, leaning = model.token_position.parts()
    assert leaning is layers[0][0]
    own = model.position_parameters()
    assert [p.shape[-1] for p in own] == [12, 1, 12, *([] if shared else [1, 12])]
    assert len({x.data_ptr() for x in model.state_dict().values()}) == len(model.state_dict())
    assert count_parameters(model)["position"].total == sum(p.numel() for p in own)

    grid = Grid(3, 4, prefix=1)
    x = torch.cat([model.prefix_tokens.expand(2, -1, -1), model.patch_embed(images)], dim=1)  # type: ignore[union-attr]
    x = x + learned.pos_embed + leaning.shift  # type: ignore[operator]
    for layer, block in enumerate(model.blocks):
        x = block(x, position=layers[0 if shared else layer][0].terms(grid))
    torch.testing.assert_close(model(images), model.head(model.norm(x)[:, 0]))

    assert model.growth() == ("interpolated", "halved"), "as is is left out where a part has another rule"
    grown = model.grow((10, 12), "halved")
    first = grown.attention_position[0].parts()[0]
    assert first is grown.token_position.parts()[1]
    torch.testing.assert_close(first.slope, leaning.slope / 2)  # type: ignore[operator]
    assert grown(torch.randn(2, 1, 10, 12)).shape == (2, 5)
    unchanged = model.grow((10, 12), "interpolated").attention_position[-1].parts()[0]
    torch.testing.assert_close(unchanged.slope, layers[-1][0].slope)  # type: ignore[arg-type]


def test_no_head_gives_pooled_features() -> None:
    model = small(num_classes=0)
    assert model(torch.randn(IMAGES)).shape == (2, 12)
    assert model.forward_features(torch.randn(IMAGES)).shape == (2, 13, 12)


# parameters


def test_the_counts_of_the_documents() -> None:
    """676 numbers for a 7 x 7 window and 4 heads; QKV at width 96 has 27,648 weights, and 288 biases beside them."""
    assert count_parameters(RelativePositionBias(4, (7, 7)))["position"].total == 676
    counts = count_parameters(MultiHeadAttention(96, 4))
    assert counts["attention qkv"].weights == 27_648
    assert counts["attention qkv"].biases == 288
    assert counts["attention projection"].weights == 96 * 96


@pytest.mark.parametrize(
    ("position", "shared"), [("none", False), ("learned", True), ("learned+relative_2d", False), ("relative_2d", True)]
)
def test_counts_sum_to_all(position: str, shared: bool) -> None:
    model = small(position=position, shared_position=shared, reg_tokens=1)
    counts = count_parameters(model)
    assert sum(count.total for count in counts.values()) == sum(p.numel() for p in model.parameters())
    assert "other" not in counts
    own = counts["position"].total if "position" in counts else 0
    assert own == sum(p.numel() for p in model.position_parameters())
    table = 3 * (5 * 7 + 3) * (1 if shared else 2)
    assert own == ("learned" in position) * 14 * 12 + ("relative" in position) * table
    assert counts["prefix tokens"].total == 24
    assert counts["patch embedding"].weights == 4 * 12
    assert counts["head"].weights == 60
    assert counts["head"].biases == 5
    assert counts["norm"].total == 2 * 12 * 5
    assert counts["mlp"].weights == 2 * 2 * 12 * 24


def test_whatever_a_mechanism_holds_is_positions() -> None:
    class Learned(Leaning):
        def __init__(self, site: Site) -> None:
            super().__init__(site)
            self.norm, self.mlp, self.head = nn.LayerNorm(4), Mlp(4, 4), nn.Linear(4, 4)

    model = small(position=Learned)
    counts, plain = count_parameters(model), count_parameters(small(position=None))
    own = counts.pop("position")
    assert counts == plain
    assert (own.weights, own.biases) == (sum(p.numel() for p in model.position_parameters()), 0)


def test_a_parameter_used_twice_counts_once() -> None:
    first, second = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
    second.weight = first.weight
    assert count_parameters(nn.ModuleList([first, second]))["other"].total == 9
    block = TransformerBlock(12, 3)
    assert count_parameters(nn.ModuleList([block, block])) == count_parameters(block)


@pytest.mark.parametrize("name", [name for name, preset in presets().items() if 2 in preset.token_axes])
def test_every_mechanism_of_images_serves_and_grows(name: str) -> None:
    """With a class token and a register, forward and backward, and on a larger image by each of its rules."""
    model = VisionTransformer(8, 2, 1, 3, embed_dim=16, depth=2, num_heads=2, reg_tokens=1, position=name)
    scores = model(torch.randn(2, 1, 8, 8))
    scores.square().sum().backward()
    assert scores.shape == (2, 3)
    assert all(parameter.grad is not None for parameter in model.position_parameters())
    assert model.growth()
    for rule in model.growth():
        assert model.grow(12, rule)(torch.randn(2, 1, 12, 12)).isfinite().all()
