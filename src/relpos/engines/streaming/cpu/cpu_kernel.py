"""The forward by PyTorch's flash attention kernel for CPU, with the bias as its mask.

The kernel reads a mask through its strides, so a Hankel view of a window (see `hankel`) is enough and nothing of size
N x M is stored. The kernel also returns the log-sum-exp that the backward needs. On a grid without a mask the kernel
usually computes all pairs (see `materialized_bias`). Otherwise:

                          prefix keys             other keys
    prefix queries        by `Forward`            by `Forward`
    other queries         merged at the end       by the kernel
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, LineVectors, Sinks
from relpos.core.private import flash_kernel
from relpos.engines.call import Call
from relpos.engines.streaming.cpu import materialized_bias, partial_softmax
from relpos.engines.streaming.cpu.by_products import ByProducts
from relpos.engines.streaming.forward import Forward
from relpos.engines.streaming.plan import planning
from relpos.engines.streaming.plan.chunks import contiguous_rows
from relpos.engines.streaming.plan.hankel import HankelPlan
from relpos.engines.streaming.plan.tiles import Block, Tile

_ROWS = 512
"""Target rows of a kernel call; with fewer, the kernel uses smaller blocks."""
_CAUSAL_ROWS = 256
"""The same under a causal or windowed mask, where more rows compute more forbidden pairs."""
_ALL_HEADS = slice(None)


def supports(call: Call) -> bool:
    """Whether the kernel can compute the forward of a call, in full precision and as fast as `Forward`."""
    mask, width = call.mask, call.q.shape[3]
    fits = (
        x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v)
    )
    if flash_kernel() is None or not all(fits) or call.dropout > 0:
        return False
    if any(term.content is None for term in call.terms.of(LineVectors)):
        return False  # products as wide as those of the kernel, of which `Forward` computes fewer
    if not HankelPlan.supports(call):
        return False
    for term in call.terms.of(LineBias):
        query, key = term.lines.layout.query, term.lines.layout.key
        if query is None or key is None:
            continue
        if math.prod(key.sizes) == 0:
            return False  # all keys are prefix keys
        if mask is None:
            continue
        if math.prod(query.sizes[1:]) != math.prod(key.sizes[1:]):
            return False  # the entries of a window that the mask allows are not consecutive
        if key.prefix > 0 and (mask.left is not None or key.prefix > query.prefix):
            return False  # some row may not see some prefix key
    return mask is None or (mask.is_interval and not mask.may_blank_rows)


def forward(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The output and the natural log-sum-exp."""
    rows, keys = call.q.shape[2] if call.mask is None else _CAUSAL_ROWS, call.k.shape[2]
    if call.terms.of(LineVectors):
        rows, keys = min(rows, _CAUSAL_ROWS), min(keys, planning.WIDTH)  # their products take memory
    materialized = materialized_bias.suits(call)
    make = partial(HankelPlan, call, rows, keys, planning.PAIRS, bfloat16=False)
    plan = make(unit=1.0, whole_columns=True, only_prefix=materialized, apart=True)
    prefix, sinks = plan.query.prefix, call.terms.one(Sinks)
    call_out, call_lse = call.q.new_empty(*call.q.shape[:3], call.v.shape[3]), call.q.new_empty(call.q.shape[:3])
    q, k, v = (x.detach().flatten(0, 1) for x in (call.q, call.k, call.v))
    if call.groups > 1 and not plan.vectors:
        k, v = k.repeat_interleave(call.groups, dim=0), v.repeat_interleave(call.groups, dim=0)
    k, v = contiguous_rows(k), contiguous_rows(v)  # the kernel ignores their last stride
    out, lse = call_out.flatten(0, 1), call_lse.flatten(0, 1)[..., None]
    first_without_sink = 0  # the first row whose result lacks the sink
    if plan.vectors:
        ByProducts(replace(call, k=contiguous_rows(call.k), v=contiguous_rows(call.v)), plan).write(call_out, call_lse)
    elif materialized:
        materialized_bias.attend(plan, q, k, v, call.scale, out, lse)
    else:
        first_without_sink = prefix
        if prefix:
            Forward(call, make(unit=planning.log_base(call.q.dtype), only_prefix=True)).write(call_out, call_lse)
        _by_views(plan, q, k, v, call.scale, out, lse)
    if sinks is not None:
        logits = sinks.rows(lse.dtype).detach().expand(*call.q.shape[:2], -1).flatten(0, 1)[..., None]
        _merge(
            out[:, first_without_sink:],
            lse[:, first_without_sink:],
            logits[:, first_without_sink:] if sinks.of_queries else logits,
        )
    return call_out, call_lse


def _by_views(
    plan: HankelPlan,
    q: Float[Tensor, "BH N D"],
    k: Float[Tensor, "BH M D"],
    v: Float[Tensor, "BH M D"],
    scale: float,
    out: Float[Tensor, "BH N D"],
    lse: Float[Tensor, "BH N 1"],
) -> None:
    """Write the rows after the prefix; the kernel reads their bias through views of windows."""
    prefix, prefix_keys = plan.query.prefix, plan.key.prefix
    forbidding = partial_softmax.forbids(plan.reversed_values)
    for blocks, tiles in _groups(plan):
        block_q = q.index_select(1, torch.cat([block.queries for block in blocks])).unflatten(1, (len(blocks), -1))
        tile_k, tile_v = (x[:, tiles[0].keys].expand(len(blocks), -1, -1, -1) for x in (k, v))
        mask, rows = _mask(plan, blocks, tiles), block_q.transpose(0, 1)
        block_out, block_lse = partial_softmax.attend(rows, tile_k, tile_v, mask, scale, forbidding=forbidding)
        for number, block in enumerate(blocks):
            out.index_copy_(1, block.queries, block_out[number])
            lse.index_copy_(1, block.queries, block_lse[number])

    out, lse = out[:, prefix:], lse[:, prefix:]
    if prefix_keys:
        score = torch.bmm(q[:, prefix:], k[:, :prefix_keys].mT).mul_(scale)
        for block in plan.blocks():
            bias = plan.bias(block, Tile(slice(0, prefix_keys)), _ALL_HEADS) if block.skew else None
            if bias is not None:
                score[:, block.queries - prefix] += bias
        _merge(out, lse, score.logsumexp(dim=-1, keepdim=True))
        out += partial_softmax.share(score, lse) @ v[:, :prefix_keys]


def _merge(out: Float[Tensor, "BH n V"], lse: Float[Tensor, "BH n 1"], other: Float[Tensor, "BH _ 1"]) -> None:
    """Extend the softmax by scores whose log-sum-exp is `other`; the caller adds their values."""
    total = torch.logaddexp(lse, other)
    out *= partial_softmax.share(lse, total)
    lse.copy_(total)


def _groups(plan: HankelPlan) -> Iterator[tuple[list[Block], list[Tile]]]:
    """Blocks of equal size with the same keys, grouped for one kernel call each."""
    pairs = [
        (block, tile)
        for block in plan.blocks()
        for tile in block.tiles
        if block.skew > 0 and tile.keys.start >= plan.key.prefix
    ]
    for (count, *_), group in itertools.groupby(pairs, lambda x: (x[0].count, x[1].keys.start, x[1].keys.stop)):
        matching, most = list(group), -(-_ROWS // count)
        for start in range(0, len(matching), most):
            blocks, tiles = zip(*matching[start : start + most], strict=True)
            yield list(blocks), list(tiles)


def _mask(plan: HankelPlan, blocks: list[Block], tiles: list[Tile]) -> Float[Tensor, "blocks _ n m"] | None:
    """The mask of a kernel call: for each block a view of its window."""
    biases = [plan.bias(block, tile, _ALL_HEADS) for block, tile in zip(blocks, tiles, strict=True)]
    if all(bias is None for bias in biases):
        return None
    if len(biases) == 1 and biases[0] is not None:
        return biases[0][None]
    windows = torch.stack([plan.window(block, tile, _ALL_HEADS) for block, tile in zip(blocks, tiles, strict=True)])
    shape = (len(blocks), windows.shape[1], blocks[0].count, tiles[0].count)
    return windows.as_strided(shape, (windows.stride(0), windows.stride(1), blocks[0].skew, 1))
