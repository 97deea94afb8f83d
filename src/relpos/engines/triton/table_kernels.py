"""The kernels of a line bias: its table as others read it; its gradient, of few tokens pair by pair, of many by
differences of cells.

Sums are in dtype SUM, without atomics and in a fixed order, as in `kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import dot, dot_onto, exp
from relpos.engines.triton.dropout import kept_pairs
from relpos.engines.triton.tiles import (
    bias_of,
    rows,
    scaled,
    sums_of_rows,
    tested,
    with_low_rank,
)


@triton.jit
def padded(
    out, values, values_h, values_l, length, index,
    PAD: tl.constexpr, ENTRIES: tl.constexpr, SCALE: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """ENTRIES numbers of one head's row: its values divided by the scale, between PAD zeros on both sides.

    `index` has the row of a table that each value is read from, or is None.
    """
    at, head = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES), tl.program_id(1).to(tl.int64)
    entry = at - PAD
    inside = (entry >= 0) & (entry < length)
    if index is not None:
        entry = tl.load(index + entry, mask=inside, other=0)
    read = tl.load(values + head * values_h + entry.to(tl.int64) * values_l, mask=inside, other=0.0).to(SUM)
    scale = tl.full([ENTRIES], SCALE, SUM)
    row = length + 2 * PAD
    tl.store(out + head * row + at, read / scale if read.dtype == tl.float64 else tl.div_rn(read, scale), mask=at < row)


@triton.jit
def d_scores(
    tile_bias, up, qkv, size, bias, allowed, dropout, batch, head, query_at, query_stop, key_at, key_stop, free,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, EDGE: tl.constexpr,
    FULL: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias of one tile: EDGE queries and keys from `query_at` and `key_at` on, up to their stops.

    `tile_bias` is the line bias of the tile, which all tiles of a program share. `batch` is inside of the batch even
    where a compiler reads ahead of the loop: low-rank biases are read without a mask.
    """
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    shared = head64 // size.groups
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, query_at, query_stop, qkv.q_n, EDGE, D, D_PAD, FULL)
    key = rows(qkv.k + batch64 * qkv.k_b + shared * qkv.k_h, key_at, key_stop, qkv.k_n, EDGE, D, D_PAD, FULL)
    value = rows(qkv.v + batch64 * qkv.v_b + shared * qkv.v_h, key_at, key_stop, qkv.v_n, EDGE, V, V_PAD, FULL)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, query_at, query_stop, up.at_n, EDGE, V, V_PAD, FULL)
    shift, row_delta = sums_of_rows(up, batch64 * size.heads + head64, query_at, EDGE)
    qi, kj = query_at + tl.arange(0, EDGE), key_at + tl.arange(0, EDGE)
    tile_bias = with_low_rank(tile_bias, qi[:, None], kj[None, :], batch, head, bias)
    raw = dot_onto(query, tl.trans(key), scaled(tile_bias, qi[:, None], batch, head, size, bias), PRECISION)
    if not free:
        raw = tested(raw, qi[:, None], kj[None, :], query_stop, key_stop, batch, size, allowed, SCALE)
    weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
    d_weight = dot(upstream, tl.trans(value), PRECISION)
    if dropout.seed is not None:
        kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
        d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
    return scaled(weight * (d_weight - row_delta[:, None]), qi[:, None], batch, head, size, bias)


@triton.jit
def backward_pairs(
    partial, up, qkv, size, bias, allowed, dropout, batches, share,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of EDGE queries and keys of one head, summed over `share` elements of the batch."""
    across = tl.cdiv(size.m, EDGE)
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    query_at, key_at = tile // across * EDGE, tile % across * EDGE
    qi, kj = query_at + tl.arange(0, EDGE)[:, None], key_at + tl.arange(0, EDGE)[None, :]
    tile_bias = bias_of(qi, kj, 0, head, size, bias)  # the batch shares the lines
    summed = tl.zeros([EDGE, EDGE], SUM)
    first = part * share
    for step in range(tl.minimum(share, batches - first)):
        summed += d_scores(
            tile_bias, up, qkv, size, bias, allowed, dropout, tl.minimum(first + step, batches - 1), head, query_at,
            size.n, key_at, size.m, False, D, V, D_PAD, V_PAD, EDGE, False, PRECISION, SCALE, UNIT,
        )  # fmt: skip
    first = partial + (part * size.heads + head).to(tl.int64) * size.n * size.m
    tl.store(first + qi * size.m + kj, summed, mask=(qi < size.n) & (kj < size.m))


@triton.jit
def sum_of_pairs(
    out, partial, order, begins, parts, pairs, length, heads, out_h, out_l,
    ENTRIES: tl.constexpr, ACROSS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """For ENTRIES entries of the line of one head the sum over their pairs, in order, and over the parts of the batch.

    `order` has the numbers of all pairs, those of one entry from its `begins` to the next entry's. The same for
    the rows of a table, over the pairs, or the entries, that read them.
    """
    entry, head = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES), tl.program_id(1)
    begin = tl.load(begins + entry, mask=entry < length, other=0)
    end = tl.load(begins + entry + 1, mask=entry < length, other=0)
    summed = tl.zeros([ENTRIES, ACROSS], SUM)
    for step in range(0, tl.max(end - begin, axis=0), ACROSS):
        at = begin[:, None] + step + tl.arange(0, ACROSS)[None, :]
        inside = at < end[:, None]
        pair = tl.load(order + at, mask=inside, other=0)
        for part in range(parts):
            where = partial + (part * heads + head).to(tl.int64) * pairs
            summed += tl.load(where + pair, mask=inside, other=0.0)
    out += head.to(tl.int64) * out_h
    tl.store(out + entry.to(tl.int64) * out_l, tl.sum(summed, axis=1), mask=entry < length)


@triton.jit
def _cells_at(cell, ahead, queries, keys, EDGE: tl.constexpr):
    """The start and stop of a cell of queries, and of the cell of keys that is `ahead` before it on each axis."""
    query_row = queries.prefix + (cell[0] * queries.second + cell[1]) * queries.inner
    key_row = keys.prefix + ((cell[0] - ahead[0]) * keys.second + cell[1] - ahead[1]) * keys.inner
    query_at, key_at = query_row + cell[2] * EDGE, key_row + (cell[2] - ahead[2]) * EDGE
    return query_at, query_row + queries.inner, key_at, key_row + keys.inner


@triton.jit
def _following(batch, cell, first, stop):
    """The next cell, or the first one of the next element of the batch. Counted up, since divisions are expensive."""
    third = cell[2] + 1
    second = cell[1] + (third == stop[2])
    third = tl.where(third == stop[2], first[2], third)
    outer = cell[0] + (second == stop[1])
    second = tl.where(second == stop[1], first[1], second)
    batch += outer == stop[0]
    return batch, (tl.where(outer == stop[0], first[0], outer), second, third)


@triton.jit
def backward_table(
    partial, up, qkv, size, bias, allowed, dropout, batches, queries, keys,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    EDGE: tl.constexpr, EVEN: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of a line bias between tokens, for one head and one difference of cells.

    Queries and keys after their prefixes are divided into cells of at most EDGE tokens (a row of a grid, a part of a
    sequence), arranged along three axes. All pairs of cells with one difference along these axes read the same entries
    of the table, once. Their tiles are summed, over cells and batch, and the diagonals of the sum are the gradient.
    EVEN: the differences of token indices are equal too, so that a mask by index may forbid all these pairs, or none.
    FULL: all cells have EDGE tokens.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    span_2, span_3 = queries.second + keys.second - 1, queries.third + keys.third - 1
    ahead_1 = number // (span_2 * span_3) - (keys.first - 1)
    ahead_2 = number // span_3 % span_2 - (keys.second - 1)
    ahead_3 = number % span_3 - (keys.third - 1)
    ahead = ahead_1, ahead_2, ahead_3
    first = tl.maximum(ahead_1, 0), tl.maximum(ahead_2, 0), tl.maximum(ahead_3, 0)
    stop_1 = tl.minimum(queries.first, keys.first + ahead_1)
    stop_2 = tl.minimum(queries.second, keys.second + ahead_2)
    stop_3 = tl.minimum(queries.third, keys.third + ahead_3)
    stop = stop_1, stop_2, stop_3
    steps = batches * (stop_1 - first[0]) * (stop_2 - first[1]) * (stop_3 - first[2])
    if EVEN:
        apart = (ahead_1 * keys.second + ahead_2) * keys.inner + ahead_3 * EDGE + queries.prefix - keys.prefix
        if allowed.left is not None:
            steps = tl.where(apart - EDGE < allowed.left, steps, 0)
        if allowed.right is not None:
            steps = tl.where(apart + EDGE > -allowed.right, steps, 0)
    free = not TESTED
    if FULL and EVEN and allowed.low is None and allowed.high is None and allowed.query_segments is None:
        free = allowed.also_low is None and allowed.also_high is None
        if allowed.left is not None:
            free = free & (apart + EDGE <= allowed.left + 1)
        if allowed.right is not None:
            free = free & (apart - EDGE >= -allowed.right - 1)
    batch, cell = number * 0, first
    tokens = tl.arange(0, EDGE)
    query_at, _, key_at, _ = _cells_at(cell, ahead, queries, keys, EDGE)
    tile_bias = bias_of(query_at + tokens[:, None], key_at + tokens[None, :], batch, head, size, bias)
    summed = tl.zeros([EDGE, EDGE], SUM)
    for _ in range(steps):
        query_at, query_stop, key_at, key_stop = _cells_at(cell, ahead, queries, keys, EDGE)
        summed += d_scores(
            tile_bias, up, qkv, size, bias, allowed, dropout, tl.minimum(batch, batches - 1), head, query_at,
            query_stop, key_at, key_stop, free, D, V, D_PAD, V_PAD, EDGE, FULL, PRECISION, SCALE, UNIT,
        )  # fmt: skip
        batch, cell = _following(batch, cell, first, stop)
    # diagonals become columns: column x of row r holds key r + EDGE - x, at offset x - EDGE
    at = tokens[:, None] + EDGE - tl.arange(0, 2 * EDGE)[None, :]
    skewed = tl.gather(summed, tl.minimum(tl.maximum(at, 0), EDGE - 1), axis=1)
    columns = tl.sum(tl.where((at >= 0) & (at < EDGE), skewed, 0.0), axis=0)
    first = (head * tl.num_programs(0) + number).to(tl.int64) * 2 * EDGE
    tl.store(partial + first + tl.arange(0, 2 * EDGE), columns)
