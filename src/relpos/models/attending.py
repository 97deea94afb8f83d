"""What attention is in a model, by name: which pairs of tokens meet, and how.

full        every pair, or every pair that is not in the future
local       a window: on a grid the rows above and below, in a sequence the last 32 tokens (Beltagy et al. 2020)
sparse      on a grid in raster order the fixed pattern of the Sparse Transformer (Child et al. 2019), in a sequence
            BigBird's blocks (Zaheer et al. 2020), of 32 tokens: a band, the first for all, and a random one a head
linear      every pair, without a softmax (Katharopoulos et al. 2020)
flash       every pair, in the tiles of FlashAttention's paper (Dao et al. 2022), in plain PyTorch
"""

from __future__ import annotations

import math
from typing import Literal, get_args

from relpos.core import Coordinates, Grid, Mask
from relpos.layers.products import Product
from relpos.patterns import big_bird, fixed, local

AttentionChoice = Literal["full", "local", "sparse", "linear", "flash"]
ATTENTIONS: tuple[AttentionChoice, ...] = get_args(AttentionChoice)
WINDOW, BLOCK = 32, 32
"""Tokens that a token of a sequence sees locally; tokens of a sparse block."""


def product_of(attention: AttentionChoice) -> Product:
    """How the pairs meet."""
    return "linear" if attention == "linear" else "tiles" if attention == "flash" else "softmax"


def pattern(attention: AttentionChoice, tokens: Coordinates, num_heads: int) -> Mask | None:
    """Which pairs meet, for a grid without prefix tokens or a causal sequence; None for those that full attention has.

    Of a sequence the future is still to be masked where the pattern is one of blocks.
    """
    if attention not in ("local", "sparse"):
        return None
    if isinstance(tokens, Grid):
        if attention == "sparse":
            return fixed(tokens.count, max(1, round(math.sqrt(tokens.count))))
        return local(2 * (tokens.sizes[-1] + 1) + 1)
    if attention == "local":
        return local(WINDOW, causal=True)
    return big_bird(tokens.count, BLOCK, global_blocks=1, random_blocks=1, heads=num_heads)
