"""The forward and the backward of a call by the kernels. Only gradients that are wanted are computed."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Sinks
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton import kernels, spans, table, tiles
from relpos.engines.triton.launch import Launch, readable, with_strides
from relpos.engines.triton.limits import cdiv

_ROWS = 64
"""Rows of a program of `backward_rows`, which reads the output once."""


def forward(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp."""
    launch = Launch(call)
    q = call.q
    out = q.new_empty(launch.batch, launch.heads, launch.n, launch.v)
    lse = q.new_empty(launch.batch, launch.heads, launch.n, dtype=launch.wide)
    shape = launch.shape("forward")
    kernels.forward[(cdiv(launch.n, shape["ROWS"]) * launch.batch * launch.heads,)](
        out, lse, launch.qkv, launch.size, launch.bias, launch.allowed, launch.queries, launch.dropout, launch.sink,
        **launch.constants, **shape, COARSE=spans.COARSE, **launch.tests(launch.m % shape["COLUMNS"] == 0),
    )  # fmt: skip
    return out, lse


def backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, gradients: Gradients) -> None:
    """Add to the gradients that are wanted."""
    launch = Launch(call)
    d_out = readable(d_out)
    out, lse, d_lse = out.contiguous(), lse.contiguous(), d_lse.contiguous()
    count = (cdiv(launch.n, spans.COARSE) + 1) * spans.COARSE  # a cell of a grid may begin at any row
    shift, delta = lse.new_empty(2, launch.batch, launch.heads, count)
    up = tiles.Upstream(*with_strides(d_out), shift, delta, count)
    kernels.backward_rows[(cdiv(count, _ROWS) * launch.batch * launch.heads,)](
        up.delta, up.shift, out, up, lse, d_lse, launch.size,
        **{name: launch.constants[name] for name in ("V", "V_PAD", "UNIT", "SUM")}, ROWS=_ROWS,
    )  # fmt: skip
    rows = up, launch.qkv, launch.size, launch.bias, launch.allowed
    if gradients.wants(call.q):
        shape = launch.shape("queries")
        d_q = torch.empty(call.q.shape, dtype=call.q.dtype, device=call.q.device)
        kernels.backward_queries[(cdiv(launch.n, shape["ROWS"]) * launch.batch * launch.heads,)](
            d_q, *rows, launch.queries, launch.dropout,
            **launch.constants, **shape, COARSE=spans.COARSE, **launch.tests(launch.m % shape["COLUMNS"] == 0),
        )  # fmt: skip
        gradients.add(call.q, d_q)
    if gradients.wants(call.k) or gradients.wants(call.v):
        shape = launch.shape("keys")
        d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (call.k, call.v))
        kernels.backward_keys[(cdiv(launch.m, shape["COLUMNS"]) * launch.batch * launch.own_heads,)](
            d_k, d_v, *rows, launch.keys, launch.dropout,
            **launch.constants, **shape, COARSE=spans.COARSE, **launch.tests(launch.n % shape["ROWS"] == 0),
        )  # fmt: skip
        for x, gradient in ((call.k, d_k), (call.v, d_v)):
            gradients.add(x, gradient)
    if launch.line is not None and gradients.wants(launch.line.values):
        gradients.add(launch.line.values, table.gradient(launch, rows))
    sinks = call.terms.one(Sinks)
    if sinks is not None and gradients.wants(sinks.logits):
        shift = torch.where(lse == -torch.inf, torch.inf, lse)
        share = torch.exp(sinks.logits.detach().to(launch.wide)[:, None] - shift) * up.delta[:, :, : launch.n]
        gradients.add(sinks.logits, -share.sum(dim=(0, 2)))
