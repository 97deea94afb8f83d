"""Other data are another comparison: what the fingerprint of three datasets looks at."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from relpos.data.datasets import of_datasets


class Listed(Dataset[Any]):
    """Items of a list, each with what is drawn for it."""

    def __init__(self, items: list[Any], draw: Callable[[], Tensor] = lambda: torch.zeros(())) -> None:
        self.items, self.draw = items, draw

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        inputs, target = self.items[index]
        return inputs + self.draw(), target


def contents(train: Any, *others: Any) -> str:
    validation, test = others or (Listed(rows(5)), Listed(rows(6)))
    found: str = of_datasets((train, validation, test)).options["contents"]
    return found


def rows(count: int) -> list[Any]:
    return [(torch.full((4,), float(index)), float(index)) for index in range(count)]


def pictures(labels: list[int]) -> Listed:
    return Listed([(torch.ones(1, 8, 8), label) for label in labels])


def changed(count: int, at: int) -> Listed:
    items = rows(count)
    items[at] = (items[at][0], -1.0)
    return Listed(items)


@pytest.mark.parametrize("at", [0, 99])
def test_first_and_last_items_of_every_split(at: int) -> None:
    kept, other = Listed(rows(100)), changed(100, at)
    usual = contents(kept, kept, kept)
    assert contents(Listed(rows(100)), kept, kept) == usual
    assert len({usual, contents(other, kept, kept), contents(kept, other, kept), contents(kept, kept, other)}) == 4


@pytest.mark.parametrize("at", [(0, 0), (51, 3), (99, 1)])
def test_every_number_of_tensors(at: tuple[int, int]) -> None:
    inputs = torch.rand(100, 4, dtype=torch.float32).to(torch.bfloat16)
    other = inputs.clone()
    other[at] += 1
    kept = (inputs, torch.arange(100.0))
    assert contents(kept, kept, kept) == contents((inputs.clone(), kept[1]), kept, kept)
    assert contents((other, kept[1]), kept, kept) != contents(kept, kept, kept)
    assert contents(kept, kept, (other, kept[1])) != contents(kept, kept, kept)


def test_the_class_of_every_image() -> None:
    labels = [index % 3 for index in range(50)]
    others = (pictures([0, 1, 2]), pictures([0, 1, 2]))
    swapped = list(labels)
    swapped[10], swapped[11] = swapped[11], swapped[10]
    assert contents(pictures(labels), *others) == contents(pictures(labels), *others)
    assert contents(pictures(labels), *others) != contents(pictures(swapped), *others)


def test_augmented_items_are_the_same_each_time() -> None:
    own = torch.Generator()
    draws: list[Callable[[], Tensor]] = [
        lambda: torch.rand(()),
        lambda: torch.tensor(random.random()),
        lambda: torch.tensor(np.random.rand()),  # noqa: NPY002
        lambda: torch.rand((), generator=own),
    ]
    for draw in draws:
        assert contents(Listed(rows(20), draw)) == contents(Listed(rows(20), draw))
        labels = [(inputs, target + 1) for inputs, target in rows(20)]
        assert contents(Listed(rows(20), draw)) != contents(Listed(labels, draw)), "what is not drawn is looked at"
