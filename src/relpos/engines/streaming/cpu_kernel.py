"""The forward by PyTorch's own flash attention kernel for CPU, which takes a bias as its mask without copying it.

The kernel reads a mask through its strides, so the Hankel view of a window (see `hankel`) will do: nothing of size
N x M exists, and the kernel's log-sum-exp is what the backward needs. Of the pairs, it computes those behind both
prefixes:

                          prefix keys         other keys
    prefix queries        by `Forward`        by `Forward`
    other queries         merged in after     by the kernel
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, LineVectors, Sinks
from relpos.core.private import flash_kernel
from relpos.engines.call import Call
from relpos.engines.streaming import planning
from relpos.engines.streaming.chunks import contiguous_rows
from relpos.engines.streaming.forward import Forward
from relpos.engines.streaming.hankel import HankelPlan
from relpos.engines.streaming.tiles import Block, Tile

_ROWS = 512
"""Query rows of one kernel call at least, where that many go together: with fewer, the kernel takes smaller blocks."""
_CAUSAL_ROWS = 256
"""The same under a causal or windowed mask, where a kernel call looks at keys that some of its rows may not see."""
_EVERY = slice(None)


def supports(call: Call) -> bool:
    """Whether the kernel can do the forward of a call, in full precision and as fast."""
    mask, width = call.mask, call.q.shape[3]
    fits = (
        x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v)
    )
    if flash_kernel() is None or not all(fits) or call.terms.of(LineVectors) or not HankelPlan.supports(call):
        return False
    for term in call.terms.of(LineBias):
        query, key = term.lines.layout.query, term.lines.layout.key
        if mask is None or query is None or key is None:
            continue
        if math.prod(query.sizes[1:]) != math.prod(key.sizes[1:]):
            return False  # what the mask allows is no stretch of a window
        if key.prefix > 0 and (mask.left is not None or key.prefix > query.prefix):
            return False  # some row may not see some prefix key
    return mask is None or (mask.is_interval and not mask.may_blank_rows)


def forward(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output, and the natural log-sum-exp."""
    rows, keys = call.q.shape[2] if call.mask is None else _CAUSAL_ROWS, call.k.shape[2]
    plan = HankelPlan(call, rows, keys, planning.PAIRS, unit=1.0, native=False, whole_columns=True)
    kernel, prefix, prefix_keys, sinks = flash_kernel(), plan.query.prefix, plan.key.prefix, call.terms.one(Sinks)
    assert kernel is not None
    whole_out, whole_lse = call.q.new_empty(*call.q.shape[:3], call.v.shape[3]), call.q.new_empty(call.q.shape[:3])
    if prefix:
        Forward(call, plan.prefix()).write(whole_out, whole_lse)
    q, k, v = (x.detach().flatten(0, 1) for x in (call.q, call.k, call.v))
    if call.groups > 1:
        k, v = k.repeat_interleave(call.groups, dim=0), v.repeat_interleave(call.groups, dim=0)
    k, v = contiguous_rows(k), contiguous_rows(v)  # whose last stride the kernel does not ask for
    out, lse = whole_out.flatten(0, 1), whole_lse.flatten(0, 1)[..., None]
    for blocks, tiles in _groups(plan):
        own = q.index_select(1, torch.cat([block.numbers for block in blocks])).unflatten(1, (len(blocks), -1))
        theirs = (x[:, tiles[0].keys].expand(len(blocks), -1, -1, -1) for x in (k, v))
        mask = _mask(plan, blocks, tiles)
        result, sums = kernel(own.transpose(0, 1), *theirs, 0.0, False, attn_mask=mask, scale=call.scale)
        for number, block in enumerate(blocks):
            out.index_copy_(1, block.numbers, result[number])
            lse.index_copy_(1, block.numbers, sums[number, ..., None])

    out, lse = out[:, prefix:], lse[:, prefix:]
    if prefix_keys:
        score = torch.bmm(q[:, prefix:], k[:, :prefix_keys].mT).mul_(call.scale)
        for block in plan.blocks():
            column = plan.bias(block, Tile(slice(0, prefix_keys)), _EVERY) if block.step else None
            if column is not None:
                score[:, block.numbers - prefix] += column
        _merge(out, lse, score.logsumexp(dim=-1, keepdim=True))
        out += torch.exp(score - lse) @ v[:, :prefix_keys]
    if sinks is not None:
        logits = sinks.logits.detach().to(lse.dtype).expand(call.q.shape[:2])
        _merge(out, lse, logits.reshape(-1, 1, 1))
    return whole_out, whole_lse


def _merge(out: Float[Tensor, "BH n V"], lse: Float[Tensor, "BH n 1"], other: Float[Tensor, "BH _ 1"]) -> None:
    """Take scores whose log-sum-exp is `other` into the softmax; their values are yet to be added."""
    total = torch.logaddexp(lse, other)
    out *= torch.exp(lse - total)
    lse.copy_(total)


def _groups(plan: HankelPlan) -> Iterator[tuple[list[Block], list[Tile]]]:
    """Blocks of one size against the same keys, enough for a kernel call."""
    pairs = [
        (block, tile)
        for block in plan.blocks()
        for tile in block.tiles
        if block.step > 0 and tile.keys.start >= plan.key.prefix
    ]
    for (count, *_), alike in itertools.groupby(pairs, lambda x: (x[0].count, x[1].keys.start, x[1].keys.stop)):
        every, at_once = list(alike), -(-_ROWS // count)
        for start in range(0, len(every), at_once):
            blocks, tiles = zip(*every[start : start + at_once], strict=True)
            yield list(blocks), list(tiles)


def _mask(plan: HankelPlan, blocks: list[Block], tiles: list[Tile]) -> Float[Tensor, "blocks _ n m"] | None:
    """A view of a window for each block."""
    biases = [plan.bias(block, tile, _EVERY) for block, tile in zip(blocks, tiles, strict=True)]
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1 and biases[0] is not None:
        return biases[0][None]
    windows = torch.stack([plan.window(block, tile, _EVERY) for block, tile in zip(blocks, tiles, strict=True)])
    shape = (len(blocks), windows.shape[1], blocks[0].count, tiles[0].count)
    return windows.as_strided(shape, (windows.stride(0), windows.stride(1), blocks[0].step, 1))
