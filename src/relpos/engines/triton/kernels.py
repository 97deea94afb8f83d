"""The kernels: attention in tiles with an online softmax and its gradients; and the rotation.

Sums are in dtype SUM: float32, or float64 for float64 inputs. There are no atomics: each output is written by one
program, and sums have a fixed order. `tiles` has the functions that kernels share and explains their arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import dot_onto, exp, log, to
from relpos.engines.triton.dropout import kept_pairs
from relpos.engines.triton.grid_tiles import PLAIN, as_step, begin_of, stop_of
from relpos.engines.triton.low_rank import no_sums, of_keys, of_queries, write_sums
from relpos.engines.triton.tiles import (
    NEGATIVE,
    bias_at,
    bias_here,
    free_span,
    of_program,
    product,
    rows,
    scaled,
    sink_of,
    span,
    sums_of_rows,
    tested,
    unscaled,
    write,
)
from relpos.engines.triton.vector_reads import d_weights, write_pairs


@triton.jit
def _tile_of_program(count, SIZE: tl.constexpr, SIDE: tl.constexpr):
    """The first token and the head of this program, from the first grid axis (others hold 65,535 programs at most)."""
    tiles = tl.cdiv(as_step(count, SIDE, SIZE), SIZE)
    return begin_of(tl.program_id(0) % tiles * SIZE, SIDE, SIZE), tl.program_id(0) // tiles


@triton.jit
def forward(
    out, lse, qkv, size, bias, allowed, spans, dropout, sink, chunk,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, ALIKE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of ROWS queries of one head."""
    start, number = of_program(size.n, ROWS, chunk, QUERIES, allowed.right is not None)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, start, size.n, qkv.q_n, ROWS, D, D_PAD)
    head_k = qkv.k + batch64 * qkv.k_b + head64 // size.groups * qkv.k_h
    head_v = qkv.v + batch64 * qkv.v_b + head64 // size.groups * qkv.v_h
    peak, total = tl.full([ROWS], NEGATIVE, SUM), tl.zeros([ROWS], SUM)
    qi = start + tl.arange(0, ROWS)
    if sink.logits is not None:
        peak, total = tl.zeros([ROWS], SUM) + sink_of(qi, batch64, head64, size, sink), total + 1.0
    summed = tl.zeros([ROWS, V_PAD], SUM)
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.n, size.m, batch, spans, COARSE, QUERIES)
    first = as_step(tl.maximum(first, 0), KEYS, COLUMNS) // COLUMNS * COLUMNS
    low, high = free_span(start, allowed.left, allowed.right, size.m, allowed, ROWS, COLUMNS, KEYS)
    at = bias_at(start, begin_of(first, KEYS, COLUMNS), head, bias, ALIKE, QUERIES, KEYS)
    for step in range(first, as_step(stop, KEYS, COLUMNS), COLUMNS):
        begin = begin_of(step, KEYS, COLUMNS)
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, begin, size.m, qkv.k_n, COLUMNS, D, D_PAD, FULL)
        here = bias_here(at, start, begin, head, bias, ALIKE, QUERIES, KEYS)
        raw = product(
            query, tl.trans(key), qi[:, None], kj[None, :], here, 1, batch, head, size, bias, chunk, ALIKE, QUERIES,
            KEYS, PRECISION,
        )  # fmt: skip
        at -= COLUMNS
        if TESTED:
            if (begin < low) | (begin >= high):
                key_stop = stop_of(begin, size.m, KEYS)
                raw = tested(raw, qi[:, None], kj[None, :], size.n, key_stop, batch, size, allowed, SCALE)
        if SCALE > 0:
            higher = tl.maximum(peak, tl.max(raw, axis=1) * (SCALE * UNIT))
        else:
            higher = tl.maximum(peak, tl.min(raw, axis=1) * (SCALE * UNIT))
        shift = tl.where(higher == NEGATIVE, 0.0, higher)
        weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
        shrink = exp(peak - shift, UNIT)
        total = total * shrink + tl.sum(weight, axis=1)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            weight = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
        value = rows(head_v, begin, size.m, qkv.v_n, COLUMNS, V, V_PAD, FULL)
        summed = dot_onto(to(weight, value.dtype, PRECISION), value, summed * shrink[:, None], PRECISION)
        peak = higher
    blank = total == 0.0
    whole = tl.where(blank, 1.0, total)
    stop = stop_of(start, size.n, QUERIES)
    write(out + batch_head * size.n * V, summed / whole[:, None], start, stop, V, ROWS, V, V_PAD, PRECISION)
    natural = tl.where(blank, NEGATIVE, (peak + log(whole, UNIT)) / UNIT)
    tl.store(lse + batch_head * size.n + qi, natural, mask=qi < stop)


@triton.jit
def backward_rows(
    out, up, lse, d_lse, size,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The delta of ROWS queries of one head, <output, its gradient> - d_lse (or 0), and their shift."""
    start, number = _tile_of_program(up.count, ROWS, PLAIN)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, start, size.n, up.at_n, ROWS, V, V_PAD)
    output = rows(out + batch_head * size.n * V, start, size.n, V, ROWS, V, V_PAD)
    qi = start + tl.arange(0, ROWS)
    read, written = batch_head * size.n + qi, up.sums + batch_head * 2 * up.count + qi
    row_delta = tl.sum(upstream.to(SUM) * output.to(SUM), axis=1)
    if d_lse is not None:
        row_delta -= tl.load(d_lse + read, mask=qi < size.n, other=0.0)
    sums = tl.load(lse + read, mask=qi < size.n, other=0.0)
    tl.store(written, tl.where(sums == NEGATIVE, 0.0, sums * UNIT), mask=qi < up.count)
    tl.store(written + up.count, row_delta, mask=qi < up.count)


@triton.jit
def backward_keys(
    d_k, d_v, d_low_rank, pairs, up, qkv, size, bias, allowed, spans, dropout, chunk,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, ALIKE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """The gradients of COLUMNS keys and values of one key head, summed over its query heads in order; and for each of
    these heads those of the keys of low-rank biases, for which there are targets."""
    start, number = _tile_of_program(size.m, COLUMNS, KEYS)
    key_heads = size.heads // size.groups
    if chunk.first_head is not None:
        number += chunk.first_head // size.groups
    batch, key_head = number // key_heads, number % key_heads
    batch64, key_head64 = batch.to(tl.int64), key_head.to(tl.int64)
    kj = start + tl.arange(0, COLUMNS)
    key = rows(qkv.k + batch64 * qkv.k_b + key_head64 * qkv.k_h, start, size.m, qkv.k_n, COLUMNS, D, D_PAD)
    value = rows(qkv.v + batch64 * qkv.v_b + key_head64 * qkv.v_h, start, size.m, qkv.v_n, COLUMNS, V, V_PAD)
    sum_k = tl.zeros([COLUMNS, D_PAD], SUM)
    sum_v = tl.zeros([COLUMNS, V_PAD], SUM)
    first, stop = span(start, COLUMNS, allowed.right, allowed.left, size.m, size.n, batch, spans, COARSE, KEYS)
    if chunk.first_head is not None:
        first, stop = tl.maximum(first, chunk.first_row), tl.minimum(stop, chunk.first_row + chunk.rows)
    first = as_step(tl.maximum(first, 0), QUERIES, ROWS) // ROWS * ROWS
    low, high = free_span(start, allowed.right, allowed.left, size.n, allowed, COLUMNS, ROWS, QUERIES)
    for member in range(size.groups):
        head = key_head * size.groups + member
        head64 = head.to(tl.int64)
        head_q, head_up = qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, up.at + batch64 * up.at_b + head64 * up.at_h
        at = bias_at(begin_of(first, QUERIES, ROWS), start, head, bias, ALIKE, QUERIES, KEYS)
        low_rank = no_sums(d_low_rank, bias.low_rank, COLUMNS, SUM)
        for step in range(first, as_step(stop, QUERIES, ROWS), ROWS):
            begin = begin_of(step, QUERIES, ROWS)
            qi = begin + tl.arange(0, ROWS)
            query = rows(head_q, begin, size.n, qkv.q_n, ROWS, D, D_PAD, FULL)
            upstream = rows(head_up, begin, size.n, up.at_n, ROWS, V, V_PAD, FULL)
            shift, row_delta = sums_of_rows(up, batch64 * size.heads + head64, begin, ROWS)
            here = bias_here(at, begin, start, head, bias, ALIKE, QUERIES, KEYS)
            raw = product(
                key, tl.trans(query), qi[None, :], kj[:, None], here, -1, batch, head, size, bias, chunk, ALIKE,
                QUERIES, KEYS, PRECISION,
            )  # fmt: skip
            at += ROWS
            if TESTED:
                if (begin < low) | (begin >= high):
                    query_stop = stop_of(begin, size.n, QUERIES)
                    raw = tested(raw, qi[None, :], kj[:, None], query_stop, size.m, batch, size, allowed, SCALE)
            weight = exp(raw * (SCALE * UNIT) - shift[None, :], UNIT)
            d_weight = d_weights(
                value, tl.trans(upstream), qi[None, :], kj[:, None], batch, head, size, chunk, PRECISION
            )
            used = weight
            if dropout.seed is not None:
                kept = kept_pairs(dropout, batch, head, qi[None, :], kj[:, None])
                used = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
                d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
            sum_v = dot_onto(to(used, upstream.dtype, PRECISION), upstream, sum_v, PRECISION)
            d_score = weight * (d_weight - row_delta[None, :])
            sum_k = dot_onto(to(d_score, query.dtype, PRECISION), query, sum_k, PRECISION)
            d_bias = scaled(d_score, qi[None, :], batch, head, size, bias)
            if pairs is not None:
                line = batch64 * size.heads + head64 - chunk.first_head
                write_pairs(pairs, d_bias, line, kj[:, None], qi[None, :], 0, size.m, chunk.first_row, chunk.rows)
            low_rank = of_keys(low_rank, d_bias, qi[None, :], batch, head, d_low_rank, bias.low_rank)
        write_sums(d_low_rank, low_rank, kj, stop_of(start, size.m, KEYS), size.m, batch64 * size.heads + head64)
    batch_head = number.to(tl.int64)
    stop = stop_of(start, size.m, KEYS)
    sum_k *= SCALE
    if chunk.first_head is not None:  # chunks of earlier queries have written theirs
        sum_k += rows(d_k + batch_head * size.m * D, start, stop, D, COLUMNS, D, D_PAD)
        sum_v += rows(d_v + batch_head * size.m * V, start, stop, V, COLUMNS, V, V_PAD)
    write(d_k + batch_head * size.m * D, sum_k, start, stop, D, COLUMNS, D, D_PAD, PRECISION)
    write(d_v + batch_head * size.m * V, sum_v, start, stop, V, COLUMNS, V, V_PAD, PRECISION)


@triton.jit
def backward_queries(
    d_q, d_factor, d_low_rank, pairs, up, qkv, size, bias, allowed, spans, dropout, chunk,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, ALIKE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head, of their factors on the bias, where these are learned, and of the
    queries of low-rank biases, for which there are targets."""
    start, number = of_program(size.n, ROWS, chunk, QUERIES, allowed.right is not None)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, start, size.n, qkv.q_n, ROWS, D, D_PAD)
    head_k = qkv.k + batch64 * qkv.k_b + head64 // size.groups * qkv.k_h
    head_v = qkv.v + batch64 * qkv.v_b + head64 // size.groups * qkv.v_h
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, start, size.n, up.at_n, ROWS, V, V_PAD)
    shift, row_delta = sums_of_rows(up, batch_head, start, ROWS)
    into = tl.zeros([ROWS, D_PAD], SUM)
    of_factor = tl.zeros([ROWS], SUM)
    low_rank = no_sums(d_low_rank, bias.low_rank, ROWS, SUM)
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.n, size.m, batch, spans, COARSE, QUERIES)
    first = as_step(tl.maximum(first, 0), KEYS, COLUMNS) // COLUMNS * COLUMNS
    low, high = free_span(start, allowed.left, allowed.right, size.m, allowed, ROWS, COLUMNS, KEYS)
    at = bias_at(start, begin_of(first, KEYS, COLUMNS), head, bias, ALIKE, QUERIES, KEYS)
    for step in range(first, as_step(stop, KEYS, COLUMNS), COLUMNS):
        begin = begin_of(step, KEYS, COLUMNS)
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, begin, size.m, qkv.k_n, COLUMNS, D, D_PAD, FULL)
        value = rows(head_v, begin, size.m, qkv.v_n, COLUMNS, V, V_PAD, FULL)
        here = bias_here(at, start, begin, head, bias, ALIKE, QUERIES, KEYS)
        raw = product(
            query, tl.trans(key), qi[:, None], kj[None, :], here, 1, batch, head, size, bias, chunk, ALIKE, QUERIES,
            KEYS, PRECISION,
        )  # fmt: skip
        at -= COLUMNS
        if TESTED:
            if (begin < low) | (begin >= high):
                key_stop = stop_of(begin, size.m, KEYS)
                raw = tested(raw, qi[:, None], kj[None, :], size.n, key_stop, batch, size, allowed, SCALE)
        weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
        d_weight = d_weights(upstream, tl.trans(value), qi[:, None], kj[None, :], batch, head, size, chunk, PRECISION)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
        d_score = weight * (d_weight - row_delta[:, None])
        into = dot_onto(to(d_score, key.dtype, PRECISION), key, into, PRECISION)
        if d_factor is not None:
            added = unscaled(d_score, qi[:, None], kj[None, :], batch, head, size, bias, chunk)
            of_factor += tl.sum(d_score * added, axis=1)
        d_bias = scaled(d_score, qi[:, None], batch, head, size, bias)
        if pairs is not None:
            line = batch_head - chunk.first_head
            write_pairs(pairs, d_bias, line, qi[:, None], kj[None, :], chunk.first_row, chunk.rows, 0, size.m)
        low_rank = of_queries(low_rank, d_bias, kj[None, :], batch, head, d_low_rank, bias.low_rank)
    stop = stop_of(start, size.n, QUERIES)
    write_sums(d_low_rank, low_rank, qi, stop, size.n, batch_head)
    if d_factor is not None:
        tl.store(d_factor + batch_head * size.n + qi, of_factor * SCALE, mask=qi < stop)
    write(d_q + batch_head * size.n * D, into * SCALE, start, stop, D, ROWS, D, D_PAD, PRECISION)


@triton.jit
def turn(
    out, x, x_b, x_h, x_n, cos, sin, angles_b, angles_h, heads, n,
    D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head, rotated by their angles, or BACK by their negatives."""
    start, number = _tile_of_program(n, ROWS, PLAIN)
    batch64, head64 = (number // heads).to(tl.int64), (number % heads).to(tl.int64)
    row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pair = tl.arange(0, PAIRS_PAD)[None, :]
    inside = (row < n) & (pair < PAIRS)
    at = batch64 * angles_b + head64 * angles_h + row * PAIRS + pair
    c = tl.load(cos + at, mask=inside, other=0.0)
    s = tl.load(sin + at, mask=inside, other=0.0)
    if BACK:
        s = -s
    first = pair if HALF else 2 * pair
    second = first + (PAIRS if HALF else 1)
    source = x + batch64 * x_b + head64 * x_h + row * x_n
    a = tl.load(source + first, mask=inside, other=0.0).to(c.dtype)
    b = tl.load(source + second, mask=inside, other=0.0).to(c.dtype)
    target = out + (number.to(tl.int64) * n + row) * D
    like: tl.constexpr = out.dtype.element_ty
    tl.store(target + first, to(a * c - b * s, like, PRECISION), mask=inside)
    tl.store(target + second, to(a * s + b * c, like, PRECISION), mask=inside)
    if REST_PAD > 0:
        column = 2 * PAIRS + tl.arange(0, REST_PAD)[None, :]
        inside = (row < n) & (column < D)
        tl.store(target + column, tl.load(source + column, mask=inside, other=0.0), mask=inside)
