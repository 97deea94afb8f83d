"""The algebra of terms: what adds up, what contradicts, and that a part of a term means a part of its meaning."""

from collections.abc import Callable

import pytest
import torch
from torch.utils import _pytree as pytree

from relpos import (
    AxisVectors,
    Blocks,
    DenseBias,
    Grid,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    Polar,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    attention,
    lines,
)
from relpos.core import Term, axis_lines, expand

HEADS, N, M, D = 3, 6, 6, 4


def rule(q: torch.Tensor, k: torch.Tensor, allowed: torch.Tensor, rows: slice, weight: torch.Tensor) -> torch.Tensor:
    place = torch.arange(rows.start, rows.stop)
    return (weight * (q.sum(-1) + place)[..., None] * k.sum(-1)[..., None, :]).where(allowed, 0)


def every_term() -> dict[str, Term]:
    torch.manual_seed(1)
    sequence, grid = lines(Sequence(N)), lines(Grid(2, 3))
    return {
        "LineBias": LineBias(torch.randn(HEADS, sequence.length), sequence),
        "LineBias on a grid": LineBias(torch.randn(1, grid.length), grid),
        "Rotation": Rotation(torch.randn(1, 1, N, 2), torch.randn(1, 1, M, 2), "half"),
        "xPos": Rotation(
            torch.randn(1, HEADS, N, 1),
            torch.randn(1, HEADS, M, 1),
            "interleaved",
            magnitude=1.2,
            query_magnitude=torch.rand(1, HEADS, N, 1),
            key_magnitude=torch.rand(1, HEADS, M, 1),
        ),
        "QueryBias": QueryBias(torch.randn(HEADS, D)),
        "LineVectors": LineVectors(torch.randn(1, sequence.length, D), None, sequence, "query"),
        "LineVectors of a content": LineVectors(
            torch.randn(1, sequence.length, 2), None, sequence, "query", content=torch.randn(1, HEADS, N, 2)
        ),
        "LineVectors of values": LineVectors(torch.randn(HEADS, sequence.length, D), None, sequence, "value"),
        "AxisVectors": AxisVectors((torch.randn(1, 3, D), torch.randn(1, 5, D)), axis_lines(Grid(2, 3))),
        "LowRank": LowRank(torch.randn(HEADS, N, 2), torch.randn(HEADS, M, 2)),
        "LowRank, batched": LowRank(torch.randn(2, HEADS, N, 2), torch.randn(1, M, 2)),
        "DenseBias": DenseBias(torch.randn(1, HEADS, N, M)),
        "IndexedBias": IndexedBias(torch.randn(HEADS, 5), torch.randint(5, (1, N, M))),
        "RowRule": RowRule(rule, (torch.tensor(0.3),)),
        "Scale": Scale(0.7),
        "Softcap": Softcap(2.0),
        "Sinks": Sinks(torch.randn(HEADS)),
        "Sinks of queries": Sinks(torch.randn(1, HEADS, N)),
        "Polar": Polar(torch.rand(1, 1, N, D), torch.rand(1, 1, M, D), phase=torch.randn(HEADS, D)),
        "QueryScale": QueryScale(torch.rand(2, 1, N)),
        "QueryScale on scores": QueryScale(torch.rand(1, HEADS, N), "scores"),
    }


TERMS = every_term()


def inputs() -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(2, HEADS, N, D) for _ in range(3)]


@pytest.mark.parametrize("name", TERMS)
def test_narrow_is_a_slice_of_the_meaning(name: str) -> None:
    (q, k, v), term = inputs(), TERMS[name]
    rows, columns = slice(1, 4), slice(0, N) if name == "RowRule" else slice(2, 5)
    seen = torch.zeros(M, dtype=torch.bool)
    seen[columns] = True
    whole = attention(q, k, v, position=term, mask=Mask.padding(seen, queries=torch.ones(N, dtype=torch.bool)))
    part = Terms(term).narrow(rows, columns)
    cut = attention(q[:, :, rows], k[:, :, columns], v[:, :, columns], position=part)
    torch.testing.assert_close(cut, whole[:, :, rows], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", TERMS)
def test_round_trip_as_a_tree(name: str) -> None:
    tensors = inputs()
    leaves, structure = pytree.tree_flatten(Terms(TERMS[name]))
    again = pytree.tree_unflatten(leaves, structure)
    found = attention(*tensors, position=again)
    assert torch.equal(found, attention(*tensors, position=TERMS[name]))
    doubled = pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, again)
    wide = attention(*(x.double() for x in tensors), position=doubled)
    torch.testing.assert_close(wide.float(), found, rtol=1e-4, atol=1e-5)
    strings = pytree.tree_map(str, again)  # a tree may hold anything while it is mapped
    assert all(isinstance(leaf, str) for leaf in pytree.tree_leaves(strings))


def test_equality_asks_no_tensor() -> None:
    """Two of them are equal where they are one; numbers alone are compared by value."""
    segments = torch.zeros(4).int()
    makers: list[Callable[[], object]] = [
        *(lambda n=n: every_term()[n] for n in TERMS if n not in ("Scale", "Softcap")),
        lambda: Terms(every_term()["LineBias"], every_term()["Sinks"]),
        lambda: lines(Sequence(4)),
        lambda: lines(Sequence(4)).offsets(),
        lambda: Mask.packed(segments),
        lambda: Blocks(torch.ones(1, 2, 2).bool(), 2),
    ]
    for make in makers:
        one, other = make(), make()
        assert one == one
        assert one != other
        assert one in {one}
    assert Scale(0.7) == Scale(0.7)
    assert Softcap(2.0) != Softcap(3.0)


@pytest.mark.parametrize("name", TERMS)
def test_to_moves_every_tensor(name: str) -> None:
    for given in (TERMS[name], Terms(TERMS[name])):
        moved = given.to("meta")
        assert type(moved) is type(given)
        (before, structure), (after, same) = pytree.tree_flatten(given), pytree.tree_flatten(moved)
        assert structure == same, "the structure is what it was"
        for x, y in zip(before, after, strict=True):
            assert (x is None and y is None) or (y.device.type, y.shape, y.dtype) == ("meta", x.shape, x.dtype)
        assert all(x is y for x, y in zip(before, pytree.tree_leaves(given.to("cpu")), strict=True))


def test_to_moves_masks_and_lines_and_keeps_what_is_shared() -> None:
    shuffled = lines(Positions(torch.tensor([2, 0, 1]), low=0, high=2))
    moved = shuffled.to(torch.device("meta"))
    assert moved.query is moved.key
    assert moved.query.is_meta
    assert (moved.layout, moved.length) == (shuffled.layout, shuffled.length)
    first, second = Terms(
        LineVectors(torch.zeros(1, 5, D), None, shuffled, "query"), LineBias(torch.zeros(1, 5), shuffled)
    ).to("meta")
    assert first.lines.same_structure(second.lines)
    mask = Mask.packed(torch.zeros(4).int()) & Mask(left=2, blocks=Blocks(torch.ones(1, 2, 2, dtype=torch.bool), 2))
    away = mask.to("meta")
    assert away.query_segments is away.key_segments
    assert away.query_segments.is_meta
    assert away.blocks.layout.is_meta
    assert away.left == 2
    assert away.dense(4, 4, torch.device("meta")).shape == (1, 1, 4, 4)
    again = pytree.tree_map_only(torch.Tensor, torch.clone, mask)
    assert torch.equal(again.dense(4, 4), mask.dense(4, 4))


def test_join_keeps_order_and_meaning() -> None:
    bias, dense, cap = TERMS["LineBias"], TERMS["DenseBias"], TERMS["Softcap"]
    joined = bias + dense + cap
    assert list(joined) == list(Terms(bias) + Terms(dense, cap)) == [bias, dense, cap]
    assert len(Terms()) == 0
    assert list(Terms() + bias) == [bias]
    assert joined.of(DenseBias) == (dense,)
    assert joined.one(Softcap) is cap
    assert joined.one(Sinks) is None
    assert list(Scale(0.5) + Scale(0.5)) == [Scale(0.5)]


def test_biases_on_equal_lines_become_one() -> None:
    line = lines(Grid(2, 3))
    first, second = torch.randn(HEADS, line.length), torch.randn(1, line.length)
    joined = LineBias(first, line) + LineBias(second, lines(Grid(2, 3)))
    assert len(joined) == 1
    (only,) = joined.of(LineBias)
    torch.testing.assert_close(expand(only.values, only.lines), expand(first + second, line))
    apart = LineBias(first, line) + LineBias(torch.randn(1, 11), lines(Sequence(6)))
    assert len(apart) == 2


def test_irregular_lines_are_never_taken_for_equal() -> None:
    a, b = (lines(Positions(torch.tensor(x), low=0, high=3)) for x in ([0, 1], [3, 1]))
    assert len(LineBias(torch.randn(1, 7), a) + LineBias(torch.randn(1, 7), b)) == 2
    assert len(LineBias(torch.randn(1, 7), a) + LineBias(torch.randn(1, 7), a)) == 1
