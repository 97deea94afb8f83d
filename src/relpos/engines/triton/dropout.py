"""Which pairs dropout keeps: random words of a counter, as `core.random` computes them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    """lowbias32 on 32-bit words, as `core.random.mix_`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_pairs(dropout, batch, head, qi, kj):
    """The pairs that dropout keeps."""
    word = _mix(tl.load(dropout.seed).to(tl.uint32))
    word = _mix(_mix(word ^ batch) ^ head)
    word = _mix(_mix(word ^ qi.to(tl.uint32)) ^ kj.to(tl.uint32))
    return word.to(tl.int64) >= dropout.threshold
