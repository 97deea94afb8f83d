"""What the kernels share: loading, scoring and writing a tile.

Scores, and sinks, are multiplied by UNIT: in half precision log2(e), for the hardware's exp2; else 1, which avoids a
rounding. Every kernel computes a tile by `product` and `scores`. `qi` and `kj` are the indices of its queries and keys,
one along rows and the other along columns, so that a tile may also be transposed. Indices outside the tensors are
clamped for reading, and masked.

Arguments that belong together are named tuples. If a pointer in one is None, its part is left out of the compiled code.
(Triton 3.6 cannot compile a whole tuple that is None, or is compared with None.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

NEGATIVE = tl.constexpr(-float("inf"))


class QKV(NamedTuple):
    """Queries, keys and values, each with the strides of batch, head and token; the last stride is 1."""

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


class Upstream(NamedTuple):
    """The gradient of the output with its strides, and the log-sum-exp and delta of each row."""

    at: Any
    at_b: Any
    at_h: Any
    at_n: Any
    lse: Any
    delta: Any


class Counts(NamedTuple):
    """The numbers of query heads, of query heads per key head, of queries and of keys."""

    heads: Any
    groups: Any
    n: Any
    m: Any


class Bias(NamedTuple):
    """A line bias: `values` divided by the scale, and the lines of queries and keys, with strides of head and batch.

    Without lines, coordinates are consecutive integers, and `origin` is the entry of the first query and first key.
    """

    table: Any
    table_h: Any
    query: Any
    query_b: Any
    key: Any
    key_b: Any
    origin: Any


class Allowed(NamedTuple):
    """The parts of a mask, or None: `left` and `right` around the index, intervals of key order, segments.

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
    """The start and stop of the tokens that each block of COARSE tokens may see, with a stride of the batch."""

    at: Any
    at_b: Any


class Dropout(NamedTuple):
    """The seed, the random word below which a pair is dropped, and the factor on kept weights, a tensor."""

    seed: Any
    threshold: Any
    factor: Any


class Cells(NamedTuple):
    """Queries or keys behind their prefix: cells on three axes, the last of which divides `inner` tokens by SIDE."""

    prefix: Any
    inner: Any
    first: Any
    second: Any
    third: Any


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """a @ b, summed in float32 or wider. "widened" is for Triton's interpreter, which has no bfloat16."""
    OUT: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    if PRECISION == "widened":
        a, b = (a.to(tl.float32), b.to(tl.float32)) if a.dtype == tl.bfloat16 else (a, b)
        return tl.dot(a, b, input_precision="ieee", out_dtype=OUT)
    else:
        return tl.dot(a, b, input_precision=PRECISION, out_dtype=OUT)


@triton.jit
def dot_onto(a, b, start, PRECISION: tl.constexpr):
    """start + a @ b, summed as `dot` does."""
    OUT: tl.constexpr = tl.float64 if a.dtype == tl.float64 else tl.float32
    if PRECISION == "widened":
        a, b = (a.to(tl.float32), b.to(tl.float32)) if a.dtype == tl.bfloat16 else (a, b)
        return tl.dot(a, b, start, input_precision="ieee", out_dtype=OUT)
    else:
        return tl.dot(a, b, start, input_precision=PRECISION, out_dtype=OUT)


@triton.jit
def exp(x, UNIT: tl.constexpr):
    """The exponential of scores, which are multiplied by UNIT."""
    return tl.exp(x) if UNIT == 1.0 else tl.exp2(x)


@triton.jit
def log(x, UNIT: tl.constexpr):
    """The inverse of `exp`."""
    return tl.log(x) if UNIT == 1.0 else tl.log2(x)


@triton.jit
def to(x, like: tl.constexpr, PRECISION: tl.constexpr):
    """x rounded to a dtype. Triton's interpreter truncates to bfloat16, so for it the bits are rounded here."""
    if PRECISION == "widened" and like == tl.bfloat16:
        word = x.to(tl.int32, bitcast=True)
        word = (word + 0x7FFF + ((word >> 16) & 1)) & -65536
        x = word.to(tl.float32, bitcast=True)
    return x.to(like)


@triton.jit
def _mix(x):
    """lowbias32 on 32-bit words, as `core.random.mix_`."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def kept_pairs(dropout, batch, head, qi, kj):
    """The pairs that dropout keeps."""
    word = _mix(tl.load(dropout.seed).to(tl.uint32))
    word = _mix(_mix(word ^ batch) ^ head)
    word = _mix(_mix(word ^ qi.to(tl.uint32)) ^ kj.to(tl.uint32))
    return word.to(tl.int64) >= dropout.threshold


@triton.jit
def product(a, b, qi, kj, batch, head, size, bias, PRECISION: tl.constexpr):
    """a @ b, plus the bias of the tile, if any, which will be scaled with it.

    The bias is the initial value of the sum: if it were added afterwards, Triton's pipeline would copy it to shared
    memory one number at a time.
    """
    if bias.table is None:
        return dot(a, b, PRECISION)
    else:
        row, column = tl.minimum(qi, size.n - 1), tl.minimum(kj, size.m - 1)
        if bias.query is not None:
            row = tl.load(bias.query + batch * bias.query_b + row)
            column = tl.load(bias.key + batch * bias.key_b + column)
        tile = tl.load(bias.table + head * bias.table_h + bias.origin + (row - column))
        return dot_onto(a, b, tile, PRECISION)


@triton.jit
def scores(product, qi, kj, batch, head, size, allowed, FACTOR: tl.constexpr, FREE: tl.constexpr):
    """The scores of a tile, -inf where a pair is not allowed. FREE: all pairs are allowed."""
    score = product * FACTOR
    if not FREE:
        query, key = tl.minimum(qi, size.n - 1), tl.minimum(kj, size.m - 1)
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
        score = tl.where(seen, score, NEGATIVE)
    return score


@triton.jit
def span(start, size, before, after, end, batch, spans, COARSE: tl.constexpr):
    """The start and stop of the keys that `size` queries from `start` on may see, or the reverse."""
    first, stop = 0, end
    if spans.at is not None:
        at = spans.at + batch * spans.at_b + start // COARSE * 2
        first, stop = tl.load(at), tl.load(at + 1)
    if before is not None:
        first = tl.maximum(first, start - before)
    if after is not None:
        stop = tl.minimum(stop, start + size + after)
    return first, stop


@triton.jit
def rows(pointer, numbers, row, count, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix whose row stride is `row`, `[len(numbers), PADDED]`, with zeros outside."""
    columns = tl.arange(0, PADDED)
    inside = numbers[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    return tl.load(pointer + numbers[:, None].to(tl.int64) * row + columns[None, :], mask=inside, other=0.0)


@triton.jit
def write(pointer, x, numbers, row, count, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr):
    """Write what `rows` would read."""
    columns = tl.arange(0, PADDED)
    inside = numbers[:, None] < count
    if PADDED != WIDTH:
        inside = inside & (columns[None, :] < WIDTH)
    where = pointer + numbers[:, None].to(tl.int64) * row + columns[None, :]
    tl.store(where, to(x, pointer.dtype.element_ty, PRECISION), mask=inside)


@triton.jit
def sums_of_rows(upstream, line, qi, n, UNIT: tl.constexpr):
    """The shift of each row, 0 if it sees nothing, and its delta."""
    sums = tl.load(upstream.lse + line * n + qi, mask=qi < n, other=0.0)
    shift = tl.where(sums == NEGATIVE, 0.0, sums * UNIT)
    return shift, tl.load(upstream.delta + line * n + qi, mask=qi < n, other=0.0)
