"""A line bias written out, and its backward without sorting."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from relpos.core import Grid, Lines, Positions, Sequence, expand, lines, lookup
from relpos.core.densify import sum_over_offsets

irregular = Positions(torch.tensor([0, 4, 1, 1]), low=0, high=4)
batched = Positions(torch.tensor([[0, 4, 1], [2, 2, 3]]), low=0, high=5)

LINES: dict[str, Lines] = {
    "one token": lines(Sequence(1)),
    "affine": lines(Sequence(5)),
    "affine, unequal": lines(Sequence(3, start=4), Sequence(7)),
    "affine, part": lines(Sequence(6), Sequence(8)).narrow(slice(2, 5), slice(1, 4)),
    "affine, keys cut": lines(Sequence(6)).narrow(slice(0, 6), slice(3, 6)),
    "one cell": lines(Grid(1, 1)),
    "row": lines(Grid(1, 4)),
    "grid": lines(Grid(3, 4)),
    "unequal grids": lines(Grid(3, 2), Grid(2, 4)),
    "three axes": lines(Grid(2, 3, 2), Grid(1, 2, 3)),
    "prefix": lines(Sequence(3, prefix=2)),
    "grid with prefix": lines(Grid(2, 3, prefix=3)),
    "prefix of queries": lines(Grid(2, 2, prefix=2), Grid(2, 3)),
    "prefix of keys": lines(Sequence(3), Sequence(4, prefix=3)),
    "only a prefix": lines(Sequence(0, prefix=1), Sequence(3, prefix=2)),
    "nested, part": lines(Grid(3, 4)).narrow(slice(1, 6), slice(0, 12)),
    "whole rows": lines(Grid(4, 3)).narrow(slice(3, 9), slice(6, 12)),
    "whole rows, unequal grids": lines(Grid(3, 2), Grid(4, 5)).narrow(slice(2, 4), slice(5, 15)),
    "whole planes": lines(Grid(3, 2, 2), Grid(2, 3, 2)).narrow(slice(4, 8), slice(6, 12)),
    "whole rows behind the prefix": lines(Grid(3, 2, prefix=2)).narrow(slice(4, 8), slice(2, 6)),
    "prefix and whole rows": lines(Grid(3, 2, prefix=2)).narrow(slice(0, 6), slice(1, 4)),
    "prefix alone": lines(Grid(3, 2, prefix=2)).narrow(slice(0, 2), slice(0, 8)),
    "a part of a part": lines(Grid(6, 2)).narrow(slice(2, 12), slice(0, 10)).narrow(slice(2, 6), slice(4, 8)),
    "irregular": lines(irregular, Sequence(3)),
    "batched": lines(batched, Sequence(3)),
}


@pytest.mark.parametrize("name", LINES)
def test_value(name: str) -> None:
    line = LINES[name]
    values = torch.randn(2, line.length)
    dense = expand(values, line)
    index = line.index()
    for h in range(2):
        for place in torch.cartesian_prod(*(torch.arange(size) for size in index.shape)).tolist():
            *b, i, j = place
            assert dense[(*b, h, i, j)] == values[h, index[tuple(place)]]


@pytest.mark.parametrize("name", LINES)
def test_gradcheck(name: str) -> None:
    line = LINES[name]
    values = torch.randn(2, line.length, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: expand(x, line), (values,), fast_mode=line.length > 30)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LINES)
def test_structured_backward_is_the_generic_one(name: str, dtype: torch.dtype) -> None:
    line = LINES[name]
    values = torch.randn(3, line.length).to(dtype).requires_grad_()
    generic = lookup(values.T, line.index()).movedim(-1, -3)
    dense = expand(values, line)
    assert torch.equal(dense, generic)
    upstream = torch.randn(dense.shape).to(dtype)
    ours, theirs = (torch.autograd.grad(x, values, upstream)[0] for x in (dense, generic))
    assert ours.dtype == dtype
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=16 * eps if dtype != torch.bfloat16 else 1e-6)
    again = torch.autograd.grad(expand(values, line), values, upstream)[0]
    assert torch.equal(ours, again)


def test_entries_that_no_pair_reads_get_no_gradient() -> None:
    line = lines(Sequence(4)).narrow(slice(0, 2), slice(0, 2))
    values = torch.randn(1, line.length, requires_grad=True)
    (gradient,) = torch.autograd.grad(expand(values, line).sum(), values)
    assert gradient.tolist() == [[0, 0, 1, 2, 1, 0, 0]]


def test_sum_over_offsets_by_loops() -> None:
    for n, m in ((1, 1), (1, 4), (4, 1), (3, 5), (5, 3)):
        x = torch.randn(2, n, m, dtype=torch.float64)
        wanted = torch.zeros(2, n + m - 1, dtype=torch.float64)
        for i in range(n):
            for j in range(m):
                wanted[:, i - j + m - 1] += x[:, i, j]
        torch.testing.assert_close(sum_over_offsets(x), wanted)


def test_irregular_lines_agree_with_regular_ones() -> None:
    """Without the layout, the same integers give the same numbers and gradient."""
    for name in ("affine, unequal", "unequal grids", "grid with prefix"):
        line = LINES[name]
        plain = replace(line, layout=replace(line.layout, query=None, key=None))
        values = torch.randn(2, line.length, dtype=torch.float64, requires_grad=True)
        ours, theirs = expand(values, line), expand(values, plain)
        assert torch.equal(ours, theirs)
        upstream = torch.randn_like(ours)
        torch.testing.assert_close(
            torch.autograd.grad(ours, values, upstream)[0], torch.autograd.grad(theirs, values, upstream)[0]
        )


@pytest.mark.parametrize("line", [lines(Sequence(4)), lines(Grid(2, 3, prefix=1))], ids=["affine", "nested"])
def test_vmap_of_a_bias_and_of_its_gradient(line: Lines) -> None:
    values = torch.randn(3, 2, line.length, dtype=torch.float64)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: expand(v, line).square().sum())(x)

    for function in (lambda x: expand(x, line), gradient):
        torch.testing.assert_close(torch.func.vmap(function)(values), torch.stack([function(x) for x in values]))
