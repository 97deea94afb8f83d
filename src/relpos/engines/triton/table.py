"""The gradient of a line bias.

For few tokens, as in windows, the gradients of all pairs of a head are summed over the batch, then along the lines. For
many tokens a kernel sums along the lines, which must be regular, and another one the pairs with a prefix.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineBias, Lines, cached
from relpos.core.line import Ramp
from relpos.engines.triton import prefix_kernels, table_kernels, tiles
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches
from relpos.engines.triton.limits import MOST_AXES, cdiv, power_of_2

Common = tuple[Any, ...]
"""The arguments of every backward kernel: upstream gradient, q, k and v, sizes, bias, mask and dropout."""


def gradient(launches: Launches, line: LineBias, rows: Common, varying: Hashable) -> Float[Tensor, "H L"]:
    """The gradient of `values`, in their shape. `varying`: see `Kernel`."""
    values, lines = line.values, line.lines
    if launches.few:
        kernel, share = launches.once("pairs", lambda: _pairs_kernel(launches))
        partial = pairs(launches, kernel.grid[2])
        kernel.launch(varying, partial, *rows, launches.batch, share)
        return of_pairs(launches, line, partial)
    query, key = lines.layout.query, lines.layout.key
    assert query is not None
    assert key is not None
    result = torch.zeros(launches.heads, lines.length, dtype=launches.wide, device=launches.device)
    if min(*query.sizes, *key.sizes) > 0:  # beside prefixes alone
        _between_tokens(launches, lines, rows, varying, query, key, result)
    if query.prefix or key.prefix:
        _of_prefixes(launches, lines, rows, varying, result)
    return result.sum_to_size(values.shape)


PROGRAMS = 1024
"""Programs that fill a GPU several times. Fixed, because the division of the batch decides the order of sums."""
_ENTRIES, _ACROSS = 16, 32
"""Entries of the line that a program of `sum_of_pairs` sums, and pairs of each that it reads at once."""


def pairs(launches: Launches, parts: int) -> Float[Tensor, "parts H N M"]:
    """For the gradient of every pair's score, summed over parts of the batch."""
    return torch.empty(parts, launches.heads, launches.n, launches.m, dtype=launches.wide, device=launches.device)


def of_pairs(launches: Launches, line: LineBias, partial: Float[Tensor, "parts H N M"]) -> Float[Tensor, "H L"]:
    """The gradient of `values`, in their shape, from that of every pair's score."""
    values, lines, n, m = line.values, line.lines, launches.n, launches.m
    order, begins = cached(lines, "order of pairs", launches.device, lambda: _order(lines), lambda: 4 * n * m)
    result = partial.new_empty(launches.heads, lines.length)
    launches.once("sum", lambda: _sum_kernel(launches, lines.length)).launch(
        None, result, partial, order, begins, len(partial), n * m, lines.length, launches.heads
    )
    return result if values.shape[0] == launches.heads else result.sum_to_size(values.shape)


def _pairs_kernel(launches: Launches) -> tuple[Kernel, int]:
    """The kernel of the pairs, and how many elements of the batch each of its programs takes."""
    shape, n, m = launches.shape("table"), launches.n, launches.m
    edge = min(shape["ROWS"], max(16, power_of_2(max(n, m))))
    across = cdiv(n, edge) * cdiv(m, edge)
    share = cdiv(launches.batch, cdiv(PROGRAMS, across * launches.heads))
    tile = {"EDGE": edge, "num_warps": shape["num_warps"], "num_stages": shape["num_stages"]}
    grid = (across, launches.heads, cdiv(launches.batch, share))
    return Kernel(table_kernels.backward_pairs, grid, {**launches.constants, **tile}), share


def _sum_kernel(launches: Launches, length: int) -> Kernel:
    constants = {"ENTRIES": _ENTRIES, "ACROSS": _ACROSS, "SUM": launches.constants["SUM"]}
    return Kernel(table_kernels.sum_of_pairs, (cdiv(length, _ENTRIES), launches.heads), constants)


def _order(lines: Lines) -> tuple[Int[Tensor, " I"], Int[Tensor, " L"]]:
    """The numbers of all pairs, sorted by the entry that they read, and where each entry's begin, plus the end."""
    index = lines.index()
    entries = (index if index.dim() == 2 else index[0]).flatten()
    order = torch.argsort(entries, stable=True)
    numbers = torch.arange(lines.length + 1, device=entries.device, dtype=entries.dtype)
    return order.to(torch.int32), torch.searchsorted(entries[order], numbers).to(torch.int32)


def _cells(prefix: int, sizes: tuple[int, ...], edge: int) -> tiles.Cells:
    first, second = (*(1,) * (MOST_AXES - len(sizes)), *sizes[:-1])
    return tiles.Cells(prefix, sizes[-1], first, second, cdiv(sizes[-1], edge))


def _between_tokens(
    launches: Launches, lines: Lines, rows: Common, varying: Hashable, query: Ramp, key: Ramp, result: Tensor
) -> None:
    """Write the gradient from pairs without a prefix."""
    axes = list(zip(query.sizes, key.sizes, query.strides, strict=True))
    axes = [axis for axis in axes if axis[:2] != (1, 1)] or axes[-1:]  # a grid with one column is a sequence
    query_sizes, key_sizes, inner_strides = zip(*axes, strict=True)
    edge = min(launches.shape("table")["ROWS"], max(16, power_of_2(max(query_sizes[-1], key_sizes[-1]))))
    queries, keys = _cells(query.prefix, query_sizes, edge), _cells(key.prefix, key_sizes, edge)
    spans = [a + b - 1 for a, b in zip(queries[2:], keys[2:], strict=True)]
    partial = result.new_empty(launches.heads, math.prod(spans[:2]), spans[2], 2, edge)
    launches.once("table", lambda: _table_kernel(launches, queries, keys, spans, edge)).launch(
        varying, partial, *rows, launches.batch, queries, keys
    )
    # neighbouring cells of the last axis overlap by half: these are its offsets, from -EDGE times the key cells on
    whole = result.new_zeros(launches.heads, partial.shape[1], spans[2] + 1, edge)
    whole[:, :, :-1] += partial[:, :, :, 0]
    whole[:, :, 1:] += partial[:, :, :, 1]
    lowest, count = -(keys.inner - 1), queries.inner + keys.inner - 1
    sums = whole.flatten(2)[:, :, edge * keys.third + lowest :][:, :, :count].unflatten(1, spans[:2])
    strides = (*(0,) * (MOST_AXES - len(inner_strides)), *inner_strides)
    before = sum((size - 1) * stride for size, stride in zip(keys[2:4], strides[:2], strict=True))
    start = query.start - key.start + lines.origin - before + lowest * strides[2]
    view = result.as_strided(sums.shape, (lines.length, *strides), result.storage_offset() + start)
    view.copy_(sums)


def _table_kernel(launches: Launches, queries: tiles.Cells, keys: tiles.Cells, spans: list[int], edge: int) -> Kernel:
    shape = launches.shape("table")
    even = queries.second == keys.second and (queries.inner == keys.inner or spans[:2] == [1, 1])
    tests = launches.tests(queries.inner % edge == 0 and keys.inner % edge == 0)
    tile = {"EDGE": edge, "EVEN": even, "num_warps": shape["num_warps"], "num_stages": shape["num_stages"]}
    grid = (math.prod(spans), launches.heads)
    return Kernel(table_kernels.backward_table, grid, {**launches.constants, **tile, **tests})


def _of_prefixes(launches: Launches, lines: Lines, rows: Common, varying: Hashable, result: Tensor) -> None:
    """Write the gradient from pairs in which the queries or the keys are a prefix: O(N) of them."""
    query, key = lines.layout.query, lines.layout.key
    assert query is not None
    assert key is not None
    kernel, share = launches.once("prefix", lambda: _prefix_kernel(launches, query.prefix, key.prefix))
    parts, n, m = kernel.grid[2], launches.n, launches.m
    partial = torch.empty((parts, launches.heads, m + n), dtype=launches.wide, device=launches.device)
    kernel.launch(varying, partial, *rows, launches.batch, share, query.prefix, key.prefix)
    of_keys, of_queries = (x.sum(dim=0) if parts > 1 else x[0] for x in (partial[:, :, :m], partial[:, :, m:]))
    tokens, origin = lines.layout.tokens, lines.origin
    if query.prefix:  # one coordinate of all its queries
        result[:, tokens + origin - lines.key[key.prefix :]] = of_keys[:, key.prefix :]
        if key.prefix:
            result[:, 2 * tokens + origin + 1] = of_keys[:, : key.prefix].sum(dim=1)
    if key.prefix:
        result[:, lines.query[query.prefix :] + (tokens + origin + 1)] = of_queries[:, query.prefix :]


def _prefix_kernel(launches: Launches, query_prefix: int, key_prefix: int) -> tuple[Kernel, int]:
    """The kernel of the prefixes' pairs, and how many elements of the batch each of its programs takes."""
    shape, n, m = launches.shape("table"), launches.n, launches.m
    edge = shape["ROWS"]
    across = (cdiv(m, edge) if query_prefix else 0) + (cdiv(n, edge) if key_prefix else 0)
    share = cdiv(launches.batch, cdiv(PROGRAMS, across * launches.heads))
    tile = {"EDGE": edge, "num_warps": shape["num_warps"], "num_stages": shape["num_stages"]}
    grid = (across, launches.heads, cdiv(launches.batch, share))
    return Kernel(prefix_kernels.backward_prefix, grid, {**launches.constants, **tile}), share
