"""A model's attention by name: which pairs of tokens attend, and with which kind of attention.

full        every pair, or every pair that is not in the future
local       a window: on a grid the rows above and below, in a sequence the last 32 tokens (Beltagy et al. 2020)
sparse      the fixed pattern of the Sparse Transformer (Child et al. 2019): a block of tokens, and the last token of
            every block; 32 tokens in a sequence, in a grid's raster order the root of their number
linear      every pair, without a softmax (Katharopoulos et al. 2020)
flash       every pair, in the tiles of FlashAttention's paper (Dao et al. 2022), in plain PyTorch
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from relpos.core import Coordinates, Grid, Mask
from relpos.layers.attention import AttentionKind
from relpos.patterns import fixed, local

AttentionChoice = Literal["full", "local", "sparse", "linear", "flash"]
ATTENTIONS: tuple[AttentionChoice, ...] = get_args(AttentionChoice)
WINDOW, BLOCK = 32, 32
"""Tokens in a window and in a sparse block of a sequence; a block must not change as a text grows."""


def kind_of(attention: AttentionChoice) -> AttentionKind:
    """The kind of attention of a model's layers."""
    return attention if attention in ("linear", "flash") else "softmax"


def pattern(attention: AttentionChoice, tokens: Coordinates) -> Mask | None:
    """Which pairs attend, on a grid without prefix tokens or in a causal sequence; None if all do as in full
    attention."""
    if attention not in ("local", "sparse"):
        return None
    if isinstance(tokens, Grid):
        if attention == "sparse":
            return fixed(tokens.count, max(1, round(math.sqrt(tokens.count))))
        return local(2 * (tokens.sizes[-1] + 1) + 1)
    if attention == "local":
        return local(WINDOW, causal=True)
    return fixed(tokens.count, BLOCK, causal=True)
