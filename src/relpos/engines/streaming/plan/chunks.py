"""The queries, keys and values of a block of rows for some heads, and the sums of keys' and values' gradients.

A chunk copies its rows from the inputs and converts them, so that a call holds only a few blocks in the wider dtype
besides its inputs and results.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.engines.call import Call
from relpos.engines.streaming.plan.tiles import Block

_FEW = 8
"""Rows are few if the tensor has at least this many times as many."""


def contiguous_rows(x: Float[Tensor, "*A D"]) -> Float[Tensor, "*A D"]:
    """`x` with a last stride of 1; copied only if it has another."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Float[Tensor, "g N D"], rows: Int[Tensor, " n"]) -> Float[Tensor, "g n D"]:
    """Some rows. `index_select` is faster, but first copies the whole tensor if it is not contiguous."""
    few = _FEW * len(rows) <= x.shape[1]
    return x[:, rows] if few and not x.is_contiguous() else x.index_select(1, rows)


class CallTensors:
    """The tensors of a call with batch and heads in one axis; `dtype` is the dtype of sums."""

    def __init__(self, call: Call, dtype: torch.dtype) -> None:
        self.dtype, self.count = dtype, call.q.shape[0] * call.q.shape[1]
        self.q, self.k, self.v = (x.detach().flatten(0, 1) for x in (call.q, call.k, call.v))
        self.plain_q = None if call.plain_q is None else call.plain_q.detach().flatten(0, 1)
        self.plain_k = None if call.plain_k is None else call.plain_k.detach().flatten(0, 1)

    def chunk(self, block: Block, heads: Heads) -> Chunk:
        """A block of rows of some heads."""
        input_q = _rows(self.q[heads.head_slice], block.queries)
        plain_q = q = input_q.to(self.dtype)
        if self.plain_q is not None:
            plain_q = _rows(self.plain_q[heads.head_slice], block.queries).to(self.dtype)
        return Chunk(block, heads, input_q, q, plain_q)


class Heads:
    """The keys and values of consecutive query heads.

    Attributes:
        head_slice: which of the B * H heads.
        input_k, input_v: keys and values in the inputs' dtype. k, v: the same in the dtype of sums.
        plain_k: the keys that vectors are multiplied with.
    """

    def __init__(self, inputs: CallTensors, head_slice: slice) -> None:
        self.inputs, self.head_slice = inputs, head_slice
        self.input_k, self.input_v = self._of_heads(inputs.k), self._of_heads(inputs.v)

    def _of_heads(self, x: Float[Tensor, "BG M D"]) -> Float[Tensor, "g M D"]:
        groups, heads = self.inputs.count // x.shape[0], self.head_slice
        if groups == 1:
            return x[heads]
        first, last = heads.start // groups, (heads.stop - 1) // groups
        if first == last:
            return x[first : last + 1].expand(heads.stop - heads.start, -1, -1)
        return x[torch.arange(heads.start, heads.stop, device=x.device) // groups]

    @cached_property
    def k(self) -> Float[Tensor, "g M D"]:
        return self.input_k.to(self.inputs.dtype)

    @cached_property
    def v(self) -> Float[Tensor, "g M V"]:
        return self.input_v.to(self.inputs.dtype)

    @cached_property
    def plain_k(self) -> Float[Tensor, "g M D"]:
        plain_k = self.inputs.plain_k
        return self.k if plain_k is None else self._of_heads(plain_k).to(self.inputs.dtype)

    @cached_property
    def longest_key(self) -> Float[Tensor, "g 1 1"]:
        """The largest norm of a key."""
        norm: Tensor = self.k.norm(dim=-1).amax(dim=-1)[:, None, None]
        return norm


@dataclass(frozen=True, eq=False)
class Chunk:
    """A block of rows of consecutive heads.

    Attributes:
        input_q: the queries in the inputs' dtype. q: the same in the dtype of sums.
        plain_q: the queries that vectors are multiplied with, in the dtype of sums.
    """

    block: Block
    heads: Heads
    input_q: Float[Tensor, "g n D"]
    q: Float[Tensor, "g n D"]
    plain_q: Float[Tensor, "g n D"]

    @property
    def head_slice(self) -> slice:
        """The chunk's heads among the B * H heads."""
        return self.heads.head_slice

    def take(self, x: Float[Tensor, "BH N D"]) -> Float[Tensor, "g n D"]:
        """The chunk's rows of a tensor."""
        return _rows(x[self.head_slice], self.block.queries)

    def put(self, into: Float[Tensor, "BH N D"], x: Float[Tensor, "g n D"]) -> None:
        """Write the chunk's rows of a tensor."""
        into[self.head_slice].index_copy_(1, self.block.queries, x.to(into.dtype))

    def add(self, into: Float[Tensor, "BH N D"], x: Float[Tensor, "g n D"]) -> None:
        """Add to the chunk's rows of a tensor."""
        into[self.head_slice].index_add_(1, self.block.queries, x.to(into.dtype))


class KeyGradient:
    """The gradient of keys or values, summed over the blocks of rows and over the query heads that share a key head.

    Args:
        like: the keys or values. heads: the number of query heads. dtype: the dtype of sums. into: sums to add to.
        head_by_head: whether the blocks of a head follow one another, so that its finished sum can be rounded at once.
    """

    def __init__(
        self, like: Float[Tensor, "B G M D"], heads: int, dtype: torch.dtype, head_by_head: bool,
        into: Float[Tensor, "B G M D"] | None = None,
    ) -> None:  # fmt: skip
        self.groups = heads // like.shape[1]
        self.dtype = dtype
        self.rounding = head_by_head and dtype != like.dtype and into is None
        if into is None:
            into = torch.empty(like.shape, dtype=like.dtype if self.rounding else dtype, device=like.device)
            self._begun: set[int] = set()  # initialized heads; each thread sets its own to zero
        else:
            self._begun = set(range(like.shape[0] * like.shape[1]))
        self._result = into
        self._heads = self._result.flatten(0, 1)
        self.sums: dict[int, Tensor] = {}

    def at(self, heads: slice, keys: slice) -> list[Float[Tensor, "m D"]]:
        """The tensors to add to, one for each query head."""
        shared = [head // self.groups for head in range(heads.start, heads.stop)]
        if not self.rounding:
            for head in shared:
                if head not in self._begun:
                    self._begun.add(head)
                    self._heads[head].zero_()
            return [self._heads[head, keys] for head in shared]
        self.settle(keep=shared)
        for head in shared:
            if head not in self.sums:
                self.sums[head] = torch.zeros(self._heads.shape[1:], dtype=self.dtype, device=self._heads.device)
        return [self.sums[head][keys] for head in shared]

    def share(self) -> KeyGradient:
        """The same gradient, for another thread, which adds to other heads."""
        share = copy.copy(self)
        share.sums = {}
        return share

    def settle(self, keep: Sequence[int] = ()) -> None:
        """Round the sums of all heads except `keep` into the result."""
        for head in self.sums.keys() - set(keep):
            assert head not in self._begun, "a head that was rounded already"
            self._begun.add(head)
            self._heads[head] = self.sums.pop(head)

    def finished(self) -> Float[Tensor, "B G M D"]:
        """The gradient, once all is added and settled; 0 for heads to which nothing was added."""
        for head in set(range(len(self._heads))) - self._begun:
            self._heads[head] = 0
        return self._result
