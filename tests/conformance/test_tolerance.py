"""The rule of `relpos.testing.tolerance` and the orders of sums that it draws: what they let pass, and what not."""

import functools
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from relpos.testing import oracle
from relpos.testing.orders import ORDERS, Orders, Shuffled, in_orders
from relpos.testing.tolerance import assert_close, rms

B, H, N, M, D = 2, 3, 5, 9, 4
NAMES = ("output", "d q", "d k", "d v")


def attended(dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients of the oracle's attention, always of the same numbers."""
    chance = torch.Generator().manual_seed(3)
    *leaves, upstream = (torch.randn(B, H, n, D, generator=chance).to(dtype) for n in (N, M, M, N))
    leaves = [x.requires_grad_() for x in leaves]
    output = oracle.attention(*leaves)[0]
    return [output, *torch.autograd.grad(output, leaves, upstream)]


@functools.cache
def by_loops() -> tuple[list[Tensor], Orders]:
    """In float64, and the cost in float32; what has been drawn is kept."""
    return attended(torch.float64), in_orders(lambda: attended(torch.float32))


@pytest.mark.parametrize(
    "sums",
    [
        lambda x: x.sum(),
        lambda x: x.sum(dim=(0, -1)),
        lambda x: x.mean(dim=1, keepdim=True),
        lambda x: x.logsumexp(dim=-1),
        lambda x: x.softmax(dim=1),
        lambda x: x.log_softmax(dim=-1),
        lambda x: x[0] @ x[1].mT,
        lambda x: x @ x.mT,
        lambda x: x[0, 0] @ x[1, 0],
        lambda x: torch.nn.functional.linear(x[0], x[1], x[0, :, 0]),
        lambda x: torch.einsum("bij,bij->b", x, x),
    ],
)
def test_a_shuffled_sum_is_the_same_but_for_rounding(sums: Callable[[Tensor], Tensor]) -> None:
    """Values and gradients, in each dtype as near to one another as rounding allows, and not all alike."""
    made = torch.randn(2, 50, 50)

    def found(x: Tensor) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        output = sums(leaf)
        return [output, *torch.autograd.grad(output.square().sum(), leaf)]

    exact, plain = found(made.double()), found(made)
    drawn = []
    for seed in range(1, 4):
        with Shuffled(seed):
            wide, narrow = found(made.double()), found(made)
        for a, b, c, d in zip(exact, wide, plain, narrow, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(d, c, rtol=1e-4, atol=1e-4)
        drawn.append(narrow[0])
    assert not all(torch.equal(plain[0], x) for x in drawn)


def test_whole_numbers_and_single_ones_are_left_alone() -> None:
    with Shuffled(1):
        assert torch.arange(5).sum() == 10
        assert torch.tensor(2.0).sum() == 2
        assert torch.tensor(2.0).softmax(dim=0) == 1
        assert (torch.arange(4)[None] @ torch.arange(4)[:, None]).item() == 14


def test_random_numbers_are_the_same_in_every_order() -> None:
    cost = in_orders(lambda: torch.randn(3))
    after = torch.rand(1)
    assert all(torch.equal(cost.drawn(0), cost.drawn(n)) for n in range(3))
    torch.default_generator.manual_seed(0)  # as the fixture `seeds` left it
    assert torch.equal(torch.randn(3), cost.drawn(0))
    assert torch.equal(torch.rand(1), after), "drawing again moved the generator"


def test_parts_of_what_was_computed() -> None:
    cost = in_orders(lambda: {"all": [torch.ones(2), torch.zeros(3)]})
    assert [len(x.drawn(1)) for x in cost["all"]] == [2, 3]


def test_other_orders_are_drawn_only_where_the_first_does_not_decide() -> None:
    calls = []

    def loops() -> list[Tensor]:
        calls.append(1)
        return attended(torch.float32)

    exact, cost = attended(torch.float64), in_orders(loops)
    assert_close(attended(torch.float32)[3], exact[3], cost[3])
    assert len(calls) == 1
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close(exact[3] * (1 + 1e-5), exact[3], cost[3], dtype=torch.float32)
    assert len(calls) == ORDERS
    calls.clear()
    with pytest.raises(AssertionError, match=r"RMS error .*; they differ most at \[\d, \d, \d, \d\]: .*, expected "):
        assert_close(-exact[3], exact[3], in_orders(loops)[3], dtype=torch.float32)
    assert len(calls) == 1


def test_what_one_order_allows_all_allow() -> None:
    """In which order the machine happens to compute decides nothing: what any of them allows, passes."""
    for chosen in range(ORDERS):
        for name, e, c in zip(NAMES, *by_loops(), strict=True):
            assert_close(e + 2 * (c.drawn(chosen).double() - e), e, c, what=name, dtype=torch.float32)


def test_orders_differ_by_luck() -> None:
    """The reason of the rule: what rounding costs is a matter of the order, by tens of per cent."""
    exact, cost = (x[1] for x in by_loops())
    drawn = [rms(cost.drawn(n).double() - exact) for n in range(ORDERS)]
    assert max(drawn) > 1.2 * min(drawn)
    assert statistics.pstdev(drawn) < statistics.fmean(drawn) / 2


@pytest.mark.parametrize("place", range(4), ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_small_relative_error_is_found(place: int, dtype: torch.dtype) -> None:
    """Of 80 units in the last place, 1e-5 in float32: in all numbers, or in a single row."""
    exact, cost = by_loops()
    size = max(rms(x) for x in exact[1:]) if place else 0.0
    wrong = 84 * torch.finfo(dtype).eps
    everywhere = exact[place] * (1 + wrong)
    one_row = exact[place].clone()
    one_row[0, 0, int(one_row[0, 0].abs().amax(dim=-1).argmax())] *= 1 + wrong
    for actual in (everywhere, one_row):
        with pytest.raises(AssertionError, match="error"):
            assert_close(actual, exact[place], cost[place], terms=size, dtype=dtype)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("asked", ["float32", "half"])
def test_sums_in_half_precision_are_found(asked: str, narrow: torch.dtype) -> None:
    """A kernel that rounds its sums as it goes, where float32 is asked for, or half precision with sums in float32."""
    a, b = torch.randn(2, 8, 512).to(narrow)
    total = torch.zeros(8, dtype=narrow)
    for left, right in zip(a.unbind(-1), b.unbind(-1), strict=True):
        total = total + left * right

    def loops(dtype: torch.dtype) -> Tensor:
        return torch.outer((a.to(dtype) * b.to(dtype)).sum(dim=-1), torch.ones(4, dtype=dtype))

    dtype = narrow if asked == "half" else torch.float32
    cost = in_orders(lambda: loops(dtype))
    with pytest.raises(AssertionError, match="RMS error"):
        assert_close(total[:, None].expand(8, 4).to(dtype), loops(torch.float64), cost)


def test_nan_and_unexpected_infinity_fail() -> None:
    exact = torch.ones(20, dtype=torch.float64)
    for bad in (torch.nan, torch.inf):
        with pytest.raises(AssertionError):
            assert_close(torch.full((20,), bad), exact, exact.float())
    exact[3] = torch.inf
    assert_close(exact.float(), exact, exact.float())
