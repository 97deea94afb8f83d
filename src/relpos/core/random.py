"""Dropout by counter: whether pair (b, h, i, j) is kept is a function of the seed and those four numbers.

No generator state, so a block of pairs can be drawn alone, in any order, on any device, and again in a backward, and
`reference`, `streaming` and `triton` drop the same pairs. The function is 32-bit integer arithmetic (multiply, xor,
shift), the finaliser known as lowbias32 (Wellons, "Prospecting for hash functions", 2018), applied once for each of the
coordinates; here in int64, kept below 2^32.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

_WORD = 0xFFFFFFFF


def _multiply(x: Tensor, factor: int) -> Tensor:
    """`x * factor mod 2^32` without leaving int64: the factor in two halves."""
    low, high = factor & 0xFFFF, factor >> 16
    return (x * low + (((x * high) & 0xFFFF) << 16)) & _WORD


def mix(x: Int[Tensor, "*S"]) -> Int[Tensor, "*S"]:
    """lowbias32: a permutation of the 32-bit words in which every input bit moves every output bit."""
    x = x ^ (x >> 16)
    x = _multiply(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = _multiply(x, 0x846CA68B)
    return x ^ (x >> 16)


def keep(
    seed: Int[Tensor, ""], batch: int, heads: int, rows: Int[Tensor, " n"], columns: Int[Tensor, " m"], dropout: float
) -> Bool[Tensor, "B H n m"]:
    """True, with probability 1 - dropout, for each pair of the given rows and columns.

    Args:
        seed: a 32-bit word.
        rows, columns: indices of queries and keys, so that a block can be drawn alone.
    """
    word = mix(seed & _WORD)
    word = mix(word ^ torch.arange(batch, device=rows.device)[:, None, None, None])
    word = mix(word ^ torch.arange(heads, device=rows.device)[:, None, None])
    word = mix(word ^ rows[:, None])
    word = mix(word ^ columns)
    return word >= int(dropout * 2**32)
