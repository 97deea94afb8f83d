"""Which plan a call gets, and how large its tiles are."""

from __future__ import annotations

import math

import torch

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.streaming import matmul
from relpos.engines.streaming.dense_plan import DensePlan
from relpos.engines.streaming.hankel import HankelPlan
from relpos.engines.streaming.plan import Plan

ROWS, WIDTH = 256, 8192
"""Rows and keys of a tile at most."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""The same in bfloat16, whose products are so fast that what surrounds each is spread over more rows."""
PAIRS = 2**18
"""Scores of several heads that are held at once, in a buffer, where one head has fewer."""


def log_base(dtype: torch.dtype) -> float:
    """By what scores are multiplied before they are exponentiated: log2(e) for exp2, and in float64 1 for exp.

    On CPU, exp is several times slower than exp2 and, where it underflows, a hundred times. In float64 that one more
    rounding would show.
    """
    return 1.0 if dtype == torch.float64 else math.log2(math.e)


def make_plan(call: Call) -> Plan:
    """The plan of a call."""
    unit, native = log_base(call.q.dtype), matmul.native(call.q)
    if not HankelPlan.supports(call):
        return DensePlan(call, PAIRS, unit=unit, native=native)
    native = native and not call.terms.of(LineVectors)
    rows, width = (_NATIVE_ROWS, _NATIVE_WIDTH) if native else (ROWS, WIDTH)
    return HankelPlan(call, rows, width, PAIRS, unit=unit, native=native)
