"""Attention patterns: each function returns a `Mask`, a structure of O(N) that combines with any position.

local       a window around each token, also dilated
sparse      Sparse Transformer, Longformer, BigBird, any block layout
windows     Swin's windows on a grid, shifted or not; `partition` splits a grid into windows, `join` reverses it
"""

from relpos.patterns.neighbourhoods import dilated, local
from relpos.patterns.partitions import join, partition, windows
from relpos.patterns.sparse import big_bird, block_sparse, fixed, longformer, strided

__all__ = [
    "big_bird",
    "block_sparse",
    "dilated",
    "fixed",
    "join",
    "local",
    "longformer",
    "partition",
    "strided",
    "windows",
]
