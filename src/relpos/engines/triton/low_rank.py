"""Biases of low rank in the kernels: `<query[i], key[j]>`, summed rank by rank in dtype SUM, and their gradients.

The numbers of a term lie rank by rank, `[*B, *H, R, tokens]`, and each rank is a multiplication a pair. Terms are
summed one by one, as the definition does: large numbers of a forget gate cancel within one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from relpos.engines.triton.reads import read


class LowRankSides(NamedTuple):
    """The two sides of a term, with strides of batch, head and rank, followed by as many zeros as a table is; and the
    rank, a constant."""

    query: Any
    query_b: Any
    query_h: Any
    query_r: Any
    key: Any
    key_b: Any
    key_h: Any
    key_r: Any
    rank: Any


@triton.jit
def _queries(qi, batch, head, term):
    """The addresses of the first rank of some queries."""
    return term.query + batch.to(tl.int64) * term.query_b + head.to(tl.int64) * term.query_h + qi


@triton.jit
def _keys(kj, batch, head, term):
    """The addresses of the first rank of some keys."""
    return term.key + batch.to(tl.int64) * term.key_b + head.to(tl.int64) * term.key_h + kj


@triton.jit
def _of_term(qi, kj, batch, head, term):
    of_query, of_key = _queries(qi, batch, head, term), _keys(kj, batch, head, term)
    total = read(of_query) * read(of_key)
    for rank in tl.static_range(1, term.rank):
        total += read(of_query + rank * term.query_r) * read(of_key + rank * term.key_r)
    return total


@triton.jit
def low_rank_of(qi, kj, batch, head, terms):
    """The bias of some pairs, of at least one term."""
    total = _of_term(qi, kj, batch, head, terms[0])
    for number in tl.static_range(1, len(terms)):
        total += _of_term(qi, kj, batch, head, terms[number])
    return total


@triton.jit
def no_sums(targets, terms, SIZE: tl.constexpr, SUM: tl.constexpr):
    """For each term, if it has a target, zeros of SIZE tokens for each rank."""
    found = ()
    for number in tl.static_range(len(terms)):
        of_term = ()
        if targets[number] is not None:
            for _ in tl.static_range(terms[number].rank):
                of_term += (tl.zeros([SIZE], SUM),)
        found += (of_term,)
    return found


@triton.jit
def _with_tile(sums, d_bias, at, apart, RANK: tl.constexpr):
    """The sums of each rank, plus those over a tile's columns, whose numbers are at `at` and `apart` further."""
    found = ()
    for rank in tl.static_range(RANK):
        found += (sums[rank] + tl.sum(d_bias * read(at + rank * apart), axis=1),)
    return found


@triton.jit
def of_queries(sums, d_bias, kj, batch, head, targets, terms):
    """The sums of queries, the rows of a tile, with those of a tile of keys `kj`, from the gradient of its bias."""
    found = ()
    for number in tl.static_range(len(terms)):
        of_term = sums[number]
        if targets[number] is not None:
            at = _keys(kj, batch, head, terms[number])
            of_term = _with_tile(of_term, d_bias, at, terms[number].key_r, terms[number].rank)
        found += (of_term,)
    return found


@triton.jit
def of_keys(sums, d_bias, qi, batch, head, targets, terms):
    """The sums of keys, the rows of a tile, with those of a tile of queries `qi`, from the gradient of its bias."""
    found = ()
    for number in tl.static_range(len(terms)):
        of_term = sums[number]
        if targets[number] is not None:
            at = _queries(qi, batch, head, terms[number])
            of_term = _with_tile(of_term, d_bias, at, terms[number].query_r, terms[number].rank)
        found += (of_term,)
    return found


@triton.jit
def write_sums(targets, sums, tokens, stop, count, batch_head):
    """Write the sums of tokens before `stop` of one head to `[B, H, R, count]` of each term that has a target."""
    for number in tl.static_range(len(sums)):
        if targets[number] is not None:
            for rank in tl.static_range(len(sums[number])):
                at = targets[number] + (batch_head * len(sums[number]) + rank) * count + tokens
                tl.store(at, sums[number][rank], mask=tokens < stop)
