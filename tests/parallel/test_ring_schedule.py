"""Who sends what to whom in a ring, and that balanced ranks have equal work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relpos import Mask
from relpos.parallel.layout import stretches
from relpos.parallel.reach import Reach
from relpos.parallel.ring_schedule import Schedule

CPU = torch.device("cpu")
DOCUMENTS = Mask.causal() & Mask.packed(torch.arange(32) // 8)


def schedules(*masks: Mask, size: int = 4, layout: Any = "contiguous", n: int = 32) -> list[Schedule]:
    return [Schedule(rank, stretches(n, size, layout), masks, CPU, 4) for rank in range(size)]


@pytest.mark.parametrize(
    "masks", [(), (Mask.causal(),), (Mask.window(2, 3),), (DOCUMENTS,), (Mask.window(20, 0), DOCUMENTS)]
)
@pytest.mark.parametrize("layout", ["contiguous", "zigzag"])
@pytest.mark.parametrize("size", [2, 4])
def test_all_that_is_allowed_is_computed_and_all_that_is_sent_arrives(masks: Any, layout: Any, size: int) -> None:
    every = schedules(*masks, size=size, layout=layout)
    computed = torch.zeros(32, 32, dtype=torch.bool)
    for one in every:
        for (a, b), (c, d) in one.all_pairs():
            assert not computed[a:b, c:d].any()
            computed[a:b, c:d] = True
    allowed = torch.ones(32, 32, dtype=torch.bool)
    for mask in masks:
        allowed &= mask.dense(32, 32)[0, 0]
    assert not (allowed & ~computed).any()
    steps = [one.steps() for one in every]
    for at in zip(*steps, strict=True):
        sent = {(rank, *step.target) for rank, step in enumerate(at) if step.target is not None}
        come = {(step.source[0], rank, step.source[1]) for rank, step in enumerate(at) if step.source is not None}
        assert sent == come


def test_whole_blocks_need_no_mask() -> None:
    (first, last) = schedules(Mask.causal(), size=2)
    assert last.reach((16, 32), (0, 16)) is Reach.ALL
    assert first.reach((0, 16), (16, 32)) is Reach.NONE
    assert first.reach((0, 16), (0, 16)) is Reach.SOME


def test_what_nobody_sees_is_not_sent() -> None:
    assert [one.tokens_sent(one.rank) for one in schedules(DOCUMENTS)] == [0, 0, 0, 0]
    assert [one.tokens_sent(one.rank) for one in schedules(Mask.causal())] == [24, 16, 8, 0]
    assert [one.tokens_sent(one.rank) for one in schedules(Mask.window(8, 0))] == [8, 8, 8, 0]
    near, far = Mask.window(3, 3), Mask(right=-20)  # of two rotations
    assert [one.tokens_sent(one.rank) for one in schedules(Mask.causal(), near)] == [8, 8, 8, 0]
    assert [one.tokens_sent(one.rank) for one in schedules(Mask.causal(), far)] == [16, 8, 0, 0]


def test_a_zigzag_gives_all_ranks_equal_work_under_a_causal_mask() -> None:
    def pairs(one: Schedule) -> int:
        whole = {Reach.ALL: 1.0, Reach.SOME: 0.5}
        return sum((b - a) * (d - c) * whole[one.reach((a, b), (c, d))] for (a, b), (c, d) in one.all_pairs())

    assert len({pairs(one) for one in schedules(Mask.causal(), layout="zigzag")}) == 1
    assert len({pairs(one) for one in schedules(Mask.causal())}) == 4


def test_tokens_that_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"in two parts each \(a multiple of 8\); got 36\. Pad to 40 or cut to 32\."):
        stretches(36, 4, "zigzag")
