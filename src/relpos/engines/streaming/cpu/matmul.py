"""The matrix products of a tile, each in the precision of its operands.

A CPU with native bfloat16 multiplies it several times faster than float32. Scores, and the products that become their
gradient, are needed in float32. Their operands are float32 copies of bfloat16 numbers: oneDNN may round these back,
which loses nothing, and accumulate in float32. The weights and the scores' gradient are rounded to bfloat16, as
PyTorch's own kernels do; sums over tiles stay in float32.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from relpos.core.private import multiplies_bfloat16


def native(q: Tensor) -> bool:
    """Whether q is in bfloat16, on a CPU that multiplies bfloat16 matrices natively."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu" or not hasattr(_settings(), "fp32_precision"):
        return False
    return torch.backends.mkldnn.is_available() and multiplies_bfloat16()


def _settings() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _Precision:
    """The setting of the process, and the number of threads that currently override it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before = "none"

    @contextmanager
    def rounding_operands(self) -> Iterator[None]:
        """Let oneDNN round the operands of float32 products to bfloat16. The setting is process-wide: products of other
        threads may be rounded meanwhile."""
        settings = _settings()
        with self.lock:
            if self.users == 0:
                self.before = settings.fp32_precision
                settings.fp32_precision = "bf16"
            self.users += 1
        try:
            yield
        finally:
            with self.lock:
                self.users -= 1
                if self.users == 0:
                    settings.fp32_precision = self.before


_precision = _Precision()


def add_matmul(
    into: Tensor | Sequence[Tensor],
    a: Tensor,
    b: Tensor,
    factor: float = 1.0,
    *,
    rounded: bool = False,
    overwrite: bool = False,
) -> None:
    """`into += factor * a @ b`, for `[g, n, m]` or a list of g `[n, m]`.

    Args:
        overwrite: replace the contents of `into` with the product.
        rounded: whether a and b hold bfloat16 numbers in float32; `native` must be true.
    """
    if a.dtype != into[0].dtype:
        for number in range(a.shape[0]):
            into[number].add_(torch.mm(a[number], b[number]), alpha=factor)
        return
    with _precision.rounding_operands() if rounded else nullcontext():
        for number in range(a.shape[0]):  # batched kernels refuse padded rows; a tensor's iterator takes longer
            into[number].addmm_(a[number], b[number], alpha=factor, beta=0 if overwrite else 1)
