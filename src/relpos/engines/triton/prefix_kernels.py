"""The gradient of a line bias from pairs with a prefix, by a kernel of its own.

All tokens of a prefix have one coordinate. So the pairs of a query prefix read one entry per key, and those of a key
prefix one entry per query:

                   keys
                   P  P  t  t  t ...
    queries   P    a  a  b  c  d ...       sums of columns: of the query prefix
              t    e  e
              t    f  f                    sums of rows: of the key prefix
              ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.table_kernels import d_scores
from relpos.engines.triton.tiles import bias_of


@triton.jit
def backward_prefix(
    partial, up, qkv, size, bias, allowed, dropout, batches, share, query_prefix, key_prefix,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr,
    EDGE: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr, SUM: tl.constexpr,
):  # fmt: skip
    """The gradient of the bias between a prefix and EDGE tokens of one head, summed over the prefix and, in order, over
    `share` elements of the batch: first of all keys with a query prefix, then of all queries with a key prefix.
    """
    number, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tiles_of_keys = tl.where(query_prefix > 0, tl.cdiv(size.m, EDGE), 0)
    of_keys = number < tiles_of_keys
    at = tl.where(of_keys, number, number - tiles_of_keys) * EDGE
    query_at, key_at = tl.where(of_keys, 0, at), tl.where(of_keys, at, 0)
    query_stop, key_stop = tl.where(of_keys, query_prefix, size.n), tl.where(of_keys, size.m, key_prefix)
    tokens = tl.arange(0, EDGE)
    # tiles that are further in the prefix have the same bias; its other rows or columns are masked
    query, key = tl.where(of_keys, tokens * 0, at + tokens), tl.where(of_keys, at + tokens, tokens * 0)
    tile_bias = bias_of(query[:, None], key[None, :], 0, head, size, bias)  # the batch shares the lines
    tiles_of_prefix = tl.cdiv(tl.where(of_keys, query_prefix, key_prefix), EDGE)
    summed = tl.zeros([EDGE, EDGE], SUM)
    first = part * share
    for step in range(tl.minimum(share, batches - first) * tiles_of_prefix):
        batch = tl.minimum(first + step // tiles_of_prefix, batches - 1)  # as `d_scores` asks
        ahead = step % tiles_of_prefix * EDGE
        summed += d_scores(
            tile_bias, up, qkv, size, bias, allowed, dropout, batch, head, query_at + tl.where(of_keys, ahead, 0),
            query_stop, key_at + tl.where(of_keys, 0, ahead), key_stop, False, D, V, D_PAD, V_PAD, EDGE, False,
            PRECISION, SCALE, UNIT,
        )  # fmt: skip
    into = partial + (part * size.heads + head).to(tl.int64) * (size.n + size.m) + at + tokens
    tl.store(into, tl.sum(summed, axis=0), mask=at + tokens < tl.where(of_keys, size.m, 0))
    tl.store(into + size.m, tl.sum(summed, axis=1), mask=at + tokens < tl.where(of_keys, 0, size.n))
