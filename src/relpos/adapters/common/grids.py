"""Tables of one number per offset of a grid, as values on the lines of that grid.

    cells       [H, (2 R - 1)(2 C - 1)], the published tables: lowest offset first, column fastest
    extras      [H, 3], with a class token: class to cell, cell to class, class to itself (BEiT)
    image       [1, H, 2 R - 1, 2 C + 2], cells with the extras on the right of each row, to pass on

A table that the model makes once for all layers is passed on in the last form. It is a plain tensor, two of them can be
added, and its shape gives the rows and columns of the grid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from relpos.adapters.common.retrofitted import Retrofitted
from relpos.core import Coordinates, Grid, LineBias, Lines, Terms, at_least_float32, expand, lines

EXTRAS = 3


def cached_lines(module: Retrofitted, queries: Coordinates, device: torch.device) -> Lines:
    """The lines of a grid, cached per module."""
    return module.cached(queries, device, lambda: lines(queries, device=device), 2 * queries.count)


def values(cells: Tensor, extras: Tensor | None = None) -> Tensor:
    """Values on the lines of a grid, float32 or wider."""
    cells = at_least_float32(cells)
    if extras is None:
        return cells.contiguous()
    extras = at_least_float32(extras)
    heads, tokens = cells.shape
    origin = tokens // 2
    to_cells, to_class, itself = extras[:, :1], extras[:, 1:2], extras[:, 2:]
    parts = ((to_cells, origin + 1), (to_class, tokens - origin), (itself, origin + 1))
    return torch.cat([cells, *(x.expand(heads, count) for x, count in parts)], dim=1)


def terms_of_table(module: Retrofitted, table: Tensor, window: Sequence[int]) -> Terms:
    """The terms of a table `[L, H]`, or `[L + 3, H]` if a class token precedes the cells."""
    count = math.prod(2 * size - 1 for size in window)
    prefix = int(table.shape[0] > count)
    line = cached_lines(module, Grid(*window, prefix=prefix), table.device)
    return Terms(LineBias(values(table[:count].T, table[count:].T if prefix else None), line))


def image_of(table: Tensor, window: tuple[int, int]) -> Tensor:
    """A table `[L, H]` or `[L + 3, H]` as an image."""
    extents = [2 * size - 1 for size in window]
    count = extents[0] * extents[1]
    extras = table[count:] if table.shape[0] > count else table.new_zeros(EXTRAS, table.shape[1])
    return with_extras(table[:count].T.unflatten(1, extents), extras)[None]


def with_extras(cells: Tensor, extras: Tensor) -> Tensor:
    """`[H, 2 R - 1, 2 C - 1]` and `[3, H]` as an image without its first axis."""
    return torch.cat([cells, extras.T[:, None].expand(-1, cells.shape[1], -1)], dim=-1)


def is_image(bias: Tensor | None, tokens: int) -> bool:
    """Whether a bias is an image; `[1, H, N, N]` never looks like one."""
    if bias is None or bias.dim() != 4 or bias.shape[2] == tokens:
        return False
    rows, columns = _window(bias)
    return bias.shape[3] == 2 * columns - 1 + EXTRAS and rows * columns in (tokens, tokens - 1)


def terms_of_image(module: Retrofitted, image: Tensor, tokens: int) -> Terms:
    """The terms of an image."""
    return Terms(LineBias(_values_of(image, tokens), cached_lines(module, _grid(image, tokens), image.device)))


def dense_of_image(image: Tensor, tokens: int) -> Tensor:
    """An image as the dense bias, `[1, H, N, N]`."""
    return expand(_values_of(image, tokens), lines(_grid(image, tokens), device=image.device))[None].to(image.dtype)


def _values_of(image: Tensor, tokens: int) -> Tensor:
    prefix = _grid(image, tokens).prefix
    return values(image[0, :, :, :-EXTRAS].flatten(1), image[0, :, 0, -EXTRAS:] if prefix else None)


def _grid(image: Tensor, tokens: int) -> Grid:
    rows, columns = _window(image)
    return Grid(rows, columns, prefix=tokens - rows * columns)


def _window(image: Tensor) -> tuple[int, int]:
    return (image.shape[2] + 1) // 2, (image.shape[3] + 1 - EXTRAS) // 2
