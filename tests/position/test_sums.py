"""Sums of mechanisms: parts, roles, growth and training; those that have a name, and others that are written."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from position.published import attended
from position.suites import PositionSuite, cover
from relpos import (
    ALiBi,
    Grid,
    LearnedPositionEmbedding,
    LineBias,
    NoPosition,
    RelativePositionBias,
    RotaryEmbedding,
    Sequence,
    SinusoidalPositionEmbedding,
    Site,
    T5Bias,
    VisionTransformer,
)
from relpos.core import Coordinates, Terms
from relpos.position import Mechanism, Sum, find, presets
from relpos.position.sums import PRESETS
from relpos.testing import oracle


class TestRotaryAndRelative(PositionSuite):
    axes = (2,)
    preset = "rotary_2d+relative_2d"

    def build(self, site: Site) -> Mechanism:
        prefix = max(site.queries.prefix, 0 if site.keys is None else site.keys.prefix)
        rotary = RotaryEmbedding(site.head_dim, axes=2, base=100.0, layout="interleaved")
        return rotary + RelativePositionBias(site.num_heads, cover(site), prefix=prefix, init_std=1.0)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        bias, sides = own.mechanisms[1], (self.places(queries), self.places(keys))
        q, k = (oracle.rotated(x, side, 2, 1, 100.0, "interleaved") for x, side in zip((q, k), sides, strict=True))
        added = oracle.relative_bias(bias.relative_position_bias_table, *sides, bias.sizes)
        return {"q": q, "k": k, "bias": added[None]}


class TestLearnedAndRelative(PositionSuite):
    axes = (2,)
    cross = False
    irregular = False
    preset = "learned+relative_2d"

    def build(self, site: Site) -> Mechanism:
        assert isinstance(site.queries, Grid)
        sizes, prefix = site.queries.sizes, site.queries.prefix
        learned = LearnedPositionEmbedding(site.embed_dim, grid_size=sizes, prefix=prefix, init_std=1.0)
        return learned + RelativePositionBias(site.num_heads, cover(site), prefix=prefix, init_std=1.0)

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        return oracle.learned_absolute(x, mechanism.mechanisms[0].pos_embed[0], range(x.shape[1]))

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        bias, sides = mechanism.mechanisms[1], (self.places(queries), self.places(keys))
        return oracle.relative_bias(bias.relative_position_bias_table, *sides, bias.sizes)


# parts, roles and growth

GRID = Grid(3, 4)


class Extending(Mechanism):
    """Says nothing and grows by rules of its own."""

    growth = ("extended", "clipped")
    grown_by = ""

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        return Terms()

    def grow(self, queries: Coordinates, rule: str) -> Mechanism:
        grown = copy.deepcopy(self)
        grown.grown_by = rule
        return grown


class Rigid(Mechanism):
    """Has no rule."""


def learned() -> LearnedPositionEmbedding:
    return LearnedPositionEmbedding(8, grid_size=(3, 4), init_std=1.0)


def relative() -> RelativePositionBias:
    return RelativePositionBias(2, (3, 4), init_std=1.0)


def test_parts_and_roles() -> None:
    parts = [learned(), relative(), NoPosition()]
    total = parts[0] + parts[1] + parts[2]
    assert total.parts() == parts
    assert Sum([Sum(parts[:2]), parts[2]]).parts() == parts
    assert total.acts_on_tokens
    assert total.acts_in_attention
    x = torch.randn(2, 12, 8)
    torch.testing.assert_close(total.embed(x, GRID), x + parts[0].pos_embed)  # type: ignore[operator]
    (term,) = total.terms(GRID).of(LineBias)
    assert torch.equal(term.values, parts[1].terms(GRID).of(LineBias)[0].values)


@pytest.mark.parametrize(
    ("parts", "rules"),
    [
        ((learned, relative), ("interpolated", "clipped")),
        ((learned, Extending), ("interpolated", "extended", "clipped")),
        ((NoPosition, relative), ("interpolated", "clipped")),
        ((NoPosition, NoPosition), ("as is",)),
        ((NoPosition, Rigid), ()),
        ((relative, Rigid), ()),
        ((), ("as is",)),
    ],
)
def test_a_sum_offers_the_rules_of_its_parts(parts: tuple[object, ...], rules: tuple[str, ...]) -> None:
    assert Sum(part() for part in parts).growth == rules  # type: ignore[operator]


def test_each_part_grows_by_the_rule_or_by_its_own_first() -> None:
    total = learned() + relative() + Extending() + NoPosition()
    large = Grid(5, 6)
    for rule, sizes, beyond, extended in (
        ("interpolated", (5, 6), "raise", "extended"),
        ("clipped", (3, 4), "clip", "clipped"),
        ("extended", (5, 6), "raise", "extended"),
    ):
        grown = total.grow(large, rule)
        absolute, bias, other, nothing = grown.parts()
        assert absolute.sizes == (5, 6)
        assert (bias.sizes, bias.beyond) == (sizes, beyond)
        assert other.grown_by == extended
        assert nothing is total.parts()[3]
        grown.embed(torch.randn(2, 30, 8), large)
        grown.terms(large)
    assert total.parts()[0].sizes == (3, 4), "the sum itself is left as it is"
    for rule in ("as is", "bent"):
        with pytest.raises(ValueError, match=r"Extending \+ NoPosition \(it has interpolated, clipped, extended\)"):
            total.grow(large, rule)
    with pytest.raises(ValueError, match="it has none at all"):
        (relative() + Rigid()).grow(large, "clipped")
    assert (NoPosition() + NoPosition()).grow(large, "as is").growth == ("as is",)


def test_a_sum_extends_its_parts() -> None:
    """Longer sequences, and on shorter ones bit for bit what the sum said."""
    learned = LearnedPositionEmbedding(8, seq_len=5, init_std=1.0)
    total = learned + RelativePositionBias(2, seq_len=5, init_std=1.0) + RotaryEmbedding(4) + ALiBi(2)
    longer = total.extend(11)
    assert [type(part) for part in longer.parts()] == [type(part) for part in total.parts()]
    assert longer.parts()[2] is total.parts()[2], "what is defined at any length is itself"
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    ours, theirs = (attended(each, q, k, v, queries=Sequence(5)) for each in (longer, total))
    assert torch.equal(ours, theirs)
    x = torch.randn(1, 5, 8)
    assert torch.equal(longer.embed(x, Sequence(5)), total.embed(x, Sequence(5)))
    longer.terms(Sequence(11))
    longer.embed(torch.randn(1, 11, 8), Sequence(11))
    with pytest.raises(ValueError, match="got Rigid"):
        (total + Rigid()).extend(11)


# by name


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_named_sum_is_found_with_its_own_title(preset: Any) -> None:
    assert find(preset.name) is preset
    names = preset.name.split("+")
    assert preset.title != " + ".join(find(name).title for name in names)
    site = Site(2, 4, 8, Grid(3, 3))
    built = preset.build(site)
    assert [str(part) for part in built.parts()] == [str(find(name).build(site)) for name in names]
    assert built.growth == ("interpolated", "clipped")


def test_any_other_sum_is_written() -> None:
    found = find("sinusoidal_2d+alibi+t5")
    assert found.name not in presets()
    assert found.title == "Sinusoidal absolute, 2-D + ALiBi + T5 bias"
    assert found.token_axes == (2,)
    built = found.build(Site(2, 4, 8, Grid(2, 3)))
    assert [type(part) for part in built.parts()] == [SinusoidalPositionEmbedding, ALiBi, T5Bias]
    assert find("t5 + alibi").name == "t5+alibi"
    assert find("relative_2d+learned").title.endswith(" + Learned absolute"), "in another order it has no name"


# trainable


@pytest.mark.parametrize("name", [*presets(), "alibi+relative_2d+learned"])
def test_a_site_says_whether_parameters_train(name: str) -> None:
    grid = Grid(2, 3)
    made = find(name).make(Site(2, 8, 16, grid))
    frozen = find(name).make(Site(2, 8, 16, grid, trainable=False))
    learns = bool(list(made.parameters()))
    assert made.trainable == learns
    assert not frozen.trainable
    assert not any(parameter.requires_grad for parameter in frozen.parameters())
    assert len(list(frozen.parameters())) == len(list(made.parameters()))


def test_trainable_is_set_and_read() -> None:
    total = learned() + relative()
    assert total.trainable
    total.parts()[0].trainable = False
    assert total.trainable, "the other part still learns"
    assert not total.parts()[0].trainable
    total.trainable = False
    assert not total.trainable
    assert not any(parameter.requires_grad for parameter in total.parameters())
    total.trainable = True
    assert all(parameter.requires_grad for parameter in total.parameters())
    assert not NoPosition().trainable, "it has nothing to train"


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
    ["learned+relative_2d", by_hand, "none"],
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
