"""Buffers for the scores of a tile, allocated once in a call.

A tile `x` of n rows and m keys lies in a buffer as it is, or skewed: row r begins r * step entries further right, where
`step` is 1 or more, so that all pairs which read one entry of a window (see `hankel`) lie in one column:

    x[0]   x00 x01 x02  .   .            n = 3, m = 3, step = 1
    x[1]    .  x10 x11 x12  .
    x[2]    .   .  x20 x21 x22

`x` is a view of that, and `whole(x, ...)` is all of it. With zeros at the dots, the sums of the columns of the scores'
gradient are the window's gradient, and matrix products with `whole` multiply each row by its own stretch of a matrix.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PAD = 16
"""Numbers between the rows of a buffer, so that they do not all fall into the same lines of the cache."""


class Buffer:
    """Memory for a tile of changing shape."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.store = torch.empty(0, dtype=dtype, device=device)
        self.shape: tuple[int, ...] = ()

    def rows(self, g: int, n: int, m: int) -> Float[Tensor, "g n m"]:
        """A tile as it is, contents undefined."""
        return self._view(g, n, m, m + _PAD)

    def skewed(self, g: int, n: int, m: int, step: int, columns: int = 1) -> Float[Tensor, "g n m"]:
        """A skewed tile, everything undefined; of several columns of a grid, each is skewed by itself."""
        return self._view(g, n, m, m + n // columns * step)

    def skewed_in_zeros(self, g: int, n: int, m: int, step: int, columns: int) -> Float[Tensor, "g n m"]:
        """A skewed tile with zeros around it: who writes there clears it, and no other method uses the same buffer."""
        view = self.skewed(g, n, m, step, columns)
        if self.shape != (g, n, m, step, columns):
            self.store.zero_()
            self.shape = (g, n, m, step, columns)
        return view

    def _view(self, g: int, n: int, m: int, apart: int) -> Float[Tensor, "g n m"]:
        if self.store.numel() < g * n * apart:
            self.store = self.store.new_empty(g * n * apart)
            self.shape = ()
        return self.store.as_strided((g, n, m), (n * apart, apart, 1))


def whole(x: Float[Tensor, "g n m"], step: int, columns: int = 1) -> Float[Tensor, "g columns r W"]:
    """All of the buffer around a skewed tile, for each column of a grid by itself."""
    rows, apart = x.shape[1] // columns, x.stride(1)  # rows are a step further apart than wide: one matrix for BLAS
    strides = (x.stride(0), rows * apart, apart - step, 1)
    return x.as_strided((x.shape[0], columns, rows, apart - step), strides, x.storage_offset())


def clear_around(x: Float[Tensor, "1 n m"]) -> None:
    """Zero what surrounds a skewed tile of step 1."""
    n, apart = x.shape[1], x.stride(1)
    if n > 1:
        x.as_strided((n - 1, n), (apart, 1), x.storage_offset() + x.shape[2]).zero_()


def fill(score: Tensor, bias: Tensor | None, shift: Tensor | None) -> None:
    """`score = bias - shift`, for `[g, n, m]`; the bias may be one of each column of a grid, `[g, columns, r, m]`."""
    if bias is not None and bias.dim() == 4:
        score = score.unflatten(1, bias.shape[1:3])
        shift = None if shift is None else shift.unflatten(1, bias.shape[1:3])
    if bias is not None and shift is not None:
        torch.sub(bias.expand_as(score), shift, out=score)
    elif bias is not None:
        score.copy_(bias)
    elif shift is not None:
        score.copy_(-shift)
    else:
        score.zero_()


class Workspace:
    """The buffers of a call."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.scores = Buffer(dtype, device)
        self.gradient = Buffer(dtype, device)
        self.skewed_gradient = Buffer(dtype, device)
        self.low = Buffer(torch.bfloat16, device)

    def rounded(self, x: Float[Tensor, "g n m"]) -> Float[Tensor, "g n m"]:
        """A bfloat16 copy."""
        return self.low.rows(*x.shape).copy_(x)
