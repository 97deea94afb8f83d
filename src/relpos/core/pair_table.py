"""`values[h, index[b, i, j]]` for every pair of query and key, and its adjoint, in a fixed order.

`core.gather` reads rows of a table, heads last. Here heads come first, as scores have them, and each is read and summed
along its own pairs: N x M numbers a head need no transposition.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from relpos.core.gather import at_least_float32, ordered_segment_sum

_AT_ONCE = 2**16
"""Pairs that are summed one after another; longer sums would lose digits in float32."""


def read_pairs(values: Float[Tensor, "H R"], index: Integer[Tensor, "B N M"]) -> Float[Tensor, "B H N M"]:
    """What each pair reads; differentiable, twice and more."""
    result: Tensor = _ReadPairs.apply(values, index)  # type: ignore[no-untyped-call]
    return result


def sum_pairs(
    gradient: Float[Tensor, "B H N M"], index: Integer[Tensor, "#B N M"], rows: int
) -> Float[Tensor, "H {rows}"]:
    """The adjoint: `out[h, r]` is the sum over the pairs whose index is r. Not differentiable."""
    wide = at_least_float32(gradient)
    if index.shape[0] == 1:
        wide = wide.sum(dim=0, keepdim=True)
    by_head = wide.transpose(0, 1).flatten(1)
    flat = index.flatten().long()
    if gradient.device.type != "cpu" or torch.compiler.is_compiling():
        return ordered_segment_sum(by_head.T, flat, rows).T.to(gradient.dtype)
    parts = [
        x.new_zeros(x.shape[0], rows).scatter_add_(1, own.expand_as(x), x)  # sequential on a CPU, a head at a time
        for x, own in zip(by_head.split(_AT_ONCE, dim=1), flat.split(_AT_ONCE), strict=True)
    ]
    return torch.stack(parts).sum(dim=0).to(gradient.dtype)


class _ReadPairs(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, index: Tensor) -> Tensor:
        read = values.index_select(1, index.flatten().long())
        return torch.unflatten(read, 1, tuple(index.shape)).transpose(0, 1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        values, index = inputs
        ctx.save_for_backward(index)
        ctx.rows = values.shape[1]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return _SumPairs.apply(gradients[0], index, ctx.rows), None  # type: ignore[no-untyped-call]


class _SumPairs(torch.autograd.Function):
    """The backward of a read, and itself differentiable: its gradient is a read."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, index: Tensor, rows: int) -> Tensor:
        return sum_pairs(gradient, index, rows)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        ctx.save_for_backward(inputs[1])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (index,) = ctx.saved_tensors
        return _ReadPairs.apply(gradients[0], index), None, None  # type: ignore[no-untyped-call]
