"""The forward on CPU by PyTorch's own flash kernel, which takes a strip's bias as its mask without copying it.

The kernel reads a mask through its strides, so that the Hankel view of a window (see `strips`) serves: nothing of size
N x M exists, and the kernel's log-sum-exp is what the backward needs. Prefix keys and sinks are merged in afterwards.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias
from relpos.engines.call import Call
from relpos.engines.private import flash_kernel
from relpos.engines.streaming.operands import put, side_by_side, take
from relpos.engines.streaming.strips import Block, Strips, Tile

_ROWS = 512
"""Query rows of one call at least, where that many go together: with fewer, the kernel takes smaller blocks."""
_CAUSAL_ROWS = 256
"""The same under a causal or windowed mask, where a call looks at keys that some of its rows may not see."""


def serves(call: Call) -> bool:
    """Whether the kernel can do the forward of a call that `Strips` serves, in full precision and as fast."""
    mask, width = call.mask, call.q.shape[3]
    fits = (
        x.device.type == "cpu" and x.dtype == torch.float32 and x.shape[3] == width for x in (call.q, call.k, call.v)
    )
    if flash_kernel() is None or not all(fits):
        return False
    for term in call.terms.of(LineBias):
        query, key = term.lines.layout.query, term.lines.layout.key
        if mask is None or query is None or key is None:
            continue
        if math.prod(query.sizes[1:]) != math.prod(key.sizes[1:]):
            return False  # what the mask allows is no part of a window
        if key.prefix > 0 and (mask.left is not None or key.prefix > query.prefix):
            return False  # some row may not see some prefix key
    return mask is None or (mask.is_interval and not mask.may_blank_rows)


def strips(call: Call) -> Strips:
    """The call cut as the kernel wants it: a strip whole, or in stretches under a mask; scores in natural units."""
    rows = call.q.shape[2] if call.mask is None else _CAUSAL_ROWS
    side = Strips(call, rows, call.k.shape[2], unit=1.0)
    side.most_rows = 0  # one strip a block
    return side


def attend(
    side: Strips,
    q: Float[Tensor, "BH N D"],
    k: Float[Tensor, "BH M D"],
    v: Float[Tensor, "BH M V"],
    scale: float,
    out: Float[Tensor, "BH N V"],
    lse: Float[Tensor, "BH N 1"],
) -> None:
    """Write output and natural log-sum-exp of all rows behind the prefix, over all keys behind the prefix."""
    kernel = flash_kernel()
    assert kernel is not None
    every = slice(None)
    k, v = side_by_side(k), side_by_side(v)  # whose last stride the kernel does not ask for
    for blocks, tiles in _groups(side):
        own = take(q, every, torch.cat([block.numbers for block in blocks])).unflatten(1, (len(blocks), -1))
        theirs = (x[:, tiles[0].keys].expand(len(blocks), -1, -1, -1) for x in (k, v))
        result, sums = kernel(
            own.transpose(0, 1), *theirs, 0.0, False, attn_mask=_mask(side, blocks, tiles), scale=scale
        )
        for number, block in enumerate(blocks):
            put(out, every, block.numbers, result[number])
            put(lse, every, block.numbers, sums[number, ..., None])


def _groups(side: Strips) -> list[tuple[list[Block], list[Tile]]]:
    """Blocks of one shape against the same keys, enough for a call."""
    found: list[tuple[list[Block], list[Tile]]] = []
    for block in side.blocks():
        if block.step == 0:
            continue
        (tile,) = (tile for tile in side.tiles(block) if tile.keys.start >= side.key.prefix)
        size = block.rows.stop - block.rows.start
        if found and size * len(found[-1][0]) < _ROWS:
            blocks, tiles = found[-1]
            if tiles[0].keys == tile.keys and blocks[0].rows.stop - blocks[0].rows.start == size:
                blocks.append(block)
                tiles.append(tile)
                continue
        found.append(([block], [tile]))
    return found


def _mask(side: Strips, blocks: list[Block], tiles: list[Tile]) -> Tensor | None:
    """`[blocks, BH, n, m]`, a view of a window a block."""
    every = slice(None)
    parts = [side.bias(block, tile, every) for block, tile in zip(blocks, tiles, strict=True)]
    if all(part is None for part in parts):
        return None
    if len(parts) == 1 and parts[0] is not None:
        return parts[0][None]
    windows = torch.stack([side.window(block, tile, every) for block, tile in zip(blocks, tiles, strict=True)])
    n, m = blocks[0].rows.stop - blocks[0].rows.start, tiles[0].count
    return windows.as_strided(
        (len(parts), windows.shape[1], n, m), (windows.stride(0), windows.stride(1), blocks[0].step, 1)
    )
