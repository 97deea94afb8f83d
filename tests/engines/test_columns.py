"""The windows of a grid's columns against loops over their entries."""

import itertools

import pytest
import torch
from torch import Tensor

from relpos.core.line import Ramp
from relpos.engines.streaming.plan.columns import Columns, rows_and_columns


def entries(columns: Columns) -> Tensor:
    """`[c, W]`, the entry that each column reads."""

    def places(sizes: tuple[int, ...], strides: tuple[int, ...]) -> list[int]:
        cells = itertools.product(*(range(size) for size in sizes))
        return [sum(x * stride for x, stride in zip(cell, strides, strict=True)) for cell in cells]

    within = places(columns.sizes, columns.strides)
    return torch.tensor([[columns.start - x + y for y in within] for x in places(columns.box, columns.strides[1:])])


CASES = {
    "a sequence": Columns(2, (), (6,), (1,)),
    "one column": Columns(3, (1,), (4, 3), (5, 1)),
    "side by side": Columns(4, (3,), (4, 3), (5, 1)),
    "some of them": Columns(6, (2,), (4, 3), (6, 1)),
    "narrow keys": Columns(7, (5,), (3, 1), (5, 1)),
    "twice as many as keys": Columns(7, (4,), (3, 2), (5, 1)),
    "three axes": Columns(9, (2, 2), (2, 3, 2), (15, 5, 1)),
    "one of the second": Columns(9, (1, 3), (2, 3, 2), (15, 5, 1)),
    "one of the third": Columns(9, (2, 1), (2, 3, 2), (15, 5, 1)),
    "three axes of narrow keys": Columns(9, (2, 3), (2, 3, 1), (15, 5, 1)),
    "four axes": Columns(22, (2, 1, 3), (2, 2, 2, 2), (24, 12, 4, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_reads_and_adds_where_it_says(name: str, dtype: torch.dtype) -> None:
    columns, heads = CASES[name], 2
    where = entries(columns)
    store = torch.randn(3 * heads, 70, dtype=dtype)
    values = store[heads : 2 * heads]  # with an offset of its own
    assert torch.equal(columns.read(values).reshape(heads, *where.shape), values[:, where])
    sums = torch.randn(heads, where.shape[0], where.shape[1] + 2, dtype=dtype)[..., 2:]  # behind those of a prefix
    wanted = values.clone().index_add_(1, where.flatten(), sums.flatten(1))
    columns.add(values, sums)
    torch.testing.assert_close(values, wanted)


@pytest.mark.parametrize(
    ("sizes", "most", "wanted"),
    [
        ((100,), 16, (16, ())),
        ((5,), 16, (5, ())),
        ((64, 64), 256, (16, (16,))),
        ((32, 32), 512, (16, (32,))),
        ((65, 65), 256, (13, (17,))),  # about as many the last time
        ((400, 2), 256, (100, (2,))),  # few columns: their rows make the block
        ((2, 400), 256, (2, (100,))),
        ((16, 8, 8), 256, (16, (2, 8))),
        ((4, 16, 16), 512, (4, (8, 16))),
        ((8, 7, 7), 512, (8, (7, 7))),
        ((5, 4), 1, (1, (1,))),
        ((0, 4), 256, (0, (1,))),
        ((4, 0), 256, (4, (1,))),
    ],
)
def test_rows_and_columns_of_a_block(sizes: tuple[int, ...], most: int, wanted: tuple[int, tuple[int, ...]]) -> None:
    queries = Ramp(0, sizes, tuple(range(len(sizes), 0, -1)))
    assert rows_and_columns(queries, most) == wanted
    assert rows_and_columns(queries, most, one_column=True) == (min(sizes[0], most), (1,) * len(sizes[1:]))
