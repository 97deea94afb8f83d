"""The queries, keys and values of some rows of some heads, and where their gradients go.

A chunk takes its rows out of the inputs and converts them, and writes its results in the dtype of the output. Only
inputs whose heads lie behind their tokens in memory are copied whole. So a call holds, besides inputs and results, a
few blocks of rows, which also saves the time that fresh memory costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.streaming.tiles import Block


def contiguous_rows(x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
    """The same numbers, those of the last axis next to each other in memory; copied only where they are not."""
    return x if x.stride(-1) == 1 else x.contiguous()


class CallTensors:
    """The tensors of a call, all heads of all batches in one axis; `dtype` is that of the sums."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self.dtype, self.count = dtype, call.q.shape[0] * call.q.shape[1]
        self.q, self.k, self.v = (x.detach().flatten(0, 1) for x in (call.q, call.k, call.v))
        self.plain_q = None if call.plain_q is None else call.plain_q.detach().flatten(0, 1)
        self.plain_k = None if call.plain_k is None else call.plain_k.detach().flatten(0, 1)

    def chunk(self, block: Block, heads: Heads) -> Chunk:
        """A block of rows of some heads."""
        low_q = self.q[heads.which].index_select(1, block.numbers)
        plain_q = q = low_q.to(self.dtype)
        if self.plain_q is not None:
            plain_q = self.plain_q[heads.which].index_select(1, block.numbers).to(self.dtype)
        return Chunk(block, heads, low_q, q, plain_q)


class Heads:
    """The keys and values of consecutive query heads.

    Attributes:
        which: of the B * H heads.
        low_k, low_v: as they came; k, v: in the dtype of the sums. plain_k: the keys that vectors are multiplied with.
    """

    def __init__(self, inputs: CallTensors, which: slice) -> None:
        self.inputs, self.which = inputs, which
        self.low_k, self.low_v = self._of_heads(inputs.k), self._of_heads(inputs.v)

    def _of_heads(self, x: Float[Tensor, "BG M D"]) -> Float[Tensor, "g M D"]:
        groups, which = self.inputs.count // x.shape[0], self.which
        if groups == 1:
            return x[which]
        first, last = which.start // groups, (which.stop - 1) // groups
        if first == last:
            return x[first : last + 1].expand(which.stop - which.start, -1, -1)
        return x[torch.arange(which.start, which.stop, device=x.device) // groups]

    @cached_property
    def k(self) -> Float[Tensor, "g M D"]:
        return self.low_k.to(self.inputs.dtype)

    @cached_property
    def v(self) -> Float[Tensor, "g M V"]:
        return self.low_v.to(self.inputs.dtype)

    @cached_property
    def plain_k(self) -> Float[Tensor, "g M D"]:
        plain_k = self.inputs.plain_k
        return self.k if plain_k is None else self._of_heads(plain_k).to(self.inputs.dtype)

    @cached_property
    def longest(self) -> Float[Tensor, "g 1 1"]:
        """The largest norm of a key."""
        longest: Tensor = self.k.norm(dim=-1).amax(dim=-1)[:, None, None]
        return longest


@dataclass(frozen=True, eq=False)
class Chunk:
    """A block of rows of consecutive heads.

    Attributes:
        low_q: the queries as they came; q: in the dtype of the sums; plain_q: those that vectors are multiplied with.
    """

    block: Block
    heads: Heads
    low_q: Float[Tensor, "g n D"]
    q: Float[Tensor, "g n D"]
    plain_q: Float[Tensor, "g n D"]

    @property
    def which(self) -> slice:
        """Which of the B * H heads."""
        return self.heads.which

    def take(self, x: Float[Tensor, "BH N D"]) -> Float[Tensor, "g n D"]:
        """The chunk's rows of a tensor."""
        return x[self.which].index_select(1, self.block.numbers)

    def put(self, into: Float[Tensor, "BH N D"], x: Float[Tensor, "g n D"]) -> None:
        """Write what `take` would take."""
        into[self.which].index_copy_(1, self.block.numbers, x.to(into.dtype))


class KeyGradient:
    """The gradient of keys or values, summed over the blocks of rows and over the heads that share one.

    Args:
        like: the keys. heads: query heads. dtype: of the sums.
        in_turn: whether each head's blocks follow one another, so that a finished sum can be rounded at once.
    """

    def __init__(self, like: Float[Tensor, "B G M D"], heads: int, dtype: torch.dtype, in_turn: bool) -> None:
        self.groups = heads // like.shape[1]
        self.dtype = dtype
        self.rounding = in_turn and dtype != like.dtype
        self.result = torch.zeros(like.shape, dtype=like.dtype if self.rounding else dtype, device=like.device)
        self.open: dict[int, Tensor] = {}

    def at(self, heads: slice, keys: slice) -> list[Float[Tensor, "m D"]]:
        """What to add to, a tensor for each query head."""
        result = self.result.flatten(0, 1)
        shared = [head // self.groups for head in range(heads.start, heads.stop)]
        if not self.rounding:
            return [result[head, keys] for head in shared]
        self._close(but=shared)
        for head in shared:
            if head not in self.open:
                self.open[head] = torch.zeros(result.shape[1:], dtype=self.dtype, device=result.device)
        return [self.open[head][keys] for head in shared]

    def _close(self, but: Sequence[int] = ()) -> None:
        for head in self.open.keys() - set(but):
            self.result.flatten(0, 1)[head] = self.open.pop(head)

    def finished(self) -> Float[Tensor, "B G M D"]:
        """The whole gradient, after the last chunk."""
        self._close()
        return self.result
