"""Table lookup by index, with a gradient that is the same on every run.

`lookup(table, index)` is `table[index]`. Its backward is a segment sum in a fixed order. A CPU adds entries in order.
Other devices sort the entries stably by the row they read, and sum each row's entries separately. There are no atomics,
so two runs on one machine agree bit for bit, also on GPU. Sums run in float32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.checks import AS_DENSE, fail, is_dense, known_value, require_device, shape_of
from relpos.core.private import inside_transform
from relpos.core.tree import register, static


def at_least_float32(x: Tensor) -> Tensor:
    """`x` itself in float32 or float64, else a float32 copy: mechanisms use their parameters in float32 or wider.

    In a half-precision model, a mechanism's own arithmetic then loses nothing. In float64, which gradient checks use,
    nothing is rounded to float32, as `x.float()` would do.

    Args:
        x: a tensor of any floating dtype, usually a parameter; its gradient has the dtype of `x`.

    Raises:
        ValueError: `x` is no tensor.

    Examples:
        >>> relpos.at_least_float32(torch.tensor([0.5], dtype=torch.bfloat16)).dtype
        torch.float32
        >>> relpos.at_least_float32(torch.tensor([0.5], dtype=torch.float64)).dtype
        torch.float64
    """
    if not isinstance(x, Tensor):
        fail("a parameter or another tensor", shape_of(x), "Pass the parameter.")
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def ordered_segment_sum(
    values: Float[Tensor, " I *C"], index: Int[Tensor, " I"], rows: int
) -> Float[Tensor, " {rows} *C"]:
    """`out[r] = sum of values[i] where index[i] == r`, summed in the order of `i`, in float32 or wider."""
    if _adds_in_order(values):
        wide = at_least_float32(values)
        index = index if index.dtype == torch.int32 else index.long()
        return torch.index_add(wide.new_zeros(rows, *wide.shape[1:]), 0, index, wide).to(values.dtype)
    return _sum_sorted(values, *_sorted(index, rows))


def _adds_in_order(values: Tensor) -> bool:
    """Whether PyTorch's own `index_add`, also as the gradient of `index_select`, adds in order; compiled code may
    not."""
    return values.device.type == "cpu" and not torch.compiler.is_compiling()


def _sorted(index: Int[Tensor, " I"], rows: int) -> tuple[Int[Tensor, " I"], Int[Tensor, " R"]]:
    """The stable order that sorts an index, and where each row begins in it, plus the end."""
    order = torch.argsort(index, stable=True)
    return order, torch.searchsorted(index[order], torch.arange(rows + 1, device=index.device, dtype=index.dtype))


def _sum_sorted(values: Float[Tensor, " I *C"], order: Tensor, begins: Tensor) -> Float[Tensor, " R *C"]:
    wide = at_least_float32(values)[order].contiguous()
    sums = torch.segment_reduce(wide, "sum", offsets=begins, initial=0, unsafe=True)
    # `.to` its own dtype would return the same tensor again, and Dynamo of torch 2.11 would lose its gradient.
    return sums if sums.dtype == values.dtype else sums.to(values.dtype)


@register("relpos.core.gather.Rows")
@dataclass(frozen=True, eq=False)
class Rows:
    """Row numbers for repeated lookups in a table: checked and sorted once.

    Args:
        index: integers in 0 ... rows - 1.
        rows: the number of rows of the table.
        in_order: whether the index is known to be 0, 1, ..., rows - 1.
    """

    index: Int[Tensor, " L"]
    rows: int = static()
    in_order: bool = static(default=False, kw_only=True)

    def __post_init__(self) -> None:
        _check(self.index, self.rows)

    @cached_property
    def order(self) -> tuple[Tensor, Tensor]:
        """The arguments of the gradient's sum; see `_sorted`."""
        with torch.inference_mode(False):
            return _sorted(self.index, self.rows)

    @cached_property
    def in_32_bits(self) -> Int[Tensor, " L"]:
        """The index in 32 bits, a copy, which begins where 16 divides the address."""
        with torch.inference_mode(False):
            return self.index.to(torch.int32, copy=True).contiguous()


def sum_by_rows(values: Float[Tensor, " L *C"], rows: Rows) -> Float[Tensor, " R *C"]:
    """`segment_sum` by row numbers that are sorted once; not differentiable."""
    if _adds_in_order(values):
        return ordered_segment_sum(values, rows.index, rows.rows)
    return _sum_sorted(values, *rows.order)


_WHOLE = (torch.int64, torch.int32)
"""The dtypes of row numbers in PyTorch. Others are masks, or no row numbers."""


class _Lookup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(table: Tensor, index: Tensor, checked: bool) -> Tensor:
        return table[index]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, bool], output: Tensor) -> None:
        table, index, ctx.checked = inputs
        ctx.save_for_backward(index)
        ctx.rows = table.shape[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        (gradient,) = gradients
        flat = gradient.reshape(index.numel(), *gradient.shape[index.dim() :])
        if not ctx.checked:  # -1 has read the last row
            index = torch.where(index < 0, index + ctx.rows, index)
        return _SegmentSum.apply(flat, index.flatten(), ctx.rows), None, None  # type: ignore[no-untyped-call]


class _SegmentSum(torch.autograd.Function):
    """The backward of a lookup, and itself differentiable: the gradient of a segment sum is a lookup."""

    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, index: Tensor, rows: int) -> Tensor:
        return ordered_segment_sum(values, index, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _Lookup.apply(gradients[0], index, True), None, None  # type: ignore[no-untyped-call]


class _ReadRows(torch.autograd.Function):
    """`read` with relpos's own gradient order, in a form that functorch does not support, with a third of the Python
    overhead."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Rows) -> Tensor:
        ctx.rows = rows
        return table.T.index_select(1, rows.index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        rows: Rows = ctx.rows
        by_row = gradients[0].T
        if torch.is_grad_enabled():  # a second derivative is wanted
            return segment_sum(by_row, rows.index, rows.rows), None
        return sum_by_rows(by_row, rows), None


def lookup(table: Float[Tensor, " R *C"], index: Int[Tensor, "*I"]) -> Float[Tensor, "*IC"]:
    """`table[index]`: the rows of a table, with an ordered, repeatable gradient.

    Args:
        table: `[R, ...]`, floating point.
        index: integers in 0 ... R - 1, any shape. On CPU others raise. They are not checked on other devices, which
            would synchronize, nor in a compiled graph or under vmap: -1 then reads the last row.

    Returns:
        The index's shape, then the shape of a row.

    Raises:
        ValueError: no table, no index, or one with other row numbers.

    Examples:
        >>> table = torch.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
        >>> relpos.lookup(table, torch.tensor([0, 0, 1])).sum().backward()
        >>> table.grad  # summed in a fixed order
        tensor([[2., 2.],
                [1., 1.]])
    """
    tabular = isinstance(table, Tensor) and is_dense(table) and table.is_floating_point()
    if not tabular or table.dim() == 0:
        fail("a floating-point table [R, ...]", shape_of(table), "Convert it with .float(); rows come first.")
    checked = _check(index, table.shape[0])
    require_device(index, "the index", table.device, "Move it to the table's device.")
    result: Tensor = _Lookup.apply(table, index, checked)  # type: ignore[no-untyped-call]
    return result


def read(table: Float[Tensor, "R H"], rows: Rows) -> Float[Tensor, "H L"]:
    """`lookup(table, rows.index).T`, of L rows that are already checked, and are sorted once for the gradient."""
    if rows.in_order:
        return table.T.clone(memory_format=torch.contiguous_format)
    if torch.compiler.is_compiling() or inside_transform():
        return lookup(table, rows.index).T
    if table.is_cpu or not (table.requires_grad and torch.is_grad_enabled()):  # `_adds_in_order`
        return table.T.index_select(1, rows.index)  # the same, faster, and contiguous per head
    result: Tensor = _ReadRows.apply(table, rows)  # type: ignore[no-untyped-call]
    return result


def _check(index: object, rows: int) -> bool:
    """Raise unless an index names rows of a table. Returns whether its numbers could be checked."""
    if not isinstance(index, Tensor) or not is_dense(index) or index.dtype not in _WHOLE:
        sparse = isinstance(index, Tensor) and not is_dense(index)
        fail("an integer tensor as index", shape_of(index), AS_DENSE if sparse else "Convert it with .long().")
    known = None if 0 in index.shape else known_value(index, lambda x: torch.stack(x.aminmax()))
    if known is not None and (known[0] < 0 or known[1] >= rows):
        wanted = f"row numbers from 0 to {rows - 1} in the index"
        fail(
            wanted,
            f"{known[0]} to {known[1]}",
            "Add rows for the others to the table.",
        )
    return known is not None or 0 in index.shape


def segment_sum(values: Float[Tensor, "*IC"], index: Int[Tensor, "*I"], rows: int) -> Float[Tensor, " {rows} *C"]:
    """The adjoint of `lookup`, and differentiable like it: `out[r] = sum of values[i] where index[i] == r`.

    `values` has the index's shape, then the shape of a row.
    """
    result: Tensor = _SegmentSum.apply(values.flatten(0, index.dim() - 1), index.flatten(), rows)  # type: ignore[no-untyped-call]
    return result
