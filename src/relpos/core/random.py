"""Counter-based dropout: whether pair (b, h, i, j) is kept is a function of the seed and those four numbers.

There is no generator state. So a block of pairs can be drawn alone, in any order, on any device, and again in a
backward, and `reference`, `streaming` and `triton` drop the same pairs. The function is 32-bit integer arithmetic
(multiply, xor, shift): the finaliser lowbias32 (Wellons, "Prospecting for hash functions", 2018), applied once per
coordinate. It runs in int32, whose products wrap around and whose right shift copies the sign.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int32, Integer
from torch import Tensor

_SIGN = -(2**31)


def mix_(x: Int32[Tensor, "*S"], spare: Int32[Tensor, "*S"] | None = None) -> Int32[Tensor, "*S"]:
    """lowbias32 in place: a permutation of the 32-bit words in which every input bit moves every output bit.

    Args:
        spare: memory for intermediate results.
    """
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32), (16, 1)):
        shifted = torch.bitwise_right_shift(x, shift, out=spare)
        x.bitwise_xor_(shifted.bitwise_and_(0xFFFFFFFF >> shift))
        if factor != 1:
            x.mul_(factor)
    return x


def head_words(seed: Integer[Tensor, ""], batch: int, heads: int) -> Int32[Tensor, "B H"]:
    """The word of each head, from the seed, the batch index and the head index."""
    numbers = (torch.arange(count, dtype=torch.int32, device=seed.device) for count in (batch, heads))
    word = mix_(seed.to(torch.int32, copy=True))
    for number in numbers:
        word = mix_(word[..., None] ^ number)
    return word


def is_kept(word: Int32[Tensor, "*S"], dropout: float, out: Tensor | None = None) -> Tensor:
    """Whether a pair's word, as an unsigned number, is at least `dropout * 2**32`. Overwrites the word."""
    return torch.ge(word.bitwise_xor_(_SIGN), int(dropout * 2**32) + _SIGN, out=out)


def kept_pairs(
    seed: Integer[Tensor, ""],
    batch: int,
    heads: int,
    rows: Integer[Tensor, " n"],
    columns: Integer[Tensor, " m"],
    dropout: float,
) -> Bool[Tensor, "B H n m"]:
    """True, with probability 1 - dropout, for each pair of the given rows and columns.

    Args:
        seed: a 32-bit word.
        rows, columns: indices of queries and keys, so that a block can be drawn alone.
    """
    word = head_words(seed, batch, heads)
    for number in (rows, columns):
        word = mix_(word[..., None] ^ number.to(torch.int32))
    return is_kept(word, dropout)
