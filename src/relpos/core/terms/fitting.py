"""Checks that a term's tensors fit the queries, keys and values of a call, for each term's `check`."""

from __future__ import annotations

from torch import Tensor

from relpos.core.checks import broadcasts, fail, require_device, require_tensor, shape_of
from relpos.core.line import Lines


def heads_first(x: Tensor, name: str, width: str) -> None:
    """Raise unless a tensor is floating point and has the dimensions `[heads, width]`."""
    require_tensor(x, name, dims=width.count(",") + 2)
    if not x.is_floating_point():
        wanted = f"{name} to be floating point [heads, {width}]"
        fail(wanted, shape_of(x), "Pass one row per query head, or a single row.")


def require_lines(x: object, name: str) -> None:
    """Raise unless these are `Lines`."""
    if not isinstance(x, Lines):
        fail(f"{name} lines to be Lines", shape_of(x), "Make them with relpos.lines(queries, keys).")


def check_device(x: Tensor | None, name: str, q: Tensor) -> None:
    """Raise unless a tensor is on q's device."""
    if x is not None:
        require_device(x, name, q.device, "Move the mechanism or mask to the device of q.")


def check_heads(x: Tensor, name: str, q: Tensor, axis: int = 0) -> None:
    """Raise unless an axis has one entry for each query head, or one for all."""
    if not broadcasts(x.shape[axis], q.shape[1]):
        wanted = f"{name} for {q.shape[1]} query heads, or for 1 shared by all"
        fail(wanted, shape_of(x), "Build the mechanism with the num_heads of q.")


def check_lines(lines: Lines, name: str, q: Tensor, k: Tensor) -> None:
    """Raise unless lines fit the numbers of queries and keys, and the batch size."""
    for tokens, line, x in (("queries", lines.query, q), ("keys", lines.key, k)):
        check_device(line, f"the lines of {name}", q)
        if line.shape[-1] != x.shape[2]:
            remedy = "Build the terms from the coordinates of these tokens, prefix included."
            fail(f"lines of {name} for {x.shape[2]} {tokens}", str(line.shape[-1]), remedy)
        if line.dim() == 2 and not broadcasts(line.shape[0], q.shape[0]):
            fail(f"lines of {name} for a batch of {q.shape[0]}", shape_of(line), "Give one row, or one per element.")


def check_shape(x: Tensor, name: str, wanted: tuple[tuple[int, ...], ...]) -> None:
    """Raise unless each size is one of those allowed for its axis."""
    if not all(any(size == one for one in allowed) for size, allowed in zip(x.shape, wanted, strict=True)):
        shape = ", ".join(" or ".join(str(n) for n in dict.fromkeys(allowed)) for allowed in wanted)
        fail(f"{name} of shape [{shape}]", shape_of(x), "Build it for the same q, k and v.")
