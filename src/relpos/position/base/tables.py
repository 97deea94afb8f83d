"""Start values of learned tables, the windows that they are built for, and BEiT's interpolation to other windows."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from relpos.core import Coordinates, Grid, Positions
from relpos.core.checks import fail, require_int, require_number, shape_of
from relpos.core.coordinates import COORDINATES
from relpos.core.private import is_fake


def require_std(x: object, name: str = "init_std") -> None:
    """Raise unless `x` can be the standard deviation that a learned table starts from."""
    require_number(x, name, "of at least 0", "Pass 0.0 to start from zeros.")


def require_window(window_size: object) -> tuple[int, ...]:
    """The cells along each axis of a window, one or more; raises for anything else."""
    if not isinstance(window_size, tuple | list) or not window_size:
        fail("window_size to be (rows, columns)", shape_of(window_size), "Pass one integer per axis.")
    return Grid(*window_size).sizes


AXES_OF_GRIDS = {2: "(rows, columns)", 3: "(depth, rows, columns)"}
"""How the axes of a grid are named in messages."""


def require_grid_window(window_size: object, axes: int) -> None:
    """Raise unless it is a window of 2 or 3 axes."""
    if not isinstance(window_size, tuple | list) or len(window_size) != axes:
        count = {2: "two", 3: "three"}[axes]
        fail(f"window_size to be {AXES_OF_GRIDS[axes]}", shape_of(window_size), f"Pass {count} integers.")
    for size in window_size:
        require_int(size, "each size of window_size", at_least=1)


def covering(queries: Coordinates, keys: Coordinates) -> tuple[int, ...]:
    """The smallest size along each axis whose offsets, -(size - 1) to size - 1, hold every query - key."""
    bounds = zip(queries.low, queries.high, keys.low, keys.high, strict=True)
    return tuple(max(qh - kl, kh - ql) + 1 for ql, qh, kl, kh in bounds)


def require_within(sizes: tuple[int, ...], queries: object, keys: object | None) -> None:
    """Raise if the low and high of `Positions` allow tokens to be farther apart than a table of `sizes` goes.

    Other coordinates say how far apart tokens are; `Positions` may declare more than occurs.
    """
    both = [queries] if keys is None else [queries, keys]
    known = [one for one in both if isinstance(one, COORDINATES) and one.axes == len(sizes)]
    if len(known) < len(both) or not any(isinstance(one, Positions) for one in known):
        return
    for axis, (size, needed) in enumerate(zip(sizes, covering(known[0], known[-1]), strict=True)):
        if needed > size:
            texts = [f"low={one.low}, high={one.high}" for one in known]
            came = texts[0] if len(texts) == 1 else f"{texts[0]} of queries and {texts[1]} of keys"
            remedy = 'Narrow low and high to the range that occurs, resize the table, or build it with beyond="clip".'
            wanted = f"Positions whose low and high are at most {size - 1} apart on axis {axis}, the table's reach"
            fail(wanted, f"{came}, which are {needed - 1} apart", remedy)


@torch.no_grad()
def start_table(table: nn.Parameter, std: float) -> None:
    """Fill a learned table from a normal distribution of this standard deviation; with zeros for 0.

    It is truncated at 2 as in timm and Swin (far out for their 0.02), or at two standard deviations if those are more.
    """
    if std == 0:
        table.zero_()
    elif not is_fake(table):  # truncation reads the numbers
        std = float(std)  # an integer may be too long for PyTorch
        cut = max(2.0, 2 * std)
        nn.init.trunc_normal_(table, std=std, a=-cut, b=cut)


def geometric_positions(size: int, new: int) -> list[float]:
    """The positions of the 2 size - 1 offsets of an axis among the 2 new - 1 of a larger one: BEiT's progression.

    0, 1, 1 + r, 1 + r + r^2, ... and the same below 0, with the ratio r that puts the farthest at new - 1; the offsets
    themselves (r = 1) if the other axis is not larger.
    """
    low, high = 1.0, float(max(new, 2))
    for _ in range(60):
        ratio = (low + high) / 2
        if sum(ratio**n for n in range(size - 1)) > new - 1:
            high = ratio
        else:
            low = ratio
    ratio = low if new > size > 2 else 1.0
    above = [sum(ratio**n for n in range(count)) for count in range(1, size)]
    return [*(-position for position in reversed(above)), 0.0, *above]


def read_between(image: Tensor, axis: int, positions: list[float], new: int) -> Tensor:
    """The image at offsets -(new - 1) to new - 1 along an axis: linear between its positions, constant beyond them."""
    known = torch.tensor(positions, dtype=torch.float64, device=image.device)
    wanted = torch.arange(1 - new, new, dtype=torch.float64, device=image.device)
    right = torch.searchsorted(known, wanted).clamp(max=len(positions) - 1)
    left = (right - 1).clamp(min=0)
    share = (wanted - known[left]) / (known[right] - known[left]).clamp(min=1)  # positions are at least 1 apart
    share = share.clamp(0, 1).to(image.dtype).view(-1, *[1] * (image.dim() - 1 - axis))
    return torch.lerp(image.index_select(axis, left), image.index_select(axis, right), share)
