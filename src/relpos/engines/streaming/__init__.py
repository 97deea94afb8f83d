"""Exact attention in O(N) memory: blocks of query rows, every term, gradients recomputed block by block.

The path of a call: `engine` applies the rotation, makes rules by row dense biases of one block of rows at a time, and
hands everything else to its operators: scattered segments are gathered (`segments`), then `forward` and `backward` go
through the loop of `loop`, which looks at the keys alone that a block's rows may see (`masks`), reads a regular line
bias as views of one vector (`strips`) and any other term by its dense meaning on a block (`general`).
"""

from relpos.engines.streaming.engine import STREAMING

__all__ = ["STREAMING"]
