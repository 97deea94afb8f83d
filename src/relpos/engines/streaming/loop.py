"""One call cut into tiles, and the scores of a tile: what forward and backward share.

Scores are kept in base 2, because exp2 is several times faster than exp on CPU where it underflows. With c = log2(e),

    score2  = c * (softcap(scale * <q, k>) + bias) - shift          the bias and -shift are written first, and the
    weight  = exp2(score2)                                          product is added to them by the matrix product
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors, Sinks, Softcap
from relpos.core.random import keep
from relpos.engines.call import Call
from relpos.engines.streaming.general import General
from relpos.engines.streaming.operands import Heads, Operands, Part
from relpos.engines.streaming.products import add_product, native
from relpos.engines.streaming.room import Room
from relpos.engines.streaming.strips import ROWS, WIDTH, Block, Strips, Tile, log_base
from relpos.engines.streaming.vectors import Vectors

PAIRS = 2**18
"""Scores of several heads that are held at once, in a buffer, where one head has fewer."""
_NATIVE_ROWS, _NATIVE_WIDTH = 512, 2048
"""Rows and keys of a tile in bfloat16, whose products are so fast that what surrounds each is spread over more."""


@dataclass(frozen=True, eq=False)
class Planned:
    """A block of rows with its tiles, of one head alone or of all."""

    block: Block
    tiles: list[Tile]
    head: int | None


class Loop:
    """One call, ready to run."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.batch, self.heads = call.q.shape[:2]
        self.dtype = torch.promote_types(call.q.dtype, torch.float32)
        self.unit = log_base(self.dtype)
        strips = Strips.serve(call) and Vectors.serve(call)
        self.native = native(call.q) and not (strips and call.terms.of(LineVectors))
        size = (_NATIVE_ROWS, _NATIVE_WIDTH) if self.native else (ROWS, WIDTH)
        self.side: Strips | General = Strips(call, *size) if strips else General(call, PAIRS)
        self.vectors: Vectors | None = None
        if isinstance(self.side, Strips) and call.terms.of(LineVectors):
            self.vectors = Vectors(call, self.side, self.unit)
        softcap = call.terms.one(Softcap)
        self.cap = None if softcap is None else softcap.cap
        sinks = call.terms.one(Sinks)
        self.sink: Tensor | None = None
        if sinks is not None:
            logits = sinks.logits.detach().to(self.dtype) * self.unit
            self.sink = logits.expand(self.batch, self.heads).reshape(-1, 1, 1)
        self.operands = Operands(call, self.dtype)
        self.planned: list[Planned] = []
        self.by_pairs = False
        if isinstance(self.side, Strips):
            apart = self.side.heads_apart
            alone = range(self.heads) if apart else (None,)
            blocks = list(self.side.blocks())
            self.planned = [
                Planned(block, list(self.side.tiles(block, head)), head) for block in blocks for head in alone
            ]
            self.by_pairs = apart or any(tile.masked for planned in self.planned for tile in planned.tiles)

    def parts(self, prefix_only: bool = False) -> Iterator[Part]:
        """Every block of rows of every head, as many heads together as the buffers hold.

        Head by head, so that its keys and values stay in the cache; but where a mask is worked out pair by pair, block
        by block, so that it is worked out once.
        """
        side, whole, count = self.side, self.operands, self.batch * self.heads
        if isinstance(side, General):
            heads = Heads(whole, slice(0, count))
            for block in side.blocks():
                yield whole.part(block, list(side.tiles(block)), heads)
            return
        planned = [one for one in self.planned if one.block.step == 0 or not prefix_only]
        widest = max((tile.count for one in planned for tile in one.tiles), default=1)
        tallest = max((one.block.rows.stop - one.block.rows.start for one in planned), default=1)
        at_once = 1 if self.vectors or side.heads_apart else max(1, PAIRS // (widest * tallest))
        chunks = [slice(start, min(start + at_once, count)) for start in range(0, count, at_once)]
        if self.by_pairs:
            every = [Heads(whole, chunk) for chunk in chunks]
            for one in planned:
                for heads in every if one.head is None else every[one.head :: self.heads]:
                    yield whole.part(one.block, one.tiles, heads)
                for tile in one.tiles:
                    tile.pairs = None
        else:
            for chunk in chunks:
                heads = Heads(whole, chunk)
                for one in planned:
                    yield whole.part(one.block, one.tiles, heads)

    # scores

    def exp(self, x: Tensor) -> Tensor:
        """In place, of scores in the units of `log_base`."""
        return x.exp_() if self.unit == 1 else x.exp2_()

    def scores(self, room: Room, part: Part, tile: Any, shift: Tensor | None) -> Float[Tensor, "g n m"]:
        """The scores of a tile, in the units of `log_base`, less `shift`."""
        if self.vectors is not None:
            return self._masked(self._scores_with_vectors(room, part, tile, shift), part, tile)
        bias = self.side.bias(part.block, tile, part.which)
        score = room.scores.rows(part.q.shape[0], part.q.shape[1], tile.count)
        q, k = part.q, part.heads.k[:, tile.keys].mT
        if self.cap is None:
            self._begin(score, bias, shift)
            add_product(score, q, k, self.call.scale * self.unit, rounded=self.native)
        else:
            room.tanh = torch.bmm(q, k).mul_(self.call.scale / self.cap).tanh_()
            self._begin(score, bias, shift)
            score.add_(room.tanh, alpha=self.cap * self.unit)
        return self._masked(score, part, tile)

    def _masked(self, score: Tensor, part: Part, tile: Any) -> Tensor:
        if tile.masked:
            if tile.pairs is None:
                tile.pairs = ~tile.mask.pairs(part.block.numbers, tile.keys)
            score.masked_fill_(self._of_heads(tile.pairs, part.which), -torch.inf)
        return score

    def _scores_with_vectors(self, room: Room, part: Part, tile: Any, shift: Tensor | None) -> Float[Tensor, "1 n m"]:
        """The same in the layout that vectors want; the whole of it is left in the room."""
        assert isinstance(self.side, Strips)
        assert self.vectors is not None
        score, whole = room.scores.shifted_over_anything(1, part.q.shape[1], tile.count, 1)
        room.whole = whole[:, 0]
        window = None
        if self.side.reversed is not None or tile.low > 0 or tile.high < tile.width:
            window = self.side.window(part.block, tile, part.which)[:, None]
        self._begin(room.whole, window, shift)
        self.vectors.add_queries(room.whole[0], part, tile)
        add_product(score, part.q, part.heads.k[:, tile.keys].mT, self.call.scale * self.unit)
        self.vectors.add_keys(score[0], part, tile)
        return score

    @staticmethod
    def _begin(score: Tensor, bias: Tensor | None, shift: Tensor | None) -> None:
        if bias is not None and bias.dim() == 4:  # several strips
            score = score.unflatten(1, bias.shape[1:3])
            shift = None if shift is None else shift.unflatten(1, bias.shape[1:3])
        if bias is not None and shift is not None:
            torch.sub(bias.expand_as(score), shift, out=score)
        elif bias is not None:
            score.copy_(bias)
        elif shift is not None:
            score.copy_(-shift)
        else:
            score.zero_()

    def _of_heads(self, x: Tensor, heads: slice) -> Tensor:
        """`[1 or B, 1 or H, n, m]` for a stretch of the B * H heads."""
        if x.shape[0] == 1 and x.shape[1] == 1:
            return x[0]
        return x.expand(self.batch, self.heads, *x.shape[2:]).flatten(0, 1)[heads]

    def kept(self, part: Part, tile: Any) -> Float[Tensor, "g n m"] | None:
        """Dropout's factors, of all heads."""
        if self.call.seed is None:
            return None
        columns = torch.arange(self.call.k.shape[2], device=part.q.device)[tile.keys]
        rows, tokens = part.block.numbers + self.call.first_row, self.call.tokens
        pairs = [(rows, columns)] if tokens is None else [(own[rows], own[columns]) for own in tokens]
        batch, seed, dropout = self.batch // len(pairs), self.call.seed, self.call.dropout
        kept = torch.stack([keep(seed, batch, self.heads, own, theirs, dropout) for own, theirs in pairs], dim=1)
        return kept.flatten(0, 2).to(self.dtype) / (1 - self.call.dropout)
