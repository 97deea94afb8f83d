"""Zeros around a skewed tile and between the rows of a bfloat16 copy, whatever was in a buffer before."""

import random

import pytest
import torch
from torch import Tensor

import relpos
from relpos.engines.streaming.workspace import Buffer, whole

ROOM = 9


def around(x: Tensor, skew: int, columns: int) -> Tensor:
    """`[g, columns, r, W]`, each column's rows of a tile one after another, shifted, in zeros."""
    g, n, m = x.shape
    rows = n // columns
    out = x.new_zeros(g, columns, rows, m + (rows - 1) * skew)
    for column in range(columns):
        for row in range(rows):
            out[:, column, row, row * skew : row * skew + m] = x[:, column * rows + row]
    return out


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("skew", [1, 4])
@pytest.mark.parametrize("g", [1, 2])
def test_zeros_stay_from_tile_to_tile(g: int, skew: int, columns: int) -> None:
    draw, buffer = random.Random(0), Buffer(torch.float64, torch.device("cpu"))
    for _ in range(60):
        start, stop = sorted(draw.sample(range(ROOM + 1), 2))
        rows = draw.choice([6, 6, 6, 12])
        keys = draw.choice([slice(start, stop), slice(start, stop), None])
        tile = buffer.skewed_in_zeros(g, rows, ROOM, skew, columns, keys)
        assert tile.shape == (g, rows, ROOM if keys is None else stop - start)
        tile.copy_(torch.randn(tile.shape, dtype=tile.dtype))
        assert torch.equal(whole(tile, skew, columns), around(tile, skew, columns))


def test_a_tile_that_fits_is_not_cleared_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, cleared = Buffer(torch.float32, torch.device("cpu")), []
    zero = Tensor.zero_
    monkeypatch.setattr(Tensor, "zero_", lambda x: (cleared.append(x.numel()), zero(x))[1])
    for keys in (slice(0, 9), slice(1, 9), slice(0, 9)):
        buffer.skewed_in_zeros(1, 6, ROOM, 2, 1, keys)
    assert sum(cleared[1:]) == 6, "the first key's six rows, once"


def test_what_stands_in_memory_does_not_reach_a_bfloat16_product() -> None:
    """oneDNN on AMX reads beside rows of 33 and 200 numbers, and multiplies what is there by 0."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # new memory then holds NaN
    try:
        for keys in (33, 200):
            q, k, v = (torch.randn(2, 2, n, 16, dtype=torch.bfloat16, requires_grad=True) for n in (33, keys, keys))
            out = relpos.attention(q, k, v, backend="streaming")
            for x in (out, *torch.autograd.grad(out.sum(), [q, k, v])):
                assert not x.isnan().any()
    finally:
        torch.use_deterministic_algorithms(before)
