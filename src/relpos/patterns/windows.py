"""Swin's windows on a grid: tokens of one window see each other (Liu et al. 2021, section 3.2)."""

from __future__ import annotations

import torch

from relpos.core import Grid, Mask
from relpos.core.checks import fail, require_int, shape_of


def windows(grid: Grid, size: int | tuple[int, ...], shift: int | tuple[int, ...] = 0) -> Mask:
    """Tokens see those of their own window, which has `size` cells along each axis.

    Shifted, the windows' borders stand `shift` cells earlier. Swin rolls the grid round its edges and masks what then
    meets wrongly; here windows at the edges are simply smaller, which allows the same pairs.

    Raises:
        ValueError: a prefix, which belongs to no window; a shift of a window or more.
    """
    if not isinstance(grid, Grid):
        fail("a Grid", shape_of(grid), "Write Grid(rows, columns).")
    if grid.prefix:
        fail("a grid without a prefix", repr(grid), "A prefix belongs to no window.")
    sizes, shifts = ((x,) * grid.axes if isinstance(x, int) else tuple(x) for x in (size, shift))
    segments = torch.zeros((), dtype=torch.long)
    for axis, (cells, one, ahead) in enumerate(zip(grid.sizes, sizes, shifts, strict=True)):
        require_int(one, "size", at_least=1)
        require_int(ahead, "shift", at_least=0)
        if ahead >= one:
            fail("a shift below the window's size", f"{ahead} and {one}", "Swin shifts by half a window.")
        own = (torch.arange(cells) + ahead) // one
        count = (cells - 1 + ahead) // one + 1
        segments = segments[..., None] * count + own.view(*(1,) * axis, -1)
    return Mask.packed(segments.flatten())
