"""Fused kernels on GPU: a line bias read inside the tile, its gradient summed along lines in a fixed order.

The path of a call: `rotation` is applied before, `launch` says sizes and strides, and `kernels` does the rest, for the
forward and the backward of `passes`. Triton itself is imported with the first call. With TRITON_INTERPRET=1 the kernels
run on CPU, for tests.
"""

from relpos.engines.triton.engine import TRITON

__all__ = ["TRITON"]
