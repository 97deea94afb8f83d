"""The forward by PyTorch's flash kernel with the bias materialized, for some heads, rows and keys at a time.

On a grid, one view serves only the rows of one column, so few that the kernel uses small blocks. A mask with a number
for every pair lets it use its largest. About a million numbers are written at a time, since a larger mask would not
stay in the cache. Results for some of the keys are merged by the log-sum-exp. If the queries of a grid run from the
last to the first, the mask is a copy of one strided view of the reversed values (see `hankel`):

    bias[r, c, a, b] = reversed[start + (r + a) * stride of rows + (c + b) * stride of columns]

The rows of a prefix take a separate kernel call: after the others they would be one more block, which the kernel's
threads could not share evenly.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias
from relpos.core.line import Ramp
from relpos.engines.call import Call
from relpos.engines.streaming.cpu import partial_softmax
from relpos.engines.streaming.plan.chunks import contiguous_rows
from relpos.engines.streaming.plan.hankel import HankelPlan

_ROWS = 1024
"""Target rows of a kernel call; from 768 on, the kernel uses blocks of 256."""
_BLOCKS = ((768, 256), (192, 64), (0, 32))
"""Pairs (minimum rows of a call, rows of the kernel's blocks)."""
_PAIRS, _MOST_PAIRS = 2**20, 2**24
"""Target pairs of a kernel call, 4 MiB of mask; and the maximum, for many threads with heads of their own, or for long
grid rows."""


def suits(call: Call) -> bool:
    """Whether a call that `HankelPlan` supports is on a grid without a mask, and one head's pairs in a kernel call are
    at most `_MOST_PAIRS`."""
    bias = call.terms.one(LineBias)
    if bias is None or call.mask is not None:
        return False
    query, key = bias.lines.layout.query, bias.lines.layout.key
    assert query is not None
    assert key is not None
    cells = min(math.prod(query.sizes), math.prod(key.sizes))
    return len(query.sizes) > 1 and cells > 0 and _pairs(query, key) <= _MOST_PAIRS


def _pieces(ramp: Ramp, tokens: int) -> list[tuple[int, int]]:
    """Cut a grid's first axis into equal ranges of about `tokens` tokens."""
    rows = ramp.sizes[0]
    step = -(-rows // max(1, round(math.prod(ramp.sizes) / tokens)))
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _cut(query: Ramp, key: Ramp) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The ranges of grid rows that kernel calls cover, of queries and of keys."""
    rows = _pieces(query, _ROWS)
    at_once = rows[0][1] * math.prod(query.sizes[1:])
    return rows, _pieces(key, max(1, _PAIRS // at_once))


def _pairs(query: Ramp, key: Ramp) -> int:
    """The maximum pairs of one head in a kernel call."""
    (_, queries), (_, keys) = (pieces[0] for pieces in _cut(query, key))
    cells = queries * math.prod(query.sizes[1:])
    return cells * (key.prefix + keys * math.prod(key.sizes[1:]))


def _heads_at_once(count: int, rows: int, pairs: int) -> int:
    """The number of heads in a kernel call for which its threads share all blocks of rows evenly."""
    threads = torch.get_num_threads()
    blocks = -(-rows // next(size for least, size in _BLOCKS if rows >= least))
    even = threads // math.gcd(threads, blocks)
    return max(1, min(count, even * max(1, _PAIRS // (even * pairs)), _MOST_PAIRS // pairs))


def attend(
    plan: HankelPlan,
    q: Float[Tensor, "BH N D"],
    k: Float[Tensor, "BH M D"],
    v: Float[Tensor, "BH M D"],
    scale: float,
    out: Float[Tensor, "BH N D"],
    lse: Float[Tensor, "BH N 1"],
) -> None:
    """Write all rows."""
    forbidding = partial_softmax.forbids(plan.reversed_values)

    def of_keys(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of some rows over some keys."""
        part_out, part_lse = partial_softmax.attend(q[None], k[None], v[None], bias[None], scale, forbidding=forbidding)
        return part_out[0], part_lse[0]

    count, prefix, columns = len(q), plan.query.prefix, plan.query_columns
    if prefix:
        prefix_q, bias = _prefix(plan, q)
        part_out, part_lse = of_keys(prefix_q, k, v, bias)
        out[:, :prefix], lse[:, :prefix] = part_out[:, :prefix], part_lse[:, :prefix]
    rows, pieces = _cut(plan.query, plan.key)
    pairs = _pairs(plan.query, plan.key)
    at_once = _heads_at_once(count, rows[0][1] * columns, pairs)
    backwards, mask = contiguous_rows(q[:, prefix:].flip(1)), q.new_empty(at_once * pairs)
    for first in range(0, count, at_once):
        heads = slice(first, min(first + at_once, count))
        for start, stop in rows:
            part_q, found = backwards[heads, start * columns : stop * columns], []
            for piece in pieces:
                keys = _keys(plan, piece)
                shape = (*part_q.shape[:2], keys.stop - keys.start)
                bias = mask[: math.prod(shape)].view(shape)
                _write(plan, bias, (start, stop), piece, heads)
                found.append(of_keys(part_q, k[heads, keys], v[heads, keys], bias))
            part_out, part_lse = _together(found)
            behind = slice(out.shape[1] - stop * columns, out.shape[1] - start * columns)
            out[heads, behind], lse[heads, behind] = part_out.flip(1), part_lse.flip(1)


def _prefix(plan: HankelPlan, q: Float[Tensor, "BH N D"]) -> tuple[Float[Tensor, "BH p D"], Float[Tensor, "BH p M"]]:
    """The queries of the prefix, and their common bias. Zeros pad the queries to a multiple of 16; otherwise the
    kernel's last digits depend on which of its threads computes them."""
    block = plan.blocks()[0]
    rows = contiguous_rows(F.pad(q[:, : block.count], (0, 0, 0, -block.count % 16)))
    row = q.new_empty(len(q), 1, plan.keys)
    for tile in block.tiles:
        bias = plan.bias(block, tile, slice(0, len(q)))
        assert bias is not None
        row[..., tile.keys] = bias[:, :1]
    return rows, row.expand(-1, rows.shape[1], -1)


def _together(found: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp over all keys, merged from those over some."""
    if len(found) == 1:
        return found[0]
    outs, lses = zip(*found, strict=True)
    out = torch.zeros_like(outs[0])
    lse = torch.empty_like(lses[0])
    for head in range(len(out)):  # separately, so that results do not depend on the number of heads
        every = torch.stack([part[head] for part in lses])
        torch.logsumexp(every, dim=0, out=lse[head])
        for part, weight in zip(outs, partial_softmax.share(every, lse[head]), strict=True):
            out[head].addcmul_(part[head], weight)
    return out, lse


def _keys(plan: HankelPlan, piece: tuple[int, int]) -> slice:
    """The keys of some grid rows; the first rows include the prefix."""
    start, stop = (plan.key.prefix + row * plan.key_columns for row in piece)
    return slice(start if piece[0] else 0, stop)


def _write(
    plan: HankelPlan, bias: Float[Tensor, "g n m"], rows: tuple[int, int], piece: tuple[int, int], heads: slice
) -> None:
    """Write the bias of some heads, query rows (counted from the last) and key rows."""
    assert plan.reversed_values is not None
    assert plan.line_bias is not None
    values, query, key, lines = plan.reversed_values[heads], plan.query, plan.key, plan.line_bias.lines
    into = bias.unflatten(1, (-1, *query.sizes[1:]))

    def read(key_start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """The values that these rows read for keys from a coordinate on."""
        first = lines.length - 1 - (query.start + query.extent - key_start + lines.origin)
        first += rows[0] * query.strides[0]
        shape = (len(values), rows[1] - rows[0], *query.sizes[1:], *sizes)
        return values.as_strided(shape, (values.stride(0), *query.strides, *strides), values.storage_offset() + first)

    sizes, prefix = (piece[1] - piece[0], *key.sizes[1:]), 0 if piece[0] else key.prefix
    of_tokens = read(key.start + piece[0] * key.strides[0], sizes, key.strides)
    into[..., prefix:].unflatten(-1, sizes).copy_(of_tokens)
    if prefix:
        into[..., :prefix] = read(-(lines.layout.tokens + 1), (1,), (0,))  # prefix keys share one coordinate
