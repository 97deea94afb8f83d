"""Swin's windows on a grid: tokens of one window see each other (Liu et al. 2021, section 3.2).

There are two forms that allow the same pairs. With the mask `windows`, tokens stay one sequence, with any position and
any other mask. With `partition`, every window is a batch element, a short sequence, which is fastest with a dense
engine if windows are small; `join` reverses it. Only this file cuts windows.
"""

from __future__ import annotations

import itertools
import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import Grid, Mask
from relpos.core.checks import fail, require_int, shape_of


def windows(grid: Grid, size: int | tuple[int, ...], shift: int | tuple[int, ...] = 0) -> Mask:
    """Tokens attend within their own window, which has `size` cells along each axis.

    The windows' borders move `shift` cells to higher indices. Swin rolls the grid around its edges and masks pairs from
    opposite edges. Here windows at the edges are smaller, which allows the same pairs.

    Args:
        grid: the tokens' grid, without a prefix.
        size: cells of a window along each axis, one number or one per axis.
        shift: cells by which the borders move to higher indices.

    Raises:
        ValueError: the grid has a prefix, which belongs to no window, or the shift is a window or more.

    Examples:
        >>> relpos.patterns.windows(relpos.Grid(4, 4), 2).query_segments.view(4, 4)
        tensor([[0, 0, 1, 1],
                [0, 0, 1, 1],
                [2, 2, 3, 3],
                [2, 2, 3, 3]])
    """
    sizes, shifts = _by_axis(grid, size, shift)
    segments = torch.zeros((), dtype=torch.long)
    for axis, (cells, one, ahead) in enumerate(zip(grid.sizes, sizes, shifts, strict=True)):
        first = (one - ahead) % one
        own, count = (torch.arange(cells) + first) // one, (cells - 1 + first) // one + 1
        segments = segments[..., None] * count + own.view(*(1,) * axis, -1)
    return Mask.packed(segments.flatten())


def _by_axis(grid: Grid, size: int | tuple[int, ...], shift: int | tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """The checked size and shift of each axis."""
    if not isinstance(grid, Grid):
        fail("a Grid", shape_of(grid), "Write Grid(rows, columns).")
    if grid.prefix:
        fail("a grid without a prefix", repr(grid), "Prefix tokens are in no window.")
    sizes, shifts = ((x,) * grid.axes if isinstance(x, int) else x for x in (size, shift))
    for name, numbers in (("size", sizes), ("shift", shifts)):
        if not isinstance(numbers, tuple | list) or len(numbers) != grid.axes:
            came = shape_of(numbers)
            fail(f"a {name} for each of {grid.axes} axes", came, "Give one number for all of them, or a tuple.")
    for one, ahead in zip(sizes, shifts, strict=True):
        require_int(one, "size", at_least=1)
        require_int(ahead, "shift", at_least=0)
        if ahead >= one:
            fail("a shift below the window's size", f"{ahead} and {one}", "Swin shifts by half a window.")
    return tuple(sizes), tuple(shifts)


def partition(
    x: Float[Tensor, "B *cells E"], size: int | tuple[int, ...], shift: int | tuple[int, ...] = 0
) -> tuple[Float[Tensor, "W T E"], Mask | None]:
    """Split tokens on a grid into windows, which become batch elements.

    The grid is padded with zeros at its far ends to whole windows and then rolled back by `shift`, as in Swin.

    Args:
        x: tokens on a grid, `[B, rows, columns, E]` or with more axes.
        size: cells of a window along each axis, one number or one per axis.
        shift: cells by which the borders move to higher indices.

    Returns:
        The tokens `[B * windows, tokens, E]`, and the mask of padding and of pairs from opposite edges; None without
        either. The windows' coordinates are `Grid(*size)`.

    Raises:
        ValueError: tokens are not on a grid, a size is below 1, or the shift is a window or more.

    Examples:
        >>> x = torch.randn(2, 8, 8, 16)  # [B, rows, columns, E]
        >>> inside, mask = relpos.patterns.partition(x, size=4)
        >>> inside.shape, mask  # four windows of 16 tokens each; none is shifted or padded
        (torch.Size([8, 16, 16]), None)
    """
    if not isinstance(x, Tensor) or x.dim() < 3:
        fail(
            "tokens [B, rows, columns, E]",
            shape_of(x),
            "Pass tokens.unflatten(1, (rows, columns)).",
        )
    grid = Grid(*x.shape[1:-1])
    sizes, shifts = _by_axis(grid, size, shift)
    apart = None
    if any(shifts) or any(cells % one for cells, one in zip(grid.sizes, sizes, strict=True)):
        own = windows(grid, size, shift).query_segments
        assert own is not None
        of_cells = _cut((own + 1).view(1, *grid.sizes, 1), sizes, shifts)[..., 0] - 1  # padding is -1
        apart = Mask.packed(of_cells.repeat(x.shape[0], 1).to(x.device))
    return _cut(x, sizes, shifts), apart


def _cut(x: Tensor, sizes: tuple[int, ...], shifts: tuple[int, ...]) -> Tensor:
    axes = len(sizes)
    ends = [-cells % one for cells, one in zip(x.shape[1:-1], sizes, strict=True)]
    x = F.pad(x, (0, 0, *itertools.chain.from_iterable((0, end) for end in reversed(ends))))
    x = x.roll([-shift for shift in shifts], dims=list(range(1, axes + 1)))
    for axis in range(axes, 0, -1):
        x = x.unflatten(axis, (-1, sizes[axis - 1]))
    # [B, count, size, count, size, ..., E]
    x = x.permute(0, *range(1, 2 * axes, 2), *range(2, 2 * axes + 1, 2), 2 * axes + 1)
    return x.flatten(axes + 1, 2 * axes).flatten(0, axes)


def join(
    x: Float[Tensor, "W T E"], grid: Grid, size: int | tuple[int, ...], shift: int | tuple[int, ...] = 0
) -> Float[Tensor, "B *cells E"]:
    """Put windows back on their grid: `join(partition(x, size, shift)[0], grid, size, shift)` is x.

    Args:
        x: tokens of windows, `[W, T, E]`, as `partition` returns them.
        grid: the tokens' grid, without a prefix.
        size: cells of a window along each axis, one number or one per axis.
        shift: cells by which the borders move to higher indices.

    Raises:
        ValueError: tokens do not match the windows or the grid, or the grid has a prefix.

    Examples:
        >>> x = torch.randn(2, 8, 8, 16)
        >>> inside, mask = relpos.patterns.partition(x, size=4, shift=2)
        >>> bool((relpos.patterns.join(inside, relpos.Grid(8, 8), size=4, shift=2) == x).all())
        True
    """
    sizes, shifts = _by_axis(grid, size, shift)
    axes, inside = grid.axes, math.prod(sizes)
    counts = [-(-cells // one) for cells, one in zip(grid.sizes, sizes, strict=True)]
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[1] != inside:
        fail(
            f"tokens of windows [W, {inside}, E]", shape_of(x), "Pass the output of attention on partition()'s windows."
        )
    if x.shape[0] % math.prod(counts):
        wanted = f"windows of {sizes} cells on {grid!r}, {math.prod(counts)} for each element of the batch"
        fail(wanted, shape_of(x), "Pass the grid and the size that partition() had.")
    x = x.unflatten(1, sizes).unflatten(0, (-1, *counts))
    pairs = itertools.chain.from_iterable((1 + axis, 1 + axes + axis) for axis in range(axes))
    x = x.permute(0, *pairs, 2 * axes + 1)
    for axis in range(1, axes + 1):
        x = x.flatten(axis, axis + 1)
    x = x.roll(shifts, dims=list(range(1, axes + 1)))
    return x[(slice(None), *(slice(0, cells) for cells in grid.sizes))]
