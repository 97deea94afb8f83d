"""The engine: what its kernels support, and its custom operators."""

from __future__ import annotations

import importlib.util
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import (
    AxisVectors,
    LineBias,
    LineVectors,
    LowRank,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    Sinks,
)
from relpos.core.checks import COMPUTED
from relpos.core.terms.table_lookup import TableLookup, read_tables
from relpos.engines.call import Call
from relpos.engines.engine import Compute, Engine, Shards
from relpos.engines.operators import (
    Gradients,
    Operator,
    RunBackward,
    RunForward,
    back_of_each,
    lacks_transform,
    of_each,
)
from relpos.engines.triton import limits, vector_sets

_WIDEST = 256


def _forward(call: Call) -> tuple[Tensor, Tensor]:
    from relpos.engines.triton import passes

    with torch.cuda.device_of(call.q):
        return passes.forward(call)


def _backward(call: Call, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor | None, gradients: Gradients) -> None:
    from relpos.engines.triton import passes

    with torch.cuda.device_of(call.q):
        passes.backward(call, out, lse, d_out, d_lse, gradients)


def _prepared(call: Call) -> tuple[RunForward, RunBackward]:
    """Forward and backward for calls of one structure, made from the first of them."""
    from relpos.engines.triton import launch, passes

    launches, device = launch.Launches(call), call.q.device
    forward, backward = partial(passes.forward, launches=launches), partial(passes.backward, launches=launches)
    if device.type != "cuda":
        return forward, backward

    def there(call: Call) -> tuple[Tensor, Tensor]:
        with torch.cuda.device(device):
            return forward(call)

    def back(*arguments: Any) -> None:
        with torch.cuda.device(device):
            backward(*arguments)

    return there, back


_INSTALLED = importlib.util.find_spec("triton") is not None
_attend = Operator("triton", of_each(_forward), back_of_each(_backward))


_MASK_PARTS = (
    "left", "right", "low", "high", "limit", "query_order", "key_order", "query_segments", "key_segments", "also",
)  # fmt: skip
"""The parts of a mask that the kernels know; all others are refused, also those of a later version."""
_REFUSED_PARTS = {
    "query_global": "a mask with globals",
    "key_global": "a mask with globals",
    "blocks": "a mask with blocks",
    "allowed": "a mask as a tensor",
}


class Triton(Engine):
    name = "triton"
    shards = Shards(_forward, _backward)
    summary = "fused kernels for biases on a line or of low rank, and for vectors, on GPU, with deterministic gradients"
    serves_any_size = True
    served = (LineBias, LineVectors, AxisVectors, LowRank, PairRotations, Rotation, QueryBias, QueryScale, Sinks)
    checked_on = ("cuda",)

    def takes_tables(self, call: Call) -> bool:
        beside = (LineBias, LineVectors, AxisVectors, LowRank, PairRotations, QueryScale)
        tables = call.terms.of(TableLookup)
        return len(tables) == 1 and tables[0].table.dtype in COMPUTED and not any(map(call.terms.of, beside))

    def unsupported(self, call: Call) -> str | None:
        if (terms := read_tables(call.terms)) is not call.terms:
            return self.unsupported(replace(call, terms=terms)) if self.takes_tables(call) else "several tables"
        q, mask = call.q, call.mask
        if q.device.type != "cuda" and not (_INSTALLED and limits.interpreting()):
            return f"a CUDA device (q is on {q.device.type})"
        if q.device.type == "cuda" and limits.shared_memory(q.device) < limits.LEAST:
            return f"{limits.LEAST // 1024} KiB of shared memory per program, which GPUs have from Ampere on"
        rotation = call.terms.one(Rotation)
        widest = max(q.shape[3] * (1 if rotation is None else rotation.widens), call.v.shape[3])
        large = widest > 128 or q.dtype == torch.float64
        if q.device.type == "cuda" and large and limits.shared_memory(q.device) < limits.AMPLE:
            return f"{limits.AMPLE // 1024} KiB of shared memory per program, which wide heads and float64 need"
        if not _INSTALLED:
            return "Triton, which is not installed"
        if (unknown := self.unknown(call)) is not None:
            return unknown
        if widest > _WIDEST:
            return f"head widths above {_WIDEST}"
        for part in () if mask is None else fields(mask):
            if part.name not in _MASK_PARTS and getattr(mask, part.name) is not None:
                return _REFUSED_PARTS.get(part.name, f"a mask with {part.name}")
        biases, ranks = call.terms.of(LineBias), [term.query.shape[-1] for term in call.terms.of(LowRank)]
        if (biases or ranks) and call.scale == 0:
            return "a scale of 0 with a bias"
        if 0 in ranks or sum(ranks) > limits.MOST_RANK:
            return f"low-rank biases of rank 0, or of ranks above {limits.MOST_RANK} in all"
        if len(biases) > 1:
            return "several line biases on different lines"
        if any(limits.lacks_order(term) for term in biases):
            return (
                f"the gradient of a bias on irregular lines of over {limits.FEW} tokens, or that differ within a batch"
            )
        return vector_sets.unsupported(call) or lacks_transform()

    def plan(self, call: Call) -> Compute:
        from relpos.engines.triton.rotation import rotate

        planned = _attend.planned(_prepared)
        return (lambda call: planned(call.rotated(rotate))) if call.has_content_terms else planned

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and log-sum-exp."""
        from relpos.engines.triton.rotation import rotate

        return _attend(call.rotated(rotate))


TRITON = Triton()
