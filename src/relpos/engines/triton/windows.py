"""The backward of calls of which each element of the batch is one tile, as windows are: `window_kernels` in one launch
computes the gradients of q, k, v and of the scores of all pairs, which are then summed along the lines."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import table, window_kernels
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches, parameter_of
from relpos.engines.triton.limits import cdiv, power_of_2


def serves(launches: Launches, call: Call, gradients: Gradients) -> bool:
    """Whether this kernel computes all gradients of a call: of q, k, v and a line bias, and nothing beside."""
    line = launches.line(call)
    if line is None or not launches.once("window", lambda: _fits(launches, call)):
        return False
    return launches.few and all(map(gradients.wants, (call.q, call.k, call.v, parameter_of(line))))


_MOST = 64 * 32
"""Numbers of a padded window of one head: more need more registers than a thread has."""


def _fits(launches: Launches, call: Call) -> bool:
    beside = launches.has_vectors or launches.low_rank(call) or launches.factor(call) or launches.sinks(call)
    grouped = launches.heads != launches.own_heads
    shape, width = launches.shape("table"), max(launches.constants["D_PAD"], launches.constants["V_PAD"])
    one_tile = _edge(launches) <= max(shape["ROWS"], shape["COLUMNS"])
    return one_tile and _edge(launches) * width <= _MOST and not (beside or grouped)


def _edge(launches: Launches) -> int:
    """The rows and columns of the tile."""
    return max(16, power_of_2(max(launches.n, launches.m)))


def backward(
    launches: Launches, call: Call, read: tuple[Any, ...], gradients: Gradients, varying: Hashable,
    of_line: table.LineGradient,
) -> None:  # fmt: skip
    """Add to the gradients.

    Args:
        read: the output, its gradient with its strides, log-sum-exp and its gradient, q, k and v, sizes, bias, mask and
            dropout. varying: see `Kernel`. of_line: sums what the kernel finds of all pairs.
    """
    line = launches.line(call)
    assert line is not None
    kernel, share = launches.once("windows", lambda: _kernel(launches))
    made = [launches.empty_like(x) for x in (call.q, call.k, call.v)]
    partial = table.pairs(launches, kernel.grid[1])
    out, upstream, *rest = read
    kernel.launch(varying, *made, partial, out, *upstream, *rest, launches.batch, share)
    for x, gradient in zip((call.q, call.k, call.v), made, strict=True):
        gradients.add(x, gradient)
    gradients.add(parameter_of(line), of_line.of_pairs(line, partial))


def _kernel(launches: Launches) -> tuple[Kernel, int]:
    """The kernel, and how many elements of the batch each of its programs takes."""
    shape, edge = launches.shape("table"), _edge(launches)
    share = cdiv(launches.batch, cdiv(table.PROGRAMS, launches.heads))
    tile = {"EDGE": edge, "num_warps": 4, "num_stages": min(2, shape["num_stages"])}
    tests = launches.tests(launches.n == launches.m == edge)
    grid = (launches.heads, cdiv(launches.batch, share))
    return Kernel(window_kernels.backward_windows, grid, {**launches.constants, **tile, **tests}), share
