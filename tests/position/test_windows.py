"""Mechanisms with tables that end: offsets beyond them, other windows and lengths, and the sites they are made for."""

import copy
from typing import Any

import pytest
import torch

from position.suites import stretched
from relpos import (
    FactoredBias,
    Grid,
    LearnedPositionEmbedding,
    LineBias,
    Positions,
    RelativePositionBias,
    Sequence,
    Site,
    TUPEPosition,
)
from relpos.core import Coordinates
from relpos.position import presets


def tupe(**where: Any) -> TUPEPosition:
    return TUPEPosition(3, 4, 10, init_std=1.0, **where)


def relative(**where: Any) -> RelativePositionBias:
    return RelativePositionBias(2, init_std=1.0, **where)


def values(own: Any, coordinates: Coordinates) -> torch.Tensor:
    (term,) = own.terms(coordinates).of(LineBias)
    found: torch.Tensor = term.values.detach()
    return found


# offsets beyond the table


@pytest.mark.parametrize(
    ("own", "queries", "keys", "says"),
    [
        (relative(seq_len=4), Sequence(5), None, "offsets from -3 to 3 on axis 0; got -4 to 4"),
        (relative(window_size=(4, 2)), Grid(4, 3), None, "offsets from -1 to 1 on axis 1; got -2 to 2"),
        (FactoredBias(2, (4, 3)), Grid(4, 4), None, "offsets from -2 to 2 on axis 1; got -3 to 3"),
        (FactoredBias(2, (4,)), Sequence(1, start=4), Sequence(4), "offsets from -3 to 3 on axis 0; got 1 to 4"),
    ],
)
def test_offsets_beyond_raise(own: Any, queries: Coordinates, keys: Coordinates | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        own.terms(queries, keys)


@pytest.mark.parametrize(
    ("own", "near", "far"),
    [
        (relative(seq_len=4), Sequence(4), Sequence(9)),
        (relative(window_size=(2, 3)), Grid(2, 3), Grid(4, 5)),
        (relative(window_size=(2, 1, 3)), Grid(2, 1, 3), Grid(3, 2, 4)),
        (FactoredBias(2, (2, 3), init_std=1.0), Grid(2, 3), Grid(4, 5)),
    ],
)
def test_offsets_beyond_read_the_border_where_clipped(own: Any, near: Any, far: Any) -> None:
    clipped = own.grow(far, "clipped")
    assert (own.beyond, clipped.beyond, clipped.sizes) == ("raise", "clip", own.sizes)
    found = values(own, near).unflatten(1, [2 * most + 1 for most in near.high])
    for axis, (most, reach) in enumerate(zip(near.high, far.high, strict=True)):
        read = torch.arange(-reach, reach + 1).clamp(-most, most) + most
        found = found.index_select(1 + axis, read)
    assert torch.equal(values(clipped, far), found.flatten(1))
    assert torch.equal(values(clipped, near), values(own, near))


def test_a_smaller_grid_needs_nothing() -> None:
    """The middle of the table, and the prefix's rows."""
    bias, small = relative(window_size=(4, 5), prefix=1), relative(window_size=(2, 3), prefix=1)
    table = bias.relative_position_bias_table.detach()
    middle = table[:-3].unflatten(0, (7, 9))[2:5, 2:7].flatten(0, 1)
    small.load_state_dict(small.state_dict() | {"relative_position_bias_table": torch.cat([middle, table[-3:]])})
    assert torch.equal(values(bias, Grid(2, 3, prefix=1)), values(small, Grid(2, 3, prefix=1)))


# other windows and lengths


@pytest.mark.parametrize(
    ("own", "size", "tables"),
    [
        (relative(seq_len=3, prefix=1), 5, lambda own: [own.relative_position_bias_table[:-3]]),
        (LearnedPositionEmbedding(4, seq_len=5, prefix=2, init_std=1.0), 9, lambda own: [own.pos_embed[0, 2:]]),
        (FactoredBias(2, (3, 4), init_std=1.0), (5, 2), lambda own: list(own.tables)),
        (FactoredBias(2, (1, 2), init_std=1.0), (3, 2), lambda own: list(own.tables)),
    ],
)
def test_resize_is_linear_on_a_line(own: Any, size: Any, tables: Any) -> None:
    for old, new in zip(tables(own), tables(own.resize(size)), strict=True):
        torch.testing.assert_close(new, torch.stack(stretched(old, len(new))))


RESIZED = pytest.mark.parametrize(
    ("own", "size", "prefix"),
    [
        (relative(window_size=(3, 4), prefix=1), (5, 6), lambda own: own.relative_position_bias_table[-3:]),
        (relative(window_size=(2, 3, 4), prefix=1), (3, 5, 4), lambda own: own.relative_position_bias_table[-3:]),
        (relative(seq_len=4, prefix=1), 9, lambda own: own.relative_position_bias_table[-3:]),
        (LearnedPositionEmbedding(4, grid_size=(3, 4), prefix=2), (5, 6), lambda own: own.pos_embed[:, :2]),
        (LearnedPositionEmbedding(4, seq_len=3, prefix=2), 8, lambda own: own.pos_embed[:, :2]),
        (FactoredBias(2, (3, 4), init_std=1.0), (5, 2), lambda own: torch.zeros(0)),
        (tupe(grid_size=(3, 4)), (5, 6), lambda own: own.places.pos_embed[:, :2]),
        (tupe(seq_len=4), 7, lambda own: own.places.pos_embed[:, :2]),
    ],
)
"""Mechanisms, another size, and what is kept at any."""


@RESIZED
def test_resize_keeps_the_prefix_and_leaves_the_original(own: Any, size: Any, prefix: Any) -> None:
    before = {name: x.clone() for name, x in own.state_dict().items()}
    sizes = getattr(own, "places", own).sizes
    grown = own.resize(size)
    assert getattr(grown, "places", grown).sizes == ((size,) if isinstance(size, int) else size)
    assert torch.equal(prefix(grown), prefix(own))
    again = own.resize(sizes if isinstance(size, tuple) else sizes[0])
    torch.testing.assert_close(dict(again.named_parameters()), dict(own.named_parameters()))
    assert all(torch.equal(x, before[name]) for name, x in own.state_dict().items())


@RESIZED
def test_resize_keeps_the_dtype_and_what_is_frozen(own: Any, size: Any, prefix: Any) -> None:
    half = copy.deepcopy(own).to(torch.bfloat16)
    next(half.parameters()).requires_grad_(False)
    for before in (own, half):
        for x, y in zip(before.resize(size).parameters(), before.parameters(), strict=True):
            assert (x.dtype, x.requires_grad) == (y.dtype, y.requires_grad)


@pytest.mark.parametrize("prefix", [0, 2])
def test_a_table_extends_by_its_farthest_offsets(prefix: int) -> None:
    """What the rule "clipped" reads, in rows of its own."""
    bias = relative(seq_len=4, prefix=prefix)
    longer, clipped = bias.extend(9), bias.grow(Sequence(9), "clipped")
    assert (bias.sizes, longer.sizes) == ((4,), (9,))
    assert longer.relative_position_bias_table.shape == (17 + (3 if prefix else 0), 2)
    for where in (Sequence(4, prefix=prefix), Sequence(9, prefix=prefix)):
        assert torch.equal(values(longer, where), values(clipped, where))


def test_learned_positions_begin_again() -> None:
    """Beltagy et al. 2020, section 5: the trained vectors are copied behind themselves."""
    learned = LearnedPositionEmbedding(4, seq_len=3, prefix=2, init_std=1.0)
    longer = learned.extend(8)
    assert torch.equal(longer.pos_embed, learned.pos_embed[:, [0, 1, *(2 + n for n in (0, 1, 2, 0, 1, 2, 0, 1))]])
    assert (learned.sizes, longer.sizes) == ((3,), (8,))
    grown: Any = learned.grow(Sequence(4, start=4, prefix=2), "repeated")
    assert torch.equal(grown.pos_embed, longer.pos_embed)


@pytest.mark.parametrize(
    "own", [relative(seq_len=4, prefix=1), LearnedPositionEmbedding(4, seq_len=4), tupe(seq_len=4)]
)
def test_what_is_extended_never_forgets_and_stays_frozen(own: Any) -> None:
    for x, y in zip(own.extend(2).parameters(), own.parameters(), strict=True):
        assert torch.equal(x, y)
    assert own.extend(9).trainable
    frozen = copy.deepcopy(own)
    frozen.trainable = False
    assert not frozen.extend(9).trainable


@pytest.mark.parametrize(
    ("own", "where", "rule", "sizes"),
    [
        (relative(window_size=(3, 3), prefix=1), Grid(5, 4, prefix=1), "interpolated", (5, 4)),
        (relative(window_size=(2, 3, 3)), Grid(4, 3, 5), "interpolated", (4, 3, 5)),
        (relative(seq_len=9), Grid(4, 4), "interpolated", (16,)),
        (relative(window_size=(3, 3), prefix=1), Grid(5, 4, prefix=1), "clipped", (3, 3)),
        (FactoredBias(3, (3, 3)), Grid(5, 4, prefix=1), "interpolated", (5, 4)),
        (FactoredBias(3, (3, 3)), Grid(5, 4), "clipped", (3, 3)),
        (tupe(grid_size=(3, 4)), Grid(5, 6, prefix=1), "interpolated", (5, 6)),
        (tupe(seq_len=5), Sequence(9, prefix=1), "interpolated", (9,)),
        (tupe(seq_len=5), Sequence(4, start=5), "interpolated", (9,)),
        (tupe(seq_len=5), Sequence(4, start=5), "repeated", (9,)),
    ],
)
def test_grow(own: Any, where: Any, rule: str, sizes: tuple[int, ...]) -> None:
    assert rule in own.growth
    grown = own.grow(where, rule)
    assert getattr(grown, "places", grown).sizes == sizes
    grown.terms(where)
    if rule == "interpolated" and type(own) is not TUPEPosition:
        size = sizes if len(own.sizes) > 1 else sizes[0]
        assert all(torch.equal(x, y) for x, y in zip(grown.parameters(), own.resize(size).parameters(), strict=True))


# the sites they are made for


@pytest.mark.parametrize(
    ("name", "queries", "keys", "sizes", "prefix"),
    [
        ("relative_1d", Sequence(3), Sequence(9), (9,), 0),
        ("relative_1d", Sequence(3, start=20), Sequence(9), (23,), 0),
        ("relative_1d", Sequence(1, start=6), Sequence(7), (7,), 0),
        ("relative_1d", Sequence(9, prefix=1), Sequence(3), (9,), 1),
        ("relative_1d", Grid(2, 3), Grid(4, 2), (8,), 0),
        ("relative_1d", Positions(torch.tensor([4, 2]), low=2, high=4), None, (3,), 0),
        ("relative_1d", Sequence(5, start=7), None, (5,), 0),
        ("relative_2d", Grid(2, 3), Grid(4, 2, prefix=2), (4, 3), 2),
        ("relative_2d", Grid(2, 3), Positions(torch.tensor([[5, 0]]), low=(0, 0), high=(5, 2)), (6, 3), 0),
        ("relative_2d", Grid(2, 3, 4), Grid(4, 2, 2, prefix=1), (4, 3, 4), 1),
        ("factored_2d", Grid(2, 3), Grid(4, 2), (4, 3), 0),
        ("factored_2d", Grid(2, 3), Positions(torch.tensor([[5, 0]]), low=(0, 0), high=(5, 2)), (6, 3), 0),
        ("factored_2d", Grid(2, 3, 4), None, (2, 3, 4), 0),
        ("decomposed", Grid(2, 5), Grid(4, 3), (4, 5), 0),
        ("tupe", Sequence(1, start=6), Sequence(7), (7,), 0),
        ("tupe", Sequence(2), Sequence(7), (7,), 0),
    ],
)
def test_a_site_is_covered_on_both_sides(name: str, queries: Any, keys: Any, sizes: Any, prefix: int) -> None:
    own: Any = presets()[name].build(Site(3, 4, 12, queries, keys))
    assert getattr(own, "places", own).sizes == sizes
    assert getattr(own, "prefix", 0) == prefix
    own.terms(queries, keys)
