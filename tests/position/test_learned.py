"""Learned absolute positions, on sequences and grids."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Grid, LearnedPositionEmbedding, Positions, Sequence, Site
from relpos.core import Coordinates
from relpos.testing import oracle


class TestLearnedSequence(LibrarySuite):
    axes = (1,)
    preset = "learned"

    def takes(self, case: Any) -> bool:
        return super().takes(case) and case.queries.low[0] >= 0

    def build(self, site: Site) -> LearnedPositionEmbedding:
        return LearnedPositionEmbedding(
            site.embed_dim, seq_len=site.queries.high[0] + 1, prefix=site.queries.prefix, init_std=1.0
        )

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        return _by_loops(mechanism, x, [place and place[0] for place in oracle.places(coordinates)])


class TestLearnedGrid(LibrarySuite):
    alike = True
    axes = (2, 3)
    irregular = False
    preset = "learned"

    def build(self, site: Site) -> LearnedPositionEmbedding:
        assert isinstance(site.queries, Grid)
        return LearnedPositionEmbedding(
            site.embed_dim, grid_size=site.queries.sizes, prefix=site.queries.prefix, init_std=1.0
        )

    def oracle_embed(self, mechanism: Any, x: Tensor, coordinates: Coordinates) -> Tensor:
        return _by_loops(mechanism, x, [place and place[0] for place in oracle.raster(coordinates)])


def _by_loops(mechanism: Any, x: Tensor, numbers: list[Any]) -> Tensor:
    """Prefix tokens take the first rows, one each; the others the row of their number behind them."""
    prefix = sum(number is None for number in numbers)
    rows = [n if number is None else prefix + number for n, number in enumerate(numbers)]
    return oracle.learned_absolute(x, mechanism.pos_embed[0], rows)


def test_shapes_and_names() -> None:
    learned = LearnedPositionEmbedding(12, grid_size=(3, 4), prefix=1)
    assert {name: x.shape for name, x in learned.named_parameters()} == {"pos_embed": (1, 13, 12)}
    assert 0.01 < learned.pos_embed.std() < 0.03
    assert learned.acts_on_tokens
    assert not learned.acts_in_attention


def test_moved_tokens_get_other_vectors() -> None:
    learned = LearnedPositionEmbedding(4, seq_len=6, init_std=1.0)
    x = torch.zeros(1, 3, 4)
    here, there = learned.embed(x, Sequence(3)), learned.embed(x, Sequence(3, start=1))
    assert torch.equal(here[:, 1:], there[:, :-1])
    assert not torch.equal(here, there)


def test_keeps_the_dtype_of_tokens() -> None:
    learned = LearnedPositionEmbedding(4, seq_len=6)
    assert learned.embed(torch.zeros(1, 6, 4, dtype=torch.bfloat16), Sequence(6)).dtype == torch.bfloat16


def test_resize_leaves_the_original() -> None:
    learned = LearnedPositionEmbedding(4, grid_size=(3, 4), prefix=2, init_std=1.0)
    before = learned.pos_embed.detach().clone()
    grown = learned.resize((5, 6))
    assert torch.equal(learned.pos_embed, before)
    assert grown.pos_embed.shape == (1, 32, 4)
    assert torch.equal(grown.pos_embed[:, :2], before[:, :2])
    assert isinstance(learned.grow(Grid(2, 2, prefix=2), "interpolated"), LearnedPositionEmbedding)
    torch.testing.assert_close(learned.resize((3, 4)).pos_embed.detach(), before)
    with pytest.raises(ValueError, match="growth rule"):
        learned.grow(Grid(2, 2, prefix=2), "clipped")


def test_extend_begins_again() -> None:
    """Beltagy et al. 2020, section 5: the trained vectors are copied behind themselves."""
    learned = LearnedPositionEmbedding(4, seq_len=3, prefix=2, init_std=1.0)
    before = learned.pos_embed.detach()
    longer = learned.extend(8)
    rows = [0, 1, *(2 + n for n in (0, 1, 2, 0, 1, 2, 0, 1))]
    assert torch.equal(longer.pos_embed, before[:, rows])
    assert longer.sizes == (8,)
    assert learned.sizes == (3,), "the mechanism itself is left as it is"
    assert torch.equal(learned.extend(2).pos_embed, before), "it never forgets a place"
    assert learned.growth == ("interpolated", "repeated")
    grown = learned.grow(Sequence(4, start=4, prefix=2), "repeated")
    assert torch.equal(grown.pos_embed, longer.pos_embed)  # type: ignore[arg-type]
    grid = LearnedPositionEmbedding(4, grid_size=(2, 3))
    assert grid.growth == ("interpolated",)
    with pytest.raises(ValueError, match="growth rule"):
        grid.grow(Grid(3, 3), "repeated")
    learned.trainable = False
    assert not learned.extend(8).trainable


def test_resize_of_a_sequence_by_loops() -> None:
    learned = LearnedPositionEmbedding(4, seq_len=5, init_std=1.0)
    old, new = learned.pos_embed.detach()[0], learned.resize(9).pos_embed.detach()[0]
    for row in range(9):
        place = min(max((row + 0.5) * 5 / 9 - 0.5, 0), 4)
        low = min(int(place), 3)
        torch.testing.assert_close(new[row], old[low] * (1 - place + low) + old[low + 1] * (place - low))


@pytest.mark.usefixtures("unchecked")
def test_errors() -> None:
    learned = LearnedPositionEmbedding(4, grid_size=(2, 3), prefix=1)
    for call in (
        lambda: LearnedPositionEmbedding(4),
        lambda: LearnedPositionEmbedding(4, seq_len=3, grid_size=(2, 2)),
        lambda: LearnedPositionEmbedding(0, seq_len=3),
        lambda: learned.embed(torch.zeros(1, 6, 4), Grid(2, 3)),
        lambda: learned.embed(torch.zeros(1, 7, 5), Grid(2, 3, prefix=1)),
        lambda: learned.embed(torch.zeros(1, 10, 4), Grid(3, 3, prefix=1)),
        lambda: learned.embed(torch.zeros(1, 7, 4), Sequence(6, prefix=1)),
        lambda: LearnedPositionEmbedding(4, seq_len=3).embed(torch.zeros(1, 4, 4), Sequence(4)),
        lambda: LearnedPositionEmbedding(4, seq_len=3).embed(torch.zeros(1, 2, 4), Sequence(2, start=-1)),
        lambda: learned.resize(4),
        lambda: learned.resize((2, 2, 2)),
        lambda: LearnedPositionEmbedding.from_site(Site(1, 4, 4, Positions(torch.arange(2), low=0, high=1))),
    ):
        with pytest.raises(ValueError, match=r"expected .*; got .*\. "):
            call()


def test_prefix_tokens_alone() -> None:
    learned = LearnedPositionEmbedding(4, seq_len=3, prefix=2, init_std=1.0)
    x = torch.randn(2, 2, 4)
    torch.testing.assert_close(learned.embed(x, Sequence(0, prefix=2)), x + learned.pos_embed[:, :2])
