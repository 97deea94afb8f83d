"""Exact attention in O(N) memory, for every term: by blocks of query rows, with scores recomputed for the gradients.

engine              applies the rotation, turns row rules into dense biases, and calls the custom operators
regroup             gathers scattered segments into smaller calls
planning            chooses the plan that cuts a call into tiles: `hankel` (with `vectors`) for regular lines,
                    `dense_plan` for all other terms; `masks` says which keys a block may see
forward, backward   go through the tiles, with `scores` in a `workspace`
cpu_kernel          a faster forward for some calls
heuristics          when `auto` prefers another engine
"""

from relpos.engines.streaming.engine import STREAMING

__all__ = ["STREAMING"]
