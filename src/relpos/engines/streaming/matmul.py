"""The matrix products of a tile, each with the precision that its operands hold.

In bfloat16, a CPU that multiplies it natively does so several times faster than float32. Scores, and the products that
become their gradient, are needed in float32 all the same. Their operands are float32 copies of bfloat16 numbers, which
oneDNN may round to bfloat16 (nothing is lost) and multiply into float32. The weights and the scores' gradient are then
rounded to bfloat16, as PyTorch's own kernels do, and multiplied as such; sums over tiles stay in float32.
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
    """Whether the CPU multiplies matrices of this dtype, bfloat16, faster than float32 copies of them."""
    if q.dtype != torch.bfloat16 or q.device.type != "cpu" or not hasattr(_settings(), "fp32_precision"):
        return False
    return torch.backends.mkldnn.is_available() and multiplies_bfloat16()


def _settings() -> Any:
    return torch.backends.mkldnn.matmul  # type: ignore[attr-defined]


class _Precision:
    """The process's setting, and how many threads are using another at the moment."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.before = "none"

    @contextmanager
    def rounding_operands(self) -> Iterator[None]:
        """float32 products whose operands oneDNN may round to bfloat16. The setting is the process's: a float32
        product of another thread in these moments may be rounded too."""
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
    """`into += factor * a @ b`, for `[g, n, m]` or g of `[n, m]`.

    Args:
        overwrite: write the product over what `into` holds.
        rounded: a and b hold bfloat16 numbers in float32, and `native` is true of them.
    """
    if a.dtype != into[0].dtype:
        for each, left, right in zip(into, a, b, strict=True):
            each.add_(torch.mm(left, right), alpha=factor)
        return
    with _precision.rounding_operands() if rounded else nullcontext():
        for each, left, right in zip(into, a, b, strict=True):  # rows are padded, which batched kernels refuse
            each.addmm_(left, right, alpha=factor, beta=0 if overwrite else 1)
