"""Tables and code for the page: matrices beside one another, differences marked, functions shown as they run."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Matrix = Sequence[Sequence[float]]


def number(value: float, digits: int = 3) -> str:
    """Rounded, never -0.000."""
    text = f"{value:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def rows_of(matrix: Tensor | Matrix) -> list[list[float]]:
    """Plain numbers."""
    return matrix.tolist() if isinstance(matrix, Tensor) else [list(row) for row in matrix]


def wrong_entries(matrix: Tensor, printed: Matrix) -> list[tuple[int, int]]:
    """Where a printed matrix differs from the computed one by more than its own rounding."""
    pairs = zip(rows_of(matrix), printed, strict=True)
    return [
        (i, j)
        for i, (own, told) in enumerate(pairs)
        for j, (a, b) in enumerate(zip(own, told, strict=True))
        if abs(a - b) > 6e-4
    ]


def block(matrix: Tensor, *, digits: int = 3, row: str = "query", column: str = "key") -> str:
    """A matrix with named rows and columns."""
    rows = rows_of(matrix)
    width = max(len(column) + 2, digits + 4)
    head = " " * (len(row) + 2) + "".join(f"{column} {j}".rjust(width + 1) for j in range(len(rows[0])))
    lines = [f"{row} {i}" + "".join(number(x, digits).rjust(width + 1) for x in one) for i, one in enumerate(rows)]
    return "\n".join(["```", head, *lines, "```"])


def beside(matrix: Tensor, printed: Matrix, *, digits: int = 3) -> str:
    """The computed matrix beside the printed one; `*` stands where the two differ."""
    wrong = set(wrong_entries(matrix, printed))
    lines = []
    for i, (own, told) in enumerate(zip(rows_of(matrix), printed, strict=True)):
        left = "".join(number(x, digits).rjust(digits + 5) for x in own)
        right = "".join(
            number(x, digits).rjust(digits + 5) + ("*" if (i, j) in wrong else " ") for j, x in enumerate(told)
        )
        lines.append(f"{left}     {right}".rstrip())
    wide = (digits + 5) * len(rows_of(matrix)[0])
    head = (
        "  computed".ljust(wide)
        + "       "
        + (f"as printed, {len(wrong)} wrong (*)" if wrong else "as printed, all right")
    )
    return "\n".join(["```", head, *lines, "```"])


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def code(*functions: Callable[..., Any]) -> str:
    """The functions as they stand in `computed.py`."""
    return "```python\n" + "\n\n\n".join(inspect.getsource(function).rstrip() for function in functions) + "\n```"


def vector(values: Tensor | Sequence[float], digits: int = 3) -> str:
    """`[0.707, 0, ...]`"""
    plain = values.tolist() if isinstance(values, Tensor) else values
    return "[" + ", ".join(number(x, digits) for x in plain) + "]"
