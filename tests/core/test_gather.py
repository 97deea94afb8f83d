"""Reading a table and its ordered gradient."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from relpos.core import Rows, at_least_float32, gather, lookup, read, segment_sum
from relpos.core.terms import vectors

SHAPES = [((5, 3), (7,)), ((5,), (4, 6)), ((4, 2, 3), (2, 3, 4)), ((1, 2), (9,)), ((6, 2), (0,))]


def loops(values: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """One addition after another, in the order of the index."""
    out = torch.zeros(rows, *values.shape[index.dim() :], dtype=values.dtype)
    for row, value in zip(index.flatten().tolist(), values.flatten(0, index.dim() - 1), strict=True):
        out[row] += value
    return out


@pytest.mark.parametrize("adds", [True, False], ids=["one after another", "sorted, as on a GPU"])
@pytest.mark.parametrize(("table", "index"), SHAPES, ids=str)
def test_value_and_gradient(
    table: tuple[int, ...], index: tuple[int, ...], adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_adds_in_order", lambda values: adds)
    x = torch.randn(table, dtype=torch.float64, requires_grad=True)
    where = torch.randint(table[0], index)
    y = lookup(x, where)
    assert torch.equal(y, x[where])
    upstream = torch.randn_like(y)
    (gradient,) = torch.autograd.grad(y, x, upstream)
    torch.testing.assert_close(gradient, loops(upstream, where, table[0]), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(segment_sum(upstream, where, table[0]), gradient, rtol=0, atol=0)


@pytest.mark.parametrize("adds", [True, False], ids=["PyTorch's", "ours, as on a GPU"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_table_is_read_by_rows_that_were_sorted_once(
    dtype: torch.dtype, adds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gather, "_adds_in_order", lambda values: adds)
    table, where = torch.randn(5, 3, dtype=dtype, requires_grad=True), torch.tensor([4, 0, 0, 2, 4, 4, 1])
    rows = Rows(where, 5)
    out = read(table, rows)
    assert torch.equal(out, table[where].T)
    upstream = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, table, upstream)
    torch.testing.assert_close(gradient, loops(upstream.T, where, 5), rtol=1e-6, atol=1e-6)
    if dtype == torch.float64:
        assert torch.autograd.gradcheck(lambda x: read(x, rows), (table,))
        assert torch.autograd.gradgradcheck(lambda x: read(x, rows).square(), (table,))


def test_sums_in_order() -> None:
    """Float32 sums that depend on their order come out in the order of the index, to the bit: on every run, and each
    row as it does alone."""
    values, index = torch.randn(500, 8) * 10.0 ** torch.randint(-4, 8, (500, 1)), torch.randint(6, (500,))
    assert torch.equal(segment_sum(values, index, 7), loops(values, index, 7))
    table = torch.zeros(7, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(lookup(table, index), table, values)
    assert torch.equal(gradient, loops(values, index, 7))


@pytest.mark.parametrize("channels", [1, 4])
def test_gradcheck(channels: int) -> None:
    table = torch.randn(4, channels, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 2, 2], [3, 2, 0]])  # row 1 is never read
    assert torch.autograd.gradcheck(lambda x: lookup(x, index), (table,))
    assert torch.autograd.gradgradcheck(lambda x: lookup(x, index).square(), (table,))
    values = torch.randn(2, 3, channels, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, index, 4), (values,))
    assert torch.autograd.gradgradcheck(lambda x: segment_sum(x, index, 4).square(), (values,))


def test_half_precision_sums_in_float32() -> None:
    table = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    (gradient,) = torch.autograd.grad(lookup(table, torch.zeros(4096, dtype=torch.long)).sum(), table)
    assert gradient.item() == 4096  # in bfloat16 the sum would stand still at 256


def test_at_least_float32() -> None:
    for given, wanted in (("float16", "float32"), ("bfloat16", "float32"), ("float32", "float32")):
        assert at_least_float32(torch.zeros(1, dtype=getattr(torch, given))).dtype == getattr(torch, wanted)
    double = torch.zeros(1, dtype=torch.float64)
    assert at_least_float32(double) is double


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:torch.searchsorted")  # of vmap itself
@pytest.mark.parametrize("places", [(0, None), (None, 0), (0, 0)], ids=str)
def test_vmap_of_a_lookup_and_of_its_gradient(places: tuple[int | None, int | None]) -> None:
    """Over tables, over indices and over both, as one after another."""
    tables, indices = torch.randn(3, 5, 2, dtype=torch.float64), torch.randint(0, 5, (3, 4))
    arguments = [x if place == 0 else x[0] for x, place in zip((tables, indices), places, strict=True)]

    def gradient(table: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda t: lookup(t, index).square().sum())(table)

    for function in (lookup, gradient):
        together = torch.func.vmap(function, in_dims=places)(*arguments)
        each = ([x[n] if place == 0 else x for x, place in zip(arguments, places, strict=True)] for n in range(3))
        torch.testing.assert_close(together, torch.stack([function(*one) for one in each]))


def test_rows_are_not_counted_from_the_end() -> None:
    for index in (torch.tensor([1, -1]), torch.tensor([[5]])):
        with pytest.raises(ValueError, match="row numbers from 0 to 4 in the index"):
            lookup(torch.randn(5, 2), index)
    assert lookup(torch.randn(0, 2), torch.zeros(0, 3, dtype=torch.long)).shape == (0, 3, 2)


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:torch.searchsorted")  # of vmap itself
def test_rows_counted_from_the_end_where_nobody_looks_have_their_gradient() -> None:
    """Under vmap, as in a compiled graph and on a GPU, -1 reads the last row: its gradient goes there, too."""
    table, index = torch.randn(5, 2, dtype=torch.float64, requires_grad=True), torch.tensor([[1, -1], [-5, 2]])
    upstream = torch.randn(2, 2, 2, dtype=torch.float64)
    (wanted,) = torch.autograd.grad(table[index], table, upstream)
    (found,) = torch.autograd.grad(torch.vmap(lambda i: lookup(table, i))(index), table, upstream)
    torch.testing.assert_close(found, wanted)
    weighed = torch.func.grad(lambda t: (torch.vmap(lambda i: lookup(t, i))(index) * upstream).sum())(table.detach())
    torch.testing.assert_close(weighed, wanted)


def test_numbers_are_not_asked_for_where_they_cannot_be_had() -> None:
    """On fake tensors and on a device that would wait; `attention/compile_terms.py` compiles it."""
    table, index = torch.randn(5, 2), torch.tensor([0, 3])
    with FakeTensorMode() as mode:
        assert lookup(mode.from_tensor(table), mode.from_tensor(index)).shape == (2, 2)
    assert lookup(table.to("meta"), index.to("meta")).shape == (2, 2)


def test_bytes_are_refused(unchecked: None) -> None:
    """PyTorch takes them for a mask."""
    with pytest.raises(ValueError, match="an integer tensor as index"):
        lookup(torch.randn(4, 3), torch.tensor([0, 1, 1, 0], dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int16, torch.int32, torch.int64])
def test_a_sum_by_an_index_of_any_integers(dtype: torch.dtype) -> None:
    index = torch.tensor([[2, 0, 2], [1, 2, 0]]).T  # not contiguous
    values = torch.randn(2, 3, 2).transpose(0, 1)
    torch.testing.assert_close(segment_sum(values, index.to(dtype), 4), loops(values, index, 4), rtol=0, atol=0)


@pytest.mark.parametrize("gathers", [True, False], ids=["PyTorch's", "ours, as on a GPU"])
@pytest.mark.parametrize("batch", [(), (2,)], ids=["rows of all", "rows of each"])
def test_pairs_pick_their_products(batch: tuple[int, ...], gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_gathers", lambda x: gathers)
    products, rows = torch.randn(2, 3, 4, 6, dtype=torch.float64, requires_grad=True), torch.randint(6, (*batch, 4, 5))
    out = vectors._pick(products, rows)
    wanted = products.gather(-1, rows.expand(2, 4, 5)[:, None].expand(-1, 3, -1, -1))
    assert torch.equal(out, wanted)
    upstream = torch.randn_like(out)
    ours, theirs = (torch.autograd.grad(x, products, upstream)[0] for x in (out, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(vectors.sum_rows(upstream, rows, 6), theirs, rtol=1e-14, atol=1e-14)
