"""Buffers for the scores of a tile, allocated once per call.

A tile `x` with n rows and m keys is stored plainly or skewed: row r begins r * skew entries further right, where
`skew` is 1 or more. All pairs that read the same entry of a window (see `hankel`) are then in one column:

    x[0]   x00 x01 x02  .   .            n = 3, m = 3, skew = 1
    x[1]    .  x10 x11 x12  .
    x[2]    .   .  x20 x21 x22

`x` is a view of the buffer, and `whole(x, ...)` is the buffer with its dots. If the dots are 0, the column sums of the
scores' gradient are the window's gradient, and a matrix product with `whole` multiplies each row by its own part of a
matrix. A buffer keeps its zeros from tile to tile. Its rows have room for all keys of a block, each tile is written at
the columns of its keys, and only what the previous tile wrote elsewhere is cleared.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PAD = 16
"""Row strides are multiples of this, so that float32 rows begin at cache lines; unaligned, a product took 1.3 times as
long. A stride that is a multiple of 128 gets one more pad: rows a power of two apart compete for the same cache lines,
and a product took 1.4 times as long. This happens with a power of two of keys, and in skewed tiles of grids."""


class Buffer:
    """Memory for one tile at a time, of any shape."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.store = torch.empty(0, dtype=dtype, device=device)
        self.shape: tuple[int, ...] = ()
        self.filled = slice(0, 0)  # the keys of the last tile of `skewed_in_zeros`

    def rows(self, g: int, n: int, m: int) -> Float[Tensor, "g n m"]:
        """A plain tile; its contents are undefined."""
        return self._view(g, n, m, m)

    def skewed(self, g: int, n: int, m: int, skew: int, columns: int = 1) -> Float[Tensor, "g n m"]:
        """A skewed tile, with each grid column skewed separately; the buffer's contents are undefined."""
        return self._view(g, n, m, m + n // columns * skew)

    def skewed_in_zeros(
        self, g: int, n: int, m: int, skew: int, columns: int, keys: slice | None = None
    ) -> Float[Tensor, "g n _"]:
        """A skewed tile, or some of its keys, with zeros everywhere else.

        Callers must preserve these zeros, and use no other method of the same buffer.
        """
        view = self.skewed(g, n, m, skew, columns)
        keys = slice(0, m) if keys is None else keys
        if self.shape != (g, n, m, skew, columns):
            self.store[: g * view.stride(0)].zero_()
            self.shape = (g, n, m, skew, columns)
        else:  # only the keys of the last tile hold numbers
            view[..., self.filled.start : keys.start].zero_()
            view[..., max(keys.stop, self.filled.start) : self.filled.stop].zero_()
        self.filled = keys
        return view[..., keys]

    def like(self, x: Float[Tensor, "g n m"]) -> Float[Tensor, "g n m"]:
        """A tile laid out as `x` is in its buffer; the contents of the buffer are undefined."""
        entries = x.untyped_storage().nbytes() // x.element_size()
        if self.store.numel() < entries:
            self.store = self.store.new_empty(entries)
        return self.store.as_strided(x.shape, x.stride(), x.storage_offset())

    def _view(self, g: int, n: int, m: int, row: int) -> Float[Tensor, "g n m"]:
        row_stride = -(-row // _PAD) * _PAD
        if row_stride % (8 * _PAD) == 0:
            row_stride += _PAD
        if self.store.numel() < g * n * row_stride:
            self.store = self.store.new_empty(g * n * row_stride)
            self.shape = ()
        return self.store.as_strided((g, n, m), (n * row_stride, row_stride, 1))


def whole(x: Float[Tensor, "g n m"], skew: int, columns: int = 1) -> Float[Tensor, "g columns r W"]:
    """The whole buffer of a skewed tile, one matrix per grid column, with strides that BLAS accepts."""
    rows = x.shape[1] // columns
    strides = (x.stride(0), rows * x.stride(1), x.stride(1) - skew, 1)
    return x.as_strided((x.shape[0], columns, rows, x.shape[2] + (rows - 1) * skew), strides, x.storage_offset())


def clear_around(x: Float[Tensor, "1 n m"]) -> None:
    """Set the entries around a tile of skew 1 to zero."""
    n = x.shape[1]
    if n > 1:
        beside = x.stride(1) - x.shape[2]
        x.as_strided((n - 1, beside), (x.stride(1), 1), x.storage_offset() + x.shape[2]).zero_()


def fill(score: Tensor, bias: Tensor | None, shift: Tensor | None) -> None:
    """`score = bias - shift`, `[g, n, m]`; the bias may be `[g, columns, rows, m]`, for each column of a grid."""
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
        self.product = Buffer(dtype, device)
        self.used = Buffer(dtype, device)
        self.kept = Buffer(dtype, device)
        self.bfloat16 = Buffer(torch.bfloat16, device)

    def rounded(self, x: Float[Tensor, "g n m"]) -> Float[Tensor, "g n m"]:
        """A bfloat16 copy, with zeros between its rows: a product by AMX (PyTorch 2.13) also reads what follows a row,
        and 0 times NaN is NaN."""
        copy = self.bfloat16.rows(*x.shape).copy_(x)
        width = copy.stride(1) - x.shape[2]
        copy.as_strided((*x.shape[:2], width), copy.stride(), x.shape[2]).zero_()
        return copy
