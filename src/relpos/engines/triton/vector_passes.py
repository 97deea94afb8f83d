"""The forward and the backward of calls with vectors, which are computed in pieces (`vectors`)."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import kernels, tiles, vector_kernels
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches, with_strides
from relpos.engines.triton.steps import add_sinks, by_keys, by_queries, of_rows
from relpos.engines.triton.vector_sets import sets_of
from relpos.engines.triton.vectors import CallVectors, Piece


def forward(call: Call, launches: Launches) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """As `passes.forward`."""
    q, (batch, heads, n, v) = call.q, (launches.batch, launches.heads, launches.n, launches.v)
    vectors = CallVectors(call, sets_of(call), launches)
    adds = vectors.of_values
    out = q.new_empty((batch, heads, n, v), dtype=launches.wide if adds else q.dtype)
    lse = q.new_empty((batch, heads, n), dtype=launches.wide)
    qkv, bias, allowed, of_queries, _, begins = launches.given(call)
    common = launches.size, bias, allowed, of_queries, launches.dropout(call)
    for piece in vectors.pieces():
        own = begins, piece.varying
        _by_queries(launches, "forward", kernels.forward, piece).launch(
            own, out, lse, qkv, *common, launches.sink(call), piece.arguments
        )
        if adds:
            pairs = vectors.pairs()
            _weights(launches, piece).launch(own, pairs, lse, qkv, *common, piece.arguments)
            vectors.add_outputs(out, piece, pairs)
        del piece  # its products, before the next are made
    return out.to(q.dtype) if adds else out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients, launches: Launches
) -> None:
    """As `passes.backward`; the gradient of a bias beside vectors is not supported."""
    d_out, *strides = upstream = with_strides(d_out)
    out, lse, d_lse = out.contiguous(), lse.contiguous(), None if d_lse is None else d_lse.contiguous()
    qkv, bias, allowed, of_queries, of_keys, begins = launches.given(call)
    varying = begins, d_out.data_ptr() % 16, None if d_lse is None else d_lse.data_ptr() % 16, *strides
    rows_kernel, count = launches.once("rows", lambda: of_rows(launches))
    up = tiles.Upstream(*upstream, lse.new_empty((launches.batch, launches.heads, 2, count)), count)
    rows_kernel.launch(varying, out, up, lse, d_lse, launches.size)
    rows = up, qkv, launches.size, bias, allowed
    vectors, scale = CallVectors(call, sets_of(call), launches, d_out), launches.factor(call)
    learned = scale is not None and gradients.wants(scale.factor)
    d_q = d_k = d_v = d_factor = None
    if gradients.wants(call.q) or learned or vectors.learns(gradients, "query"):
        d_q = torch.empty_like(call.q, dtype=launches.wide, memory_format=torch.contiguous_format)
        d_factor = lse.new_empty(lse.shape) if learned else None
    if gradients.wants(call.k) or gradients.wants(call.v) or vectors.learns(gradients, "key"):  # parts add to these
        d_k = torch.zeros_like(call.k, dtype=launches.wide, memory_format=torch.contiguous_format)
        d_v = torch.zeros_like(call.v, dtype=launches.wide, memory_format=torch.contiguous_format)
    no_sides = (None,) * len(launches.low_rank_at)
    for piece in vectors.pieces():
        own, tail = (varying, piece.varying), (launches.dropout(call), piece.arguments)
        if d_q is not None:
            pairs = piece.pairs("query", gradients)
            _by_queries(launches, "queries", kernels.backward_queries, piece).launch(
                (*own, learned, pairs is not None), d_q, d_factor, no_sides, pairs, *rows, of_queries, *tail
            )
            piece.collect("query", pairs, gradients)
        if d_k is not None:
            pairs = piece.pairs("key", gradients)
            keys = launches.once(f"keys{piece.name}", lambda: by_keys(launches, piece.heads))  # noqa: B023
            keys.launch((*own, pairs is not None), d_k, d_v, no_sides, pairs, *rows, of_keys, *tail)
            piece.collect("key", pairs, gradients)
        pairs = piece.pairs("value", gradients)
        if pairs is not None:
            _weights(launches, piece).launch(own, pairs, lse, *rows[1:], of_queries, *tail)
            piece.collect("value", pairs, gradients)
        del piece, tail  # its products, before the next are made
    for x, gradient in ((call.q, d_q), (call.k, d_k), (call.v, d_v)):
        gradients.add(x, gradient)
    if scale is not None and d_factor is not None:
        gradients.add(scale.factor, d_factor.sum_to_size(scale.factor.shape))
    add_sinks(launches, call, lse, up, gradients)


def _weights(launches: Launches, piece: Piece) -> Kernel:
    return _by_queries(launches, "weights", vector_kernels.weights, piece)


def _by_queries(launches: Launches, kind: str, kernel: Any, piece: Piece) -> Kernel:
    return launches.once(f"{kind}{piece.name}", lambda: by_queries(launches, kind, kernel, piece.rows, piece.heads))
