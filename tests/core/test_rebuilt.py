"""Terms, masks and coordinates are rebuilt field by field, as FSDP rebuilds the data classes that enter a block."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_terms import TERMS, inputs
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos import (
    Blocks,
    FIREBias,
    Grid,
    LineBias,
    Mask,
    Positions,
    RelativePositionBias,
    RotaryEmbedding,
    Sequence,
    Terms,
    attention,
    lines,
)

WHOLE = {
    **{name: Terms(term) for name, term in TERMS.items()},
    "all that may stand together": Terms(*(TERMS[name] for name in ("LineBias", "xPos", "LowRank", "Sinks"))),
    "nothing": Terms(),
}
PLACES = [
    Sequence(5, start=2, prefix=1),
    Grid(2, 3),
    Grid(7, prefix=2),
    Positions(torch.tensor([3, 1, 2]), low=0, high=4),
    Positions(torch.rand(2, 3, 2), low=(0, 0), high=(1, 2), prefix=1),
]


def rebuilt(x: Any, change: Callable[[Tensor], Tensor] = lambda x: x) -> Any:
    """As `torch.distributed.utils._apply_to_tensors` goes about it."""
    if isinstance(x, Tensor):
        return change(x)
    if dataclasses.is_dataclass(x) and not isinstance(x, type):
        own = dataclasses.replace(x)
        changes = {field.name: rebuilt(getattr(own, field.name), change) for field in dataclasses.fields(own)}
        return dataclasses.replace(own, **changes)
    if isinstance(x, list | tuple):
        return type(x)(rebuilt(one, change) for one in x)
    return x


def to_half(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16) if x.is_floating_point() else x


@pytest.mark.parametrize("name", WHOLE)
def test_terms(name: str) -> None:
    again = rebuilt(WHOLE[name])
    assert [type(term) for term in again] == [type(term) for term in WHOLE[name]]
    found, wanted = (attention(*inputs(), position=position) for position in (again, WHOLE[name]))
    assert torch.equal(found, wanted)


def test_terms_take_their_items_by_name() -> None:
    first, second = TERMS["LineBias"], TERMS["Sinks"]
    assert list(Terms(items=(first, second))) == list(Terms(first, second))
    assert list(Terms(first, items=(second,))) == list(Terms(first, second))
    assert len(Terms(items=(first, first))) == 1, "they are joined as ever"
    assert list(dataclasses.replace(Terms(first), items=(second,))) == [second]


@pytest.mark.parametrize("where", PLACES, ids=repr)
def test_coordinates(where: Any) -> None:
    again = rebuilt(where)
    assert (type(again), again.count, again.low, again.high) == (type(where), where.count, where.low, where.high)
    assert torch.equal(again.tokens(), where.tokens())


def test_masks() -> None:
    segments = torch.tensor([0, 0, 1, 1])
    mask = Mask.packed(segments) & Mask(left=2, blocks=Blocks(torch.ones(1, 2, 2, dtype=torch.bool), 2))
    assert torch.equal(rebuilt(mask, to_half).dense(4, 4), mask.dense(4, 4))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "made",
    [
        RelativePositionBias(2, seq_len=6).terms(Sequence(6)),
        RotaryEmbedding(8).terms(Sequence(6)),
        LineBias(torch.randn(1, 11), lines(Sequence(6))),
        Positions(torch.rand(6), low=0, high=1),
    ],
    ids=["bias", "rotation", "one term", "positions"],
)
def test_what_a_sharded_block_casts_says_where_to_make_it(made: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^expected .* float32 or float64; got .*bfloat16.*compute the terms inside it"
    ) as said:
        rebuilt(made, to_half)
    assert "\n" not in str(said.value)


def test_fire_counts_far_places_in_half_precision_too() -> None:
    """Its parameters may be cast, as all of a sharded block's are; places never are."""
    q, k, v = (torch.randn(1, 2, count, 8) for count in (1, 600, 600))
    terms = FIREBias(2).to(torch.bfloat16).terms(Sequence(1, start=599), Sequence(600))
    cast = rebuilt(terms, to_half)
    assert any(x.dtype == torch.bfloat16 for x in pytree.tree_leaves(cast))
    torch.testing.assert_close(*(attention(q, k, v, position=each) for each in (cast, terms)))
