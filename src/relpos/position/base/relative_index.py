"""The index of a table of offsets: the row that each pair of tokens reads, as published models store it."""

from __future__ import annotations

from jaxtyping import Int
from torch import Tensor

from relpos.core import Grid, Sequence, lines
from relpos.position.base.tables import require_grid_window


def get_relative_position_index_1d(seq_len: int) -> Int[Tensor, "N N"]:
    """`index[i, j] = i - j + seq_len - 1`: 0 to 2 seq_len - 2.

    For reading, and for others' checkpoints; no engine uses it.

    Args:
        seq_len: N.

    Raises:
        ValueError: no integer of at least 1.

    Examples:
        >>> relpos.get_relative_position_index_1d(3)
        tensor([[2, 1, 0],
                [3, 2, 1],
                [4, 3, 2]])
    """
    return lines(Sequence(seq_len)).index()


def get_relative_position_index_2d(window_size: tuple[int, int]) -> Int[Tensor, "N N"]:
    """`index[i, j] = (d_row + Wh - 1) * (2 Ww - 1) + d_col + Ww - 1`: Swin's index.

    For reading, and for others' checkpoints; no engine uses it.

    Args:
        window_size: rows Wh and columns Ww; N is their product.

    Raises:
        ValueError: no two integers of at least 1.

    Examples:
        >>> relpos.get_relative_position_index_2d((2, 2))
        tensor([[4, 3, 1, 0],
                [5, 4, 2, 1],
                [7, 6, 4, 3],
                [8, 7, 5, 4]])
    """
    require_grid_window(window_size, 2)
    return lines(Grid(*window_size)).index()
