"""What the kernels share: loading, scoring and writing a tile.

Scores, and sinks, are multiplied by UNIT: in half precision log2(e), for the hardware's exp2; else 1, which avoids a
rounding. Every kernel computes a tile by `product`. If TESTED, some tiles may hold pairs that are not allowed, or are
outside of the tensors: tiles outside of `free_span` are `tested`. FULL: no row is outside. `qi` and `kj` are the
indices of a tile's queries and keys, one along rows and the other along columns, so that it may be transposed.

Arguments that belong together are named tuples. If a pointer in one is None, its part is left out of the compiled code.
(Triton 3.6 cannot compile a whole tuple that is None, or is compared with None.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import dot, dot_onto, to
from relpos.engines.triton.grid_tiles import PLAIN, as_step, begin_of, coordinate
from relpos.engines.triton.low_rank import low_rank_of
from relpos.engines.triton.reads import read, read_lattice
from relpos.engines.triton.vector_reads import onto_scores

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
    """The gradient of the output with its strides, and `sums`: of each head the shift of every row, the log-sum-exp
    times UNIT or 0 if the row sees nothing, then the delta of every row. There are `count` of each, more than rows, so
    that no tile ends beyond them."""

    at: Any
    at_b: Any
    at_h: Any
    at_n: Any
    sums: Any
    count: Any


class Counts(NamedTuple):
    """The numbers of query heads, of query heads per key head, of queries and of keys."""

    heads: Any
    groups: Any
    n: Any
    m: Any


class Bias(NamedTuple):
    """A line bias: `values` divided by the scale, and the lines of queries and keys, with strides of head and batch.
    And biases of low rank, a tuple of `LowRankSides`, not divided; `inverse` is 1 / scale, a constant.

    Without lines, coordinates are consecutive integers, and `origin` is the entry of the first query and first key. On
    regular lines `first` is that of the first ones after the prefixes, whose own coordinates are `query_prefix` and
    `key_prefix` from there. The table has zeros at both ends (`grids.padding`), so that no index needs a clamp.
    The bias of a query is multiplied by its `factor`, if there are factors.
    """

    table: Any
    table_h: Any
    query: Any
    query_b: Any
    key: Any
    key_b: Any
    origin: Any
    first: Any
    query_prefix: Any
    key_prefix: Any
    factor: Any
    factor_b: Any
    factor_h: Any
    low_rank: Any
    inverse: Any


class Allowed(NamedTuple):
    """The parts of a mask, or None: `left` and `right` around the index, intervals of key order, segments, intervals of
    another order.

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
    query_segments: Any
    query_segments_b: Any
    key_segments: Any
    key_segments_b: Any
    also_low: Any
    also_low_b: Any
    also_high: Any
    also_high_b: Any
    also_order: Any
    also_order_b: Any


class Sink(NamedTuple):
    """The logits of sinks, times UNIT, with strides of batch, head and query."""

    logits: Any
    logits_b: Any
    logits_h: Any
    logits_n: Any


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
    """Queries or keys after their prefix: cells on three axes; the last axis divides `inner` tokens by EDGE."""

    prefix: Any
    inner: Any
    first: Any
    second: Any
    third: Any


@triton.jit
def bias_of(qi, kj, batch, head, size, bias):
    """The bias of any pairs, one load per pair."""
    row, column = tl.minimum(qi, size.n - 1), tl.minimum(kj, size.m - 1)
    if bias.query is not None:
        row = tl.load(bias.query + batch * bias.query_b + row)
        column = tl.load(bias.key + batch * bias.key_b + column)
    return read(bias.table + head.to(tl.int64) * bias.table_h + bias.origin + (row - column))


@triton.jit
def scaled(tile_bias, qi, batch, head, size, bias):
    """A tile of bias, or of its gradient, each query's times its factor, if it has one."""
    if bias.factor is not None:
        row = tl.minimum(qi, size.n - 1)
        tile_bias *= tl.load(bias.factor + batch.to(tl.int64) * bias.factor_b + head * bias.factor_h + row)
    return tile_bias


@triton.jit
def with_low_rank(tile_bias, qi, kj, batch, head, bias):
    """A tile of a line bias plus the biases of low rank, divided by the scale too."""
    if len(bias.low_rank) > 0:
        tile_bias += low_rank_of(qi, kj, batch, head, bias.low_rank) * bias.inverse
    return tile_bias


@triton.jit
def all_biases_of(qi, kj, batch, head, size, bias):
    """What `product` adds for any pairs, without the factors of queries."""
    if bias.table is not None:
        return with_low_rank(bias_of(qi, kj, batch, head, size, bias), qi, kj, batch, head, bias)
    else:
        return low_rank_of(qi, kj, batch, head, bias.low_rank) * bias.inverse


@triton.jit
def sink_of(qi, batch, head, size, sink):
    """The logits of the sinks of some queries."""
    of_head = sink.logits + batch * sink.logits_b + head * sink.logits_h
    return tl.load(of_head + tl.minimum(qi, size.n - 1) * sink.logits_n)


@triton.jit
def bias_at(query, key, head, bias, ALIKE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The address of the bias of the tile from a query and a key on, if tiles are alike."""
    if bias.table is None or not ALIKE:
        return tl.cast(query, tl.int64)
    else:
        of_query, of_key = coordinate(query - QUERIES[0], QUERIES), coordinate(key - KEYS[0], KEYS)
        if QUERIES[0] > 0:
            of_query = tl.where(query < QUERIES[0], bias.query_prefix, of_query)
        if KEYS[0] > 0:
            of_key = tl.where(key < KEYS[0], bias.key_prefix, of_key)
        return bias.table + head.to(tl.int64) * bias.table_h + bias.first + (of_query - of_key)


@triton.jit
def bias_here(at, query, key, head, bias, ALIKE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The same in a loop, which moves the address `at` by a constant; on other lines than consecutive integers it is
    computed anew."""
    if QUERIES == PLAIN and KEYS == PLAIN:
        return at
    else:
        return bias_at(query, key, head, bias, ALIKE, QUERIES, KEYS)


@triton.jit
def product(
    a, b, qi, kj, at, SIGN: tl.constexpr, batch, head, size, bias, chunk, ALIKE: tl.constexpr,
    QUERIES: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """a @ b, plus the biases of the tile, if any, and what its pairs read of vectors, which will be scaled with it.

    `at` comes from `bias_at`; SIGN is 1 if rows are queries, and -1 if they are keys. ALIKE, QUERIES and KEYS: see
    `grids`. The bias is the initial value of the sum: if it were added afterwards, Triton's pipeline would copy it to
    shared memory one number at a time.
    """
    if bias.table is None and len(bias.low_rank) == 0 and chunk.first_head is None:
        return dot(a, b, PRECISION)
    else:
        if bias.table is None and len(bias.low_rank) == 0:
            added = tl.zeros([a.shape[0], b.shape[1]], tl.float64 if a.dtype == tl.float64 else tl.float32)
        elif bias.table is None or not ALIKE:
            added = all_biases_of(qi, kj, batch, head, size, bias)
        elif SIGN == 1:
            added = read_lattice(at, a.shape[0], b.shape[1], 1, QUERIES, KEYS)
            added = with_low_rank(added, qi, kj, batch, head, bias)
        else:
            added = read_lattice(at, a.shape[0], b.shape[1], -1, KEYS, QUERIES)
            added = with_low_rank(added, qi, kj, batch, head, bias)
        if chunk.first_head is not None:
            added = onto_scores(added, qi, kj, batch, head, size, chunk)
        return dot_onto(a, b, scaled(added, qi, batch, head, size, bias), PRECISION)


@triton.jit
def unscaled(like, qi, kj, batch, head, size, bias, chunk):
    """What `product` adds to a tile, before it is scaled."""
    if bias.table is None and len(bias.low_rank) == 0:
        added = like * 0
    else:
        added = all_biases_of(qi, kj, batch, head, size, bias)
    if chunk.first_head is not None:
        added = onto_scores(added, qi, kj, batch, head, size, chunk)
    return added


@triton.jit
def tested(raw, qi, kj, query_stop, key_stop, batch, size, allowed, SCALE: tl.constexpr):
    """The product, changed so that scores are -inf from the stops on and for pairs that are not allowed."""
    query, key = tl.minimum(qi, size.n - 1), tl.minimum(kj, size.m - 1)
    inside = (kj < key_stop) & (qi < query_stop)
    if allowed.left is not None:
        inside = inside & (kj >= qi - allowed.left)
    if allowed.right is not None:
        inside = inside & (kj <= qi + allowed.right)
    if allowed.low is not None or allowed.high is not None:
        order = key
        if allowed.order is not None:
            order = tl.load(allowed.order + batch * allowed.order_b + key)
        if allowed.low is not None:
            inside = inside & (order >= tl.load(allowed.low + batch * allowed.low_b + query))
        if allowed.high is not None:
            inside = inside & (order <= tl.load(allowed.high + batch * allowed.high_b + query))
    if allowed.also_low is not None or allowed.also_high is not None:
        order = key
        if allowed.also_order is not None:
            order = tl.load(allowed.also_order + batch * allowed.also_order_b + key)
        if allowed.also_low is not None:
            inside = inside & (order >= tl.load(allowed.also_low + batch * allowed.also_low_b + query))
        if allowed.also_high is not None:
            inside = inside & (order <= tl.load(allowed.also_high + batch * allowed.also_high_b + query))
    if allowed.query_segments is not None:
        query_segment = tl.load(allowed.query_segments + batch * allowed.query_segments_b + query)
        key_segment = tl.load(allowed.key_segments + batch * allowed.key_segments_b + key)
        inside = inside & (query_segment == key_segment) & (query_segment >= 0)
    return tl.where(inside, raw, NEGATIVE if SCALE > 0 else -NEGATIVE)


@triton.jit
def of_program(count, SIZE: tl.constexpr, chunk, SIDE: tl.constexpr, BACKWARDS: tl.constexpr = False):
    """The first token and the head of this program, from the first grid axis (others hold 65,535 programs at most).

    BACKWARDS: programs of the last tokens start first, because they have the most work.
    """
    if chunk.first_head is not None:
        count = chunk.rows
    tiles = tl.cdiv(as_step(count, SIDE, SIZE), SIZE)
    tile, number = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if BACKWARDS:
        tile = tiles - 1 - tile
    start = begin_of(tile * SIZE, SIDE, SIZE)
    if chunk.first_head is not None:
        start, number = start + chunk.first_row, number + chunk.first_head
    return start, number


@triton.jit
def span(start, size, before, after, own_end, end, batch, spans, COARSE: tl.constexpr, SIDE: tl.constexpr):
    """The start and stop of the keys that `size` queries from `start` on may see, or the reverse. SIDE: of these."""
    first, stop = 0, end
    if spans.at is not None:
        at = spans.at + batch * spans.at_b + start // COARSE * 2
        first, stop = tl.load(at), tl.load(at + 1)
        if SIDE[0] > 0:  # a tile after a prefix may be in two blocks
            at = spans.at + batch * spans.at_b + (tl.minimum(start + size, own_end) - 1) // COARSE * 2
            first, stop = tl.minimum(first, tl.load(at)), tl.maximum(stop, tl.load(at + 1))
    if before is not None:
        first = tl.maximum(first, start - before)
    if after is not None:
        stop = tl.minimum(stop, start + size + after)
    return first, stop


@triton.jit
def free_span(start, before, after, end, allowed, SIZE: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr):
    """From where on and up to where full tiles of STEP keys begin that all SIZE queries may see; none if the mask has
    tensors. SIDE: of the keys."""
    low, high = SIDE[0], end - STEP + 1
    if allowed.low is not None or allowed.high is not None or allowed.query_segments is not None:
        high = 0
    if allowed.also_low is not None or allowed.also_high is not None:
        high = 0
    if before is not None:
        low = tl.maximum(low, start + SIZE - 1 - before)
    if after is not None:
        high = tl.minimum(high, start + after + 2 - STEP)
    return low, high


@triton.jit
def _offsets(start, stop, row, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """The offset of a tile in a matrix, 32-bit offsets of its numbers from there, and which of them are inside."""
    numbers, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, PADDED)[None, :]
    inside = start + numbers < stop
    if PADDED != WIDTH:
        inside = inside & (columns < WIDTH)
    return tl.cast(start, tl.int64) * row, numbers * row + columns, inside


@triton.jit
def rows(
    pointer, start, stop, row, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, FULL: tl.constexpr = False
):
    """SIZE rows of a matrix with row stride `row`, `[SIZE, PADDED]`; zeros from `stop` on. FULL: none are there."""
    begin, at, inside = _offsets(start, stop, row, SIZE, WIDTH, PADDED)
    if FULL and PADDED == WIDTH:
        return tl.load(pointer + begin + at)
    else:
        return tl.load(pointer + begin + at, mask=inside, other=0.0)


@triton.jit
def write(
    pointer, x, start, stop, row, SIZE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, PRECISION: tl.constexpr
):
    """Write what `rows` would read."""
    begin, at, inside = _offsets(start, stop, row, SIZE, WIDTH, PADDED)
    tl.store(pointer + begin + at, to(x, pointer.dtype.element_ty, PRECISION), mask=inside)


@triton.jit
def sums_of_rows(up, line, start, SIZE: tl.constexpr):
    """The shift and the delta of each row."""
    at = up.sums + line * 2 * up.count + start + tl.arange(0, SIZE)
    return tl.load(at), tl.load(at + up.count)
