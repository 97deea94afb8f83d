"""A ring as an autograd node: blocks of keys and values arrive and are computed; their gradients are sent back.

It knows nothing of positions: `by_ring` makes the terms ready, and an engine computes each shard
(`engines.engine.Shards`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from relpos.core import Mask, Terms
from relpos.core.checks import without_autocast
from relpos.engines.call import Call
from relpos.engines.engine import Shards
from relpos.engines.operators import Gradients
from relpos.engines.selection import choose_for_shards
from relpos.parallel.layout import Stretch
from relpos.parallel.ranks import Ranks
from relpos.parallel.reach import Reach, narrowed
from relpos.parallel.ring_schedule import RingStep, Schedule

Pair = tuple[Stretch, Stretch]
"""A stretch of queries and a stretch or block of keys."""


@dataclass
class RingWork:
    """What the ring of one call does, but for its numbers.

    Attributes:
        forward, backward: the schedules of both.
        terms: by stretch of queries, between these and all keys, without what was applied to queries and keys.
        parts: by the pairs of the backward, their terms; made outside, so that gradients reach what is cut.
        learned: the tensors of these that want gradients, and those of queries that see nothing, whose gradients are 0.
        place: where this rank holds some of its tokens.
    """

    ranks: Ranks
    forward: Schedule
    backward: Schedule
    terms: dict[Stretch, Terms]
    parts: dict[Pair, Terms]
    learned: list[Tensor]
    mask: Mask | None
    scale: float
    place: Callable[[Stretch], slice]
    shards: Shards | None = None

    def call(
        self, pair: Pair, terms: Terms, q: Tensor, plain_q: Tensor | None, block: list[Tensor], *, forward: bool
    ) -> Call:
        """One shard: a stretch of queries, and a block's keys, values and, where terms meet them, keys not rotated."""
        queries, keys = pair
        rows = self.place(queries)
        schedule = self.forward if forward else self.backward
        whole = schedule.reach(queries, keys) is Reach.ALL
        mask = None if whole else narrowed(self.mask, queries, keys, q.device)
        call = Call(
            q[:, :, rows], block[0], block[1], terms, mask, self.scale, return_lse=forward,
            plain_q=None if plain_q is None else plain_q[:, :, rows], plain_k=block[2] if len(block) > 2 else None,
        )  # fmt: skip
        if self.shards is None:
            with torch.set_grad_enabled(bool(self.learned)):  # autograd has switched them off, and a backward follows
                self.shards = choose_for_shards(call).shards
        return call


class _Transfer:
    """What is sent to a rank and what comes from another, on its way."""

    def __init__(self, ranks: Ranks, outgoing: list[Tensor], to: int, incoming: list[Tensor], source: int) -> None:
        self.ranks, self.arrived, self._held = ranks, incoming, outgoing
        ops = [dist.P2POp(dist.irecv, x, ranks.peer(source), ranks.group) for x in incoming]
        ops += [dist.P2POp(dist.isend, x, ranks.peer(to), ranks.group) for x in outgoing]
        with ranks.watched():
            self._works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> list[Tensor]:
        """What came."""
        with self.ranks.watched():
            for work in self._works:
                work.wait()
        self._held = []
        return self.arrived


class _Travel:
    """The blocks that come to this rank, step by step, the next one on its way while one is computed."""

    def __init__(self, work: RingWork, schedule: Schedule, own: list[Tensor]) -> None:
        self.work, self.own, self.steps = work, own, schedule.steps()
        self._next = self._send(0)

    def _send(self, index: int) -> _Transfer | None:
        if index == len(self.steps):
            return None
        step = self.steps[index]
        incoming, outgoing, to, source = [], [], 0, 0
        if step.source is not None:
            source, (start, stop) = step.source
            incoming = [x.new_empty(*x.shape[:2], stop - start, x.shape[3]) for x in self.own]
        if step.target is not None:
            to, block = step.target
            outgoing = [x[:, :, self.work.place(block)].contiguous() for x in self.own]
        return _Transfer(self.work.ranks, outgoing, to, incoming, source)

    def __iter__(self) -> Iterator[tuple[RingStep, list[Tensor]]]:
        for index, step in enumerate(self.steps):
            now, self._next = self._next, self._send(index + 1)
            assert now is not None
            yield step, now.wait()
            del now


def _zeros(like: Tensor) -> Tensor:
    """A gradient to add to in place: contiguous, whatever the strides of its tensor."""
    return torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _merge_(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a shard to the output and log-sum-exp of those before it, in place."""
    together = torch.logaddexp(lse, part_lse)
    shift = together.masked_fill(together == -torch.inf, 0)  # rows that see nothing so far
    out.mul_((lse - shift).exp()[..., None]).add_(part * (part_lse - shift).exp()[..., None])
    lse.copy_(together)


class Ring(torch.autograd.Function):
    """Output and log-sum-exp of a rank's queries and the keys of all, and their gradient.

    Saved are this rank's tokens, output and log-sum-exp; the blocks of others are not.
    """

    @staticmethod
    def forward(
        ctx: Any, work: RingWork, q: Tensor, k: Tensor, v: Tensor, plain_q: Tensor | None, plain_k: Tensor | None,
        *learned: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        own = [k, v] if plain_k is None else [k, v, plain_k]
        wide = torch.promote_types(q.dtype, torch.float32)
        out = torch.zeros(*q.shape[:3], v.shape[3], dtype=wide, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, dtype=wide, device=q.device)

        def add(keys: Stretch, block: list[Tensor]) -> None:
            for pair in work.forward.pairs(keys):
                terms = work.terms[pair[0]].narrow(slice(None), slice(*keys))
                call, rows = work.call(pair, terms, q, plain_q, block, forward=True), work.place(pair[0])
                assert work.shards is not None
                part, part_lse = work.shards.forward(call)
                _merge_(out[:, :, rows], lse[:, :, rows], part, part_lse)

        travel = _Travel(work, work.forward, own)
        for keys in work.forward.own:
            add(keys, [x[:, :, work.place(keys)] for x in own])
        for step, block in travel:
            if step.source is not None:
                add(step.source[1], block)
        ctx.work = work
        # What is learned is in `work`, too; saved, autograd notices that it was changed meanwhile.
        ctx.save_for_backward(q, k, v, plain_q, plain_k, out, lse, *learned)
        return (out if out.dtype == q.dtype else out.to(q.dtype)), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_lse: Tensor) -> tuple[Tensor | None, ...]:
        work: RingWork = ctx.work
        q, k, v, plain_q, plain_k, out, lse, *_ = ctx.saved_tensors
        own = [k, v] if plain_k is None else [k, v, plain_k]
        d_q, d_plain_q = _zeros(q), None if plain_q is None else _zeros(plain_q)
        d_own = [_zeros(x) for x in own]
        sums: list[Tensor | None] = [None] * len(work.learned)

        def found(keys: Stretch, block: list[Tensor], into: list[Tensor]) -> None:
            """Add what the queries of this rank find for a block's keys."""
            for pair in work.backward.pairs(keys):
                call = work.call(pair, work.parts[pair], q, plain_q, block, forward=False)
                rows = work.place(pair[0])
                mine = [call.q] if call.plain_q is None else [call.q, call.plain_q]
                totals = [d_q[:, :, rows], *([] if d_plain_q is None else [d_plain_q[:, :, rows]]), *into]
                gradients = Gradients([*mine, *block, *work.learned])
                gradients.sums = [*totals, *sums]
                assert work.shards is not None
                work.shards.backward(
                    call, out[:, :, rows], lse[:, :, rows], d_out[:, :, rows], d_lse[:, :, rows], gradients
                )
                sums[:] = gradients.sums[len(totals) :]
                for total, one in zip(totals, gradients.sums, strict=False):
                    if one is not None and one is not total:
                        total.copy_(one)

        with without_autocast(q.device):
            travel, returning = _Travel(work, work.backward, own), None
            for keys in work.backward.own:
                found(keys, [x[:, :, work.place(keys)] for x in own], [x[:, :, work.place(keys)] for x in d_own])
            for step, block in travel:
                theirs: list[Tensor] = []
                if step.source is not None:
                    theirs = [_zeros(x) for x in block]
                    found(step.source[1], block, theirs)
                del block
                if returning is not None:
                    _add_returned(work, returning, d_own)
                returning = _return(work, step, theirs, d_own)
                del theirs
            if returning is not None:
                _add_returned(work, returning, d_own)
        d_k, d_v, d_plain_k = (*d_own, None)[:3]
        inputs = (q, k, v, plain_q, plain_k, *work.learned)
        gradients = (d_q, d_k, d_v, d_plain_q, d_plain_k, *sums)
        given = [
            None if x is None or not wanted else torch.zeros_like(x) if g is None else g.to(x.dtype)
            for wanted, x, g in zip(ctx.needs_input_grad[1:], inputs, gradients, strict=True)
        ]
        return None, *given


def _return(work: RingWork, step: RingStep, theirs: list[Tensor], like: list[Tensor]) -> tuple[RingStep, _Transfer]:
    """Send what was found for a block back to the rank that holds it, and get what another found for an own block."""
    incoming, target, source = [], 0, 0
    if step.target is not None:
        target, (start, stop) = step.target
        incoming = [x.new_empty(*x.shape[:2], stop - start, x.shape[3]) for x in like]
    if step.source is not None:
        source = step.source[0]
    return step, _Transfer(work.ranks, theirs, source, incoming, target)


def _add_returned(work: RingWork, returning: tuple[RingStep, _Transfer], d_own: list[Tensor]) -> None:
    step, transfer = returning
    parts = transfer.wait()
    if step.target is not None:
        for total, part in zip(d_own, parts, strict=True):
            total[:, :, work.place(step.target[1])].add_(part)
