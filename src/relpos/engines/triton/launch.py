"""A call as the kernels want it: strides, what is absent, the size of tiles, and the launches themselves.

Nothing here reads a tensor, so a call can be captured in a CUDA graph, once a first one has compiled the kernels.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, Sinks
from relpos.engines.triton import HOPPERS, interpreting, kernels, shared_memory, spans, table, tiles
from relpos.engines.work import Work


class Launch:
    """One call, ready for any kernel."""

    def __init__(self, work: Work) -> None:
        self.work = work
        self.batch, self.heads, self.n, self.d = work.q.shape
        self.own_heads, self.m, self.v = work.v.shape[1:]
        q, k, v = (x.detach() if x.stride(3) == 1 else x.detach().contiguous() for x in (work.q, work.k, work.v))
        self.sides = tiles.Sides(*_side(q), *_side(k), *_side(v))
        self.size = tiles.Counts(self.heads, self.heads // self.own_heads, self.n, self.m)
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.unit = 1.0 if q.dtype == self.wide else math.log2(math.e)
        self.line = next(iter(work.terms.of(LineBias)), None)
        self.bias = tiles.Bias(None, 0, None, 0, None, 0, 0) if self.line is None else self._bias(self.line)
        self.allowed, self.queries, self.keys = spans.allowed(work.mask, self.n, self.m, q.device)
        sinks = work.terms.one(Sinks)
        self.sink = None if sinks is None else sinks.logits.detach().to(self.wide) * self.unit
        self.dropout = tiles.Dropout(None, 0, None)
        if work.seed is not None:
            threshold = int(work.dropout * 2**32)
            factor = torch.full((1,), 1 / (1 - work.dropout), dtype=self.wide, device=q.device)
            self.dropout = tiles.Dropout(work.seed.view(1), threshold, factor)

    def _bias(self, line: LineBias) -> tiles.Bias:
        lines, layout = line.lines, line.lines.layout
        values = (line.values.detach().to(self.wide) / self.work.scale).contiguous()
        head = 0 if values.shape[0] == 1 else values.stride(0)
        if layout.kind == "affine":
            assert layout.query is not None
            assert layout.key is not None
            origin = lines.origin + layout.query.start - layout.key.start
            return tiles.Bias(values, head, None, 0, None, 0, origin)
        query, key = (x.to(torch.int32).contiguous() for x in (lines.query, lines.key))
        query_b, key_b = (x.stride(0) if x.dim() == 2 and x.shape[0] > 1 else 0 for x in (query, key))
        return tiles.Bias(values, head, query, query_b, key, key_b, lines.origin)

    def constants(self) -> dict[str, Any]:
        """What every kernel is compiled for."""
        padded = (max(16, triton.next_power_of_2(width)) for width in (self.d, self.v))
        return {
            **dict(zip(("D_PAD", "V_PAD"), padded, strict=True)),
            "D": self.d,
            "V": self.v,
            "PRECISION": "widened" if interpreting() else "ieee",  # half precision has but one
            "SCALE": self.work.scale,
            "UNIT": self.unit,
            "SUM": tl.float64 if self.wide == torch.float64 else tl.float32,
        }

    def shape(self, kind: str) -> dict[str, int]:
        """Rows, columns, warps and stages: a fixed choice, so that sums run in one order on every run."""
        half = self.work.q.dtype in (torch.float16, torch.bfloat16)
        classes = [width for width in _CLASSES if width >= max(self.d, self.v)]
        roomy = shared_memory(self.work.q.device) >= HOPPERS
        found = dict(SHAPES[kind, "half" if half else "full", classes[0 if roomy else min(1, len(classes) - 1)]])
        if not roomy:  # the tiles of wider heads, one at a time
            found["num_stages"] = 1
        for side, count in (("ROWS", self.n), ("COLUMNS", self.m)):  # a window needs no more
            found[side] = min(found[side], max(16, triton.next_power_of_2(count)))
        return found

    def free(self, shape: dict[str, int]) -> bool:
        """Whether no pair is forbidden and every tile full."""
        return self.work.mask is None and self.n % shape["ROWS"] == 0 and self.m % shape["COLUMNS"] == 0

    def forward(self) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and natural log-sum-exp."""
        q = self.work.q
        out = q.new_empty(self.batch, self.heads, self.n, self.v)
        lse = q.new_empty(self.batch, self.heads, self.n, dtype=self.wide)
        shape = self.shape("forward")
        kernels.forward[(triton.cdiv(self.n, shape["ROWS"]) * self.batch * self.heads,)](
            out, lse, self.sides, self.size, self.bias, self.allowed, self.queries, self.dropout, self.sink,
            **self.constants(), **shape, COARSE=spans.COARSE, FREE=self.free(shape),
        )  # fmt: skip
        return out, lse

    def backward(
        self, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needed: list[Tensor]
    ) -> dict[int, Tensor]:
        """The gradients by the `id` of their tensors."""
        work, wanted = self.work, {id(x) for x in needed}
        d_out = d_out if d_out.stride(3) == 1 else d_out.contiguous()
        out, lse, d_lse = out.contiguous(), lse.contiguous(), d_lse.contiguous()
        up = tiles.Upstream(*_side(d_out), lse, torch.empty_like(lse))
        constants = self.constants()
        kernels.backward_rows[(triton.cdiv(self.n, _ROWS) * self.batch * self.heads,)](
            up.delta, out, up, d_lse, self.size,
            **{name: constants[name] for name in ("V", "V_PAD", "SUM")}, ROWS=_ROWS,
        )  # fmt: skip
        found: dict[int, Tensor] = {}

        def add(x: Tensor, gradient: Tensor) -> None:  # one tensor may serve in several places
            found[id(x)] = found[id(x)] + gradient if id(x) in found else gradient

        rows = up, self.sides, self.size, self.bias, self.allowed
        if id(work.q) in wanted:
            shape = self.shape("queries")
            d_q = torch.empty(work.q.shape, dtype=work.q.dtype, device=work.q.device)
            kernels.backward_queries[(triton.cdiv(self.n, shape["ROWS"]) * self.batch * self.heads,)](
                d_q, *rows, self.queries, self.dropout,
                **self.constants(), **shape, COARSE=spans.COARSE, FREE=self.free(shape),
            )  # fmt: skip
            add(work.q, d_q)
        if id(work.k) in wanted or id(work.v) in wanted:
            shape = self.shape("keys")
            d_k, d_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (work.k, work.v))
            kernels.backward_keys[(triton.cdiv(self.m, shape["COLUMNS"]) * self.batch * self.own_heads,)](
                d_k, d_v, *rows, self.keys, self.dropout,
                **self.constants(), **shape, COARSE=spans.COARSE, FREE=self.free(shape),
            )  # fmt: skip
            for x, gradient in ((work.k, d_k), (work.v, d_v)):
                if id(x) in wanted:
                    add(x, gradient)
        if self.line is not None and id(self.line.values) in wanted:
            add(self.line.values, table.gradient(self, rows))
        sinks = work.terms.one(Sinks)
        if sinks is not None and id(sinks.logits) in wanted:
            shift = torch.where(lse == -torch.inf, torch.inf, lse)
            share = torch.exp(sinks.logits.detach().to(self.wide)[:, None] - shift) * up.delta
            add(sinks.logits, -share.sum(dim=(0, 2)))
        return found


_CLASSES = (64, 128, 256)
_ROWS = 64
"""Of a program that only goes over the output once."""


def _side(x: Tensor) -> tuple[Tensor, int, int, int]:
    return x, x.stride(0), x.stride(1), x.stride(2)


def _shape(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


SHAPES: dict[tuple[str, str, int], dict[str, int]] = {
    ("forward", "half", 64): _shape(128, 64, 4, 3),
    ("forward", "half", 128): _shape(128, 64, 8, 3),
    ("forward", "half", 256): _shape(64, 32, 8, 2),
    ("forward", "full", 64): _shape(64, 32, 4, 2),
    ("forward", "full", 128): _shape(64, 32, 8, 2),
    ("forward", "full", 256): _shape(32, 16, 8, 1),
    ("queries", "half", 64): _shape(128, 64, 8, 2),
    ("queries", "half", 128): _shape(64, 64, 8, 2),
    ("queries", "half", 256): _shape(64, 32, 8, 1),
    ("queries", "full", 64): _shape(64, 32, 4, 2),
    ("queries", "full", 128): _shape(32, 32, 8, 1),
    ("queries", "full", 256): _shape(32, 16, 8, 1),
    ("keys", "half", 64): _shape(64, 128, 8, 2),
    ("keys", "half", 128): _shape(64, 64, 8, 2),
    ("keys", "half", 256): _shape(32, 64, 8, 1),
    ("keys", "full", 64): _shape(32, 64, 4, 2),
    ("keys", "full", 128): _shape(32, 32, 8, 1),
    ("keys", "full", 256): _shape(16, 32, 8, 1),
    ("table", "half", 64): _shape(64, 64, 4, 2),
    ("table", "half", 128): _shape(64, 64, 8, 2),
    ("table", "half", 256): _shape(32, 32, 4, 1),
    ("table", "full", 64): _shape(32, 32, 8, 1),
    ("table", "full", 128): _shape(32, 32, 8, 1),
    ("table", "full", 256): _shape(16, 16, 4, 1),
}
"""By kernel, precision and head width, for Hopper; powers of two that divide `spans.COARSE`. Unmeasured as yet."""
