"""Products, exponentials and rounding in the kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, summed in float32 or wider. "widened" is for Triton's interpreter, which has no bfloat16."""
    OUT: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    if PRECISION == "widened":
        a, b = (a.to(tl.float32), b.to(tl.float32)) if a.dtype == tl.bfloat16 else (a, b)
        return tl.dot(a, b, input_precision="ieee", out_dtype=OUT)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=OUT)


@triton.jit
def dot_onto(a, b, start, PRECISION: tl.constexpr):
    """start + a @ b, summed as `dot` does."""
    OUT: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    if PRECISION == "widened":
        a, b = (a.to(tl.float32), b.to(tl.float32)) if a.dtype == tl.bfloat16 else (a, b)
        return tl.dot(a, b, start, input_precision="ieee", out_dtype=OUT)
    else:
        return tl.dot(a, b, start, input_precision=PRECISION, out_dtype=OUT)


@triton.jit
def exp(x, UNIT: tl.constexpr):
    """The exponential of scores, which are multiplied by UNIT."""
    return tl.exp(x) if UNIT == 1.0 else tl.exp2(x)


@triton.jit
def log(x, UNIT: tl.constexpr):
    """The inverse of `exp`."""
    return tl.log(x) if UNIT == 1.0 else tl.log2(x)


@triton.jit
def to(x, like: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded to a dtype. Triton's interpreter truncates to bfloat16, so for it the bits are rounded here."""
    if PRECISION == "widened" and like == tl.bfloat16:
        word = x.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        x = word.to(tl.float32, bitcast=True)
    return x.to(like)
