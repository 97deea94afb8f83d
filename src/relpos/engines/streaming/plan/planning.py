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
"""Maximum rows and keys of a tile. If the keys after the prefix are at most half of these, the rows double: for
vectors, which need many small products, and in the float32 backward, except under a window, where more rows compute
more forbidden pairs."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""The same in bfloat16, whose products are so fast that their fixed cost needs more rows to pay off."""
_BACKWARD_WIDTH = 2048
"""Maximum keys in the float32 backward. It gains nothing from all keys in one tile, and each thread has several buffers
of a tile's size."""
PAIRS = 2**18
"""Maximum scores in a buffer that holds several heads."""
_PREFIX_PAIRS = 2**20
"""The same if keys have a prefix. Prefix queries have a separate block and, under a mask, prefix keys a separate tile
in each block; these are so small that many heads at once cost less."""


def log_base(dtype: torch.dtype) -> float:
    """The factor on scores before they are exponentiated: log2(e), for exp2; in float64 1, for exp.

    On CPU exp is several times slower than exp2, and a hundred times where it underflows. In float64 the rounding error
    of the factor would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


def make_plan(call: Call, *, backward: bool = False, natural: bool = False) -> TilePlan:
    """The plan of a call, or of its backward; `natural` for scores in base e, as in the flash kernel."""
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
    return HankelPlan(call, rows, keys, pairs, unit=unit, bfloat16=bfloat16, apart=backward)
