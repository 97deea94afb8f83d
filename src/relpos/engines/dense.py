"""The dense meaning of each term: what it adds to the score of every pair. The engines that are dense share it.

All functions take q and k widened to float32 or float64, k repeated to the query heads, and return something that
broadcasts to `[B, H, N, M]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.core import (
    AxisVectors,
    DenseBias,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    QueryBias,
    Rotation,
    RowRule,
    Terms,
    at_least_float32,
    expand,
    lookup,
    rotate,
    segment_sum,
)


def content(
    terms: Terms, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B G M D"], rotate: Callable[..., Tensor] = rotate
) -> tuple[Float[Tensor, "B H N D"], Float[Tensor, "B G M D"]]:
    """`rotate(q) + u` and `rotate(k)`: what meets in the content product. Grouped keys may stay so where every head
    rotates alike. An engine may bring its own `rotate`."""
    rotation = terms.one(Rotation)
    if rotation is not None:
        magnitude = rotation.magnitude
        own = 1.0 if rotation.query_magnitude is None else rotation.query_magnitude
        q = rotate(q, rotation.query, layout=rotation.layout, magnitude=own * magnitude)
        if rotation.key is not None:
            own = 1.0 if rotation.key_magnitude is None else rotation.key_magnitude
            k = rotate(k, rotation.key, layout=rotation.layout, magnitude=own * magnitude)
    for term in terms.of(QueryBias):
        q = q + term.u[:, None, :].to(q.dtype)
    return q, k


def line_rows(term: LineVectors | None, vectors: Tensor, lines: Lines) -> Int[Tensor, "*B N M"]:
    """The row of `vectors` each pair reads; R, one past the last, stands for a row of zeros."""
    rows = vectors.shape[1]
    entry = lines.index()
    if term is not None and term.index is not None:
        entry = term.index[entry]
    return torch.where((entry < 0) | (entry >= rows), rows, entry)


def with_zero_row(vectors: Float[Tensor, "H R D"], dtype: torch.dtype) -> Float[Tensor, "H R1 D"]:
    """The vectors and, behind them, one of zeros."""
    return torch.nn.functional.pad(vectors.to(dtype), (0, 0, 0, 1))


def _flat_index(rows: Int[Tensor, "*B N M"], count: int) -> Int[Tensor, "*B N M"]:
    """Row numbers that are unique to each query as well: `(b * N + i) * count + row`."""
    lead = torch.arange(rows.shape[:-1].numel(), device=rows.device).view(*rows.shape[:-1], 1)
    return lead * count + rows


def _pick(products: Float[Tensor, "B H N R"], rows: Int[Tensor, "*B N M"]) -> Float[Tensor, "B H N M"]:
    """`out[b, h, i, j] = products[b, h, i, rows[i, j]]`, with an ordered backward."""
    flat = _flat_index(rows, products.shape[-1])
    if rows.dim() == 3:
        table = products.transpose(1, 2).transpose(2, 3).flatten(0, 2)  # [B N R, H]
        return lookup(table, flat).movedim(-1, 1)
    table = products.permute(2, 3, 0, 1).flatten(0, 1)  # [N R, B, H]
    return lookup(table, flat).permute(2, 3, 0, 1)


def meet(
    x: Float[Tensor, "B H N D"], bias: Tensor | None, vectors: Float[Tensor, "#H R D"], rows: Int[Tensor, "*B N M"]
) -> Float[Tensor, "B H N M"]:
    """`<x[i] + bias, vectors[rows[i, j]]>`, never storing N x M x D."""
    if bias is not None:
        x = x + bias[:, None, :].to(x.dtype)
    return _pick(x @ with_zero_row(vectors, x.dtype).mT, rows.expand(x.shape[0], -1, -1) if rows.dim() == 3 else rows)


def line_vectors(
    term: LineVectors, q: Float[Tensor, "B H N D"], k: Float[Tensor, "B H M D"], scale: float
) -> Float[Tensor, "B H N M"]:
    """The score that vectors on the query or key side add."""
    rows = line_rows(term, term.vectors, term.lines)
    if term.side == "query":
        score = meet(q, term.bias, term.vectors, rows)
    else:
        score = meet(k, term.bias, term.vectors, rows.mT).mT
    return score * scale if term.scaled else score


def sum_rows(x: Float[Tensor, "B H N M"], rows: Int[Tensor, "*B N M"], count: int) -> Float[Tensor, "B H N R"]:
    """`out[b, h, i, r] = sum of x[b, h, i, j] where rows[i, j] == r`: the adjoint of reading `rows`."""
    batch, _, n, _ = x.shape
    if rows.dim() == 3:
        rows = rows.expand(batch, -1, -1)
        sums = segment_sum(x.movedim(1, -1), _flat_index(rows, count), batch * n * count)  # [B N R, H]
        return torch.unflatten(sums, 0, (batch, n, count)).movedim(-1, 1)
    sums = segment_sum(x.permute(2, 3, 0, 1), _flat_index(rows, count), n * count)  # [N R, B, H]
    return torch.unflatten(sums, 0, (n, count)).permute(2, 3, 0, 1)


def value_vectors(term: LineVectors, weights: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N V"]:
    """What vectors on the value side add to the output: weights are summed a row of vectors first."""
    rows = line_rows(term, term.vectors, term.lines)
    return sum_rows(weights, rows, term.vectors.shape[1] + 1) @ with_zero_row(term.vectors, weights.dtype)


def row_rule(
    term: RowRule,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    allowed: Bool[Tensor, "#B #H N M"] | None,
) -> Float[Tensor, "#B #H N M"]:
    """The bias of all rows. Of many pairs a block of rows at a time, whose inner numbers are computed again when the
    gradient comes: a rule may hold dozens of them a pair."""
    n, m = q.shape[2], k.shape[2]
    seen = torch.ones(1, 1, n, m, dtype=torch.bool, device=q.device) if allowed is None else allowed
    step = max(1, PAIRS_AT_ONCE // max(1, m))
    if n <= step:
        return term(q, k, seen, slice(0, n))
    blocks = []
    for start in range(0, n, step):
        rows = slice(start, min(start + step, n))
        block = checkpoint(term, q[:, :, rows], k, seen[:, :, rows], rows, use_reentrant=False)
        assert isinstance(block, Tensor)
        blocks.append(block)
    return torch.cat(blocks, dim=2)


PAIRS_AT_ONCE = 2**18
"""Pairs of query and key for which a rule is called at once."""


def bias(
    terms: Terms,
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    scale: float,
    allowed: Bool[Tensor, "#B #H N M"] | None,
) -> Float[Tensor, "#B #H N M"] | None:
    """Everything that is added to the content score, in the order of the terms; None where there is nothing."""
    parts: list[Tensor] = []
    for term in terms:
        match term:
            case LineBias():
                parts.append(expand(term.values, term.lines))
            case LineVectors() if term.side != "value":
                parts.append(line_vectors(term, q, k, scale))
            case AxisVectors():
                for vectors, lines in zip(term.vectors, term.lines, strict=True):
                    parts.append(meet(q, None, vectors, line_rows(None, vectors, lines)))
            case LowRank():
                parts.append(term.query.to(q.dtype) @ term.key.to(q.dtype).mT)
            case DenseBias():
                parts.append(term.bias)
            case RowRule():
                parts.append(row_rule(term, q, k, allowed))
            case _:
                pass
    if not parts:
        return None
    total = reduce(torch.add, map(at_least_float32, parts)).to(q.dtype)
    return total if total.dim() == 4 else total[None]
