"""Numbers that pairs read from a table, and their sums, against loops: layouts, dtypes, sizes, batches, chunks."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from relpos.core import pair_table
from relpos.core.pair_table import read_pairs, sum_pairs

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
HEADS, ROWS = 3, 5


def indices(batch: int, n: int, m: int) -> dict[str, Tensor]:
    """The same row numbers as they may lie in memory; one row for all queries in the last."""
    plain = torch.randint(ROWS, (batch, n, m))
    spread = torch.zeros(batch, 2 * n, 2 * m, dtype=torch.long)
    spread[:, ::2, ::2] = plain
    return {
        "plain": plain,
        "transposed": plain.mT.contiguous().mT,
        "strided": spread[:, ::2, ::2],
        "expanded": plain[:, :1].expand(-1, n, -1),
    }


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("batch", "n", "m"), [(1, 4, 7), (2, 3, 3), (2, 1, 1), (1, 0, 3), (2, 3, 0)])
def test_values_and_sums(dtype: torch.dtype, batch: int, n: int, m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(ROWS, HEADS, dtype=torch.float64).T  # heads last in memory
    for at_once in (4, 2**16):
        monkeypatch.setattr(pair_table, "_AT_ONCE", at_once)
        for name, index in indices(batch, n, m).items():
            read = read_pairs(values, index.to(dtype))
            assert read.shape == (batch, HEADS, n, m)
            upstream = torch.randn(2, HEADS, n, m, dtype=torch.float64)  # an index may be one for the whole batch
            sums = torch.zeros(HEADS, ROWS, dtype=torch.float64)
            for b in range(2):
                for i in range(n):
                    for j in range(m):
                        row = int(index[b % batch, i, j])
                        assert torch.equal(read[b % batch, :, i, j], values[:, row]), name
                        sums[:, row] += upstream[b, :, i, j]
            torch.testing.assert_close(sum_pairs(upstream, index.to(dtype), ROWS), sums, rtol=1e-13, atol=1e-13)


def test_gradients_of_gradients_and_vmap() -> None:
    values = torch.randn(2, HEADS, ROWS, dtype=torch.float64, requires_grad=True)
    index = torch.randint(ROWS, (2, 3, 4)).byte()
    assert gradcheck(read_pairs, (values[0], index))
    assert gradgradcheck(read_pairs, (values[0], index))
    mapped = torch.vmap(read_pairs, in_dims=(0, None))(values, index)
    assert torch.equal(mapped, torch.stack([read_pairs(x, index) for x in values]))


def test_half_precision_is_summed_in_float32() -> None:
    upstream = torch.ones(1, 1, 64, 64, dtype=torch.bfloat16)  # in bfloat16 a sum of ones ends at 256
    index = torch.zeros(1, 64, 64, dtype=torch.uint8)
    assert sum_pairs(upstream, index, 1).item() == 4096
