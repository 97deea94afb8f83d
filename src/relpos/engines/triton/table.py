"""The gradient of a line bias.

For few tokens, as in windows, the gradients of all pairs of a head are summed over the batch, then along the lines. For
many tokens a kernel sums along the lines, which must be regular, and another one the pairs with a prefix. Where a
table is read, pairs or entries are summed by row.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import LineBias, Lines, Rows, cached
from relpos.core.line import Ramp
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.triton import prefix_kernels, table_kernels, tiles
from relpos.engines.triton.handles import Kernel
from relpos.engines.triton.launch import Launches, parameter_of
from relpos.engines.triton.limits import MOST_AXES, cdiv, power_of_2

Common = tuple[Any, ...]
"""The arguments of every backward kernel: upstream gradient, q, k and v, sizes, bias, mask and dropout."""
ReadOrder = tuple[Int[Tensor, " I"], Int[Tensor, " L"]]
"""The numbers of the pairs that read entries, or entries that read rows, sorted by what they read, and where those of
each begin, plus the end."""


PROGRAMS = 1024
"""Programs that fill a GPU several times. Fixed, because the division of the batch decides the order of sums."""
_ENTRIES, _ACROSS = 16, 32
"""Entries of the line that a program of `sum_of_pairs` sums, and pairs of each that it reads at once."""
_OF_ROW = 1024
"""Pairs, or entries, of a row of a table that a program reads at once: many share a row. Not measured."""


class LineGradient:
    """The gradient of the line bias of calls of one structure: what it launches, decided once. Holds no tensor.

    Args:
        launches: what all calls of the structure have in common.
        line: the bias of the first.
    """

    def __init__(self, launches: Launches, line: LineBias | TableLookup) -> None:
        self.launches = launches
        heads, read_by = launches.heads, launches.n * launches.m if launches.few else line.lines.length
        self._pairs: Kernel | None = None
        if launches.few:
            self._pairs, self._share = _pairs_kernel(launches)
        entries, across = _ENTRIES, _ACROSS
        if isinstance(line, TableLookup):
            count = line.rows.rows
            self._shape, strides = (count, heads), (1, heads)
            if not line.rows.in_order:
                entries, across = 1, _OF_ROW
        else:
            count = line.lines.length
            self._shape, strides = (heads, count), (count, 1)
        constants = {"ENTRIES": entries, "ACROSS": across, "SUM": launches.constants["SUM"]}
        self._sum = Kernel(table_kernels.sum_of_pairs, (cdiv(count, entries), heads), constants)
        self._sizes = (read_by, count, heads, *strides)

    def of_call(self, line: LineBias | TableLookup, common: Common, varying: Hashable) -> Float[Tensor, "_ _"]:
        """The gradient of `values`, or of the table, in its shape. `varying`: see `Kernel`."""
        launches = self.launches
        if self._pairs is None:
            return self._of_many(line, common, varying)
        partial = pairs(launches, self._pairs.grid[2])
        self._pairs.launch(varying, partial, *common, launches.batch, self._share)
        return self.of_pairs(line, partial)

    def of_pairs(self, line: LineBias | TableLookup, partial: Float[Tensor, "parts H N M"]) -> Float[Tensor, "_ _"]:
        """The same from the gradient of every pair's score."""
        lines, rows = line.lines, line.rows if isinstance(line, TableLookup) and not line.rows.in_order else None
        key = "order of pairs" if rows is None else rows
        order = cached(
            lines, key, self.launches.device, lambda: _order_of_pairs(lines, rows), lambda: 4 * self._sizes[0]
        )
        return self._sums(line, partial, order)

    def _of_many(self, line: LineBias | TableLookup, common: Common, varying: Hashable) -> Float[Tensor, "_ _"]:
        launches, lines = self.launches, line.lines
        query, key = lines.layout.query, lines.layout.key
        assert query is not None
        assert key is not None
        result = torch.zeros(launches.heads, lines.length, dtype=launches.wide, device=launches.device)
        if min(*query.sizes, *key.sizes) > 0:  # beside prefixes alone
            _between_tokens(launches, lines, common, varying, query, key, result)
        if query.prefix or key.prefix:
            _of_prefixes(launches, lines, common, varying, result)
        if isinstance(line, TableLookup):
            rows = line.rows
            if not rows.in_order:
                order = cached(rows, "order in 32 bits", launches.device, lambda: _order(rows.index, rows.rows))
                return self._sums(line, result[None], order)
            result = result.T.contiguous()
        return result.sum_to_size(parameter_of(line).shape)

    def _sums(self, line: LineBias | TableLookup, partial: Float[Tensor, "parts H *I"], order: ReadOrder) -> Tensor:
        """From the gradients of all that reads the values, or the table, and its order."""
        result = partial.new_empty(*self._shape)
        self._sum.launch(None, result, partial, *order, len(partial), *self._sizes)
        own = parameter_of(line).shape
        return result if own == self._shape else result.sum_to_size(own)


def pairs(launches: Launches, parts: int) -> Float[Tensor, "parts H N M"]:
    """For the gradient of every pair's score, summed over parts of the batch."""
    return torch.empty(parts, launches.heads, launches.n, launches.m, dtype=launches.wide, device=launches.device)


def _pairs_kernel(launches: Launches) -> tuple[Kernel, int]:
    """The kernel of the pairs, and how many elements of the batch each of its programs takes."""
    shape, n, m = launches.shape("table"), launches.n, launches.m
    edge = min(shape["ROWS"], max(16, power_of_2(max(n, m))))
    across = cdiv(n, edge) * cdiv(m, edge)
    share = cdiv(launches.batch, cdiv(PROGRAMS, across * launches.heads))
    tile = {"EDGE": edge, "num_warps": shape["num_warps"], "num_stages": shape["num_stages"]}
    grid = (across, launches.heads, cdiv(launches.batch, share))
    return Kernel(table_kernels.backward_pairs, grid, {**launches.constants, **tile}), share


def _order(read: Int[Tensor, " I"], count: int) -> ReadOrder:
    order = torch.argsort(read, stable=True)
    numbers = torch.arange(count + 1, device=read.device, dtype=read.dtype)
    return order.to(torch.int32), torch.searchsorted(read[order], numbers).to(torch.int32)


def _order_of_pairs(lines: Lines, rows: Rows | None) -> ReadOrder:
    """Of all pairs, by the entry of the line that they read, or by the row of a table."""
    index = lines.index()
    entries = (index if index.dim() == 2 else index[0]).flatten()
    return _order(entries, lines.length) if rows is None else _order(rows.index[entries], rows.rows)


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
