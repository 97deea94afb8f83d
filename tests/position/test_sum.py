"""Sums of mechanisms: parts, roles, and growth by rules that not all parts have."""

from __future__ import annotations

import copy

import pytest
import torch

from relpos import Grid, LearnedPositionEmbedding, NoPosition, RelativePositionBias, Sequence
from relpos.core import Coordinates, LineBias, Terms
from relpos.position import Mechanism, Sum

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
        assert isinstance(nothing, NoPosition)
        grown.embed(torch.randn(2, 30, 8), large)
        grown.terms(large)
    assert total.parts()[0].sizes == (3, 4), "the sum itself is left as it is"
    for rule in ("as is", "bent"):
        with pytest.raises(ValueError, match=r"Extending \+ NoPosition \(it has interpolated, clipped, extended\)"):
            total.grow(large, rule)
    with pytest.raises(ValueError, match="it has none at all"):
        (relative() + Rigid()).grow(large, "clipped")


def test_what_is_defined_anywhere_grows_as_it_is() -> None:
    assert (NoPosition() + NoPosition()).grow(Sequence(9), "as is").growth == ("as is",)
