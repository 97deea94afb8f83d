"""The forward and the backward of a call by the kernels. Only gradients that are wanted are computed."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import kernels, steps, table, tiles, vector_passes, windows
from relpos.engines.triton.launch import Launches, parameter_of, with_strides
from relpos.engines.triton.vectors import NO_CHUNK


def forward(call: Call, launches: Launches | None = None) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp.

    Args:
        call: its rotation applied.
        launches: of calls like this one; default made for it.
    """
    launches = Launches(call) if launches is None else launches
    if launches.has_vectors:
        return vector_passes.forward(call, launches)
    q, batch, heads, n = call.q, launches.batch, launches.heads, launches.n
    out, lse = q.new_empty(batch, heads, n, launches.v), q.new_empty(batch, heads, n, dtype=launches.wide)
    qkv, bias, allowed, of_queries, _, begins = launches.given(call)
    call.prepared = (bias, begins) if launches.keeps_bias else None
    kernel = launches.once("forward", lambda: steps.by_queries(launches, "forward", kernels.forward, n, batch * heads))
    kernel.launch(
        begins, out, lse, qkv, launches.size, bias, allowed, of_queries, launches.dropout(call), launches.sink(call),
        NO_CHUNK,
    )  # fmt: skip
    return out, lse


def backward(
    call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients,
    launches: Launches | None = None,
) -> None:  # fmt: skip
    """Add to the gradients that are wanted."""
    launches = Launches(call) if launches is None else launches
    if launches.has_vectors:
        vector_passes.backward(call, out, lse, d_out, d_lse, gradients, launches)
        return
    way = launches.backwards.get(gradients.kind)
    if way is None:
        way = GradientLaunches(launches, call, gradients)
        if gradients.kind is not None:
            launches.backwards[gradients.kind] = way
    d_lse = None if d_lse is None else d_lse.contiguous()
    way.run(call, out.contiguous(), lse.contiguous(), d_out, d_lse, gradients)


class GradientLaunches:
    """The backward of calls of one structure of which the same gradients are wanted: what it launches, decided once.
    Holds no tensor.

    Args:
        launches: what all calls of the structure have in common.
        call, gradients: those of the first.
    """

    def __init__(self, launches: Launches, call: Call, gradients: Gradients) -> None:
        self.launches = launches
        wants, heads = gradients.wants, launches.batch * launches.heads
        line, factor, ranks = launches.line(call), launches.factor(call), launches.low_rank(call)
        self.of_line = None if line is None or not wants(parameter_of(line)) else table.LineGradient(launches, line)
        self.of_factor = factor is not None and wants(factor.factor)
        self.of_query_sides = tuple(wants(term.query) for term in ranks)
        self.of_key_sides = tuple(wants(term.key) for term in ranks)
        self.of_sinks = launches.sinks_at is not None
        bias = () if line is None or parameter_of(line).dtype != launches.wide else (parameter_of(line),)
        own = set(map(id, (call.q, call.k, call.v, *bias)))
        self.completes = own.issuperset(map(id, gradients.tensors))  # none is made of parts, or in another dtype
        self.by_windows = windows.serves(launches, call, gradients)
        self.rows, self.count = steps.of_rows(launches)
        self.queries = self.keys = None
        if wants(call.q) or self.of_factor or any(self.of_query_sides):
            self.queries = steps.by_queries(launches, "queries", kernels.backward_queries, launches.n, heads)
        if wants(call.k) or wants(call.v) or any(self.of_key_sides):
            self.keys = steps.by_keys(launches, heads)

    def run(
        self, call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients
    ) -> None:
        """Add to the gradients that are wanted. `out`, `lse` and `d_lse` are contiguous."""
        launches = self.launches
        qkv, bias, allowed, of_queries, of_keys, begins = launches.given_back(call)
        size, dropout, upstream = launches.size, launches.dropout(call), with_strides(d_out)
        varying = begins, upstream[0].data_ptr() % 16, None if d_lse is None else d_lse.data_ptr() % 16, upstream[1:]
        if self.by_windows:
            assert self.of_line is not None
            read = out, upstream, lse, d_lse, qkv, size, bias, allowed, dropout
            windows.backward(launches, call, read, gradients, varying, self.of_line)
            gradients.complete = self.completes
            return
        up = tiles.Upstream(*upstream, lse.new_empty(launches.batch, launches.heads, 2, self.count), self.count)
        self.rows.launch(varying, out, up, lse, d_lse, size)
        if self.queries is not None:
            d_q, d_factor = launches.empty_like(call.q), torch.empty_like(lse) if self.of_factor else None
            sides = _empty_sides(launches, call, "query", self.of_query_sides)
            self.queries.launch(
                varying, d_q, d_factor, sides, None, up, qkv, size, bias, allowed, of_queries, dropout, NO_CHUNK
            )
            gradients.add(call.q, d_q)
            factor = launches.factor(call)
            if factor is not None and d_factor is not None:
                gradients.add(factor.factor, d_factor.sum_to_size(factor.factor.shape))
            _add_sides(launches, call, "query", sides, gradients)
        if self.keys is not None:
            d_k, d_v = launches.empty_like(call.k), launches.empty_like(call.v)
            sides = _empty_sides(launches, call, "key", self.of_key_sides)
            self.keys.launch(varying, d_k, d_v, sides, None, up, qkv, size, bias, allowed, of_keys, dropout, NO_CHUNK)
            gradients.add(call.k, d_k)
            gradients.add(call.v, d_v)
            _add_sides(launches, call, "key", sides, gradients)
        if self.of_line is not None:
            line = launches.line(call)
            assert line is not None
            common = up, qkv, size, bias, allowed, dropout
            gradients.add(parameter_of(line), self.of_line.of_call(line, common, varying))
        if self.of_sinks:
            steps.add_sinks(launches, call, lse, up, gradients)
        gradients.complete = self.completes


def _empty_sides(
    launches: Launches, call: Call, side: Literal["query", "key"], wanted: tuple[bool, ...]
) -> tuple[Tensor | None, ...]:
    """For a side of each low-rank bias an empty `[B, H, R, tokens]`, if its gradient is wanted."""
    if not wanted:
        return ()
    heads, found = (launches.batch, launches.heads), []
    for term, wants in zip(launches.low_rank(call), wanted, strict=True):
        x: Tensor = getattr(term, side)
        found.append(x.new_empty(*heads, x.shape[-1], x.shape[-2], dtype=launches.wide) if wants else None)
    return tuple(found)


def _add_sides(
    launches: Launches,
    call: Call,
    side: Literal["query", "key"],
    found: tuple[Tensor | None, ...],
    gradients: Gradients,
) -> None:
    """Add what the kernels wrote for a side of each, summed over the heads and the batch that share it."""
    if not found:
        return
    for term, gradient in zip(launches.low_rank(call), found, strict=True):
        x: Tensor = getattr(term, side)
        gradients.add(x, None if gradient is None else gradient.mT.sum_to_size(x.shape))
