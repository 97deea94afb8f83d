"""The forward and the backward of a call by the kernels. Only gradients that are wanted are computed."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import grids, kernels, spans, table, tiles
from relpos.engines.triton.handles import Alignment, Kernel
from relpos.engines.triton.launch import Launches, readable, with_strides
from relpos.engines.triton.limits import cdiv

_ROWS = 64
"""Rows of a program of `backward_rows`, which reads the output once."""


def forward(call: Call, launches: Launches | None = None) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp.

    Args:
        call: its rotation applied.
        launches: of calls like this one; default made for it.
    """
    launches = Launches(call) if launches is None else launches
    q, (batch, heads, n, v) = call.q, (launches.batch, launches.heads, launches.n, launches.v)
    out = q.new_empty((batch, heads, n, v))
    lse = q.new_empty((batch, heads, n), dtype=launches.wide)
    allowed, queries, _ = launches.allowed(call)
    qkv, bias = launches.qkv(call), launches.bias(call)
    given = qkv, bias, allowed, queries
    launches.once("forward", lambda: _by_queries(launches, "forward", kernels.forward))(
        out, lse, qkv, launches.size, bias, allowed, queries, launches.dropout(call), launches.sink(call),
        varying=launches.once("given", lambda: Alignment(*given))(*given),
    )  # fmt: skip
    return out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients,
    launches: Launches | None = None,
) -> None:  # fmt: skip
    """Add to the gradients that are wanted."""
    launches = Launches(call) if launches is None else launches
    d_out = readable(d_out)
    out, lse, d_lse = out.contiguous(), lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    count = (cdiv(launches.n, spans.COARSE) + 1) * spans.COARSE  # a cell of a grid may begin at any row
    shift, delta = lse.new_empty((2, launches.batch, launches.heads, count)).unbind()
    up = tiles.Upstream(*with_strides(d_out), shift, delta, count)
    allowed, of_queries, of_keys = launches.allowed(call)
    dropout = launches.dropout(call)
    rows = up, launches.qkv(call), launches.size, launches.bias(call), allowed
    given = (out, lse, d_lse), up, rows[1], rows[3], allowed, of_queries, of_keys
    kind = "given back" if d_lse is None else "given back, of the log-sum-exp too"
    varying = kind, launches.once(kind, lambda: Alignment(*given))(*given), up[1:4]
    launches.once("rows", lambda: _rows(launches, count))(
        up.delta, up.shift, out, up, lse, d_lse, launches.size, varying=varying
    )
    scale = launches.factor(call)
    learned = scale is not None and gradients.wants(scale.factor)
    sides = [term.query for term in launches.low_rank(call)]
    d_sides = _targets(sides, launches, gradients)
    if learned or any(map(gradients.wants, (call.q, *sides))):
        d_q = call.q.new_empty(call.q.shape)
        d_factor = lse.new_empty(lse.shape) if learned else None
        launches.once("queries", lambda: _by_queries(launches, "queries", kernels.backward_queries))(
            d_q, d_factor, d_sides, *rows, of_queries, dropout,
            varying=(varying, learned, *map(gradients.wants, sides)),
        )  # fmt: skip
        gradients.add(call.q, d_q)
        if scale is not None and d_factor is not None:
            gradients.add(scale.factor, d_factor.sum_to_size(scale.factor.shape))
        _add(gradients, sides, d_sides)
    sides = [term.key for term in launches.low_rank(call)]
    d_sides = _targets(sides, launches, gradients)
    if any(map(gradients.wants, (call.k, call.v, *sides))):
        d_k, d_v = call.k.new_empty(call.k.shape), call.v.new_empty(call.v.shape)
        launches.once("keys", lambda: _by_keys(launches))(
            d_k, d_v, d_sides, *rows, of_keys, dropout, varying=(varying, *map(gradients.wants, sides))
        )
        _add(gradients, sides, d_sides)
        for x, gradient in ((call.k, d_k), (call.v, d_v)):
            gradients.add(x, gradient)
    line = launches.line(call)
    if line is not None and gradients.wants(line.values):
        gradients.add(line.values, table.gradient(launches, call, line, (*rows, dropout), varying))
    sinks = launches.sinks(call)
    if sinks is not None and gradients.wants(sinks.logits):
        shift = torch.where(lse == -torch.inf, torch.inf, lse)
        share = -torch.exp(sinks.rows(launches.wide).detach() - shift) * up.delta[:, :, : launches.n]
        gradients.add(
            sinks.logits, share.sum_to_size(sinks.logits.shape) if sinks.of_queries else share.sum(dim=(0, 2))
        )


def _targets(sides: list[Tensor], launches: Launches, gradients: Gradients) -> tuple[Tensor | None, ...]:
    """For each side of a low-rank bias an empty `[B, H, R, tokens]`, if its gradient is wanted."""
    heads = launches.batch, launches.heads

    def empty(side: Tensor) -> Tensor:
        return side.new_empty((*heads, side.shape[-1], side.shape[-2]), dtype=launches.wide)

    return tuple([empty(side) if gradients.wants(side) else None for side in sides])


def _add(gradients: Gradients, sides: list[Tensor], found: tuple[Tensor | None, ...]) -> None:
    """Add what the kernels wrote for each side, summed over the heads and the batch that share it."""
    for side, gradient in zip(sides, found, strict=True):
        gradients.add(side, None if gradient is None else gradient.mT.sum_to_size(side.shape))


def _by_queries(launches: Launches, kind: str, kernel: Any) -> Kernel:
    shape = launches.shape(kind)
    tiled = launches.tiled(shape)
    rows = cdiv(grids.steps(launches.n, tiled["QUERIES"], shape["ROWS"]), shape["ROWS"])
    tests = _tests(launches, tiled, launches.m, tiled["KEYS"], shape["COLUMNS"])
    grid = (rows * launches.batch * launches.heads,)
    return Kernel(kernel, grid, {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled})


def _by_keys(launches: Launches) -> Kernel:
    shape = launches.shape("keys")
    tiled = launches.tiled(shape)
    columns = cdiv(grids.steps(launches.m, tiled["KEYS"], shape["COLUMNS"]), shape["COLUMNS"])
    tests = _tests(launches, tiled, launches.n, tiled["QUERIES"], shape["ROWS"])
    grid = (columns * launches.batch * launches.own_heads,)
    return Kernel(
        kernels.backward_keys, grid, {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled}
    )


def _tests(launches: Launches, tiled: dict[str, Any], count: int, side: grids.Side, size: int) -> dict[str, bool]:
    """Of a kernel whose loop takes `size` of `count` tokens at a time."""
    tests = launches.tests((count - side[0]) % size == 0 and count >= size)
    prefixes = tiled["QUERIES"][0] + tiled["KEYS"][0] > 0
    return {**tests, "TESTED": tests["TESTED"] or prefixes}


def _rows(launches: Launches, count: int) -> Kernel:
    constants = {name: launches.constants[name] for name in ("V", "V_PAD", "UNIT", "SUM")}
    grid = (cdiv(count, _ROWS) * launches.batch * launches.heads,)
    return Kernel(kernels.backward_rows, grid, {**constants, "ROWS": _ROWS})
