"""Batches from a later one on: what a run that goes on trains with."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from relpos.data import Task, find_task
from relpos.data.datasets import of_datasets


class Counted(Sequence[tuple[Tensor, int]]):
    """A dataset that knows what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> tuple[Tensor, int]:  # type: ignore[override]
        self.asked.append(index)
        return torch.full((1, 16, 16), float(index)), index % 3


@pytest.mark.parametrize("start", [0, 1, 4, 5, 7, 20])
@pytest.mark.parametrize(
    ("make", "batch_size"),
    [
        (lambda: find_task("digits"), 300),
        (lambda: find_task("text"), 3),
        (lambda: of_datasets((Counted(), Counted(), Counted())), 12),
    ],
    ids=["images", "text", "datasets"],
)
def test_batches_from_a_later_one_on(make: Callable[[], Task], batch_size: int, start: int) -> None:
    task = make()
    wanted = list(itertools.islice(task.batches(batch_size, 3), start, start + 6))
    for own, other in zip(task.batches(batch_size, 3, start=start), wanted, strict=False):
        assert all(torch.equal(x, y) for x, y in zip(own, other, strict=True))


def test_what_is_passed_over_is_not_loaded() -> None:
    train = Counted()
    task = of_datasets((train, Counted(), Counted()))
    train.asked.clear()
    next(task.batches(10, 0, start=12))
    assert len(train.asked) == 10
