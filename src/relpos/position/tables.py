"""What learned tables start from, and the windows that they are built for."""

from __future__ import annotations

import torch
from torch import nn

from relpos.core import Grid
from relpos.core.checks import fail, require_number, shape_of


def require_std(x: object, name: str = "init_std") -> None:
    """Raise unless `x` can be the standard deviation that a learned table starts from."""
    require_number(x, name, "of at least 0", "Pass 0.0 to start from zeros.")


def require_window(window_size: object) -> tuple[int, ...]:
    """The cells along each axis of a window, one or more; raises where they are no such thing."""
    if not isinstance(window_size, tuple | list) or not window_size:
        fail("window_size to be (rows, columns)", shape_of(window_size), "Pass one integer per axis.")
    return Grid(*window_size).sizes


@torch.no_grad()
def start_table(table: nn.Parameter, std: float) -> None:
    """Fill a learned table from a normal of this standard deviation; with zeros for 0.

    Cut at 2 as timm and Swin cut (far out for their 0.02), or at two standard deviations where those are more.
    """
    if std == 0:
        table.zero_()
    else:
        cut = max(2.0, 2 * std)
        nn.init.trunc_normal_(table, std=std, a=-cut, b=cut)
