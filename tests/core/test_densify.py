"""A line bias written out, and its backward without sorting."""

import pytest
import torch

from relpos.core import Grid, Lines, Positions, Sequence, densify, expand, lines, lookup

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("few", [True, False], ids=["pair by pair", "along diagonals"])
@pytest.mark.parametrize("name", LINES)
def test_values_and_gradients_are_those_of_a_lookup(
    name: str, few: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = LINES[name]
    if not few:
        monkeypatch.setattr(densify, "_FEW_PAIRS", 0)
    values = torch.randn(3, line.length).to(dtype).requires_grad_()
    generic = lookup(values.T, line.index()).movedim(-1, -3)
    dense = expand(values, line)
    assert torch.equal(dense, generic)
    upstream = torch.randn(dense.shape).to(dtype)
    ours, again = (torch.autograd.grad(x, values, upstream)[0] for x in (dense, expand(values, line)))
    (theirs,) = torch.autograd.grad(generic, values, upstream)
    assert torch.equal(ours, again)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(ours, theirs, rtol=2 * eps, atol=16 * eps if dtype != torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("line", [lines(Sequence(4)), lines(Grid(2, 3, prefix=1))], ids=["affine", "nested"])
def test_vmap_of_a_bias_and_of_its_gradient(line: Lines) -> None:
    values = torch.randn(3, 2, line.length, dtype=torch.float64)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: expand(v, line).square().sum())(x)

    for function in (lambda x: expand(x, line), gradient):
        torch.testing.assert_close(torch.func.vmap(function)(values), torch.stack([function(x) for x in values]))
