"""The kernels of vectors on offsets, beside attention's: sums of a token's pairs by the column that they read.

Sums are in dtype SUM, without atomics and in a fixed order, as in `kernels`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import exp
from relpos.engines.triton.dropout import kept_pairs
from relpos.engines.triton.tiles import (
    NEGATIVE,
    bias_at,
    free_span,
    of_program,
    product,
    rows,
    span,
    tested,
)
from relpos.engines.triton.vector_reads import write_pairs


class Others(NamedTuple):
    """The coordinates of the tokens that pairs are summed for, of the others in ascending order, with strides of the
    batch, and the numbers of these others. None: consecutive integers from 0 on."""

    own: Any
    own_b: Any
    other: Any
    other_b: Any
    order: Any
    origin: Any


class Runs(NamedTuple):
    """The entries of a line, sorted by the column that they read. For each the length of its run from there on (entries
    one after another, of one column); for each column where its entries begin, and how many runs there are. None: each
    entry reads its own column."""

    order: Any
    ahead: Any
    begins: Any
    counts: Any


@triton.jit
def weights(
    pairs, lse, qkv, size, bias, allowed, spans, dropout, chunk,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, ALIKE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """The weights of ROWS queries of one head on the keys that they may see, after dropout, written pair by pair."""
    start, number = of_program(size.n, ROWS, chunk, QUERIES, allowed.right is not None)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, start, size.n, qkv.q_n, ROWS, D, D_PAD)
    head_k = qkv.k + batch64 * qkv.k_b + head64 // size.groups * qkv.k_h
    shift = tl.load(lse + batch_head * size.n + qi, mask=qi < size.n, other=0.0)
    shift = tl.where(shift == NEGATIVE, 0.0, shift * UNIT)
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.n, size.m, batch, spans, COARSE, QUERIES)
    first = tl.maximum(first, 0) // COLUMNS * COLUMNS
    low, high = free_span(start, allowed.left, allowed.right, size.m, allowed, ROWS, COLUMNS, KEYS)
    at = bias_at(start, first, head, bias, ALIKE, QUERIES, KEYS)
    line = (number - chunk.first_head).to(tl.int64)
    for begin in range(first, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, begin, size.m, qkv.k_n, COLUMNS, D, D_PAD, FULL)
        raw = product(
            query, tl.trans(key), qi[:, None], kj[None, :], at, 1, batch, head, size, bias, chunk, ALIKE, QUERIES, KEYS,
            PRECISION,
        )  # fmt: skip
        at -= COLUMNS
        if TESTED:
            if (begin < low) | (begin >= high):
                raw = tested(raw, qi[:, None], kj[None, :], size.n, size.m, batch, size, allowed, SCALE)
        weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            weight = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
        write_pairs(pairs, weight, line, qi[:, None], kj[None, :], chunk.first_row, chunk.rows, 0, size.m)


@triton.jit
def _first_from(coordinates, count, steps, x):
    """The first index of ascending coordinates that are at least x; `count` if none is. By halves, in `steps` steps."""
    low = x * 0
    high = low + count
    for _ in range(steps):
        middle = (low + high) // 2
        left = low < high
        below = tl.load(coordinates + middle, mask=left, other=0) < x
        low, high = tl.where(left & below, middle + 1, low), tl.where(left & ~below, middle, high)
    return low


@triton.jit
def sum_by_column(
    out, pairs, others, runs, count, width, tokens, other_count, steps, first_head, heads,
    SIGN: tl.constexpr, OWN: tl.constexpr, COLUMNS: tl.constexpr, ACROSS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """For OWN tokens of one head, and COLUMNS columns: the sum over the token's pairs that read the column, in order.

    `pairs` is `[heads, tokens, other_count]`; SIGN is 1 if queries are its rows, and -1 if keys are. The entries of the
    line that read a column are some runs of entries one after another. For one token a run is a range of coordinates,
    and a range of the others where these are in ascending order.
    """
    across = tl.cdiv(tokens, OWN)
    number, within = tl.program_id(0) // (across * tl.cdiv(width, COLUMNS)), tl.program_id(0)
    token = within % across * OWN + tl.arange(0, OWN)
    column = within // across % tl.cdiv(width, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    batch = (first_head + number) // heads
    place = token
    if others.own is not None:
        place = tl.load(others.own + batch * others.own_b + tl.minimum(token, tokens - 1))
    at, end, most = column, column + 1, 1
    if runs.order is not None:
        at = tl.load(runs.begins + column, mask=column < count, other=0)
        end = tl.load(runs.begins + column + 1, mask=column < count, other=0)
        most = tl.max(tl.load(runs.counts + column, mask=column < count, other=0), axis=0)
    summed = tl.zeros([OWN, COLUMNS, ACROSS], SUM)
    row = pairs + (number.to(tl.int64) * tokens + token[:, None, None]) * other_count
    for _ in range(most):
        left = (at < end) & (column < count)
        entry, length = at, tl.where(left, 1, 0)
        if runs.order is not None:
            entry = tl.load(runs.order + at, mask=left, other=0)
            length = tl.load(runs.ahead + at, mask=left, other=0)
        if SIGN > 0:
            low = place[:, None] + others.origin + 1 - (entry + length)[None, :]
        else:
            low = place[:, None] - others.origin + entry[None, :]
        high = low + length[None, :]
        if others.other is not None:
            coordinates = others.other + batch * others.other_b
            low = _first_from(coordinates, other_count, steps, low)
            high = _first_from(coordinates, other_count, steps, high)
        else:
            low = tl.minimum(tl.maximum(low, 0), other_count)
            high = tl.minimum(tl.maximum(high, 0), other_count)
        high = tl.where(token[:, None] < tokens, high, low)
        for step in range(0, tl.max(tl.max(high - low, axis=1), axis=0), ACROSS):
            other = low[:, :, None] + step + tl.arange(0, ACROSS)[None, None, :]
            inside = other < high[:, :, None]
            if others.order is not None:
                other = tl.load(others.order + batch * others.other_b + other, mask=inside, other=0)
            summed += tl.load(row + other, mask=inside, other=0.0)
        at += length
    where = out + (number.to(tl.int64) * tokens + token[:, None]) * width + column[None, :]
    tl.store(where, tl.sum(summed, axis=2), mask=(token[:, None] < tokens) & (column[None, :] < width))
