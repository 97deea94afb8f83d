"""What the passes of a call share: the kernels whose grids go along queries or keys, the sums of rows, and sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import grids, kernels, spans, tiles
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches
from relpos.engines.triton.limits import cdiv, power_of_2

_ROWS = 64
"""Rows of a program of `backward_rows`, which reads the output once."""


def by_queries(launches: Launches, kind: str, kernel: Any, rows: int, heads: int) -> Kernel:
    """A kernel whose programs take some rows each, of so many heads of all elements of the batch."""
    shape = launches.shape(kind)
    tiled = launches.tiled(shape)
    count = cdiv(grids.steps(rows, tiled["QUERIES"], shape["ROWS"]), shape["ROWS"])
    tests = _tests(launches, tiled, launches.m, tiled["KEYS"], shape["COLUMNS"])
    constants = {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled}
    return Kernel(kernel, (count * heads,), constants)


def by_keys(launches: Launches, heads: int) -> Kernel:
    """The kernel of the keys' gradients, whose programs take some keys each."""
    shape = launches.shape("keys")
    tiled = launches.tiled(shape)
    count = cdiv(grids.steps(launches.m, tiled["KEYS"], shape["COLUMNS"]), shape["COLUMNS"])
    tests = _tests(launches, tiled, launches.n, tiled["QUERIES"], shape["ROWS"])
    constants = {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled}
    return Kernel(kernels.backward_keys, (count * heads // launches.size.groups,), constants)


def _tests(launches: Launches, tiled: dict[str, Any], count: int, side: grids.TileSide, size: int) -> dict[str, bool]:
    """Of a kernel whose loop takes `size` of `count` tokens at a time."""
    tests = launches.tests((count - side[0]) % size == 0 and count >= size)
    prefixes = tiled["QUERIES"][0] + tiled["KEYS"][0] > 0
    return {**tests, "TESTED": tests["TESTED"] or prefixes}


def of_rows(launches: Launches) -> tuple[Kernel, int]:
    """The kernel of the rows' sums, and how many of each kind a head has: see `tiles.Upstream`."""
    most = min(spans.COARSE, max(16, power_of_2(launches.n)))  # rows of a tile
    count = (cdiv(launches.n, most) + 1) * most  # a cell of a grid may begin at any row
    constants = {name: launches.constants[name] for name in ("V", "V_PAD", "UNIT", "SUM")}
    grid = (cdiv(count, _ROWS) * launches.batch * launches.heads,)
    return Kernel(kernels.backward_rows, grid, {**constants, "ROWS": _ROWS}), count


def add_sinks(launches: Launches, call: Call, lse: Tensor, up: tiles.Upstream, gradients: Gradients) -> None:
    """Add the gradient of a call's sinks, if it is wanted, from the log-sum-exp and the delta of every row."""
    sinks = launches.sinks(call)
    if sinks is None or not gradients.wants(sinks.logits):
        return
    shift = torch.where(lse == -torch.inf, torch.inf, lse)
    share = -torch.exp(sinks.rows(launches.wide).detach() - shift) * up.sums[:, :, 1, : launches.n]
    gradients.add(sinks.logits, share.sum_to_size(sinks.logits.shape) if sinks.of_queries else share.sum(dim=(0, 2)))
