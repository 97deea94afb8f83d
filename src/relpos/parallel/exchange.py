"""What ranks exchange as a whole, with gradients: tokens of all ranks, and heads for tokens.

Every sum over ranks is taken in their order, by the rank that needs it: the same bits in every run.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from relpos.parallel.layout import Stretch, in_order, share_of
from relpos.parallel.ranks import Ranks, rank_ordered_sum

Shares = list[list[Stretch]]


def gather_tokens(ranks: Ranks, shares: Shares, dim: int, *parts: Tensor) -> tuple[Tensor, ...]:
    """All tokens of some tensors, in order, from each rank's share along an axis.

    Backward: each rank gets the gradients of its own tokens from all ranks, summed in the order of the ranks.
    """
    if ranks.size == 1:
        return parts
    found: tuple[Tensor, ...] = _Gather.apply(ranks, shares, dim, *parts)  # type: ignore[no-untyped-call]
    return found


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, shares: Shares, dim: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.ranks, ctx.shares, ctx.dim = ranks, shares, dim
        found = []
        for x in parts:
            own = x.contiguous()
            every = [torch.empty_like(own) for _ in range(ranks.size)]
            with ranks.watched():
                dist.all_gather(every, own, group=ranks.group)
            found.append(in_order(every, shares, dim))
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        found = [
            rank_ordered_sum(_swap(ctx.ranks, [share_of(g, spans, ctx.dim) for spans in ctx.shares]))
            if wanted
            else None
            for g, wanted in zip(gradients, ctx.needs_input_grad[3:], strict=True)
        ]
        return None, None, None, *found


def _swap(ranks: Ranks, parts: list[Tensor]) -> Float[Tensor, "R ..."]:
    """What every rank has for this one, from what this one has for every rank; all of one shape."""
    own = torch.stack(parts)
    theirs = torch.empty_like(own)
    with ranks.watched():
        dist.all_to_all_single(theirs, own, group=ranks.group)
    return theirs


def heads_for_tokens(ranks: Ranks, shares: Shares, x: Float[Tensor, "B H n D"]) -> Float[Tensor, "B h N D"]:
    """All tokens of this rank's heads, h = H / R, from its own tokens of all heads."""
    whole: Tensor = _HeadsForTokens.apply(ranks, shares, x)  # type: ignore[no-untyped-call]
    return whole


def tokens_for_heads(ranks: Ranks, shares: Shares, x: Float[Tensor, "B h N D"]) -> Float[Tensor, "B H n D"]:
    """The inverse: this rank's tokens of all heads, from all tokens of its own heads."""
    share: Tensor = _TokensForHeads.apply(ranks, shares, x)  # type: ignore[no-untyped-call]
    return share


def _to_heads(ranks: Ranks, shares: Shares, x: Tensor) -> Tensor:
    return in_order(list(_swap(ranks, list(x.chunk(ranks.size, dim=1)))), shares, 2)


def _to_tokens(ranks: Ranks, shares: Shares, x: Tensor) -> Tensor:
    return torch.cat(list(_swap(ranks, [share_of(x, spans, 2) for spans in shares])), dim=1)


class _HeadsForTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, shares: Shares, x: Tensor) -> Tensor:
        ctx.ranks, ctx.shares = ranks, shares
        return _to_heads(ranks, shares, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _to_tokens(ctx.ranks, ctx.shares, *gradients)


class _TokensForHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: Ranks, shares: Shares, x: Tensor) -> Tensor:
        ctx.ranks, ctx.shares = ranks, shares
        return _to_tokens(ranks, shares, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor]:
        return None, None, _to_heads(ctx.ranks, ctx.shares, *gradients)
