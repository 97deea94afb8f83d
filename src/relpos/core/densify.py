"""`values[h, query[i] - key[j] + origin]` for every pair: a line bias written out, for engines that are dense anyway.

The forward reads `values` at `lines.index()`. The backward is a sum along diagonals in a fixed order. Where the lines
are regular it needs no sorting: with keys reversed, every diagonal is an anti-diagonal, and a row of n numbers written
into a buffer with rows one longer than they are read back with shifts each row by one, so that anti-diagonals become
columns. Axes are summed one after another. This stores several N x M tensors; `streaming` and `triton` do not.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.gather import at_least_float32, lookup, segment_sum
from relpos.core.line import Layout, Lines


def sum_over_offsets(x: Float[Tensor, "*C n m"]) -> Float[Tensor, "*C d"]:
    """`out[i - j + m - 1] = sum of x[i, j]`: the sums along the n + m - 1 diagonals."""
    n, m = x.shape[-2:]
    wide = x.new_zeros(*x.shape[:-1], n + m)
    wide[..., :m] = x.flip(-1)
    skewed = wide.flatten(-2)[..., : n * (n + m - 1)]
    return torch.unflatten(skewed, -1, (n, n + m - 1)).sum(dim=-2)


def _gradient(
    gradient: Float[Tensor, "H N M"], query: Tensor, key: Tensor, origin: int, length: int, layout: Layout
) -> Float[Tensor, "H L"]:
    """d(values) for regular lines."""
    assert layout.query is not None
    assert layout.key is not None
    wide = at_least_float32(gradient)
    result = wide.new_zeros(wide.shape[0], length)
    rows, columns = layout.query.prefix, layout.key.prefix
    cells = wide[:, rows:, columns:]
    if cells.numel():
        sums = cells.unflatten(2, layout.key.sizes).unflatten(1, layout.query.sizes)
        axes = len(layout.spans)
        for axis in range(axes):
            sums = sum_over_offsets(sums.movedim((1, 1 + axes - axis), (-2, -1)))
        sums = sums.flatten(1)
        last = sum((size - 1) * stride for size, stride in zip(layout.key.sizes, layout.key.strides, strict=True))
        lowest = layout.query.start - (layout.key.start + last) + origin  # above 0 in a part of the lines
        result[:, lowest : lowest + sums.shape[1]] = sums
    if rows and cells.shape[2]:
        result[:, query[0] - key[columns:] + origin] = wide[:, :rows, columns:].sum(dim=1)
    if columns and cells.shape[1]:
        result[:, query[rows:] - key[0] + origin] = wide[:, rows:, :columns].sum(dim=2)
    if rows and columns:
        result[:, query[:1] - key[:1] + origin] = wide[:, :rows, :columns].sum(dim=(1, 2))[:, None]
    return result.to(gradient.dtype)


class _Expand(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(values: Tensor, query: Tensor, key: Tensor, origin: int, length: int, layout: Layout) -> Tensor:
        return values[:, query[:, None] - key[None, :] + origin]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, query, key, *ctx.plain = inputs
        ctx.save_for_backward(query, key)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key = ctx.saved_tensors
        return _gradient(gradients[0], query, key, *ctx.plain), None, None, None, None, None


def contract(gradient: Float[Tensor, "*B H N M"], lines: Lines) -> Float[Tensor, "H L"]:
    """The adjoint of `expand`: `out[h, l]` is the sum over the pairs that read entry l, in a fixed order."""
    if lines.layout.kind == "irregular":
        columns = gradient.movedim(-3, -1)  # [*B, N, M, H]
        index = lines.index()
        if columns.dim() > index.dim() + 1:
            columns = columns.sum(dim=0)
        index = index.expand(columns.shape[:-1])
        return segment_sum(columns, index, lines.length).T
    whole = gradient.sum(dim=0) if gradient.dim() == 4 else gradient
    return _gradient(whole, lines.query, lines.key, lines.origin, lines.length, lines.layout)


def expand(values: Float[Tensor, "H L"], lines: Lines) -> Float[Tensor, "*B H N M"]:
    """`values` at every pair of `lines`: `[H, N, M]`, or `[B, H, N, M]` where the lines have a batch axis."""
    if lines.layout.kind == "irregular":
        return lookup(values.T, lines.index()).movedim(-1, -3)
    key = lines.key.clone() if lines.key is lines.query else lines.key  # torch.compile takes no tensor twice
    result: Tensor = _Expand.apply(values, lines.query, key, lines.origin, lines.length, lines.layout)  # type: ignore[no-untyped-call]
    return result
