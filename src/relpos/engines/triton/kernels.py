"""The kernels: attention in tiles with an online softmax, its gradients, the gradient of a line bias; and the rotation.

Sums are in dtype SUM: float32, or float64 for float64 inputs. There are no atomics: each output is written by one
program, and sums have a fixed order. `tiles` has the functions that kernels share and explains their arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.tiles import (
    NEGATIVE,
    bias_at,
    bias_of,
    dot,
    dot_onto,
    exp,
    free_span,
    kept_pairs,
    log,
    product,
    rows,
    scaled,
    sink_of,
    span,
    sums_of_rows,
    tested,
    to,
    write,
)


@triton.jit
def _tile_of_program(count, SIZE: tl.constexpr, BACKWARDS: tl.constexpr = False):
    """The first token and the head of this program, from the first grid axis (others hold 65,535 programs at most).

    BACKWARDS: programs of the last tokens start first, because they have the most work.
    """
    tiles = tl.cdiv(count, SIZE)
    tile = tl.program_id(0) % tiles
    if BACKWARDS:
        tile = tiles - 1 - tile
    return tile * SIZE, tl.program_id(0) // tiles


@triton.jit
def forward(
    out, lse, qkv, size, bias, allowed, spans, dropout, sink,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of ROWS queries of one head."""
    start, number = _tile_of_program(size.n, ROWS, allowed.right is not None)
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
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    first = tl.maximum(first, 0) // COLUMNS * COLUMNS
    low, high = free_span(start, allowed.left, allowed.right, size.m, allowed, ROWS, COLUMNS)
    at = bias_at(start - first, head, bias)
    for begin in range(first, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, begin, size.m, qkv.k_n, COLUMNS, D, D_PAD, FULL)
        raw = product(query, tl.trans(key), qi[:, None], kj[None, :], at, 1, batch, head, size, bias, PRECISION)
        at -= COLUMNS
        if TESTED:
            if (begin < low) | (begin >= high):
                raw = tested(raw, qi[:, None], kj[None, :], size.n, size.m, batch, size, allowed, SCALE)
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
    write(out + batch_head * size.n * V, summed / whole[:, None], start, size.n, V, ROWS, V, V_PAD, PRECISION)
    natural = tl.where(blank, NEGATIVE, (peak + log(whole, UNIT)) / UNIT)
    tl.store(lse + batch_head * size.n + qi, natural, mask=qi < size.n)


@triton.jit
def backward_rows(
    delta, shift, out, up, lse, d_lse, size,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The delta of ROWS queries of one head, <output, its gradient> - d_lse, and their shift."""
    start, number = _tile_of_program(up.count, ROWS)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, start, size.n, up.at_n, ROWS, V, V_PAD)
    output = rows(out + batch_head * size.n * V, start, size.n, V, ROWS, V, V_PAD)
    qi = start + tl.arange(0, ROWS)
    read, written = batch_head * size.n + qi, batch_head * up.count + qi
    row_delta = tl.sum(upstream.to(SUM) * output.to(SUM), axis=1)
    row_delta -= tl.load(d_lse + read, mask=qi < size.n, other=0.0)
    sums = tl.load(lse + read, mask=qi < size.n, other=0.0)
    tl.store(delta + written, row_delta, mask=qi < up.count)
    tl.store(shift + written, tl.where(sums == NEGATIVE, 0.0, sums * UNIT), mask=qi < up.count)


@triton.jit
def backward_keys(
    d_k, d_v, up, qkv, size, bias, allowed, spans, dropout,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradients of COLUMNS keys and values of one key head, summed over its query heads in order."""
    start, number = _tile_of_program(size.m, COLUMNS)
    key_heads = size.heads // size.groups
    batch, key_head = number // key_heads, number % key_heads
    batch64, key_head64 = batch.to(tl.int64), key_head.to(tl.int64)
    kj = start + tl.arange(0, COLUMNS)
    key = rows(qkv.k + batch64 * qkv.k_b + key_head64 * qkv.k_h, start, size.m, qkv.k_n, COLUMNS, D, D_PAD)
    value = rows(qkv.v + batch64 * qkv.v_b + key_head64 * qkv.v_h, start, size.m, qkv.v_n, COLUMNS, V, V_PAD)
    sum_k = tl.zeros([COLUMNS, D_PAD], SUM)
    sum_v = tl.zeros([COLUMNS, V_PAD], SUM)
    first, stop = span(start, COLUMNS, allowed.right, allowed.left, size.n, batch, spans, COARSE)
    first = tl.maximum(first, 0) // ROWS * ROWS
    low, high = free_span(start, allowed.right, allowed.left, size.n, allowed, COLUMNS, ROWS)
    for member in range(size.groups):
        head = key_head * size.groups + member
        head64 = head.to(tl.int64)
        head_q, head_up = qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, up.at + batch64 * up.at_b + head64 * up.at_h
        at = bias_at(first - start, head, bias)
        for begin in range(first, stop, ROWS):
            qi = begin + tl.arange(0, ROWS)
            query = rows(head_q, begin, size.n, qkv.q_n, ROWS, D, D_PAD, FULL)
            upstream = rows(head_up, begin, size.n, up.at_n, ROWS, V, V_PAD, FULL)
            shift, row_delta = sums_of_rows(up, batch64 * size.heads + head64, begin, ROWS)
            raw = product(key, tl.trans(query), qi[None, :], kj[:, None], at, -1, batch, head, size, bias, PRECISION)
            at += ROWS
            if TESTED:
                if (begin < low) | (begin >= high):
                    raw = tested(raw, qi[None, :], kj[:, None], size.n, size.m, batch, size, allowed, SCALE)
            weight = exp(raw * (SCALE * UNIT) - shift[None, :], UNIT)
            d_weight = dot(value, tl.trans(upstream), PRECISION)
            used = weight
            if dropout.seed is not None:
                kept = kept_pairs(dropout, batch, head, qi[None, :], kj[:, None])
                used = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
                d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
            sum_v = dot_onto(to(used, upstream.dtype, PRECISION), upstream, sum_v, PRECISION)
            d_score = weight * (d_weight - row_delta[None, :])
            sum_k = dot_onto(to(d_score, query.dtype, PRECISION), query, sum_k, PRECISION)
    batch_head = number.to(tl.int64)
    write(d_k + batch_head * size.m * D, sum_k * SCALE, start, size.m, D, COLUMNS, D, D_PAD, PRECISION)
    write(d_v + batch_head * size.m * V, sum_v, start, size.m, V, COLUMNS, V, V_PAD, PRECISION)


@triton.jit
def backward_queries(
    d_q, d_factor, up, qkv, size, bias, allowed, spans, dropout,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr, COARSE: tl.constexpr, FULL: tl.constexpr, TESTED: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head, and of their factors on the bias, where these are learned."""
    start, number = _tile_of_program(size.n, ROWS, allowed.right is not None)
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
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    first = tl.maximum(first, 0) // COLUMNS * COLUMNS
    low, high = free_span(start, allowed.left, allowed.right, size.m, allowed, ROWS, COLUMNS)
    at = bias_at(start - first, head, bias)
    for begin in range(first, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, begin, size.m, qkv.k_n, COLUMNS, D, D_PAD, FULL)
        value = rows(head_v, begin, size.m, qkv.v_n, COLUMNS, V, V_PAD, FULL)
        raw = product(query, tl.trans(key), qi[:, None], kj[None, :], at, 1, batch, head, size, bias, PRECISION)
        at -= COLUMNS
        if TESTED:
            if (begin < low) | (begin >= high):
                raw = tested(raw, qi[:, None], kj[None, :], size.n, size.m, batch, size, allowed, SCALE)
        weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
        d_weight = dot(upstream, tl.trans(value), PRECISION)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
        d_score = weight * (d_weight - row_delta[:, None])
        into = dot_onto(to(d_score, key.dtype, PRECISION), key, into, PRECISION)
        if d_factor is not None:
            of_factor += tl.sum(d_score * bias_of(qi[:, None], kj[None, :], batch, head, size, bias), axis=1)
    if d_factor is not None:
        tl.store(d_factor + batch_head * size.n + qi, of_factor * SCALE, mask=qi < size.n)
    write(d_q + batch_head * size.n * D, into * SCALE, start, size.n, D, ROWS, D, D_PAD, PRECISION)


@triton.jit
def _d_scores(
    tile_bias, up, qkv, size, bias, allowed, dropout, batch, head, query_at, query_stop, key_at, key_stop, free,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, EDGE: tl.constexpr,
    FULL: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias of one tile: EDGE queries and keys from `query_at` and `key_at` on, up to their stops.

    `tile_bias` is the bias of the tile, which all tiles of a program share.
    """
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    shared = head64 // size.groups
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, query_at, query_stop, qkv.q_n, EDGE, D, D_PAD, FULL)
    key = rows(qkv.k + batch64 * qkv.k_b + shared * qkv.k_h, key_at, key_stop, qkv.k_n, EDGE, D, D_PAD, FULL)
    value = rows(qkv.v + batch64 * qkv.v_b + shared * qkv.v_h, key_at, key_stop, qkv.v_n, EDGE, V, V_PAD, FULL)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, query_at, query_stop, up.at_n, EDGE, V, V_PAD, FULL)
    shift, row_delta = sums_of_rows(up, batch64 * size.heads + head64, query_at, EDGE)
    qi, kj = query_at + tl.arange(0, EDGE), key_at + tl.arange(0, EDGE)
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
        summed += _d_scores(
            tile_bias, up, qkv, size, bias, allowed, dropout, first + step, head, query_at, size.n, key_at, size.m,
            False, D, V, D_PAD, V_PAD, EDGE, False, PRECISION, SCALE, UNIT,
        )  # fmt: skip
    first = partial + (part * size.heads + head).to(tl.int64) * size.n * size.m
    tl.store(first + qi * size.m + kj, summed, mask=(qi < size.n) & (kj < size.m))


@triton.jit
def sum_of_pairs(
    out, partial, order, begins, parts, pairs, length, heads,
    ENTRIES: tl.constexpr, ACROSS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """For ENTRIES entries of the line of one head the sum over their pairs, in order, and over the parts of the batch.

    `order` has the numbers of all pairs, those of one entry from its `begins` to the next entry's.
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
    tl.store(out + head.to(tl.int64) * length + entry, tl.sum(summed, axis=1), mask=entry < length)


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
        summed += _d_scores(
            tile_bias, up, qkv, size, bias, allowed, dropout, batch, head, query_at, query_stop, key_at, key_stop, free,
            D, V, D_PAD, V_PAD, EDGE, FULL, PRECISION, SCALE, UNIT,
        )  # fmt: skip
        batch, cell = _following(batch, cell, first, stop)
    # diagonals become columns: column x of row r holds key r + EDGE - x, at offset x - EDGE
    at = tokens[:, None] + EDGE - tl.arange(0, 2 * EDGE)[None, :]
    skewed = tl.gather(summed, tl.minimum(tl.maximum(at, 0), EDGE - 1), axis=1)
    columns = tl.sum(tl.where((at >= 0) & (at < EDGE), skewed, 0.0), axis=0)
    first = (head * tl.num_programs(0) + number).to(tl.int64) * 2 * EDGE
    tl.store(partial + first + tl.arange(0, 2 * EDGE), columns)


@triton.jit
def turn(
    out, x, x_b, x_h, x_n, cos, sin, angles_b, angles_h, heads, n,
    D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head, rotated by their angles, or BACK by their negatives."""
    start, number = _tile_of_program(n, ROWS)
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
