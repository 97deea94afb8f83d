"""Fused kernels on GPU for line biases, whose gradient is summed along lines in a fixed order.

`rotation` is applied first. `passes` then launches the `kernels` of the forward or the backward, with the sizes and
strides from `launch`. Triton is imported at the first call. With TRITON_INTERPRET=1 the kernels run on CPU, for tests.
"""

from relpos.engines.triton.engine import TRITON

__all__ = ["TRITON"]
