"""The kernels: attention in tiles with an online softmax, its gradients, the gradient of a line bias; and the rotation.

Sums are in dtype SUM: float32, or float64 for float64 inputs. There are no atomics: each output is written by one
program, and sums have a fixed order. `tiles` has the functions that kernels share and explains their arguments.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.tiles import (
    NEGATIVE,
    dot,
    exp,
    kept_pairs,
    log,
    product,
    rows,
    scores,
    span,
    sums_of_rows,
    to,
    write,
)


@triton.jit
def _place(count, SIZE: tl.constexpr):
    """The first token and the head of this program, from the first grid axis (others hold 65,535 programs at most)."""
    tiles = tl.cdiv(count, SIZE)
    return tl.program_id(0) % tiles * SIZE, tl.program_id(0) // tiles


@triton.jit
def forward(
    out, lse, qkv, size, bias, allowed, spans, dropout, sink,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of ROWS queries of one head."""
    start, number = _place(size.n, ROWS)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, qi, qkv.q_n, size.n, D, D_PAD)
    head_k = qkv.k + batch64 * qkv.k_b + head64 // size.groups * qkv.k_h
    head_v = qkv.v + batch64 * qkv.v_b + head64 // size.groups * qkv.v_h
    peak = tl.full([ROWS], NEGATIVE, SUM)
    total = tl.zeros([ROWS], SUM)
    if sink is not None:
        peak = tl.zeros([ROWS], SUM) + tl.load(sink + head)
        total = total + 1.0
    summed = tl.zeros([ROWS, V_PAD], SUM)
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    for begin in range(tl.maximum(first, 0) // COLUMNS * COLUMNS, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, kj, qkv.k_n, size.m, D, D_PAD)
        raw = product(query, tl.trans(key), qi[:, None], kj[None, :], batch, head, size, bias, PRECISION)
        score = scores(raw, qi[:, None], kj[None, :], batch, head, size, allowed, SCALE * UNIT, FREE)
        higher = tl.maximum(peak, tl.max(score, axis=1))
        shift = tl.where(higher == NEGATIVE, 0.0, higher)
        weight = exp(score - shift[:, None], UNIT)
        shrink = exp(peak - shift, UNIT)
        total = total * shrink + tl.sum(weight, axis=1)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            weight = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
        value = rows(head_v, kj, qkv.v_n, size.m, V, V_PAD)
        summed = summed * shrink[:, None]
        summed += dot(to(weight, value.dtype, PRECISION), value, PRECISION)
        peak = higher
    blank = total == 0.0
    whole = tl.where(blank, 1.0, total)
    write(out + batch_head * size.n * V, summed / whole[:, None], qi, V, size.n, V, V_PAD, PRECISION)
    natural = tl.where(blank, NEGATIVE, (peak + log(whole, UNIT)) / UNIT)
    tl.store(lse + batch_head * size.n + qi, natural, mask=qi < size.n)


@triton.jit
def backward_rows(
    delta, out, up, d_lse, size,
    V: tl.constexpr, V_PAD: tl.constexpr, ROWS: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """Delta of ROWS queries of one head: <output, its gradient> - d_lse."""
    start, number = _place(size.n, ROWS)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, qi, up.at_n, size.n, V, V_PAD)
    output = rows(out + batch_head * size.n * V, qi, V, size.n, V, V_PAD)
    row_delta = tl.sum(upstream.to(SUM) * output.to(SUM), axis=1)
    inside = qi < size.n
    row_delta -= tl.load(d_lse + batch_head * size.n + qi, mask=inside, other=0.0)
    tl.store(delta + batch_head * size.n + qi, row_delta, mask=inside)


@triton.jit
def backward_keys(
    d_k, d_v, up, qkv, size, bias, allowed, spans, dropout,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradients of COLUMNS keys and values of one key head, summed over its query heads in order."""
    start, number = _place(size.m, COLUMNS)
    key_heads = size.heads // size.groups
    batch, key_head = number // key_heads, number % key_heads
    batch64, key_head64 = batch.to(tl.int64), key_head.to(tl.int64)
    kj = start + tl.arange(0, COLUMNS)
    key = rows(qkv.k + batch64 * qkv.k_b + key_head64 * qkv.k_h, kj, qkv.k_n, size.m, D, D_PAD)
    value = rows(qkv.v + batch64 * qkv.v_b + key_head64 * qkv.v_h, kj, qkv.v_n, size.m, V, V_PAD)
    sum_k = tl.zeros([COLUMNS, D_PAD], SUM)
    sum_v = tl.zeros([COLUMNS, V_PAD], SUM)
    first, stop = span(start, COLUMNS, allowed.right, allowed.left, size.n, batch, spans, COARSE)
    for member in range(size.groups):
        head = key_head * size.groups + member
        head64 = head.to(tl.int64)
        batch_head = batch64 * size.heads + head64
        for begin in range(tl.maximum(first, 0) // ROWS * ROWS, stop, ROWS):
            qi = begin + tl.arange(0, ROWS)
            query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, qi, qkv.q_n, size.n, D, D_PAD)
            upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, qi, up.at_n, size.n, V, V_PAD)
            shift, row_delta = sums_of_rows(up, batch_head, qi, size.n, UNIT)
            raw = product(key, tl.trans(query), qi[None, :], kj[:, None], batch, head, size, bias, PRECISION)
            score = scores(raw, qi[None, :], kj[:, None], batch, head, size, allowed, SCALE * UNIT, FREE)
            weight = exp(score - shift[None, :], UNIT)
            d_weight = dot(value, tl.trans(upstream), PRECISION)
            used = weight
            if dropout.seed is not None:
                kept = kept_pairs(dropout, batch, head, qi[None, :], kj[:, None])
                used = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
                d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
            sum_v += dot(to(used, upstream.dtype, PRECISION), upstream, PRECISION)
            d_score = weight * (d_weight - row_delta[None, :])
            sum_k += dot(to(d_score, query.dtype, PRECISION), query, PRECISION)
    batch_head = number.to(tl.int64)
    write(d_k + batch_head * size.m * D, sum_k * SCALE, kj, D, size.m, D, D_PAD, PRECISION)
    write(d_v + batch_head * size.m * V, sum_v, kj, V, size.m, V, V_PAD, PRECISION)


@triton.jit
def backward_queries(
    d_q, up, qkv, size, bias, allowed, spans, dropout,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head."""
    start, number = _place(size.n, ROWS)
    batch, head = number // size.heads, number % size.heads
    batch_head, batch64, head64 = number.to(tl.int64), batch.to(tl.int64), head.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, qi, qkv.q_n, size.n, D, D_PAD)
    head_k = qkv.k + batch64 * qkv.k_b + head64 // size.groups * qkv.k_h
    head_v = qkv.v + batch64 * qkv.v_b + head64 // size.groups * qkv.v_h
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, qi, up.at_n, size.n, V, V_PAD)
    shift, row_delta = sums_of_rows(up, batch_head, qi, size.n, UNIT)
    into = tl.zeros([ROWS, D_PAD], SUM)
    first, stop = span(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    for begin in range(tl.maximum(first, 0) // COLUMNS * COLUMNS, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = rows(head_k, kj, qkv.k_n, size.m, D, D_PAD)
        value = rows(head_v, kj, qkv.v_n, size.m, V, V_PAD)
        raw = product(query, tl.trans(key), qi[:, None], kj[None, :], batch, head, size, bias, PRECISION)
        score = scores(raw, qi[:, None], kj[None, :], batch, head, size, allowed, SCALE * UNIT, FREE)
        weight = exp(score - shift[:, None], UNIT)
        d_weight = dot(upstream, tl.trans(value), PRECISION)
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
            d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
        d_score = weight * (d_weight - row_delta[:, None])
        into += dot(to(d_score, key.dtype, PRECISION), key, PRECISION)
    write(d_q + batch_head * size.n * D, into * SCALE, qi, D, size.n, D, D_PAD, PRECISION)


@triton.jit
def _d_scores(
    up, qkv, size, bias, allowed, dropout, batch, head, qi, kj,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of one tile, for queries `qi` and keys `kj`."""
    batch64, head64 = batch.to(tl.int64), head.to(tl.int64)
    batch_head = batch64 * size.heads + head64
    shared = head64 // size.groups
    query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, qi, qkv.q_n, size.n, D, D_PAD)
    key = rows(qkv.k + batch64 * qkv.k_b + shared * qkv.k_h, kj, qkv.k_n, size.m, D, D_PAD)
    value = rows(qkv.v + batch64 * qkv.v_b + shared * qkv.v_h, kj, qkv.v_n, size.m, V, V_PAD)
    upstream = rows(up.at + batch64 * up.at_b + head64 * up.at_h, qi, up.at_n, size.n, V, V_PAD)
    shift, row_delta = sums_of_rows(up, batch_head, qi, size.n, UNIT)
    raw = product(query, tl.trans(key), qi[:, None], kj[None, :], batch, head, size, bias, PRECISION)
    score = scores(raw, qi[:, None], kj[None, :], batch, head, size, allowed, SCALE * UNIT, False)
    weight = exp(score - shift[:, None], UNIT)
    d_weight = dot(upstream, tl.trans(value), PRECISION)
    if dropout.seed is not None:
        kept = kept_pairs(dropout, batch, head, qi[:, None], kj[None, :])
        d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
    return weight * (d_weight - row_delta[:, None])


@triton.jit
def backward_pairs(
    partial, up, qkv, size, bias, allowed, dropout, batches, share,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    SIDE: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of the scores of SIDE queries and keys of one head, summed over `share` elements of the batch."""
    across = tl.cdiv(size.m, SIDE)
    tile, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    qi = tile // across * SIDE + tl.arange(0, SIDE)
    kj = tile % across * SIDE + tl.arange(0, SIDE)
    summed = tl.zeros([SIDE, SIDE], SUM)
    first = part * share
    for step in range(tl.minimum(share, batches - first)):
        batch = first + step
        summed += _d_scores(
            up, qkv, size, bias, allowed, dropout, batch, head, qi, kj, D, V, D_PAD, V_PAD, PRECISION, SCALE, UNIT
        )  # fmt: skip
    place = partial + (part * size.heads + head).to(tl.int64) * size.n * size.m
    inside = (qi[:, None] < size.n) & (kj[None, :] < size.m)
    tl.store(place + qi[:, None] * size.m + kj[None, :], summed, mask=inside)


@triton.jit
def backward_table(
    partial, up, qkv, size, bias, allowed, dropout, batches, queries, keys,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    SIDE: tl.constexpr, EVEN: tl.constexpr, PRECISION: tl.constexpr,
    SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of a line bias between tokens, for one head and one difference of cells.

    Queries and keys behind their prefixes are divided into cells of at most SIDE tokens (a row of a grid, a part of a
    sequence), arranged along three axes. All pairs of cells with one difference along these axes read the same entries
    of the table. Their tiles are summed, over cells and batch, and the diagonals of the sum are the gradient. EVEN: the
    differences of token indices are equal too, so that a mask by index may forbid all these pairs.
    """
    number, head = tl.program_id(0), tl.program_id(1)
    span_2, span_3 = queries.second + keys.second - 1, queries.third + keys.third - 1
    ahead_1 = number // (span_2 * span_3) - (keys.first - 1)
    ahead_2 = number // span_3 % span_2 - (keys.second - 1)
    ahead_3 = number % span_3 - (keys.third - 1)
    first_1, first_2, first_3 = tl.maximum(ahead_1, 0), tl.maximum(ahead_2, 0), tl.maximum(ahead_3, 0)
    count_1 = tl.minimum(queries.first, keys.first + ahead_1) - first_1
    count_2 = tl.minimum(queries.second, keys.second + ahead_2) - first_2
    count_3 = tl.minimum(queries.third, keys.third + ahead_3) - first_3
    steps = batches * count_1 * count_2 * count_3
    if EVEN:
        apart = (ahead_1 * keys.second + ahead_2) * keys.inner + ahead_3 * SIDE + queries.prefix - keys.prefix
        if allowed.left is not None:
            steps = tl.where(apart - SIDE < allowed.left, steps, 0)
        if allowed.right is not None:
            steps = tl.where(apart + SIDE > -allowed.right, steps, 0)
    tokens = tl.arange(0, SIDE)
    summed = tl.zeros([SIDE, SIDE], SUM)
    for step in range(steps):
        cell_3 = first_3 + step % count_3
        cell_2 = first_2 + step // count_3 % count_2
        cell_1 = first_1 + step // (count_3 * count_2) % count_1
        batch = step // (count_3 * count_2 * count_1)
        query_at = cell_3 * SIDE + tokens
        key_at = (cell_3 - ahead_3) * SIDE + tokens
        query_row = queries.prefix + (cell_1 * queries.second + cell_2) * queries.inner
        key_row = keys.prefix + ((cell_1 - ahead_1) * keys.second + cell_2 - ahead_2) * keys.inner
        qi = tl.where(query_at < queries.inner, query_row + query_at, size.n)
        kj = tl.where(key_at < keys.inner, key_row + key_at, size.m)
        summed += _d_scores(
            up, qkv, size, bias, allowed, dropout, batch, head, qi, kj, D, V, D_PAD, V_PAD, PRECISION, SCALE, UNIT
        )  # fmt: skip
    # diagonals become columns: column x of row r holds key r + SIDE - x, at offset x - SIDE
    at = tokens[:, None] + SIDE - tl.arange(0, 2 * SIDE)[None, :]
    sheared = tl.gather(summed, tl.minimum(tl.maximum(at, 0), SIDE - 1), axis=1)
    columns = tl.sum(tl.where((at >= 0) & (at < SIDE), sheared, 0.0), axis=0)
    place = (head * tl.num_programs(0) + number).to(tl.int64) * 2 * SIDE
    tl.store(partial + place + tl.arange(0, 2 * SIDE), columns)


@triton.jit
def turn(
    out, x, x_b, x_h, x_n, cos, sin, angles_b, angles_h, heads, n,
    D: tl.constexpr, PAIRS: tl.constexpr, PAIRS_PAD: tl.constexpr, REST_PAD: tl.constexpr, ROWS: tl.constexpr,
    HALF: tl.constexpr, BACK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS tokens of one head, rotated by their angles, or BACK by their negatives."""
    start, number = _place(n, ROWS)
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
