"""Exact attention in O(N) memory, for every term: by blocks of query rows, with scores recomputed for the gradients.

engine              applies the rotation, turns row rules into dense biases, and calls the custom operators
forward, backward   go through the tiles of a plan, with `scores` in a `workspace`
plan/               cuts a call into tiles: `planning` chooses `hankel` for regular lines, `dense_plan` for all other
                    terms; `masks` says which keys a block may see, `regroup` gathers scattered segments
terms/              vectors on lines, in a Hankel plan
cpu/                PyTorch's flash kernel for some forwards, products in bfloat16, heads in parallel threads
"""

from relpos.engines.streaming.engine import STREAMING

__all__ = ["STREAMING"]
