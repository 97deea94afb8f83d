"""The forward and the backward of a call by the kernels. Only gradients that are wanted are computed."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.terms.vectors import Side
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import grids, kernels, spans, table, tiles, vector_kernels, windows
from relpos.engines.triton.handles import Alignment, Kernel
from relpos.engines.triton.launch import Launches, readable, with_strides
from relpos.engines.triton.limits import cdiv, power_of_2
from relpos.engines.triton.vectors import CallVectors, Piece, pieces

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
    vectors = CallVectors.of(call, launches)
    adds = vectors is not None and vectors.of_values
    out = q.new_empty((batch, heads, n, v), dtype=launches.wide if adds else q.dtype)
    lse = q.new_empty((batch, heads, n), dtype=launches.wide)
    allowed, queries, _ = launches.allowed(call)
    qkv, bias = launches.qkv(call), launches.bias(call)
    call.prepared = bias if launches.keeps_bias else None
    given = qkv, bias, allowed, queries
    varying = launches.once("given", lambda: Alignment(*given))(*given)
    common = launches.size, bias, allowed, queries, launches.dropout(call)
    for piece in pieces(vectors, launches):
        own = varying, piece.varying
        _by_queries(launches, "forward", kernels.forward, piece)(
            out, lse, qkv, *common, launches.sink(call), piece.arguments, varying=own
        )
        if vectors is not None and vectors.of_values:
            pairs = vectors.pairs()
            _weights(launches, piece)(pairs, lse, qkv, *common, piece.arguments, varying=own)
            vectors.add_outputs(out, piece, pairs)
        del piece  # its products, before the next are made
    return out.to(q.dtype) if adds else out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients,
    launches: Launches | None = None,
) -> None:  # fmt: skip
    """Add to the gradients that are wanted."""
    launches = Launches(call) if launches is None else launches
    d_out = readable(d_out)
    out, lse, d_lse = out.contiguous(), lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    allowed, of_queries, of_keys = launches.allowed(call)
    dropout, qkv, bias = launches.dropout(call), launches.qkv(call), call.prepared or launches.bias(call)
    kind = "given back" if d_lse is None else "given back, of the log-sum-exp too"
    if windows.serves(launches, call, gradients):
        read = (out, lse, d_lse, d_out), qkv, bias, allowed
        varying = kind, launches.once(f"{kind}, windows", lambda: Alignment(*read))(*read), d_out.stride()
        common = qkv, launches.size, bias, allowed, dropout
        windows.backward(launches, call, out, lse, d_out, d_lse, common, gradients, varying)
        return
    of_rows, count = launches.once("rows", lambda: _rows(launches))
    sums = lse.new_empty((launches.batch, launches.heads, 2, count))
    up = tiles.Upstream(*with_strides(d_out), sums, count)
    rows = up, qkv, launches.size, bias, allowed
    given = (out, lse, d_lse), up, rows[1], rows[3], allowed, of_queries, of_keys
    varying = kind, launches.once(kind, lambda: Alignment(*given))(*given), up[1:4]
    of_rows(out, up, lse, d_lse, launches.size, varying=varying)
    scale = launches.factor(call)
    learned = scale is not None and gradients.wants(scale.factor)
    vectors = CallVectors.of(call, launches, d_out)

    def learns(side: Side) -> bool:
        return vectors is not None and vectors.learns(gradients, side)

    ranks = launches.low_rank(call)
    sides = [term.query for term in ranks], [term.key for term in ranks]
    d_sides = [_targets(side, launches, gradients) for side in sides]
    wanted = [tuple(map(gradients.wants, side)) for side in sides]
    d_q = d_k = d_v = d_factor = None
    in_dtype = None if vectors is None else launches.wide
    if gradients.wants(call.q) or learned or learns("query") or any(wanted[0]):
        d_q = torch.empty_like(call.q, dtype=in_dtype, memory_format=torch.contiguous_format)
        d_factor = lse.new_empty(lse.shape) if learned else None
    if gradients.wants(call.k) or gradients.wants(call.v) or learns("key") or any(wanted[1]):
        empty = torch.empty_like if vectors is None else torch.zeros_like  # parts of a call add to these
        d_k = empty(call.k, dtype=in_dtype, memory_format=torch.contiguous_format)
        d_v = empty(call.v, dtype=in_dtype, memory_format=torch.contiguous_format)
    for piece in pieces(vectors, launches):
        own, tail = (varying, piece.varying), (dropout, piece.arguments)
        if d_q is not None:
            pairs = piece.pairs("query", gradients)
            _by_queries(launches, "queries", kernels.backward_queries, piece)(
                d_q, d_factor, d_sides[0], pairs, *rows, of_queries, *tail,
                varying=(*own, learned, wanted[0], pairs is not None),
            )  # fmt: skip
            piece.collect("query", pairs, gradients)
        if d_k is not None:
            pairs = piece.pairs("key", gradients)
            _by_keys(launches, piece)(
                d_k, d_v, d_sides[1], pairs, *rows, of_keys, *tail, varying=(*own, wanted[1], pairs is not None)
            )
            piece.collect("key", pairs, gradients)
        pairs = piece.pairs("value", gradients)
        if pairs is not None:
            _weights(launches, piece)(pairs, lse, *rows[1:], of_queries, *tail, varying=own)
            piece.collect("value", pairs, gradients)
        del piece, tail  # its products, before the next are made
    for x, gradient in ((call.q, d_q), (call.k, d_k), (call.v, d_v)):
        gradients.add(x, gradient)
    if scale is not None and d_factor is not None:
        gradients.add(scale.factor, d_factor.sum_to_size(scale.factor.shape))
    for side, found in zip(sides, d_sides, strict=True):
        _add(gradients, side, found)
    line = launches.line(call)
    if line is not None and gradients.wants(line.values):
        gradients.add(line.values, table.gradient(launches, line, (*rows, dropout), varying))
    sinks = launches.sinks(call)
    if sinks is not None and gradients.wants(sinks.logits):
        shift = torch.where(lse == -torch.inf, torch.inf, lse)
        share = -torch.exp(sinks.rows(launches.wide).detach() - shift) * sums[:, :, 1, : launches.n]
        gradients.add(
            sinks.logits, share.sum_to_size(sinks.logits.shape) if sinks.of_queries else share.sum(dim=(0, 2))
        )


def _targets(sides: list[Tensor], launches: Launches, gradients: Gradients) -> tuple[Tensor | None, ...]:
    """For each side of a low-rank bias an empty `[B, H, R, tokens]`, if its gradient is wanted."""
    if not sides:
        return ()
    heads = launches.batch, launches.heads

    def empty(side: Tensor) -> Tensor:
        return side.new_empty((*heads, side.shape[-1], side.shape[-2]), dtype=launches.wide)

    return tuple([empty(side) if gradients.wants(side) else None for side in sides])


def _add(gradients: Gradients, sides: list[Tensor], found: tuple[Tensor | None, ...]) -> None:
    """Add what the kernels wrote for each side, summed over the heads and the batch that share it."""
    for side, gradient in zip(sides, found, strict=True):
        gradients.add(side, None if gradient is None else gradient.mT.sum_to_size(side.shape))


def _weights(launches: Launches, piece: Piece) -> Kernel:
    return _by_queries(launches, "weights", vector_kernels.weights, piece)


def _by_queries(launches: Launches, kind: str, kernel: Any, piece: Piece) -> Kernel:
    def made() -> Kernel:
        shape = launches.shape(kind)
        tiled = launches.tiled(shape)
        rows = cdiv(grids.steps(piece.rows, tiled["QUERIES"], shape["ROWS"]), shape["ROWS"])
        tests = _tests(launches, tiled, launches.m, tiled["KEYS"], shape["COLUMNS"])
        constants = {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled}
        return Kernel(kernel, (rows * piece.heads,), constants)

    return launches.once(f"{kind}{piece.name}", made)


def _by_keys(launches: Launches, piece: Piece) -> Kernel:
    def made() -> Kernel:
        shape = launches.shape("keys")
        tiled = launches.tiled(shape)
        columns = cdiv(grids.steps(launches.m, tiled["KEYS"], shape["COLUMNS"]), shape["COLUMNS"])
        tests = _tests(launches, tiled, launches.n, tiled["QUERIES"], shape["ROWS"])
        constants = {**launches.constants, **shape, "COARSE": spans.COARSE, **tests, **tiled}
        return Kernel(kernels.backward_keys, (columns * piece.heads // launches.size.groups,), constants)

    return launches.once(f"keys{piece.name}", made)


def _tests(launches: Launches, tiled: dict[str, Any], count: int, side: grids.TileSide, size: int) -> dict[str, bool]:
    """Of a kernel whose loop takes `size` of `count` tokens at a time."""
    tests = launches.tests((count - side[0]) % size == 0 and count >= size)
    prefixes = tiled["QUERIES"][0] + tiled["KEYS"][0] > 0
    return {**tests, "TESTED": tests["TESTED"] or prefixes}


def _rows(launches: Launches) -> tuple[Kernel, int]:
    """The kernel of the rows' sums, and how many of each kind a head has: see `tiles.Upstream`."""
    most = min(spans.COARSE, max(16, power_of_2(launches.n)))  # rows of a tile
    count = (cdiv(launches.n, most) + 1) * most  # a cell of a grid may begin at any row
    constants = {name: launches.constants[name] for name in ("V", "V_PAD", "UNIT", "SUM")}
    grid = (cdiv(count, _ROWS) * launches.batch * launches.heads,)
    return Kernel(kernels.backward_rows, grid, {**constants, "ROWS": _ROWS}), count
