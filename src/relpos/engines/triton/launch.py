"""The arguments of the kernels for a call: tensors with strides, constants, and the size of tiles.

No tensor is read, so a call can be captured in a CUDA graph once a first call has compiled the kernels.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from relpos.core import LineBias, Sinks
from relpos.engines.call import Call
from relpos.engines.triton import spans, tiles
from relpos.engines.triton.limits import HOPPERS, interpreting, power_of_2, shared_memory


class Launch:
    """The arguments of any kernel for one call."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.batch, self.heads, self.n, self.d = call.q.shape
        self.own_heads, self.m, self.v = call.v.shape[1:]
        q, k, v = (readable(x.detach()) for x in (call.q, call.k, call.v))
        self.qkv = tiles.QKV(*with_strides(q), *with_strides(k), *with_strides(v))
        self.size = tiles.Counts(self.heads, self.heads // self.own_heads, self.n, self.m)
        self.wide = torch.promote_types(q.dtype, torch.float32)
        self.unit = 1.0 if q.dtype == self.wide else math.log2(math.e)
        self.line = next(iter(call.terms.of(LineBias)), None)
        self.bias = tiles.Bias(None, 0, None, 0, None, 0, 0) if self.line is None else self._bias(self.line)
        self.allowed, self.queries, self.keys = spans.allowed(call.mask, self.n, self.m, q.device)
        sinks = call.terms.one(Sinks)
        self.sink = None if sinks is None else sinks.logits.detach().to(self.wide) * self.unit
        self.dropout = tiles.Dropout(None, 0, None)
        if call.seed is not None:
            threshold = int(call.dropout * 2**32)
            factor = torch.full((1,), 1 / (1 - call.dropout), dtype=self.wide, device=q.device)
            self.dropout = tiles.Dropout(call.seed.view(1), threshold, factor)

    def _bias(self, line: LineBias) -> tiles.Bias:
        lines, layout = line.lines, line.lines.layout
        values = line.values.detach().to(self.wide)
        # A tile reaches one beyond the table; compilers that read ahead of the loop (for Blackwell) reach two more.
        pad = 3 * spans.COARSE
        table = values.new_zeros(values.shape[0], values.shape[1] + 2 * pad)
        torch.div(values, self.call.scale, out=table[:, pad:-pad])
        head, zero = 0 if table.shape[0] == 1 else table.stride(0), pad + lines.origin
        if layout.kind == "affine":
            assert layout.query is not None
            assert layout.key is not None
            return tiles.Bias(table, head, None, 0, None, 0, zero + layout.query.start - layout.key.start)
        query, key = (x.to(torch.int32).contiguous() for x in (lines.query, lines.key))
        query_b, key_b = (x.stride(0) if x.dim() == 2 and x.shape[0] > 1 else 0 for x in (query, key))
        return tiles.Bias(table, head, query, query_b, key, key_b, zero)

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants that all kernels take."""
        padded = (max(16, power_of_2(width)) for width in (self.d, self.v))
        return {
            **dict(zip(("D_PAD", "V_PAD"), padded, strict=True)),
            "D": self.d,
            "V": self.v,
            "PRECISION": "widened" if interpreting() else "ieee",  # no effect in half precision
            "SCALE": self.call.scale,
            "UNIT": self.unit,
            "SUM": tl.float64 if self.wide == torch.float64 else tl.float32,
        }

    def shape(self, kind: str) -> dict[str, int]:
        """Rows, columns, warps and stages of a kernel: fixed, so that sums have the same order in every run."""
        half = self.call.q.dtype in (torch.float16, torch.bfloat16)
        classes = [width for width in _CLASSES if width >= max(self.d, self.v)]
        roomy = shared_memory(self.call.q.device) >= HOPPERS
        found = dict(SHAPES[kind, "half" if half else "full", classes[0 if roomy else min(1, len(classes) - 1)]])
        if not roomy:  # the tiles of wider heads, without pipelining
            found["num_stages"] = 1
        for name, count in (("ROWS", self.n), ("COLUMNS", self.m)):  # short sequences need no more
            found[name] = min(found[name], max(16, power_of_2(count)))
        return found

    def tests(self, full: bool) -> dict[str, bool]:
        """Whether all tiles are full, and whether some are tested for pairs that are not allowed or outside."""
        return {"FULL": full, "TESTED": self.call.mask is not None or not full}


_CLASSES = (64, 128, 256)


def readable(x: Tensor) -> Tensor:
    """A tensor as it is, if the kernels can read it: with neighbouring numbers, and offsets in a tile of 32 bits."""
    return x if x.stride(3) == 1 and x.stride(2) * spans.COARSE < 2**31 else x.contiguous()


def with_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """A tensor with its strides along batch, head and token."""
    return x, x.stride(0), x.stride(1), x.stride(2)


def _shape(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


SHAPES: dict[tuple[str, str, int], dict[str, int]] = {
    ("forward", "half", 64): _shape(128, 64, 8, 3),
    ("forward", "half", 128): _shape(128, 64, 8, 3),
    ("forward", "half", 256): _shape(64, 32, 8, 2),
    ("forward", "full", 64): _shape(64, 32, 4, 2),
    ("forward", "full", 128): _shape(64, 32, 8, 2),
    ("forward", "full", 256): _shape(32, 16, 8, 1),
    ("queries", "half", 64): _shape(64, 64, 4, 2),
    ("queries", "half", 128): _shape(64, 64, 4, 2),
    ("queries", "half", 256): _shape(64, 32, 8, 1),
    ("queries", "full", 64): _shape(64, 32, 4, 2),
    ("queries", "full", 128): _shape(32, 32, 8, 1),
    ("queries", "full", 256): _shape(32, 16, 8, 1),
    ("keys", "half", 64): _shape(64, 64, 4, 2),
    ("keys", "half", 128): _shape(64, 128, 8, 2),
    ("keys", "half", 256): _shape(32, 64, 8, 1),
    ("keys", "full", 64): _shape(32, 64, 4, 2),
    ("keys", "full", 128): _shape(32, 32, 8, 1),
    ("keys", "full", 256): _shape(16, 32, 8, 1),
    ("table", "half", 64): _shape(64, 64, 4, 3),
    ("table", "half", 128): _shape(64, 64, 4, 3),
    ("table", "half", 256): _shape(32, 32, 4, 1),
    ("table", "full", 64): _shape(32, 32, 8, 1),
    ("table", "full", 128): _shape(32, 32, 8, 1),
    ("table", "full", 256): _shape(16, 16, 4, 1),
}
"""By kernel, precision and head width, for Hopper; powers of two that divide `spans.COARSE`. Those of widths 64 and 128
in half precision are the best of a few on an H200 (docs/log.md, 2026-11-27); the others are not measured."""
