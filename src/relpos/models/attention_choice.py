"""A model's attention by name: which pairs of tokens attend, and with which kind of attention.

full        every pair, or every pair that is not in the future
local       a window: on a grid the rows above and below, in a sequence the last 32 tokens (Beltagy et al. 2020)
sparse      the fixed pattern of the Sparse Transformer (Child et al. 2019): a block of tokens, and the last token of
            every block; 32 tokens in a sequence, in a grid's raster order the root of their number
linear      every pair, without a softmax (Katharopoulos et al. 2020)
flash       every pair, in the tiles of FlashAttention's paper (Dao et al. 2022), in plain PyTorch

A `window` for each layer goes with "full" alone: the layers of Gemma 3 and others see the last tokens only or, some of
them, all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

from torch import Tensor

from relpos.core import Coordinates, Grid, Mask
from relpos.core.checks import fail, require_int
from relpos.layers.attention import AttentionKind
from relpos.patterns import fixed, local

AttentionChoice = Literal["full", "local", "sparse", "linear", "flash"]
ATTENTIONS: tuple[AttentionChoice, ...] = get_args(AttentionChoice)
WindowChoice = int | None | tuple[int | None, ...]
"""Tokens that a token sees, itself included; None for all. Of a tuple, layer i has entry i modulo their number."""
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


def windows_of(window: WindowChoice, attention: AttentionChoice, depth: int) -> list[int | None]:
    """The window of each layer; raises unless there are 1 to `depth` entries, and `attention` is full."""
    entries = window if isinstance(window, tuple) else (window,)
    if not 0 < len(entries) <= depth:
        wanted = f"1 to {depth} windows for {depth} layer{'s' if depth > 1 else ''}"
        fail(wanted, f"{len(entries)} in {window!r}", "Layer i has entry i modulo their number.")
    for one in entries:
        if one is not None:
            require_int(one, "window", at_least=1)
            if attention != "full":
                remedy = "The other kinds of attention have their own pairs: leave out one of both."
                fail('attention="full" with a window', repr(attention), remedy)
    return [entries[layer % len(entries)] for layer in range(depth)]


def windowed(mask: Mask | None, window: int | None, queries: Tensor | None, keys: Tensor | None) -> Mask | None:
    """A causal mask in which a token sees `window` tokens, itself included. `queries` and `keys` are the orders of both
    where that is not their index; without a mask every key is at or before each query."""
    if window is None:
        return mask
    bounds = Mask.causal() if mask is None else mask
    return replace(bounds, left=window - 1, query_order=queries, key_order=keys)
