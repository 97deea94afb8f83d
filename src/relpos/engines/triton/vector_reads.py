"""How the kernels read products with vectors on offsets, pair by pair, and write numbers of pairs.

Products are `[heads, tokens, columns]`: each token's state times the vector of each column. A pair reads the row of its
query or of its key, in the column of its offset. Pairs in one row of a tile read neighbouring columns, in any order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import dot, dot_onto
from relpos.engines.triton.reads import read

AHEAD = tl.constexpr(16)


class Products(NamedTuple):
    """Products with vectors on offsets, `[heads, tokens, width]`: of queries or of keys, divided by the scale, and of
    the upstream gradient with value vectors. Lines as in `Bias`, but `origin` is AHEAD more. Each entry reads the
    column in `index`, or its own; columns from `count` on are zeros.

    No number is 1: within a loop Triton 3.6 forgets a 1 in a tuple of a tuple that has one too, as a single query has.
    """

    of_queries: Any
    of_keys: Any
    of_upstream: Any
    width: Any
    count: Any
    index: Any
    query: Any
    query_b: Any
    key: Any
    key_b: Any
    origin: Any


class VectorChunk(NamedTuple):
    """What one launch computes, if there are vectors: `rows` queries of some heads, counted through the batch, with
    their products. Else it computes all, and `first_head` is None."""

    first_head: Any
    first_row: Any
    rows: Any
    one: Any
    two: Any
    three: Any


@triton.jit
def _column(qi, kj, batch, size, products):
    """The column that each pair reads."""
    row, column = tl.minimum(qi, size.n - 1), tl.minimum(kj, size.m - 1)
    if products.query is not None:
        row = tl.load(products.query + batch * products.query_b + row)
        column = tl.load(products.key + batch * products.key_b + column)
    entry = products.origin - AHEAD + (row - column)
    if products.index is not None:
        return read(products.index + entry)
    else:
        return tl.where((entry >= 0) & (entry < products.count), entry, products.count)


@triton.jit
def _row_of_query(qi, batch, head, size, chunk, products):
    """Where the products of each query begin."""
    line = (batch * size.heads + head - chunk.first_head).to(tl.int64)
    return (line * chunk.rows + tl.minimum(qi, size.n - 1) - chunk.first_row) * products.width


@triton.jit
def _row_of_key(kj, batch, head, size, chunk, products):
    line = (batch * size.heads + head - chunk.first_head).to(tl.int64)
    return (line * size.m + tl.minimum(kj, size.m - 1)) * products.width


@triton.jit
def _onto_scores(start, qi, kj, batch, head, size, chunk, products):
    """`start` plus what each pair reads of one set of products."""
    if products.of_queries is not None or products.of_keys is not None:
        column = _column(qi, kj, batch, size, products)
        if products.of_queries is not None:
            start += read(products.of_queries + _row_of_query(qi, batch, head, size, chunk, products) + column)
        if products.of_keys is not None:
            start += read(products.of_keys + _row_of_key(kj, batch, head, size, chunk, products) + column)
    return start


@triton.jit
def onto_scores(start, qi, kj, batch, head, size, chunk):
    """`start` plus what each pair reads of products of queries and of keys."""
    start = _onto_scores(start, qi, kj, batch, head, size, chunk, chunk.one)
    start = _onto_scores(start, qi, kj, batch, head, size, chunk, chunk.two)
    return _onto_scores(start, qi, kj, batch, head, size, chunk, chunk.three)


@triton.jit
def _onto_weights(start, qi, kj, batch, head, size, chunk, products):
    if products.of_upstream is not None:
        column = _column(qi, kj, batch, size, products)
        start += read(products.of_upstream + _row_of_query(qi, batch, head, size, chunk, products) + column)
    return start


@triton.jit
def onto_weights(start, qi, kj, batch, head, size, chunk):
    """`start`, the gradient of some weights, plus what value vectors add to it."""
    start = _onto_weights(start, qi, kj, batch, head, size, chunk, chunk.one)
    start = _onto_weights(start, qi, kj, batch, head, size, chunk, chunk.two)
    return _onto_weights(start, qi, kj, batch, head, size, chunk, chunk.three)


@triton.jit
def d_weights(a, b, qi, kj, batch, head, size, chunk, PRECISION: tl.constexpr):
    """a @ b, the gradient of some weights, plus what value vectors add to it."""
    if chunk.first_head is None:
        return dot(a, b, PRECISION)
    else:
        start = tl.zeros([a.shape[0], b.shape[1]], tl.float64 if a.dtype == tl.float64 else tl.float32)
        return dot_onto(a, b, onto_weights(start, qi, kj, batch, head, size, chunk), PRECISION)


@triton.jit
def write_pairs(pairs, x, line, own, other, first, count, other_first, other_count):
    """Write a tile of `[heads, count, other_count]` numbers of pairs; their tokens begin at `first`."""
    row, column = own - first, other - other_first
    at = (line * count + row) * other_count + column
    tl.store(pairs + at, x, mask=(row < count) & (column < other_count))
