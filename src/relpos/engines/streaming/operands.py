"""The queries, keys and values of one part of a call, and where their gradients go.

A part takes its rows and converts them, and gives back rows in the dtype of the result; only inputs whose heads lie
behind their tokens in memory are copied whole. What a call holds besides inputs and results is then a few blocks, which
also spares the time of getting fresh memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.engines.call import Call


def take(x: Float[Tensor, "BH N D"], heads: slice, numbers: Int[Tensor, " n"]) -> Float[Tensor, "g n D"]:
    """Some rows, by number in any order, of a stretch of the heads."""
    return x[heads].index_select(1, numbers)


def put(into: Float[Tensor, "BH N D"], heads: slice, numbers: Int[Tensor, " n"], x: Float[Tensor, "g n D"]) -> None:
    """Write what `take` would take."""
    into[heads].index_copy_(1, numbers, x.to(into.dtype))


def side_by_side(x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
    """The same numbers, those of the last axis next to each other in memory; copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


class Operands:
    """The tensors of a call, all heads of all batches in one axis."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self.dtype, self.count = dtype, call.q.shape[0] * call.q.shape[1]
        self.q, self.k, self.v = (x.detach().flatten(0, 1) for x in (call.q, call.k, call.v))
        self.plain_q = None if call.plain_q is None else call.plain_q.detach().flatten(0, 1)
        self.plain_k = None if call.plain_k is None else call.plain_k.detach().flatten(0, 1)

    def part(self, block: Any, tiles: Sequence[Any], heads: Heads) -> Part:
        """A block of rows of some heads."""
        low_q = take(self.q, heads.which, block.numbers)
        q = low_q.to(self.dtype)
        plain_q = q if self.plain_q is None else take(self.plain_q, heads.which, block.numbers).to(self.dtype)
        return Part(block, tiles, heads, low_q, q, plain_q)


class Heads:
    """The keys and values of a stretch of the query heads.

    Attributes:
        low_k, low_v: as they came; k, v: in the dtype of the sums. plain_k: the keys that vectors meet.
    """

    def __init__(self, whole: Operands, which: slice) -> None:
        self.whole, self.which = whole, which
        self.low_k, self.low_v = self._own(whole.k), self._own(whole.v)

    def _own(self, x: Float[Tensor, "BG M D"]) -> Float[Tensor, "g M D"]:
        groups, which = self.whole.count // x.shape[0], self.which
        if groups == 1:
            return x[which]
        first, last = which.start // groups, (which.stop - 1) // groups
        if first == last:
            return x[first : last + 1].expand(which.stop - which.start, -1, -1)
        return x[torch.arange(which.start, which.stop, device=x.device) // groups]

    @cached_property
    def k(self) -> Float[Tensor, "g M D"]:
        return self.low_k.to(self.whole.dtype)

    @cached_property
    def v(self) -> Float[Tensor, "g M V"]:
        return self.low_v.to(self.whole.dtype)

    @cached_property
    def plain_k(self) -> Float[Tensor, "g M D"]:
        whole = self.whole
        return self.k if whole.plain_k is None else self._own(whole.plain_k).to(whole.dtype)

    @cached_property
    def longest(self) -> Float[Tensor, "g 1 1"]:
        """The largest norm of a key."""
        longest: Tensor = self.k.norm(dim=-1).amax(dim=-1)[:, None, None]
        return longest


@dataclass(eq=False)
class Part:
    """A block of rows of a stretch of the heads, with its tiles.

    Attributes:
        low_q: the queries as they came; q: in the dtype of the sums. plain_q: the queries that vectors meet.
    """

    block: Any
    tiles: Sequence[Any]
    heads: Heads
    low_q: Float[Tensor, "g n D"]
    q: Float[Tensor, "g n D"]
    plain_q: Float[Tensor, "g n D"]

    @property
    def which(self) -> slice:
        """The heads."""
        return self.heads.which


class KeyGradient:
    """The gradient of keys or values, summed over the blocks of rows and over the heads that share one.

    Args:
        like: the keys. heads: query heads. dtype: of the sums.
        in_turn: each head's blocks follow one another, so that a finished sum can be rounded at once.
    """

    def __init__(self, like: Float[Tensor, "B G M D"], heads: int, dtype: torch.dtype, in_turn: bool) -> None:
        self.groups = heads // like.shape[1]
        self.dtype = dtype
        self.rounding = in_turn and dtype != like.dtype
        self.result = torch.zeros(like.shape, dtype=like.dtype if self.rounding else dtype, device=like.device)
        self.open: dict[int, Tensor] = {}

    def at(self, heads: slice, keys: slice) -> list[Float[Tensor, "m D"]]:
        """What to add to, of a query head each."""
        result = self.result.flatten(0, 1)
        places = [head // self.groups for head in range(heads.start, heads.stop)]
        if not self.rounding:
            return [result[place, keys] for place in places]
        self._close(but=places)
        for place in places:
            if place not in self.open:
                self.open[place] = torch.zeros(result.shape[1:], dtype=self.dtype, device=result.device)
        return [self.open[place][keys] for place in places]

    def _close(self, but: Sequence[int] = ()) -> None:
        for place in self.open.keys() - set(but):
            self.result.flatten(0, 1)[place] = self.open.pop(place)

    def finished(self) -> Float[Tensor, "B G M D"]:
        """The whole, when every part has been added."""
        self._close()
        return self.result
