"""The scores of a call, tile by tile, for both forward and backward.

Scores are in base 2, because exp2 is several times faster than exp on CPU: with unit = log2(e),

    score  = unit * (softcap(scale * <q, k>) + bias) - shift        bias - shift is written into a buffer first, and the
    weight = exp2(score)                                            matrix product is added to it

In float64 the unit is 1, and exp replaces exp2. The unit is also 1 if the flash kernel computed the forward: the
backward multiplies by log2(e) after it subtracts the shift. Where one key has nearly all weight, its score and the
log-sum-exp are equal and cancel exactly. Multiplied by log2(e) first, each would be off by half a unit in the last
place.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Sinks, Softcap
from relpos.engines.call import Call
from relpos.engines.streaming.cpu.matmul import add_matmul
from relpos.engines.streaming.dropout import DropoutFactors
from relpos.engines.streaming.plan.chunks import CallTensors, Chunk, Heads
from relpos.engines.streaming.plan.tile_plan import TilePlan
from relpos.engines.streaming.plan.tiles import Tile
from relpos.engines.streaming.workspace import Workspace

_LOG2E = math.log2(math.e)


class Scores:
    """The scores of a call by a plan.

    Attributes:
        sink: the sink's logit of each of the B * H heads, `[BH, 1 or N, 1]`, in the unit of the scores.
        tanh: the tanh of the last tile's soft cap, `[g, n, m]`.
        dropout: the factors of dropout, or None without dropout.
    """

    def __init__(self, call: Call, plan: TilePlan) -> None:
        self.call, self.plan = call, plan
        self.batch, self.heads = call.q.shape[:2]
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.inputs = CallTensors(call, self.dtype)
        self._make_buffers()
        softcap, sinks = call.terms.one(Softcap), call.terms.one(Sinks)
        self.cap = None if softcap is None else softcap.cap
        self.tanh: Tensor | None = None
        self.sink: Tensor | None = None
        if sinks is not None:
            logits = sinks.rows(self.dtype).detach() * plan.unit
            self.sink = logits.expand(self.batch, self.heads, -1).reshape(self.batch * self.heads, -1, 1)

    def share(self, plan: TilePlan) -> Scores:
        """The scores by a plan for some of the heads, for another thread."""
        share = copy.copy(self)
        share.plan = plan
        share._make_buffers()
        return share

    def _make_buffers(self) -> None:
        self.workspace = Workspace(self.dtype, self.call.q.device)
        self.dropout = None if self.call.seed is None else DropoutFactors(self.call, self.call.seed, self.workspace)

    def chunks(self) -> Iterator[Chunk]:
        """Every block for every head, in the order that the plan asks for (`by_block`)."""
        inputs, plan = self.inputs, self.plan
        if not plan.by_block:
            for head_slices, blocks in plan.passes():
                for head_slice in head_slices:
                    heads = Heads(inputs, head_slice)
                    yield from (inputs.chunk(block, heads) for block in blocks)
            return
        every = [Heads(inputs, head_slice) for head_slice in plan.head_slices()]
        for block in plan.blocks():
            for heads in every if block.head is None else every[block.head :: self.heads]:
                yield inputs.chunk(block, heads)
            for tile in block.tiles:
                tile.forbidden = None

    def sink_of(self, chunk: Chunk) -> Float[Tensor, "g _ 1"] | None:
        """The sink's logit of each row of a chunk, or of all its rows."""
        if self.sink is None or self.sink.shape[1] > 1:
            return None if self.sink is None else chunk.take(self.sink)
        return self.sink[chunk.head_slice]

    def compute(self, chunk: Chunk, tile: Tile, shift: Tensor | None) -> Float[Tensor, "g n m"]:
        """The scores of a tile, in the plan's unit, minus `shift`."""
        call, unit = self.call, self.plan.unit
        q, k = chunk.q, chunk.heads.k[:, tile.keys].mT
        score = self.plan.start_scores(self.workspace, chunk, tile, shift)
        if self.cap is None:
            add_matmul(score, q, k, call.scale * unit, rounded=self.plan.bfloat16)
        else:
            self.tanh = torch.bmm(q, k).mul_(call.scale / self.cap).tanh_()
            score.add_(self.tanh, alpha=self.cap * unit)
        self.plan.finish_scores(score, chunk, tile)
        if tile.mask is not None:
            if tile.forbidden is None:
                tile.forbidden = ~tile.mask.pairs(chunk.block.queries, tile.keys)
            score.masked_fill_(self._of_heads(tile.forbidden, chunk.head_slice), -torch.inf)
        return score

    def exp(self, x: Tensor) -> Tensor:
        """The exponential of scores in the plan's unit, in place."""
        if self.plan.unit != 1:
            return x.exp2_()
        return x.exp_() if x.dtype == torch.float64 else x.mul_(_LOG2E).exp2_()

    def _of_heads(self, x: Tensor, heads: slice) -> Tensor:
        """`[1 or B, 1 or H, n, m]` for some of the B * H heads."""
        if x.shape[0] == 1 and x.shape[1] == 1:
            return x[0]
        return x.expand(self.batch, self.heads, *x.shape[2:]).flatten(0, 1)[heads]
