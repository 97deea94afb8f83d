"""Exact attention in O(N) memory: blocks of query rows, every term, scores recomputed block by block for the gradients.

engine      applies the rotation, makes row rules dense biases of one block of rows at a time, and calls its
            operators, which do the rest:
regroup     scattered segments are gathered into smaller calls
plan        a call is cut into tiles, by `hankel` (with `vectors`) for regular lines and by `dense_plan` for any
            other term; `masks` tells which keys a block may see
forward, backward
            go from tile to tile, with `scores` in a `workspace`; `cpu_kernel` is a faster forward for some calls
"""

from relpos.engines.streaming.engine import STREAMING

__all__ = ["STREAMING"]
