"""The learned relative bias, in one to three dimensions."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
from position.suites import PositionSuite, cover
from relpos import (
    Grid,
    LearnedPositionEmbedding,
    LineBias,
    Positions,
    RelativePositionBias,
    Sequence,
    Site,
    T5Bias,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)
from relpos.core import Coordinates, Offsets
from relpos.position.base.tables import geometric_positions
from relpos.testing import SuiteCase, oracle


class TestRelative1d(PositionSuite):
    axes = (1, 2)
    raster = True
    translation_invariant = True
    preset = "relative_1d"

    def build(self, site: Site) -> RelativePositionBias:
        queries, keys = site.queries, site.queries if site.keys is None else site.keys
        if not isinstance(queries, Grid) and queries.axes == 2:
            return RelativePositionBias(site.num_heads, seq_len=20, init_std=1.0)
        (length,) = cover(replace(site, queries=queries.raster(), keys=keys.raster()))
        prefix = max(queries.prefix, keys.prefix)
        return RelativePositionBias(site.num_heads, seq_len=length, bias_type="1d", init_std=1.0, prefix=prefix)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        table = mechanism.relative_position_bias_table
        return oracle.relative_bias(table, self.places(queries), self.places(keys), mechanism.sizes)


class TestRelative2d(TestRelative1d):
    interpreted = True
    axes = (2,)
    raster = False
    preset = "relative_2d"

    def build(self, site: Site) -> RelativePositionBias:
        prefix = max(site.queries.prefix, 0 if site.keys is None else site.keys.prefix)
        return RelativePositionBias(site.num_heads, window_size=cover(site), init_std=1.0, prefix=prefix)


class TestRelative3d(TestRelative2d):
    interpreted = False
    alike = True
    axes = (3,)
    row = "relative_2d (3-D)"

    def cases(self) -> list[SuiteCase]:
        cells = Positions(torch.tensor([[1, 0, 2], [0, 1, 0], [1, 1, 1]]), low=(0, 0, 0), high=(1, 1, 2))
        return [
            *super().cases(),
            SuiteCase("3 x 2 x 4 with a prefix token", Grid(3, 2, 4, prefix=1)),
            SuiteCase("unequal boxes", Grid(1, 3, 2), Grid(3, 2, 2)),
            SuiteCase("some cells of a box", cells, Grid(2, 2, 3)),
        ]


# the index and the table of Swin and BEiT


@pytest.mark.parametrize("length", [1, 7])
def test_index_1d_by_loops(length: int) -> None:
    rows = oracle.table_rows([(n,) for n in range(length)], [(n,) for n in range(length)], (length,))
    assert torch.equal(get_relative_position_index_1d(length), rows)
    assert torch.equal(RelativePositionBias(1, seq_len=length).relative_position_index, rows)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("window", [(1, 1), (4, 8), (5, 3), (2, 3, 4)])
def test_index_of_grids_by_loops(window: Any, prefix: int) -> None:
    places = oracle.places(Grid(*window, prefix=prefix))
    rows = oracle.table_rows(places, places, window)
    assert torch.equal(RelativePositionBias(1, window, prefix=prefix).relative_position_index, rows)
    if not prefix and len(window) == 2:
        assert torch.equal(get_relative_position_index_2d(window), rows)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("sizes", [{"window_size": (3, 4)}, {"window_size": (2, 3, 2)}, {"seq_len": 5}], ids=str)
def test_forward_is_the_dense_bias(sizes: dict[str, Any], prefix: int) -> None:
    bias = RelativePositionBias(3, **sizes, prefix=prefix, init_std=1.0)
    table, index = bias.relative_position_bias_table, bias.relative_position_index
    assert torch.equal(bias(), table.T[:, index])
    upstream = torch.randn_like(bias())
    ours, theirs = (torch.autograd.grad(x, table, upstream)[0] for x in (bias(), table[index].permute(2, 0, 1)))
    torch.testing.assert_close(ours, theirs)


def test_checkpoints_of_others_load() -> None:
    ours = RelativePositionBias(3, (2, 3), prefix=1)
    assert list(RelativePositionBias(3, (7, 7)).state_dict()) == ["relative_position_bias_table"]
    theirs = {
        "relative_position_bias_table": torch.randn(18, 3),
        "relative_position_index": torch.zeros(7, 7, dtype=torch.long),
    }
    ours.load_state_dict(theirs, strict=True)
    assert torch.equal(ours.relative_position_bias_table, theirs["relative_position_bias_table"])
    assert "relative_position_index" in theirs, "the caller's own dictionary is left alone"
    inside = torch.nn.ModuleDict({"a": ours})
    inside.load_state_dict({f"a.{name}": x for name, x in theirs.items()}, strict=True)


@pytest.mark.parametrize("std", [0.0, 0.02, 5.0])
@pytest.mark.parametrize(
    "make",
    [
        lambda std: RelativePositionBias(32, (16, 16), init_std=std).relative_position_bias_table,
        lambda std: LearnedPositionEmbedding(64, seq_len=500, init_std=std).pos_embed,
    ],
)
def test_tables_start_from_a_normal_cut_far_out(make: Any, std: float) -> None:
    """At 2, as timm and Swin cut, or at two deviations where those are more."""
    start = make(std).detach()
    assert (start.abs() <= max(2.0, 2 * std)).all()
    left = 0.8796 if std == 5.0 else 1.0
    torch.testing.assert_close(start.std(), torch.tensor(left * std), rtol=0.03, atol=0)


# BEiT's way to other windows; the others are in test_windows.py


@pytest.mark.parametrize(("old", "new"), [(7, 14), (14, 24), (4, 7), (3, 9), (2, 5), (1, 4), (5, 5), (6, 3)])
def test_geometric_places(old: int, new: int) -> None:
    """A geometric progression of steps out to the farthest offset; the offsets themselves where none lie beyond."""
    places = geometric_positions(old, new)
    assert len(places) == 2 * old - 1
    assert places == [-place for place in reversed(places)]
    side = places[old - 1 :]
    steps = [b - a for a, b in itertools.pairwise(side)]
    assert steps[:1] == [1.0][: old - 1]
    if new <= old or old == 2:
        assert steps == [1.0] * (old - 1)
    elif old > 1:
        assert side[-1] == pytest.approx(new - 1, abs=1e-9)
        ratios = [b / a for a, b in itertools.pairwise(steps)]
        assert min(ratios) > 1
        assert max(ratios) == pytest.approx(min(ratios), rel=1e-12)


@pytest.mark.filterwarnings("ignore")  # of timm's indexing
@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize(("old", "new"), [((7, 7), (14, 14)), ((7, 5), (10, 8)), ((14, 14), (24, 24))])
def test_geometric_parity_with_timm(timm: Any, old: Any, new: Any, prefix: int) -> None:
    """Their bisection stops at 1e-6 of the ratio, which moves far places by up to 1e-4; it goes from 1.01 to 1.5 only,
    so that an axis that keeps its size is stretched by 1.01, and one that grows by more does not reach the border."""
    bias = RelativePositionBias(3, old, prefix=prefix, init_std=1.0)
    before, middle = bias.relative_position_bias_table.detach(), (2 * new[0] - 1) * (2 * new[1] - 1) // 2
    ours = bias.resize(new, mode="geometric").relative_position_bias_table.detach()
    published = timm.layers.pos_embed_rel.resize_rel_pos_bias_table
    theirs = published(before, new, tuple(ours.shape), old)
    parity.agree(
        "relative_2d",
        "timm resize_rel_pos_bias_table, geometric",
        {"output": ours},
        {"output": theirs},
        limit=1e-4,
        why="theirs searches its ratio by halves, to 1e-6",
    )
    assert torch.equal(ours[middle], before[(2 * old[0] - 1) * (2 * old[1] - 1) // 2]), "offset 0 keeps its number"
    assert not prefix or torch.equal(ours[-3:], before[-3:])


def test_geometric_keeps_what_does_not_grow() -> None:
    bias = RelativePositionBias(3, (5, 4), prefix=1, init_std=1.0)
    cells = bias.relative_position_bias_table.detach()[:-3].unflatten(0, (9, 7))
    for rows, columns in ((5, 4), (3, 4), (1, 2)):
        small = bias.resize((rows, columns), mode="geometric").relative_position_bias_table.detach()
        kept = cells[5 - rows : 4 + rows, 4 - columns : 3 + columns].flatten(0, 1)
        torch.testing.assert_close(small[:-3], kept)


def test_a_box_grows_geometrically_along_each_axis() -> None:
    """Depth keeps its size; each slice of it grows as a window does."""
    box = RelativePositionBias(3, (2, 3, 4), init_std=1.0)
    before = box.relative_position_bias_table.detach().unflatten(0, (3, 5, 7))
    after = box.resize((2, 5, 6), mode="geometric").relative_position_bias_table.detach().unflatten(0, (3, 9, 11))
    window = RelativePositionBias(3, (3, 4))
    for old, new in zip(before, after, strict=True):
        window.load_state_dict({"relative_position_bias_table": old.flatten(0, 1)}, strict=False)
        grown = window.resize((5, 6), mode="geometric").relative_position_bias_table.detach()
        torch.testing.assert_close(new.flatten(0, 1), grown)


@pytest.mark.parametrize(
    ("length", "new", "read"),
    [
        (4, 8, {0: 0, 7: 3, 14: 6}),
        (2, 5, {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 2, 6: 2, 7: 2, 8: 2}),
        (1, 3, {0: 0, 1: 0, 2: 0, 3: 0, 4: 0}),
    ],
)
def test_geometric_on_a_line(length: int, new: int, read: dict[int, int]) -> None:
    """The ends stay the ends; of one offset a side no ratio reaches the border, and all beyond is that offset's."""
    line = RelativePositionBias(2, seq_len=length, init_std=1.0)
    grown = line.resize(new, mode="geometric").relative_position_bias_table.detach()
    for row, old in read.items():
        torch.testing.assert_close(grown[row], line.relative_position_bias_table.detach()[old])


# what a subclass, an instance or another setting says


def bias_of(own: Any) -> Tensor:
    (term,) = own.terms(Sequence(6)).of(LineBias)
    values: Tensor = term.values
    return values


def test_what_a_subclass_says_of_axes_counts() -> None:
    class Rows(RelativePositionBias):
        axes = 2

    with pytest.raises(ValueError, match="queries with 2 axes for Rows"):
        Rows(2, seq_len=6).terms(Sequence(6))


@pytest.mark.parametrize(("kind", "size"), [(RelativePositionBias, {"seq_len": 6}), (T5Bias, {})])
def test_what_a_subclass_says_of_values_counts(kind: Any, size: dict[str, int]) -> None:
    class Twice(kind):  # type: ignore[misc]
        def bias(self, offsets: Offsets) -> Tensor:
            return 2 * super().bias(offsets)

    twice, once = Twice(2, **size), kind(2, **size)
    once.load_state_dict(twice.state_dict())
    torch.testing.assert_close(bias_of(twice), 2 * bias_of(once))


def test_what_an_instance_says_of_values_counts() -> None:
    bias: Any = RelativePositionBias(2, seq_len=6)
    bias.bias = lambda offsets: torch.full((2, len(offsets.kind)), 7.0)
    assert (bias_of(bias) == 7).all()


@pytest.mark.parametrize("rows", [9, 13])
@pytest.mark.usefixtures("unchecked")
def test_another_table_in_its_place_is_refused(rows: int) -> None:
    bias = RelativePositionBias(2, seq_len=6)
    bias.terms(Sequence(6))
    bias.relative_position_bias_table = torch.nn.Parameter(torch.randn(rows, 2))
    with pytest.raises(ValueError, match=r"RelativePositionBias.bias to return \[heads, 11\]"):
        bias.terms(Sequence(6))


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # of PyTorch, for its forward mode
def test_derivatives_are_pushed_forward_through_a_whole_table() -> None:
    bias, table = RelativePositionBias(2, seq_len=6), torch.randn(11, 2)

    def values(x: Tensor) -> Tensor:
        (term,) = bias.terms_from({"relative_position_bias_table": x}, Sequence(6)).of(LineBias)
        return term.values

    pushed = torch.func.jvp(values, (table,), (table,))[1]
    torch.testing.assert_close(pushed, values(table))


def test_settings_changed_between_two_calls_count() -> None:
    bias = RelativePositionBias(2, seq_len=6, beyond="clip")
    bias.terms(Sequence(9))
    bias.beyond = "raise"
    for _ in range(2):
        with pytest.raises(ValueError, match="offsets from -5 to 5"):
            bias.terms(Sequence(9))
    assert bias.terms(Sequence(6)).items
