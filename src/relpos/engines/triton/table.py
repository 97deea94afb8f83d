"""The gradient of a line bias.

For few tokens, as in windows, the gradients of all pairs of a head are summed over the batch, then along the lines. For
many tokens a kernel sums along the lines, which must be regular; pairs with a prefix are computed in PyTorch.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineBias, Lines, kept
from relpos.core.gather import Rows, sum_by_rows
from relpos.core.line import Ramp
from relpos.core.random import keep
from relpos.engines.triton import kernels, tiles
from relpos.engines.triton.launch import Launch
from relpos.engines.triton.limits import MOST_AXES, are_few, cdiv, power_of_2


def gradient(launch: Launch, rows: tuple[Any, ...]) -> Float[Tensor, "H L"]:
    """The gradient of `values`, in their shape; `rows` are the arguments that every backward kernel takes."""
    assert launch.line is not None
    values, lines = launch.line.values, launch.line.lines
    if are_few(lines):
        return _of_pairs(launch, lines, rows).sum_to_size(values.shape)
    query, key = lines.layout.query, lines.layout.key
    assert query is not None
    assert key is not None
    result = torch.zeros(launch.heads, lines.length, dtype=launch.wide, device=launch.call.q.device)
    _between_tokens(launch, lines, rows, query, key, result)
    prefixes = query.prefix, key.prefix
    for first, second in (
        (slice(0, prefixes[0]), slice(0, launch.m)),
        (slice(prefixes[0], launch.n), slice(0, prefixes[1])),
    ):
        if first.stop > first.start and second.stop > second.start:
            _of_prefix(launch, launch.line, rows, first, second, prefixes, result)
    return result.sum_to_size(values.shape)


_PROGRAMS = 1024
"""Programs that fill a GPU several times. Fixed, because the division of the batch decides the order of sums."""


def _of_pairs(launch: Launch, lines: Lines, rows: tuple[Any, ...]) -> Float[Tensor, "H L"]:
    """The gradient from that of every pair's score, summed over the batch."""
    shape, n, m = launch.shape("table"), launch.n, launch.m
    side = min(shape["ROWS"], max(16, power_of_2(max(n, m))))
    across = cdiv(n, side) * cdiv(m, side)
    share = cdiv(launch.batch, cdiv(_PROGRAMS, across * launch.heads))
    parts = cdiv(launch.batch, share)
    partial = torch.empty(parts, launch.heads, n, m, dtype=launch.wide, device=launch.call.q.device)
    kernels.backward_pairs[across, launch.heads, parts](
        partial, *rows, launch.dropout, launch.batch, share, **launch.constants, SIDE=side,
        num_warps=shape["num_warps"], num_stages=shape["num_stages"],
    )  # fmt: skip
    order = kept.keep(
        lines, "rows of pairs", partial.device, lambda: Rows(_pairs(lines), lines.length), lambda: _ROW * n * m
    )
    return sum_by_rows(partial.sum(dim=0).flatten(1).T, order).T


_ROW = 24
"""Bytes that an entry of `Rows` takes: its row, and its place in the order."""


def _pairs(lines: Lines) -> Int[Tensor, " I"]:
    index = lines.index()
    return (index if index.dim() == 2 else index[0]).flatten()


def _cells(prefix: int, sizes: tuple[int, ...], side: int) -> tiles.Cells:
    first, second = (*(1,) * (MOST_AXES - len(sizes)), *sizes[:-1])
    return tiles.Cells(prefix, sizes[-1], first, second, cdiv(sizes[-1], side))


def _between_tokens(
    launch: Launch, lines: Lines, rows: tuple[Any, ...], query: Ramp, key: Ramp, result: Tensor
) -> None:
    """Write the gradient from pairs without a prefix."""
    shape = launch.shape("table")
    axes = list(zip(query.sizes, key.sizes, query.strides, strict=True))
    axes = [axis for axis in axes if axis[:2] != (1, 1)] or axes[-1:]  # a grid with one column is a sequence
    query_sizes, key_sizes, inner_strides = zip(*axes, strict=True)
    wider = max(query_sizes[-1], key_sizes[-1])
    side = min(shape["ROWS"], max(16, power_of_2(wider)))
    queries, keys = _cells(query.prefix, query_sizes, side), _cells(key.prefix, key_sizes, side)
    spans = [a + b - 1 for a, b in zip(queries[2:], keys[2:], strict=True)]
    even = queries.second == keys.second and (queries.inner == keys.inner or spans[:2] == [1, 1])
    tests = launch.tests(queries.inner % side == 0 and keys.inner % side == 0)
    partial = result.new_empty(launch.heads, math.prod(spans[:2]), spans[2], 2, side)
    kernels.backward_table[math.prod(spans), launch.heads](
        partial, *rows, launch.dropout, launch.batch, queries, keys, **launch.constants, SIDE=side, EVEN=even,
        **tests, num_warps=shape["num_warps"], num_stages=shape["num_stages"],
    )  # fmt: skip
    # neighbouring cells of the last axis overlap by half: these are its offsets, from -SIDE times the key cells on
    whole = result.new_zeros(launch.heads, partial.shape[1], spans[2] + 1, side)
    whole[:, :, :-1] += partial[:, :, :, 0]
    whole[:, :, 1:] += partial[:, :, :, 1]
    lowest, count = -(keys.inner - 1), queries.inner + keys.inner - 1
    sums = whole.flatten(2)[:, :, side * keys.third + lowest :][:, :, :count].unflatten(1, spans[:2])
    strides = (*(0,) * (MOST_AXES - len(inner_strides)), *inner_strides)
    before = sum((size - 1) * stride for size, stride in zip(keys[2:4], strides[:2], strict=True))
    start = query.start - key.start + lines.origin - before + lowest * strides[2]
    view = result.as_strided(sums.shape, (lines.length, *strides), result.storage_offset() + start)
    view.copy_(sums)


def _of_prefix(
    launch: Launch, line: LineBias, rows: tuple[Any, ...], queries: slice, keys: slice, prefixes: tuple[int, int],
    result: Tensor,
) -> None:  # fmt: skip
    """Write the gradient from pairs in which the queries or the keys are a prefix: O(N) of them, in PyTorch."""
    call, up = launch.call, rows[0]
    groups = launch.heads // launch.own_heads
    q, upstream = call.q.detach()[:, :, queries].to(launch.wide), up.at[:, :, queries].to(launch.wide)
    k, v = (x.detach()[:, :, keys].to(launch.wide).repeat_interleave(groups, dim=1) for x in (call.k, call.v))
    entries = line.lines.query[queries, None] - line.lines.key[None, keys] + line.lines.origin
    score = (q @ k.mT) * call.scale + line.values.detach().to(launch.wide)[:, entries]
    numbers = torch.arange(queries.start, queries.stop, device=q.device)
    if call.mask is not None:
        score = score.masked_fill(~call.mask.pairs(numbers, keys), -torch.inf)
    weight = torch.exp(score - up.shift[:, :, queries, None] / launch.unit)
    d = upstream @ v.mT
    if call.seed is not None:
        columns = torch.arange(keys.start, keys.stop, device=q.device)
        kept = keep(call.seed, launch.batch, launch.heads, numbers, columns, call.dropout)
        d = d * kept / (1 - call.dropout)
    d = (weight * (d - up.delta[:, :, queries, None])).sum(dim=0)
    if queries.start == 0 and prefixes[0]:  # these queries have one coordinate
        split = prefixes[1]
        result[:, entries[0, split:]] = d[:, :, split:].sum(dim=1)
        if split:
            result[:, entries[:1, 0]] = d[:, :, :split].sum(dim=(1, 2))[:, None]
    else:  # these keys have one coordinate
        result[:, entries[:, 0]] = d.sum(dim=2)
