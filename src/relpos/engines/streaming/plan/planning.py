"""The choice of a plan for a call, and of the size of its tiles."""

from __future__ import annotations

import math

import torch

from relpos.core import LineBias, LineVectors
from relpos.engines.call import Call
from relpos.engines.streaming.cpu import matmul
from relpos.engines.streaming.plan.dense_plan import DensePlan
from relpos.engines.streaming.plan.hankel import HankelPlan
from relpos.engines.streaming.plan.tile_plan import TilePlan

ROWS, WIDTH = 256, 8192
"""The most rows and keys of a tile. For vectors, which come with many small products, and in the backward in float32,
twice the rows where all keys but a prefix are at most half of these; but under a window more rows see more keys in
vain."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""The same in bfloat16, whose products are so fast that the fixed cost of each needs more rows to pay off."""
_BACKWARD_WIDTH = 2048
"""The most keys in the backward in float32, which has no use for all keys in one tile: each thread has several buffers
of a tile's size."""
PAIRS = 2**18
"""The most scores in a buffer, where it holds several heads."""
_PREFIX_PAIRS = 2**20
"""The same where keys have a prefix: its queries are a block of their own, and under a mask its keys a tile of
their own in each block, so small that they cost less for many heads."""


def log_base(dtype: torch.dtype) -> float:
    """The factor on scores before they are exponentiated: log2(e), for exp2; in float64 1, for exp.

    On CPU exp is several times slower than exp2, and a hundred times where it underflows. In float64 the rounding error
    of the factor would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


def make_plan(call: Call, *, backward: bool = False, natural: bool = False) -> TilePlan:
    """The plan of a call, or of its backward; `natural` for scores in base e, as those of the flash kernel."""
    unit, bfloat16 = 1.0 if natural else log_base(call.q.dtype), matmul.native(call.q)
    if not HankelPlan.supports(call):
        return DensePlan(call, PAIRS, unit=unit, bfloat16=bfloat16)
    vectors = bool(call.terms.of(LineVectors))
    bfloat16 = bfloat16 and not vectors
    rows, keys = (_NATIVE_ROWS, _NATIVE_WIDTH) if bfloat16 else (ROWS, WIDTH)
    cut = backward and call.q.dtype == torch.float32
    if cut:
        keys = _BACKWARD_WIDTH
    layouts = [term.lines.layout for term in call.terms.of(LineBias)]
    prefix = max((layout.key.prefix for layout in layouts if layout.key is not None), default=0)
    windowed = call.mask is not None and call.mask.left is not None
    if (vectors or (cut and not windowed)) and call.k.shape[2] - prefix <= keys // 2:
        rows *= 2
    pairs = _PREFIX_PAIRS if prefix else PAIRS
    return HankelPlan(call, rows, keys, pairs, unit=unit, bfloat16=bfloat16)
