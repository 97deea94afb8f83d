"""The kernels: attention in tiles with an online softmax, its gradients, and the gradient of a line bias.

Scores are in base 2: the caller multiplies the scale, the table and the sinks by log2(e). A tile is computed the same
way in every kernel, by `_scores`; `qi` and `kj` are the numbers of its queries and keys, one of them along rows and the
other along columns, so that a kernel takes its tile either way round. What is outside the tensors is clamped where it is
read and masked where it counts. No atomics: every number is written by one program, and every sum runs in one order.

Arguments that belong together travel as named tuples; a pointer that is None leaves its part out of the compiled code.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

_NEGATIVE = tl.constexpr(-float("inf"))
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


class Sides(NamedTuple):
    """Queries, keys and values, each with the strides of batch, head and token; those of the width are 1."""

    q: Any
    q_b: Any
    q_h: Any
    q_n: Any
    k: Any
    k_b: Any
    k_h: Any
    k_n: Any
    v: Any
    v_b: Any
    v_h: Any
    v_n: Any


class Size(NamedTuple):
    """Query heads, how many share a key head, tokens of both sides, and the content product's factor in base 2."""

    heads: Any
    groups: Any
    n: Any
    m: Any
    scale: Any


class Bias(NamedTuple):
    """A line bias: the table, in base 2, and the lines of both sides, with strides of head and batch.

    Without lines, both sides are consecutive integers, and `origin` is the entry of the first query and first key.
    """

    table: Any
    table_h: Any
    query: Any
    query_b: Any
    key: Any
    key_b: Any
    origin: Any


class Allowed(NamedTuple):
    """A mask's parts, None where there is none: `left` and `right` around the index, intervals of key order, segments.

    Tensors have a stride of the batch.
    """

    left: Any
    right: Any
    low: Any
    low_b: Any
    high: Any
    high_b: Any
    order: Any
    order_b: Any
    mine: Any
    mine_b: Any
    theirs: Any
    theirs_b: Any


class Spans(NamedTuple):
    """First and last + 1 of what each stretch of COARSE tokens may meet, with a stride of the batch."""

    at: Any
    at_b: Any


class Dropout(NamedTuple):
    """The seed, the word below which a pair is dropped, and what kept weights are multiplied by."""

    seed: Any
    threshold: Any
    factor: Any


class Cells(NamedTuple):
    """One side's tokens behind its prefix: cells of `inner` tokens, cut into SIDE, on three axes."""

    prefix: Any
    inner: Any
    first: Any
    second: Any
    third: Any


@triton.jit
def _dot(a, b, PRECISION: tl.constexpr):
    """a @ b, summed in float32. "widened" is for Triton's interpreter, which cannot multiply bfloat16."""
    if PRECISION == "widened":
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def _to(x, like: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded to a dtype. Triton's interpreter would cut bfloat16 off, so there its last bits are rounded here."""
    if PRECISION == "widened":
        if like == tl.bfloat16:
            word = x.to(tl.int32, bitcast=True)
            word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
            x = word.to(tl.float32, bitcast=True)
    return x.to(like)


@triton.jit
def _mix(x):
    """lowbias32, as `core.random.mix`, on 32-bit words."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _kept(dropout, batch, head, qi, kj):
    """Which pairs are not dropped."""
    word = _mix(tl.load(dropout.seed).to(tl.uint32))
    word = _mix(_mix(word ^ batch) ^ head)
    word = _mix(_mix(word ^ qi) ^ kj)
    return word.to(tl.int64) >= dropout.threshold


@triton.jit
def _scores(product, qi, kj, batch, head, size, bias, allowed, FREE: tl.constexpr):
    """The scores of a tile, -inf where a pair is not allowed. FREE: nothing is forbidden or outside."""
    score = product * size.scale
    query = tl.minimum(qi, size.n - 1)
    key = tl.minimum(kj, size.m - 1)
    if bias is not None:
        row, column = query, key
        if bias.query is not None:
            row = tl.load(bias.query + batch * bias.query_b + query)
            column = tl.load(bias.key + batch * bias.key_b + key)
        score += tl.load(bias.table + head * bias.table_h + bias.origin + (row - column))
    if not FREE:
        seen = (kj < size.m) & (qi < size.n)
        if allowed.left is not None:
            seen = seen & (kj >= qi - allowed.left)
        if allowed.right is not None:
            seen = seen & (kj <= qi + allowed.right)
        if allowed.low is not None or allowed.high is not None:
            order = key
            if allowed.order is not None:
                order = tl.load(allowed.order + batch * allowed.order_b + key)
            if allowed.low is not None:
                seen = seen & (order >= tl.load(allowed.low + batch * allowed.low_b + query))
            if allowed.high is not None:
                seen = seen & (order <= tl.load(allowed.high + batch * allowed.high_b + query))
        if allowed.mine is not None:
            mine = tl.load(allowed.mine + batch * allowed.mine_b + query)
            theirs = tl.load(allowed.theirs + batch * allowed.theirs_b + key)
            seen = seen & (mine == theirs) & (mine >= 0)
        score = tl.where(seen, score, _NEGATIVE)
    return score


@triton.jit
def _range(start, size, before, after, end, batch, spans, COARSE: tl.constexpr):
    """The tokens of the other side that `size` tokens from `start` on may meet."""
    first, stop = 0, end
    if spans is not None:
        at = spans.at + batch * spans.at_b + start // COARSE * 2
        first, stop = tl.load(at), tl.load(at + 1)
    if before is not None:
        first = tl.maximum(first, start - before)
    if after is not None:
        stop = tl.minimum(stop, start + size + after)
    return first, stop


@triton.jit
def _rows(pointer, numbers, row, count, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """`[len(numbers), PADDED]` of a matrix with rows `row` apart, zeros outside."""
    columns = tl.arange(0, PADDED)
    inside = numbers[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    return tl.load(pointer + numbers[:, None].to(tl.int64) * row + columns[None, :], mask=inside, other=0.0)


@triton.jit
def _write(pointer, x, numbers, row, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """The reverse of `_rows`."""
    columns = tl.arange(0, PADDED)
    inside = numbers[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    where = pointer + numbers[:, None].to(tl.int64) * row + columns[None, :]
    tl.store(where, _to(x, pointer.dtype.element_ty, PRECISION), mask=inside)


@triton.jit
def _sums_of_rows(lse, delta, line, qi, n):
    """The shift of each row in base 2, 0 where it sees nothing, and its delta."""
    sums = tl.load(lse + line * n + qi, mask=qi < n, other=0.0)
    shift = tl.where(sums == _NEGATIVE, 0.0, sums * _LOG2_E)
    return shift, tl.load(delta + line * n + qi, mask=qi < n, other=0.0)


@triton.jit
def forward(
    out, lse, sides, size, bias, allowed, spans, dropout, sink,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output and log-sum-exp of ROWS queries of one head."""
    start = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // size.heads, tl.program_id(1) % size.heads
    line, far = tl.program_id(1).to(tl.int64), batch.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = _rows(sides.q + far * sides.q_b + head * sides.q_h, qi, sides.q_n, size.n, D, D_PAD)
    own_k = sides.k + far * sides.k_b + head // size.groups * sides.k_h
    own_v = sides.v + far * sides.v_b + head // size.groups * sides.v_h
    peak = tl.full([ROWS], _NEGATIVE, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if sink is not None:
        peak = tl.zeros([ROWS], tl.float32) + tl.load(sink + head)
        total = total + 1.0
    summed = tl.zeros([ROWS, V_PAD], tl.float32)
    first, stop = _range(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    for begin in range(tl.maximum(first, 0) // COLUMNS * COLUMNS, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = _rows(own_k, kj, sides.k_n, size.m, D, D_PAD)
        product = _dot(query, tl.trans(key), PRECISION)
        score = _scores(product, qi[:, None], kj[None, :], batch, head, size, bias, allowed, FREE)
        higher = tl.maximum(peak, tl.max(score, axis=1))
        shift = tl.where(higher == _NEGATIVE, 0.0, higher)
        weight = tl.exp2(score - shift[:, None])
        shrink = tl.exp2(peak - shift)
        total = total * shrink + tl.sum(weight, axis=1)
        if dropout is not None:
            kept = _kept(dropout, batch, head, qi[:, None], kj[None, :])
            weight = tl.where(kept, weight * dropout.factor, 0.0)
        value = _rows(own_v, kj, sides.v_n, size.m, V, V_PAD)
        summed = summed * shrink[:, None]
        summed += _dot(_to(weight, value.dtype, PRECISION), value, PRECISION)
        peak = higher
    blank = total == 0.0
    whole = tl.where(blank, 1.0, total)
    _write(out + line * size.n * V, summed / whole[:, None], qi, V, size.n, V, V_PAD, PRECISION)
    natural = tl.where(blank, _NEGATIVE, (peak + tl.log2(whole)) * _LN_2)
    tl.store(lse + line * size.n + qi, natural, mask=qi < size.n)


@triton.jit
def backward_keys(
    d_k, d_v, d_out, lse, delta, sides, size, bias, allowed, spans, dropout, natural,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of COLUMNS keys and values of one key head, over the query heads it serves, in order."""
    start = tl.program_id(0) * COLUMNS
    owners = size.heads // size.groups
    batch, own = tl.program_id(1) // owners, tl.program_id(1) % owners
    far = batch.to(tl.int64)
    kj = start + tl.arange(0, COLUMNS)
    key = _rows(sides.k + far * sides.k_b + own * sides.k_h, kj, sides.k_n, size.m, D, D_PAD)
    value = _rows(sides.v + far * sides.v_b + own * sides.v_h, kj, sides.v_n, size.m, V, V_PAD)
    into_k = tl.zeros([COLUMNS, D_PAD], tl.float32)
    into_v = tl.zeros([COLUMNS, V_PAD], tl.float32)
    first, stop = _range(start, COLUMNS, allowed.right, allowed.left, size.n, batch, spans, COARSE)
    for head in range(own * size.groups, (own + 1) * size.groups):
        line = far * size.heads + head
        for begin in range(tl.maximum(first, 0) // ROWS * ROWS, stop, ROWS):
            qi = begin + tl.arange(0, ROWS)
            query = _rows(sides.q + far * sides.q_b + head * sides.q_h, qi, sides.q_n, size.n, D, D_PAD)
            upstream = _rows(d_out + line * size.n * V, qi, V, size.n, V, V_PAD)
            shift, less = _sums_of_rows(lse, delta, line, qi, size.n)
            product = _dot(key, tl.trans(query), PRECISION)
            score = _scores(product, qi[None, :], kj[:, None], batch, head, size, bias, allowed, FREE)
            weight = tl.exp2(score - shift[None, :])
            d_weight = _dot(value, tl.trans(upstream), PRECISION)
            used = weight
            if dropout is not None:
                kept = _kept(dropout, batch, head, qi[None, :], kj[:, None])
                used = tl.where(kept, weight * dropout.factor, 0.0)
                d_weight = tl.where(kept, d_weight * dropout.factor, 0.0)
            into_v += _dot(_to(used, upstream.dtype, PRECISION), upstream, PRECISION)
            d_score = weight * (d_weight - less[None, :])
            into_k += _dot(_to(d_score, query.dtype, PRECISION), query, PRECISION)
    line = tl.program_id(1).to(tl.int64)
    _write(d_k + line * size.m * D, into_k * natural, kj, D, size.m, D, D_PAD, PRECISION)
    _write(d_v + line * size.m * V, into_v, kj, V, size.m, V, V_PAD, PRECISION)


@triton.jit
def backward_queries(
    d_q, d_out, lse, delta, sides, size, bias, allowed, spans, dropout, natural,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, COARSE: tl.constexpr, FREE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of ROWS queries of one head."""
    start = tl.program_id(0) * ROWS
    batch, head = tl.program_id(1) // size.heads, tl.program_id(1) % size.heads
    line, far = tl.program_id(1).to(tl.int64), batch.to(tl.int64)
    qi = start + tl.arange(0, ROWS)
    query = _rows(sides.q + far * sides.q_b + head * sides.q_h, qi, sides.q_n, size.n, D, D_PAD)
    own_k = sides.k + far * sides.k_b + head // size.groups * sides.k_h
    own_v = sides.v + far * sides.v_b + head // size.groups * sides.v_h
    upstream = _rows(d_out + line * size.n * V, qi, V, size.n, V, V_PAD)
    shift, less = _sums_of_rows(lse, delta, line, qi, size.n)
    into = tl.zeros([ROWS, D_PAD], tl.float32)
    first, stop = _range(start, ROWS, allowed.left, allowed.right, size.m, batch, spans, COARSE)
    for begin in range(tl.maximum(first, 0) // COLUMNS * COLUMNS, stop, COLUMNS):
        kj = begin + tl.arange(0, COLUMNS)
        key = _rows(own_k, kj, sides.k_n, size.m, D, D_PAD)
        value = _rows(own_v, kj, sides.v_n, size.m, V, V_PAD)
        product = _dot(query, tl.trans(key), PRECISION)
        score = _scores(product, qi[:, None], kj[None, :], batch, head, size, bias, allowed, FREE)
        weight = tl.exp2(score - shift[:, None])
        d_weight = _dot(upstream, tl.trans(value), PRECISION)
        if dropout is not None:
            kept = _kept(dropout, batch, head, qi[:, None], kj[None, :])
            d_weight = tl.where(kept, d_weight * dropout.factor, 0.0)
        d_score = weight * (d_weight - less[:, None])
        into += _dot(_to(d_score, key.dtype, PRECISION), key, PRECISION)
    _write(d_q + line * size.n * D, into * natural, qi, D, size.n, D, D_PAD, PRECISION)


@triton.jit
def backward_table(
    partial, d_out, lse, delta, sides, size, bias, allowed, dropout, batches, queries, keys,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    SIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of a line bias between tokens, for one head and one difference of cells.

    Behind its prefix each side is cells of SIDE tokens at most (a row of a grid, a stretch of a sequence), which stand on
    three axes. All pairs of cells with one difference along the axes read the same entries of the table, pair by pair of
    their tokens; so their tiles are added up, over cells and batch, and the sum's diagonals are the gradient.
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
    tokens = tl.arange(0, SIDE)
    summed = tl.zeros([SIDE, SIDE], tl.float32)
    for step in range(0, batches * count_1 * count_2 * count_3):
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
        far = batch.to(tl.int64)
        line = far * size.heads + head
        shared = head // size.groups
        query = _rows(sides.q + far * sides.q_b + head * sides.q_h, qi, sides.q_n, size.n, D, D_PAD)
        key = _rows(sides.k + far * sides.k_b + shared * sides.k_h, kj, sides.k_n, size.m, D, D_PAD)
        value = _rows(sides.v + far * sides.v_b + shared * sides.v_h, kj, sides.v_n, size.m, V, V_PAD)
        upstream = _rows(d_out + line * size.n * V, qi, V, size.n, V, V_PAD)
        shift, less = _sums_of_rows(lse, delta, line, qi, size.n)
        product = _dot(query, tl.trans(key), PRECISION)
        score = _scores(product, qi[:, None], kj[None, :], batch, head, size, bias, allowed, False)
        weight = tl.exp2(score - shift[:, None])
        d_weight = _dot(upstream, tl.trans(value), PRECISION)
        if dropout is not None:
            kept = _kept(dropout, batch, head, qi[:, None], kj[None, :])
            d_weight = tl.where(kept, d_weight * dropout.factor, 0.0)
        summed += weight * (d_weight - less[:, None])
    # diagonals become columns: column x of row r holds key r + SIDE - x, which is at offset x - SIDE
    at = tokens[:, None] + SIDE - tl.arange(0, 2 * SIDE)[None, :]
    sheared = tl.gather(summed, tl.minimum(tl.maximum(at, 0), SIDE - 1), axis=1)
    columns = tl.sum(tl.where((at >= 0) & (at < SIDE), sheared, 0.0), axis=0)
    place = (head * tl.num_programs(0) + number).to(tl.int64) * 2 * SIDE
    tl.store(partial + place + tl.arange(0, 2 * SIDE), columns)
