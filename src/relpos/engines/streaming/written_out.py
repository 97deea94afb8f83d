"""The forward by PyTorch's flash kernel where its mask is written out, for some heads and rows at a time.

On a grid the rows that one view serves are a column's, so few that the kernel takes small blocks of them. Numbers for
every pair let it take its largest, and the prefix is attended to with the rest. With the queries of a grid from the
last to the first they are one strided view of the reversed values (see `hankel`), which is copied:

    bias[r, c, a, b] = reversed[start + (r + a) * stride of rows + (c + b) * stride of columns]
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias
from relpos.core.line import Ramp
from relpos.core.private import flash_kernel
from relpos.engines.call import Call
from relpos.engines.streaming.chunks import contiguous_rows
from relpos.engines.streaming.hankel import HankelPlan

_ROWS = 1024
"""The rows of a kernel call; from 768 on the kernel takes blocks of 256."""
_PAIRS, _MOST_PAIRS = 2**22, 2**24
"""The pairs of a kernel call, 16 MiB of mask; and the most, where so many threads want heads of their own, or the rows
of a grid are so long."""


def suits(call: Call) -> bool:
    """Whether a call is for a grid without a mask, of which enough rows can be written out at once. It is one that
    `HankelPlan` supports."""
    bias = call.terms.one(LineBias)
    if bias is None or call.mask is not None:
        return False
    query, key = bias.lines.layout.query, bias.lines.layout.key
    assert query is not None
    assert key is not None
    cells = min(math.prod(query.sizes), math.prod(key.sizes))
    return len(query.sizes) > 1 and cells > 0 and _cut(query, call.k.shape[2])[1] <= _MOST_PAIRS


def _cut(query: Ramp, keys: int) -> tuple[range, int]:
    """Where the rows of a kernel call start, counted from the last query, and the most pairs of one head."""
    cells = math.prod(query.sizes)
    n, (length, *_) = query.prefix + cells, query.sizes
    step = -(-length // max(1, round(n / _ROWS))) * (cells // length)
    starts = range(0, cells, step)
    return starts, max(step, n - starts[-1]) * keys


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
    kernel, (count, n, _) = flash_kernel(), q.shape
    assert kernel is not None
    starts, pairs = _cut(plan.query, plan.keys)
    threads = torch.get_num_threads()
    at_once = max(1, min(count, max(_PAIRS, min(_MOST_PAIRS, threads // 2 * pairs)) // pairs))
    at_once -= at_once % threads if at_once > threads else 0  # the kernel's threads share blocks of rows of all heads
    backwards, mask = contiguous_rows(q.flip(1)), q.new_empty(at_once * pairs)
    for first in range(0, count, at_once):
        heads = slice(first, min(first + at_once, count))
        for start, stop in zip(starts, [*starts[1:], n], strict=True):
            shape = (heads.stop - first, stop - start, plan.keys)
            bias = mask[: math.prod(shape)].view(shape)
            _write(plan, bias, start, heads)
            part_q = backwards[heads, start:stop]
            part_out, part_lse = kernel(
                *(x[None] for x in (part_q, k[heads], v[heads])), 0.0, False, attn_mask=bias[None], scale=scale
            )
            out[heads, n - stop : n - start] = part_out[0].flip(1)
            lse[heads, n - stop : n - start, 0] = part_lse[0].flip(1)


def _write(plan: HankelPlan, bias: Float[Tensor, "g n M"], start: int, heads: slice) -> None:
    """Write the bias of some heads and rows, from row `start` on, counted from the last query."""
    assert plan.reversed_values is not None
    assert plan.line_bias is not None
    values, query, key, lines = plan.reversed_values[heads], plan.query, plan.key, plan.line_bias.lines
    n = bias.shape[1]
    regular = min(n, plan.queries - query.prefix - start)
    rows = slice(start // plan.query_columns, (start + regular) // plan.query_columns)
    into = bias[:, :regular].unflatten(1, (-1, *query.sizes[1:]))

    def pairs(key_start: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        """What these rows read for keys that begin at a coordinate."""
        first = lines.length - 1 - (query.start + query.extent - key_start + lines.origin)
        shape, steps = (len(values), *query.sizes, *sizes), (values.stride(0), *query.strides, *strides)
        return values.as_strided(shape, steps, values.storage_offset() + first)[:, rows]

    into[..., key.prefix :].unflatten(-1, key.sizes).copy_(pairs(key.start, key.sizes, key.strides))
    if key.prefix:
        into[..., : key.prefix] = pairs(-(lines.layout.tokens + 1), (1,), (0,))  # the one coordinate of all of them
    if regular < n:
        block = plan.blocks()[0]
        for tile in block.tiles:
            found = plan.bias(block, tile, heads)
            assert found is not None
            bias[:, regular:, tile.keys] = found
