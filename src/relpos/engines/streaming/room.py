"""What one call writes into: buffers for the scores of a tile, allocated once and laid out for what follows."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

_PAD = 16
"""Numbers between the rows of a buffer, so that they do not all fall into the same lines of the cache."""


class Buffer:
    """Room for scores of changing shape, allocated once."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.store = torch.empty(0, dtype=dtype, device=device)
        self.shape: tuple[int, ...] = ()

    def rows(self, g: int, n: int, m: int) -> Float[Tensor, "g n m"]:
        """`[g, n, m]`, contents undefined."""
        return self._room(g * n * (m + _PAD)).as_strided((g, n, m), (n * (m + _PAD), m + _PAD, 1))

    def shifted(self, g: int, n: int, m: int, step: int, strips: int = 1) -> tuple[Tensor, Tensor]:
        """`[g, n, m]` with row r of a strip shifted by `r * step` to the right, and the whole, zero outside the rows:
        `[g, strips, rows of each, W]`."""
        view, whole = self.shifted_over_anything(g, n, m, step, strips)
        if self.shape != (g, n, m, step, strips):
            self.store.zero_()
            self.shape = (g, n, m, step, strips)
        return view, whole

    def shifted_over_anything(self, g: int, n: int, m: int, step: int, strips: int = 1) -> tuple[Tensor, Tensor]:
        """The same with undefined numbers outside the rows. Between strips lies room that makes all rows equally far
        apart, so that they are one operand of a matrix product."""
        each = n // strips
        width = m + (each - 1) * step
        apart = width + step
        store = self._room(g * n * apart)
        whole = store.as_strided((g, strips, each, width), (n * apart, each * apart, width, 1))
        return store.as_strided((g, n, m), (n * apart, apart, 1)), whole

    def _room(self, count: int) -> Tensor:
        if self.store.numel() < count:
            self.store = self.store.new_empty(count)
            self.shape = ()
        return self.store


def clear_around(whole: Float[Tensor, "n W"], m: int) -> None:
    """Zero what does not belong to the rows of m numbers, of which each begins one to the right of the one before."""
    n, width = whole.shape
    if n > 1:
        whole.as_strided((n - 1, n), (width + 1, 1), whole.storage_offset() + m).zero_()


class Room:
    """The buffers of a call."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.scores = Buffer(dtype, device)
        self.shifted = Buffer(dtype, device)  # kept zero around its rows, so used for nothing else
        self.other = Buffer(dtype, device)
        self.low = Buffer(torch.bfloat16, device)
        self.tanh: Tensor | None = None  # of a capped tile
        self.whole: Tensor | None = None  # what a tile with vectors lies in

    def rounded(self, x: Float[Tensor, "g n m"]) -> Float[Tensor, "g n m"]:
        """A bfloat16 copy."""
        return self.low.rows(*x.shape).copy_(x)
