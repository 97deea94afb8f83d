"""Tiles along rows of cells, in the kernels: where they begin and stop, and coordinates. `grids` explains them.

A loop counts steps, as if all tiles were full: a prefix token is a tile of one token, and has SIZE steps, too.

    tokens       0 | 1 | 2 ... 17 | 18 ...      two prefix tokens, SIZE 16
    steps        0 | 16 | 32 ... 47 | 48 ...
"""

from __future__ import annotations

import triton
import triton.language as tl

from relpos.engines.triton.grids import PLAIN_SIDE

PLAIN = tl.constexpr(PLAIN_SIDE)


@triton.jit
def coordinate(t, SIDE: tl.constexpr):
    """The coordinate of tokens after the prefix, minus that of the first of them."""
    result = t
    if SIDE[1] > 0:
        result += t // SIDE[1] * SIDE[2]
    if SIDE[3] > 0:
        result += t // SIDE[3] * SIDE[4]
    return result


@triton.jit
def as_step(token, SIDE: tl.constexpr, SIZE: tl.constexpr):
    """The step of a token, or a stop of steps; tile i has the SIZE steps from i * SIZE on."""
    if SIDE[0] > 0:
        return tl.minimum(token * SIZE, token + SIDE[0] * (SIZE - 1))
    else:
        return token


@triton.jit
def begin_of(step, SIDE: tl.constexpr, SIZE: tl.constexpr):
    """The first token of the tile that begins at a step."""
    if SIDE[0] > 0:
        return tl.maximum(step // SIZE, step - SIDE[0] * (SIZE - 1))
    else:
        return step


@triton.jit
def stop_of(begin, end, SIDE: tl.constexpr):
    """Where the tokens of a tile stop at the latest: after one of a prefix, or where all do."""
    if SIDE[0] > 0:
        return tl.where(begin < SIDE[0], begin + 1, end)
    else:
        return end
