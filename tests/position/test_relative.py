"""The learned relative bias, in one and two dimensions."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
from conformance.suite import LibrarySuite
from relpos import (
    Grid,
    LearnedPositionEmbedding,
    LineBias,
    Positions,
    RelativePositionBias,
    Sequence,
    Site,
    T5Bias,
    attention,
    get_relative_position_index_1d,
    get_relative_position_index_2d,
)
from relpos.core import Coordinates, Offsets
from relpos.position.tables import geometric_places
from relpos.testing import oracle


class TestRelative1d(LibrarySuite):
    axes = (1, 2)
    translation_invariant = True
    preset = "relative_1d"

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> RelativePositionBias:
        queries, keys = site.queries, site.queries if site.keys is None else site.keys
        if not isinstance(queries, Grid) and queries.axes == 2:
            return RelativePositionBias(site.num_heads, seq_len=20, init_std=1.0)
        length = _cover(queries.raster(), keys.raster())[0]
        prefix = max(queries.prefix, keys.prefix)
        return RelativePositionBias(site.num_heads, seq_len=length, bias_type="1d", init_std=1.0, prefix=prefix)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        table = mechanism.relative_position_bias_table
        return oracle.relative_bias(table, oracle.raster(queries), oracle.raster(keys), mechanism.sizes)

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestRelative2d(LibrarySuite):
    interpreted = True
    axes = (2,)
    translation_invariant = True
    preset = "relative_2d"

    def build(self, site: Site) -> RelativePositionBias:
        queries, keys = site.queries, site.queries if site.keys is None else site.keys
        prefix = max(queries.prefix, keys.prefix)
        return RelativePositionBias(site.num_heads, window_size=_cover(queries, keys), init_std=1.0, prefix=prefix)

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        table = mechanism.relative_position_bias_table
        return oracle.relative_bias(table, oracle.places(queries), oracle.places(keys), mechanism.sizes)


def _cover(queries: Coordinates, keys: Coordinates) -> Any:
    """The window whose table holds every offset that the coordinates' bounds allow."""
    return tuple(
        max(qh - kl, kh - ql) + 1 for ql, qh, kl, kh in zip(queries.low, queries.high, keys.low, keys.high, strict=True)
    )


# the names and shapes of the documents


def test_table_and_index() -> None:
    bias = RelativePositionBias(num_heads=4, window_size=(7, 7), bias_type="2d")
    assert bias.relative_position_bias_table.shape == (169, 4)
    assert bias.relative_position_index.shape == (49, 49)
    assert list(bias.state_dict()) == ["relative_position_bias_table"]
    assert bias.relative_position_bias_table.std() < 0.03
    line = RelativePositionBias(num_heads=4, seq_len=5)
    assert line.bias_type == "1d"
    assert line.relative_position_bias_table.shape == (9, 4)
    assert RelativePositionBias(3, (2, 3), prefix=1).relative_position_bias_table.shape == (18, 3)


@pytest.mark.parametrize("length", [1, 2, 7])
def test_index_1d_by_loops(length: int) -> None:
    rows = oracle.table_rows([(n,) for n in range(length)], [(n,) for n in range(length)], (length,))
    assert torch.equal(get_relative_position_index_1d(length), rows)
    assert torch.equal(RelativePositionBias(1, seq_len=length).relative_position_index, rows)


@pytest.mark.parametrize("prefix", [0, 1, 3])
@pytest.mark.parametrize("window", [(1, 1), (1, 5), (4, 8), (5, 3)])
def test_index_2d_by_loops(window: tuple[int, int], prefix: int) -> None:
    places = oracle.places(Grid(*window, prefix=prefix))
    rows = oracle.table_rows(places, places, window)
    assert torch.equal(RelativePositionBias(1, window, prefix=prefix).relative_position_index, rows)
    if not prefix:
        assert torch.equal(get_relative_position_index_2d(window), rows)


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("sizes", [{"window_size": (3, 4)}, {"seq_len": 5}], ids=str)
def test_forward_is_the_dense_bias(sizes: dict[str, Any], prefix: int) -> None:
    bias = RelativePositionBias(3, **sizes, prefix=prefix, init_std=1.0)
    index = bias.relative_position_index
    dense = bias()
    assert torch.equal(dense, bias.relative_position_bias_table.T[:, index])
    upstream = torch.randn_like(dense)
    (ours,) = torch.autograd.grad(dense, bias.relative_position_bias_table, upstream)
    (theirs,) = torch.autograd.grad(
        bias.relative_position_bias_table[index].permute(2, 0, 1), bias.relative_position_bias_table, upstream
    )
    torch.testing.assert_close(ours, theirs)


def test_checkpoints_of_others_load() -> None:
    ours = RelativePositionBias(3, (2, 3), prefix=1)
    theirs = {
        "relative_position_bias_table": torch.randn(18, 3),
        "relative_position_index": torch.zeros(7, 7, dtype=torch.long),
    }
    ours.load_state_dict(theirs, strict=True)
    assert torch.equal(ours.relative_position_bias_table, theirs["relative_position_bias_table"])
    assert "relative_position_index" in theirs, "the caller's own dictionary is left alone"
    inside = torch.nn.ModuleDict({"a": RelativePositionBias(3, (2, 3), prefix=1)})
    inside.load_state_dict({f"a.{name}": x for name, x in theirs.items()}, strict=True)


# offsets beyond the table


def test_beyond_raises_or_clips() -> None:
    raising = RelativePositionBias(2, seq_len=4, init_std=1.0)
    with pytest.raises(ValueError, match="offsets from -3 to 3 on axis 0"):
        raising.terms(Sequence(5))
    with pytest.raises(ValueError, match="offsets from -1 to 1 on axis 1"):
        RelativePositionBias(2, (4, 2)).terms(Grid(4, 3))
    clipping = RelativePositionBias(2, seq_len=4, init_std=1.0, beyond="clip")
    (term,) = clipping.terms(Sequence(9)).of(LineBias)
    table = clipping.relative_position_bias_table
    for entry in range(17):
        assert torch.equal(term.values[:, entry], table[min(max(entry - 8, -3), 3) + 3])
    grid = RelativePositionBias(2, (2, 3), init_std=1.0, beyond="clip")
    (term,) = grid.terms(Grid(4, 4)).of(LineBias)
    rows = grid.relative_position_bias_table.unflatten(0, (3, 5))
    values = term.values.unflatten(1, (7, 7))
    for dy in range(-3, 4):
        for dx in range(-3, 4):
            wanted = rows[min(max(dy, -1), 1) + 1, min(max(dx, -2), 2) + 2]
            assert torch.equal(values[:, dy + 3, dx + 3], wanted)


def test_a_smaller_grid_needs_nothing() -> None:
    bias = RelativePositionBias(2, (4, 5), init_std=1.0, prefix=1)
    small = RelativePositionBias(2, (2, 3), prefix=1)
    with torch.no_grad():
        rows = bias.relative_position_bias_table[:-3].unflatten(0, (7, 9))[2:5, 2:7].flatten(0, 1)
        small.relative_position_bias_table.copy_(torch.cat([rows, bias.relative_position_bias_table[-3:]]))
    q, k, v = torch.randn(3, 1, 2, 7, 4)
    ours, theirs = (attention(q, k, v, position=each, queries=Grid(2, 3, prefix=1)) for each in (bias, small))
    assert torch.equal(ours, theirs)  # type: ignore[arg-type]


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
    assert bool(start.any()) == (std > 0)


# growing


def test_resize_keeps_the_prefix_rows_and_the_middle() -> None:
    for sizes, new in (({"window_size": (3, 4)}, (5, 6)), ({"seq_len": 4}, 9)):
        bias = RelativePositionBias(3, **sizes, prefix=1, init_std=1.0)  # type: ignore[arg-type]
        before = bias.relative_position_bias_table.detach().clone()
        grown = bias.resize(new)  # type: ignore[arg-type]
        table = grown.relative_position_bias_table
        assert grown.table_sizes == tuple(2 * size - 1 for size in ((new,) if isinstance(new, int) else new))
        assert torch.equal(table[-3:], before[-3:])
        torch.testing.assert_close(table[(len(table) - 3) // 2], before[(len(before) - 3) // 2])
        assert torch.equal(bias.relative_position_bias_table, before), "the mechanism itself is left as it is"
        same = bias.resize(tuple(bias.sizes) if len(bias.sizes) == 2 else bias.sizes[0])  # type: ignore[arg-type]
        torch.testing.assert_close(same.relative_position_bias_table.detach(), before)


def test_resize_1d_by_loops() -> None:
    """Linear interpolation between the centres of cells."""
    bias = RelativePositionBias(2, seq_len=3, init_std=1.0)
    old, new = bias.relative_position_bias_table.detach(), bias.resize(5).relative_position_bias_table.detach()
    for row in range(9):
        place = min(max((row + 0.5) * 5 / 9 - 0.5, 0), 4)
        low = min(int(place), 3)
        torch.testing.assert_close(new[row], old[low] * (1 - place + low) + old[low + 1] * (place - low))


def test_grow() -> None:
    bias = RelativePositionBias(3, (3, 3), prefix=1, init_std=1.0)
    grown = bias.grow(Grid(5, 4, prefix=1), "interpolated")
    assert isinstance(grown, RelativePositionBias)
    assert grown.sizes == (5, 4)
    clipped = bias.grow(Grid(5, 4, prefix=1), "clipped")
    assert isinstance(clipped, RelativePositionBias)
    assert clipped.beyond == "clip"
    assert bias.beyond == "raise"
    assert torch.equal(clipped.relative_position_bias_table, bias.relative_position_bias_table)
    clipped.terms(Grid(5, 4, prefix=1))
    line = RelativePositionBias(3, seq_len=9).grow(Grid(4, 4), "interpolated")
    line.terms(Grid(4, 4))
    with pytest.raises(ValueError, match="interpolated, clipped"):
        bias.grow(Grid(5, 5), "extended")


def test_from_site() -> None:
    site = Site(3, 4, 12, Grid(2, 5, prefix=1))
    assert RelativePositionBias.from_site(site).sizes == (2, 5)
    line = RelativePositionBias.from_site(site, "1d")
    assert (line.sizes, line.prefix) == ((10,), 1)


@pytest.mark.parametrize(
    ("queries", "keys", "bias_type", "sizes", "prefix"),
    [
        (Sequence(3), Sequence(9), "1d", (9,), 0),
        (Sequence(3, start=20), Sequence(9), "1d", (23,), 0),
        (Sequence(1, start=6), Sequence(7), "1d", (7,), 0),
        (Sequence(9, prefix=1), Sequence(3), "1d", (9,), 1),
        (Grid(2, 3), Grid(4, 2, prefix=2), "2d", (4, 3), 2),
        (Grid(2, 3), Grid(4, 2), "1d", (8,), 0),
        (Grid(2, 3), Positions(torch.tensor([[5, 0]]), low=(0, 0), high=(5, 2)), "2d", (6, 3), 0),
        (Positions(torch.tensor([4, 2]), low=2, high=4), None, "1d", (3,), 0),
        (Sequence(5, start=7), None, "1d", (5,), 0),
    ],
)
def test_from_site_covers_both_sides(
    queries: Coordinates, keys: Coordinates | None, bias_type: Any, sizes: tuple[int, ...], prefix: int
) -> None:
    bias = RelativePositionBias.from_site(Site(3, 4, 12, queries, keys), bias_type)
    assert (bias.sizes, bias.prefix) == (sizes, prefix)
    bias.terms(queries, keys)


@pytest.mark.parametrize(("old", "new"), [(7, 14), (14, 24), (4, 7), (3, 9), (2, 5), (1, 4), (5, 5), (6, 3)])
def test_geometric_places(old: int, new: int) -> None:
    """A geometric progression of steps out to the farthest offset; the offsets themselves where none lie beyond."""
    places = geometric_places(old, new)
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
    for size in ((5, 4), (3, 4), (1, 2)):
        small = bias.resize(size, mode="geometric").relative_position_bias_table.detach()
        cells = bias.relative_position_bias_table.detach()[:-3].unflatten(0, (9, 7))
        (rows, columns) = size
        kept = cells[5 - rows : 4 + rows, 4 - columns : 3 + columns].flatten(0, 1)
        torch.testing.assert_close(small[:-3], kept)
    line = RelativePositionBias(2, seq_len=4, init_std=1.0)
    pair = RelativePositionBias(2, seq_len=2, init_std=1.0)  # one offset a side: no ratio reaches the border
    (first, middle, last) = pair.relative_position_bias_table.detach()
    wanted = torch.stack([first] * 4 + [middle] + [last] * 4)
    torch.testing.assert_close(pair.resize(5, mode="geometric").relative_position_bias_table.detach(), wanted)
    grown = line.resize(8, mode="geometric").relative_position_bias_table.detach()
    for end in (0, -1):
        torch.testing.assert_close(grown[end], line.relative_position_bias_table.detach()[end])
    assert (
        RelativePositionBias(2, seq_len=1).resize(3, mode="geometric").relative_position_bias_table.unique().numel()
        <= 2
    )


@pytest.mark.parametrize("prefix", [0, 2])
def test_extend_repeats_the_farthest_offset(prefix: int) -> None:
    """What the rule "clipped" reads, in rows of its own."""
    bias = RelativePositionBias(2, seq_len=4, init_std=1.0, prefix=prefix)
    longer = bias.extend(9)
    assert longer.sizes == (9,)
    assert longer.relative_position_bias_table.shape == (17 + (3 if prefix else 0), 2)
    clipped = bias.grow(Sequence(9), "clipped")
    for coordinates in (Sequence(4, prefix=prefix), Sequence(9, prefix=prefix), Sequence(3, start=5, prefix=prefix)):
        ours, theirs = (each.terms(coordinates).of(LineBias)[0].values for each in (longer, clipped))
        assert torch.equal(ours, theirs)
    assert torch.equal(bias.extend(2).relative_position_bias_table, bias.relative_position_bias_table)
    assert bias.sizes == (4,), "the mechanism itself is left as it is"
    assert longer.trainable
    bias.trainable = False
    assert not bias.extend(9).trainable


@pytest.mark.usefixtures("unchecked")
def test_errors() -> None:
    for arguments in (
        {},
        {"window_size": (2, 2), "seq_len": 3},
        {"window_size": (2, 2), "bias_type": "1d"},
        {"seq_len": 3, "bias_type": "2d"},
        {"seq_len": 3, "bias_type": "3d"},
        {"window_size": (2, 2, 2)},
        {"window_size": (2, 0)},
        {"seq_len": 3, "beyond": "guess"},
        {"seq_len": 3, "prefix": -1},
    ):
        with pytest.raises(ValueError, match=r"expected .*; got .*\. "):
            RelativePositionBias(3, **arguments)  # type: ignore[arg-type]
    bias = RelativePositionBias(3, (2, 2))
    for coordinates in (Sequence(4), Grid(2, 2, prefix=1), Positions(torch.arange(3), low=0, high=2)):
        with pytest.raises(ValueError, match=r"expected .*; got .*\. "):
            bias.terms(coordinates)
    with pytest.raises(ValueError, match="number of axes"):
        bias.resize(4)


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
    (ours,), (plain,) = (bias.terms(Sequence(6)).of(LineBias) for bias in (twice, once))
    torch.testing.assert_close(ours.values, 2 * plain.values)


def test_what_an_instance_says_of_values_counts() -> None:
    bias: Any = RelativePositionBias(2, seq_len=6)
    bias.bias = lambda offsets: torch.full((2, len(offsets.kind)), 7.0)
    (term,) = bias.terms(Sequence(6)).of(LineBias)
    assert (term.values == 7).all()


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
