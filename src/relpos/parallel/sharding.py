"""A rank's share of a tensor of tokens, the whole again, and the gradients of weights over all ranks."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from relpos.parallel.exchange import gather_tokens
from relpos.parallel.layout import ShardLayout, require_layout, share_of, stretches
from relpos.parallel.ranks import Ranks, rank_ordered_sum


def shard(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, dim: int = 1, layout: ShardLayout = "contiguous"
) -> Tensor:
    """This rank's share of a tensor that holds all tokens along an axis: tokens, labels, positions.

    Args:
        x: the same on every rank.
        mesh: the ranks that share the sequence.
        dim: the axis of the tokens.
        layout: as in `context_attention`.

    Returns:
        The share, contiguous in memory: N / R tokens along the axis. Gradients go back to `x`.

    Raises:
        ValueError: the tokens cannot be divided into equal shares.
    """
    require_layout(layout)
    ranks = Ranks.of(mesh)
    return share_of(x, stretches(x.shape[dim], ranks.size, layout)[ranks.rank], dim).contiguous()


def unshard(
    x: Tensor, mesh: DeviceMesh | dist.ProcessGroup, *, dim: int = 1, layout: ShardLayout = "contiguous"
) -> Tensor:
    """All tokens in order, on every rank, from each rank's share: the inverse of `shard`.

    Gradients of all ranks add up, in the order of the ranks.

    Args:
        x: this rank's share, of one shape on all ranks.
        mesh: the ranks that share the sequence.
        dim: the axis of the tokens.
        layout: as in `context_attention`.

    Raises:
        ConnectionError: a rank has ended.
        ValueError: shares of different shapes.
    """
    require_layout(layout)
    ranks = Ranks.of(mesh)
    ranks.agree({"the shape of a share": tuple(x.shape), "its dtype": str(x.dtype)}, x.device)
    shares = stretches(x.shape[dim] * ranks.size, ranks.size, layout)
    (whole,) = gather_tokens(ranks, shares, dim % x.dim(), x)
    return whole


def average_gradients(
    weights: nn.Module | Iterable[nn.Parameter], mesh: DeviceMesh | dist.ProcessGroup, *, bucket: int = 2**22
) -> None:
    """The mean over ranks of the gradients of weights, in place: what DistributedDataParallel and FSDP do themselves.

    A rank's backward finds what its own tokens contribute to the gradient of a weight, be it a projection or a table of
    positions. The loss of the batch is the mean over all its tokens, so that with a rank's loss as the mean over its
    own, equally many, the mean over ranks is the gradient. Where tokens count differently (padding), a rank's loss is
    `ranks * sum of its own / count of all`. It is summed once, in the order of the ranks: the bits are the same in
    every run, and on every rank.

    Args:
        weights: a module, or parameters; those without a gradient on all ranks are left out.
        mesh: the ranks that share the sequence.
        bucket: gradients are sent so many numbers at a time.

    Raises:
        ConnectionError: a rank has ended.
        ValueError: the ranks have gradients of other weights.
    """
    ranks = Ranks.of(mesh)
    if ranks.size == 1:
        return
    parameters = list(weights.parameters() if isinstance(weights, nn.Module) else weights)
    if not parameters:
        return
    shapes = [(tuple(x.shape), str(x.dtype)) for x in parameters]
    ranks.agree({"the weights": shapes}, parameters[0].device)
    has = torch.tensor([x.grad is not None for x in parameters], device=parameters[0].device).int()
    with ranks.watched():
        dist.all_reduce(has, op=dist.ReduceOp.MAX, group=ranks.group)
    waiting: dict[torch.dtype, list[Tensor]] = {}
    for x, somewhere in zip(parameters, has.tolist(), strict=True):
        if not somewhere:
            continue
        x.grad = torch.zeros_like(x) if x.grad is None else x.grad
        waiting.setdefault(x.grad.dtype, []).append(x.grad)
    for gradients in waiting.values():
        first, size = 0, 0
        for index, gradient in enumerate(gradients):
            size += gradient.numel()
            if size >= bucket or index == len(gradients) - 1:
                _average(ranks, gradients[first : index + 1])
                first, size = index + 1, 0


def _average(ranks: Ranks, gradients: list[Tensor]) -> None:
    """Each rank sums one part of all gradients, and has the sums of the other parts from the other ranks."""
    flat = torch.cat([g.flatten() for g in gradients])
    count = flat.numel()
    width = -(-count // ranks.size)
    own = flat.new_zeros(ranks.size * width)
    own[:count] = flat
    theirs = torch.empty_like(own)
    with ranks.watched():
        dist.all_to_all_single(theirs, own, group=ranks.group)
        mean = rank_ordered_sum(theirs.view(ranks.size, width)) / ranks.size
        every = [torch.empty_like(mean) for _ in range(ranks.size)]
        dist.all_gather(every, mean, group=ranks.group)
    found = torch.cat(every)[:count].split([g.numel() for g in gradients])
    for gradient, whole in zip(gradients, found, strict=True):
        gradient.copy_(whole.view_as(gradient))
