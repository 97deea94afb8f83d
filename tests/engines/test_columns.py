"""The windows of a grid's columns against loops over their entries."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from relpos.engines.streaming.columns import Columns


def entries(columns: Columns) -> Tensor:
    """`[c, W]`, the entry that each column reads."""
    rows = itertools.product(*(range(size) for size in columns.sizes))
    within = [sum(x * stride for x, stride in zip(row, columns.strides, strict=True)) for row in rows]
    return torch.tensor([[columns.start - offset + x for x in within] for offset in columns.offsets])


CASES = {
    "a sequence": Columns(2, (0,), (6,), (1,)),
    "one column": Columns(3, (0,), (4, 3), (5, 1)),
    "side by side": Columns(4, (0, 1, 2), (4, 3), (5, 1)),
    "some of them": Columns(6, (0, 1), (4, 3), (6, 1)),
    "narrow keys": Columns(7, (0, 1, 2, 3, 4), (3, 1), (5, 1)),
    "twice as many as keys": Columns(7, (0, 1, 2, 3), (3, 2), (5, 1)),
    "three axes": Columns(9, (0, 1, 5, 6), (2, 3, 2), (15, 5, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", CASES)
def test_reads_and_adds_where_it_says(name: str, dtype: torch.dtype) -> None:
    columns, heads = CASES[name], 2
    where = entries(columns)
    store = torch.randn(3 * heads, 60, dtype=dtype)
    values = store[heads : 2 * heads]  # with an offset of its own
    assert torch.equal(columns.read(values).reshape(heads, *where.shape), values[:, where])
    sums = torch.randn(heads, where.shape[0], where.shape[1] + 2, dtype=dtype)[..., 2:]  # behind those of a prefix
    wanted = values.clone().index_add_(1, where.flatten(), sums.flatten(1))
    columns.add(values, sums)
    torch.testing.assert_close(values, wanted)
