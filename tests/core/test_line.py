"""Lines: every pair of tokens reads the entry that stands for its offset, and nothing else does."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relpos.core import Grid, Kind, Lines, Positions, Ramp, Sequence, axis_lines, lines
from relpos.testing import oracle

PAIRS = [
    (Sequence(1), None),
    (Sequence(7), None),
    (Sequence(5), Sequence(9)),
    (Sequence(1, start=6), Sequence(7)),
    (Sequence(4, start=-3), Sequence(2, start=11)),
    (Grid(1, 1), None),
    (Grid(1, 6), None),
    (Grid(6, 1), None),
    (Grid(4, 8), None),
    (Grid(5, 3), Grid(2, 4)),
    (Grid(2, 3, 2), Grid(1, 4, 3)),
    (Sequence(0, prefix=1), Sequence(3, prefix=2)),
]


def with_prefix(coordinates: Sequence | Grid, prefix: int) -> Sequence | Grid:
    if isinstance(coordinates, Grid):
        return Grid(*coordinates.sizes, prefix=prefix)
    return Sequence(coordinates.length, coordinates.start, prefix) if coordinates.length else coordinates


KINDS = {
    (True, False): Kind.PREFIX_TO_TOKEN,
    (False, True): Kind.TOKEN_TO_PREFIX,
    (True, True): Kind.PREFIX_TO_PREFIX,
}
"""By whether the query and the key are of a prefix."""


def check(queries: Sequence | Grid | Positions, keys: Sequence | Grid | Positions | None) -> Lines:
    """Every pair decodes to its own offset and kind; entries tell all offsets apart."""
    line = lines(queries, keys)
    offsets, index = line.offsets(), line.index()
    assert offsets.kind.shape == (line.length,)
    left, right = oracle.places(queries), oracle.places(queries if keys is None else keys)
    assert index.shape == (len(left), len(right))
    meaning: dict[int, object] = {}
    for (i, query), (j, key) in itertools.product(enumerate(left), enumerate(right)):
        entry = int(index[i, j])
        assert 0 <= entry < line.length
        if query is None or key is None:
            said: object = KINDS[query is None, key is None]
            assert offsets.kind[entry] == said
            assert not offsets.axes[entry].any()
        else:
            said = offset = tuple(a - b for a, b in zip(query, key, strict=True))
            assert offsets.kind[entry] == Kind.TOKENS
            assert tuple(offsets.axes[entry].tolist()) == offset
            assert all(low <= x <= high for low, x, high in zip(offsets.low, offset, offsets.high, strict=True))
        assert meaning.setdefault(entry, said) == said
    named = [value for value in meaning.values() if isinstance(value, tuple)]
    assert len(named) == len(set(named)), "one offset has two entries"
    return line


@pytest.mark.parametrize("prefixes", list(itertools.product((0, 1, 3), repeat=2)), ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_every_pair(pair: tuple[Sequence | Grid, Sequence | Grid | None], prefixes: tuple[int, int]) -> None:
    queries, keys = pair
    check(with_prefix(queries, prefixes[0]), with_prefix(queries if keys is None else keys, prefixes[1]))


def on_the_ramp(ramp: Ramp) -> list[int]:
    """The line numbers that a ramp says, prefix left out."""
    steps = itertools.product(*(range(size) for size in ramp.sizes))
    return [ramp.start + sum(x * stride for x, stride in zip(step, ramp.strides, strict=True)) for step in steps]


@given(st.data())
def test_any_pair(data: st.DataObject) -> None:
    axes = data.draw(st.integers(1, 3))

    def side() -> Sequence | Grid | Positions:
        prefix = data.draw(st.integers(0, 3))
        form = data.draw(st.sampled_from(("positions", "sequence" if axes == 1 else "grid")))
        if form == "sequence":
            return Sequence(data.draw(st.integers(1, 6)), data.draw(st.integers(-9, 9)), prefix)
        if form == "grid":
            return Grid(*(data.draw(st.integers(1, 4)) for _ in range(axes)), prefix=prefix)
        token = st.tuples(*(st.integers(-4, 5) for _ in range(axes)))
        tokens = data.draw(st.lists(token, min_size=1, max_size=5))
        slack = data.draw(st.integers(0, 2))
        low = tuple(min(column) - slack for column in zip(*tokens, strict=True))
        high = tuple(max(column) + slack for column in zip(*tokens, strict=True))
        return Positions(torch.tensor(tokens), low=low, high=high, prefix=prefix)

    queries, keys = side(), side()
    line = check(queries, keys)
    n, m = queries.count, keys.count
    i, j = data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, m - 1))
    rows, columns = slice(i, data.draw(st.integers(i + 1, n))), slice(j, data.draw(st.integers(j + 1, m)))
    part = line.narrow(rows, columns)
    assert torch.equal(part.index(), line.index()[rows, columns])
    assert (part.origin, part.length) == (line.origin, line.length)
    for ramp, side in ((part.layout.query, part.query), (part.layout.key, part.key)):
        if ramp is not None:
            assert side[ramp.prefix :].tolist() == on_the_ramp(ramp)
            assert len(set(side[: ramp.prefix].tolist())) <= 1


def test_default_keys_are_the_queries() -> None:
    for coordinates in (Sequence(4, 2), Grid(2, 3, prefix=2)):
        ours, theirs = lines(coordinates), lines(coordinates, coordinates)
        assert torch.equal(ours.index(), theirs.index())
        assert ours.same_structure(theirs)


def test_swins_order() -> None:
    line = lines(Grid(4, 8))
    assert line.length == 7 * 15
    assert torch.equal(line.index(), oracle.table_rows(oracle.places(Grid(4, 8)), oracle.places(Grid(4, 8)), (4, 8)))


def test_beits_regions_in_order() -> None:
    """Behind the offsets, kinds stand in BEiT's order: class to token, token to class, class to class."""
    kinds = lines(Grid(2, 3, prefix=1)).offsets().kind
    assert kinds.tolist() == sorted(kinds.tolist())
    assert kinds.unique().tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (lines(Sequence(4)), "affine"),
        (lines(Sequence(4), Sequence(6, start=2)), "affine"),
        (lines(Sequence(4, prefix=1)), "nested"),
        (lines(Grid(2, 2)), "nested"),
        (lines(Sequence(2), Positions(torch.tensor([0, 5]), low=0, high=5)), "irregular"),
        (lines(Sequence(6), Sequence(9)).narrow(slice(2, 5), slice(1, 9)), "affine"),
        (lines(Sequence(6, prefix=1)).narrow(slice(2, 5), slice(1, 7)), "affine"),
        (lines(Grid(3, 4)).narrow(slice(None), slice(None)), "nested"),
        (lines(Grid(3, 4)).narrow(slice(1, 5), slice(None)), "irregular"),
        (lines(Grid(3, 4)).narrow(slice(4, 12), slice(0, 8)), "nested"),
        (lines(Grid(3, 4, prefix=2)).narrow(slice(2, 10), slice(None)), "nested"),
        (lines(Grid(3, 4, prefix=2)).narrow(slice(0, 6), slice(None)), "nested"),
        (lines(Grid(3, 4, prefix=2)).narrow(slice(1, 6), slice(None)), "nested"),
        (lines(Grid(3, 4, prefix=2)).narrow(slice(1, 5), slice(None)), "irregular"),
        (lines(Grid(3, 4, prefix=2)).narrow(slice(0, 1), slice(None)), "irregular"),  # no row at all
    ],
)
def test_kinds_of_layout(line: Lines, kind: str) -> None:
    assert line.layout.kind == kind


def test_narrow_keeps_what_it_can() -> None:
    grid, rest = lines(Grid(3, 4)), slice(None)
    assert grid.narrow(slice(4, 8), rest).same_structure(lines(Grid(3, 4)).narrow(slice(4, 8), rest))
    assert not grid.narrow(slice(4, 8), rest).same_structure(grid.narrow(slice(0, 4), rest))
    for bad in (slice(3, 3), slice(0, 4, 2)):
        with pytest.raises(ValueError, match="consecutive"):
            grid.narrow(bad, rest)


def test_batched_lines() -> None:
    positions = Positions(torch.tensor([[0, 1, 2], [4, 2, 0]]), low=0, high=4, prefix=1)
    line = lines(positions, Sequence(5))
    assert line.index().shape == (2, 4, 5)
    for b in range(2):
        alone = lines(Positions(positions.values[b, :, 0], low=0, high=4, prefix=1), Sequence(5))
        assert torch.equal(line.index()[b], alone.index())
    assert torch.equal(line.narrow(slice(1, 3), slice(2, 4)).index(), line.index()[:, 1:3, 2:4])


@pytest.mark.parametrize("prefix", [0, 1, 3])
def test_axis_lines(prefix: int) -> None:
    queries, keys = Grid(3, 4, prefix=prefix), Grid(2, 5)
    parts = axis_lines(queries, keys)
    assert [line.layout.tokens for line in parts] == [4, 8]
    for axis, line in enumerate(parts):
        offsets, index = line.offsets(), line.index()
        pairs = itertools.product(enumerate(oracle.places(queries)), enumerate(oracle.places(keys)))
        for (i, query), (j, key) in pairs:
            entry = index[i, j]
            if query is None:
                assert offsets.kind[entry] == Kind.PREFIX_TO_TOKEN
            else:
                assert offsets.axes[entry].tolist() == [query[axis] - key[axis]]


def test_errors() -> None:
    with pytest.raises(ValueError, match="axes"):
        lines(Sequence(4), Grid(2, 2))
    with pytest.raises(ValueError, match="Only rotations"):
        lines(Positions(torch.tensor([0.5]), low=0, high=1))


def test_same_structure() -> None:
    assert lines(Grid(2, 3)).same_structure(lines(Grid(2, 3)))
    assert not lines(Grid(2, 3)).same_structure(lines(Grid(3, 2)))
    assert not lines(Sequence(6)).same_structure(lines(Sequence(6), Sequence(6, start=1)))
    assert not lines(Sequence(6)).same_structure(lines(Sequence(6, prefix=1), Sequence(6)))
    irregular = Positions(torch.tensor([0, 2]), low=0, high=2)
    line = lines(irregular)
    assert line.same_structure(line)
    assert not line.same_structure(lines(irregular)), "unknown without reading tensors, so not claimed"
