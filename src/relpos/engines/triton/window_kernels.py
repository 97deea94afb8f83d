"""The backward of windows, each of which is one tile: all gradients by one kernel, which reads each number once.

A program holds the bias of its head and the sum of its gradient, and walks over a part of the batch:

    program     head 0            head 0             ...   head 1
    windows     0 1 2 ... s - 1   s ... 2 s - 1            0 1 2 ... s - 1
    it writes   gradients of q, k and v of each window; at the end the sum of the gradients of scores

The delta of a row is <output, its gradient>, as in `backward_rows`. The sum of weight * d_weight would be the same only
if the output were this call's: it may be that of several, put together by their log-sum-exps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.arithmetic import dot, dot_onto, exp, to
from relpos.engines.triton.dropout import kept_pairs
from relpos.engines.triton.tiles import NEGATIVE, bias_of, rows, tested, write


@triton.jit
def backward_windows(
    d_q, d_k, d_v, partial, out, up, up_b, up_h, up_n, lse, d_lse, qkv, size, bias, allowed, dropout, batches, share,
    D: tl.constexpr, V: tl.constexpr, D_PAD: tl.constexpr, V_PAD: tl.constexpr, EDGE: tl.constexpr,
    FULL: tl.constexpr, TESTED: tl.constexpr, PRECISION: tl.constexpr, SCALE: tl.constexpr, UNIT: tl.constexpr,
    SUM: tl.constexpr,
):  # fmt: skip
    """The gradients of `share` windows of one head, and in `partial` the sum of those of their scores.

    EDGE is at least the number of queries, and of keys. FULL: it is both.
    """
    head, part = tl.program_id(0), tl.program_id(1)
    head64 = head.to(tl.int64)
    tokens = tl.arange(0, EDGE)
    qi, kj = tokens[:, None], tokens[None, :]
    tile_bias = bias_of(qi, kj, 0, head, size, bias)  # the batch shares the lines
    summed = tl.zeros([EDGE, EDGE], SUM)
    first = part * share
    for step in range(tl.minimum(share, batches - first)):
        batch = first + step
        batch64 = batch.to(tl.int64)
        batch_head = batch64 * size.heads + head64
        query = rows(qkv.q + batch64 * qkv.q_b + head64 * qkv.q_h, 0, size.n, qkv.q_n, EDGE, D, D_PAD, FULL)
        key = rows(qkv.k + batch64 * qkv.k_b + head64 * qkv.k_h, 0, size.m, qkv.k_n, EDGE, D, D_PAD, FULL)
        value = rows(qkv.v + batch64 * qkv.v_b + head64 * qkv.v_h, 0, size.m, qkv.v_n, EDGE, V, V_PAD, FULL)
        upstream = rows(up + batch64 * up_b + head64 * up_h, 0, size.n, up_n, EDGE, V, V_PAD, FULL)
        sums = tl.load(lse + batch_head * size.n + tokens, mask=tokens < size.n, other=0.0)
        shift = tl.where(sums == NEGATIVE, 0.0, sums * UNIT)
        raw = dot_onto(query, tl.trans(key), tile_bias, PRECISION)
        if TESTED:
            raw = tested(raw, qi, kj, size.n, size.m, batch, size, allowed, SCALE)
        weight = exp(raw * (SCALE * UNIT) - shift[:, None], UNIT)
        used = weight
        if dropout.seed is not None:
            kept = kept_pairs(dropout, batch, head, qi, kj)
            used = tl.where(kept, weight * tl.load(dropout.factor), 0.0)
        d_value = dot(tl.trans(to(used, upstream.dtype, PRECISION)), upstream, PRECISION)
        write(d_v + batch_head * size.m * V, d_value, 0, size.m, V, EDGE, V, V_PAD, PRECISION)
        d_weight = dot(upstream, tl.trans(value), PRECISION)
        if dropout.seed is not None:
            d_weight = tl.where(kept, d_weight * tl.load(dropout.factor), 0.0)
        output = rows(out + batch_head * size.n * V, 0, size.n, V, EDGE, V, V_PAD, FULL)
        row_delta = tl.sum(upstream.to(SUM) * output.to(SUM), axis=1)
        if d_lse is not None:
            row_delta -= tl.load(d_lse + batch_head * size.n + tokens, mask=tokens < size.n, other=0.0)
        d_score = weight * (d_weight - row_delta[:, None])
        summed += d_score
        rounded = to(d_score, query.dtype, PRECISION)
        d_key = dot(tl.trans(rounded), query, PRECISION)
        write(d_k + batch_head * size.m * D, d_key * SCALE, 0, size.m, D, EDGE, D, D_PAD, PRECISION)
        d_query = dot(rounded, key, PRECISION)
        write(d_q + batch_head * size.n * D, d_query * SCALE, 0, size.n, D, EDGE, D, D_PAD, PRECISION)
    at = partial + (part * size.heads + head).to(tl.int64) * size.n * size.m
    tl.store(at + qi * size.m + kj, summed, mask=(qi < size.n) & (kj < size.m))
