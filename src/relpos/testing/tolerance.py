"""The tolerance of a comparison, derived from the rounding error of the same arithmetic.

Every comparison has three parties. `exact` is the float64 oracle. The yardstick is the oracle's own loops run in the
dtype under test; its error is what rounding costs. `actual` is under test. It passes where

    rms(actual - exact) <= factor * cost by rms + eps * rms(exact)
    max(actual - exact) <= 2 * factor * cost by max + 8 * eps * max(exact)

with eps that of the dtype and factor 1.1 in half precision, 2 in float32. In float64 there is no wider dtype: the
yardstick then runs in float32 and its error is scaled by eps(float64) / eps(float32). NaN fails, infinity fails unless
expected.

The cost is not the error of one run of the loops. That depends on the order of their sums, and with it on the width of
the processor's vectors: the root mean square of a hundred errors in float32 is up to twice as large in one order as in
another. So the loops are run in n = `ORDERS` orders (`relpos.testing.orders`), and of their n errors

    cost by rms = mean + sqrt(n) * deviation, with deviation^2 = mean((error - mean)^2)
    cost by max = the largest

No single one of n draws is above the cost by rms, whatever their distribution (Samuelson's inequality: the largest is
at most sqrt(n - 1) deviations above the mean). So no order decides by luck. A result that passes by the first order
alone would pass by all of them: the others are only run if it does not. The deviation falls with the number of results
that round independently, from a fifth of the mean (40 numbers behind 30 softmaxes) over a twentieth (800 numbers) to a
fiftieth (16,000), where the cost is that of one run. So it is in half precision: sums are made in float32 and rounded
once, so they are the same in any order.

The root mean square of a handful of errors is luck: fewer than `FEW` numbers only need the second line.

Where a result is a difference of larger terms that may cancel to nothing (a gradient behind a softmax), eps applies to
the terms: their size is given as `terms` and takes the place of rms(exact) and max(exact) where it is larger.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from relpos.testing.orders import ORDERS, Orders

Magnitude = Callable[[Tensor], float]
FACTOR = {torch.float64: 2.0, torch.float32: 2.0, torch.bfloat16: 1.1, torch.float16: 1.1}
FEW = 16
HOPELESS = 1000
"""An error this many times what the first order allows does not depend on the order: the others are not computed."""


def yardstick_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the yardstick for results in `dtype` is computed."""
    return torch.float32 if dtype == torch.float64 else dtype


def rms(x: Tensor) -> float:
    """Root of the mean square, in float64; 0 of nothing."""
    return float(x.detach().double().square().mean().sqrt()) if x.numel() else 0.0


def largest(x: Tensor) -> float:
    """The largest magnitude; 0 of nothing."""
    return float(x.detach().double().abs().max()) if x.numel() else 0.0


def assert_close(
    actual: Tensor,
    exact: Tensor,
    yardstick: Orders | Tensor,
    *,
    what: str = "result",
    terms: float = 0.0,
    dtype: torch.dtype | None = None,
) -> None:
    """Assert that `actual` is as near to `exact` as the rule of this module asks.

    Args:
        actual: the result under test.
        exact: the oracle's, in float64.
        yardstick: `in_orders(...)` of the loops; a tensor where nothing is summed, as of a result that is only rounded.
        what: how a failing message calls the result.
        terms: size of the terms of a difference that may cancel.
        dtype: the dtype of the arithmetic, where it is not that of `actual`.

    Raises:
        AssertionError: they differ by more; the message says by how much, and where most.
    """
    __tracebackhide__ = True
    dtype = actual.dtype if dtype is None else dtype
    drawn = yardstick.drawn if isinstance(yardstick, Orders) else lambda number: yardstick
    shapes = actual.shape, exact.shape, drawn(0).shape
    assert len(set(shapes)) == 1, f"{what}: shapes {shapes}"
    assert exact.dtype == torch.float64, f"{what}: the oracle ran in {exact.dtype}"
    actual, exact = actual.detach().double(), exact.detach()
    assert not actual.isnan().any(), f"{what}: NaN"
    infinite = exact.isinf()
    assert torch.equal(actual[infinite], exact[infinite]), f"{what}: infinities differ"
    error = actual[~infinite] - exact[~infinite]

    eps, factor = torch.finfo(dtype).eps, FACTOR[dtype]
    unit = eps / torch.finfo(yardstick_dtype(dtype)).eps

    def costs(measure: Magnitude, orders: int) -> list[float]:
        return [unit * measure((drawn(n).detach().double() - exact)[~infinite]) for n in range(orders)]

    def ask(line: str, measure: Magnitude, of_all: Callable[[list[float]], float], factor: float, units: float) -> None:
        __tracebackhide__ = True
        found, own = measure(error), units * eps * max(measure(exact[~infinite]), terms)
        first = factor * costs(measure, 1)[0] + own
        if found <= first:
            return
        hopeless = found > HOPELESS * first > 0
        allowed = first if hopeless else factor * of_all(costs(measure, ORDERS)) + own
        assert found <= allowed, f"{what}: {line} {found:.3g} above {allowed:.3g} in {dtype}{_worst(actual, exact)}"

    if error.numel() >= FEW:
        ask("RMS error", rms, _above_all, factor, 1)
    ask("largest error", largest, max, 2 * factor, 8)


def _worst(actual: Tensor, exact: Tensor) -> str:
    """Where two tensors differ most, and by which values."""
    difference = (actual - exact).abs().nan_to_num(nan=-1.0)  # infinities that agree
    if not difference.dim():
        return f": {float(actual):.6g}, expected {float(exact):.6g}"
    index = tuple(int(i) for i in torch.unravel_index(difference.argmax(), difference.shape))
    return f"; they differ most at {list(index)}: {float(actual[index]):.6g}, expected {float(exact[index]):.6g}"


def _above_all(draws: list[float]) -> float:
    """A bound that none of the draws exceeds, whatever their distribution."""
    return statistics.fmean(draws) + math.sqrt(len(draws)) * statistics.pstdev(draws)
