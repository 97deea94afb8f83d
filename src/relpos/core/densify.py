"""`values[h, query[i] - key[j] + origin]` for every pair: a line bias, materialized for engines that are dense anyway.

The forward reads `values` at `lines.index()`. The backward is a sum along diagonals in a fixed order. For regular lines
it needs no sorting. With keys reversed, every diagonal is an anti-diagonal. Rows are written into a buffer and read
back as rows one entry shorter, which shifts each row by one: anti-diagonals become columns. Axes are summed one after
another. This stores several N x M tensors; `streaming` and `triton` do not.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor

from relpos.core.cache import cached, may_cache
from relpos.core.gather import at_least_float32, lookup, segment_sum
from relpos.core.line import Lines, Ramp

_FEW_PAIRS = 2**13
"""Maximum pairs for which a sequential sum is faster than one along diagonals, and hardly less exact."""


def sum_over_offsets(x: Float[Tensor, "*C n m"]) -> Float[Tensor, "*C d"]:
    """`out[i - j + m - 1] = sum of x[i, j]`: the sums along the n + m - 1 diagonals."""
    n, m = x.shape[-2:]
    wide = F.pad(x.flip(-1), (0, n))  # no slice is written to: with symbolic sizes torch 2.10 loses it
    skewed = wide.flatten(-2)[..., : n * (n + m - 1)]
    return torch.unflatten(skewed, -1, (n, n + m - 1)).sum(dim=-2)


class _Regular(NamedTuple):
    """The integers of regular lines.

    Attributes:
        origin, length: of `Lines`.
        lowest: the lowest entry of `values` that a pair of cells reads; above 0 in narrowed lines.
        rows, columns: the prefix tokens among queries and among keys.
        query_sizes, key_sizes: the sizes of the two grids, one number an axis.
    """

    origin: int
    length: int
    lowest: int
    rows: int
    columns: int
    query_sizes: tuple[int, ...]
    key_sizes: tuple[int, ...]

    @classmethod
    def of(cls, lines: Lines) -> Self:
        query, key = lines.layout.query, lines.layout.key
        assert query is not None
        assert key is not None
        lowest = query.start - (key.start + key.extent) + lines.origin
        return cls(lines.origin, lines.length, lowest, query.prefix, key.prefix, query.sizes, key.sizes)


def _gradient(gradient: Float[Tensor, "H N M"], query: Tensor, key: Tensor, regular: _Regular) -> Float[Tensor, "H L"]:
    """d(values) for regular lines."""
    origin, rows, columns = regular.origin, regular.rows, regular.columns
    wide = at_least_float32(gradient)
    result = wide.new_zeros(wide.shape[0], regular.length)
    cells = wide[:, rows:, columns:]
    if cells.numel():
        sums = cells.unflatten(2, regular.key_sizes).unflatten(1, regular.query_sizes)
        axes = len(regular.query_sizes)
        for axis in range(axes):
            sums = sum_over_offsets(sums.movedim((1, 1 + axes - axis), (-2, -1)))
        sums = sums.flatten(1)
        result[:, regular.lowest : regular.lowest + sums.shape[1]] = sums
    if rows and cells.shape[2]:
        result[:, query[0] - key[columns:] + origin] = wide[:, :rows, columns:].sum(dim=1)
    if columns and cells.shape[1]:
        result[:, query[rows:] - key[0] + origin] = wide[:, rows:, :columns].sum(dim=2)
    if rows and columns:
        result[:, query[:1] - key[:1] + origin] = wide[:, :rows, :columns].sum(dim=(1, 2))[:, None]
    return result.to(gradient.dtype)


class _Expand(torch.autograd.Function):
    """`values` at every pair. The sizes of both grids come as shapes of empty tensors, and all else as single integers,
    since Dynamo of torch 2.10 mixes up symbols inside containers."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        values: Tensor, query: Tensor, key: Tensor, query_shape: Tensor, key_shape: Tensor,
        origin: int, length: int, lowest: int, rows: int, columns: int,
    ) -> Tensor:  # fmt: skip
        return values[:, query[:, None] - key[None, :] + origin]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:5])
        ctx.integers = inputs[5:]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, *shapes = ctx.saved_tensors
        sizes = [x.shape[1:] for x in shapes]
        return _gradient(gradients[0], query, key, _Regular(*ctx.integers, *sizes)), *(None for _ in range(9))


class _Read(torch.autograd.Function):
    """`_Expand` outside of transforms and compiled graphs, with a third of the Python overhead."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, lines: Lines) -> Tensor:
        ctx.lines = lines
        return expand_regular(values, lines)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return contract(gradients[0], ctx.lines), None


def expand_regular(values: Shaped[Tensor, "H L"], lines: Lines) -> Shaped[Tensor, "H N M"]:
    """`values` at every pair of regular lines, without autograd.

    With `values` reversed, a pair of cells reads entry `c - query + key`: each row of keys reads consecutive entries,
    and the next query reads one entry earlier. So the rows of all queries, last first, are one view, flipped once:

        reversed          v6 v5 v4 v3 v2 v1 v0
        query 1, 0, as    v5 v4 v3                  (rows of the view overlap)
        they are read        v4 v3 v2
    """
    query, key = lines.layout.query, lines.layout.key
    assert query is not None
    assert key is not None
    if lines.query.shape[0] == 1:  # while decoding: one operation
        row = cached(lines, "row", values.device, lambda: lines.index().view(-1), lambda: 8 * lines.key.shape[0])
        return values.index_select(1, row).unsqueeze(1)
    if query.strides != key.strides:
        return values[:, lines.index()]
    if query.prefix or key.prefix:
        few = lines.query.shape[0] * lines.key.shape[0] <= _FEW_PAIRS
        return values[:, lines.index()] if few else _read_with_prefix(values, lines, query, key)
    end = 1 + lines.origin - key.start + query.start + query.extent  # the last query reads the first key before it
    turned = (
        values[:, end - query.extent - key.extent - 1 : end].flip(-1).contiguous()
    )  # `values` may be a table with heads last
    view = turned.as_strided(
        (values.shape[0], *query.sizes, *key.sizes), (turned.stride(0), *query.strides, *key.strides)
    )
    axes = len(query.sizes)
    return view.flip(tuple(range(1, 1 + axes))).reshape(values.shape[0], lines.query.shape[0], lines.key.shape[0])


def _read_with_prefix(values: Shaped[Tensor, "H L"], lines: Lines, query: Ramp, key: Ramp) -> Shaped[Tensor, "H N M"]:
    """`expand_regular` of the cells, and each prefix token's row and column."""
    rows, columns = query.prefix, key.prefix
    out = values.new_empty(values.shape[0], lines.query.shape[0], lines.key.shape[0])
    if 0 not in (cells := out[:, rows:, columns:]).shape:
        bare = replace(lines.layout, query=replace(query, prefix=0), key=replace(key, prefix=0))
        cells.copy_(
            expand_regular(values, replace(lines, query=lines.query[rows:], key=lines.key[columns:], layout=bare))
        )
    if rows:
        out[:, :rows] = values[:, lines.query[:1] - lines.key + lines.origin][:, None]
    if columns:
        out[:, rows:, :columns] = values[:, lines.query[rows:] - lines.key[:1] + lines.origin][..., None]
    return out


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
    pairs = whole.shape[1] * whole.shape[2]
    if pairs <= _FEW_PAIRS and whole.device.type == "cpu":  # sequential there, and so in a fixed order
        wide, index = at_least_float32(whole).reshape(whole.shape[0], pairs), lines.index().view(1, -1)
        sums = wide.new_zeros(whole.shape[0], lines.length).scatter_add_(1, index.expand_as(wide), wide)
        return sums.to(gradient.dtype)
    return _gradient(whole, lines.query, lines.key, _Regular.of(lines))


def expand(values: Float[Tensor, "H L"], lines: Lines) -> Float[Tensor, "*B H N M"]:
    """`values` at every pair of `lines`: `[H, N, M]`, or `[B, H, N, M]` where the lines have a batch axis."""
    if lines.layout.kind == "irregular":
        return lookup(values.T, lines.index()).movedim(-1, -3)
    if may_cache(values.device):
        if not (values.requires_grad and torch.is_grad_enabled()):
            return expand_regular(values, lines)
        read: Tensor = _Read.apply(values, lines)  # type: ignore[no-untyped-call]
        return read
    key = lines.key.clone() if lines.key is lines.query else lines.key  # torch.compile takes a tensor only once
    *integers, query_sizes, key_sizes = _Regular.of(lines)
    shapes = (values.new_empty(0, *sizes) for sizes in (query_sizes, key_sizes))
    result: Tensor = _Expand.apply(values, lines.query, key, *shapes, *integers)  # type: ignore[no-untyped-call]
    return result
