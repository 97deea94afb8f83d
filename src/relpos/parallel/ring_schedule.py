"""What each rank of a ring sends, receives and computes, step by step.

Queries stay where they are; keys are cut into blocks. At step (t, b) rank r gets block b of rank r - t, and sends its
own block b to rank r + t, if a query there sees one of its keys. All ranks count the same steps, so that none waits in
a circle. A block goes straight to the rank that needs it: as many bytes as in a ring of neighbours, and none through
ranks that see nothing.

    3 ranks, step t = 1:    0 -> 1 -> 2 -> 0        t = 2:    0 -> 2 -> 1 -> 0
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import torch

from relpos.core import Mask
from relpos.parallel.layout import Stretch
from relpos.parallel.reach import Reach, reach_of, reach_table

FORWARD, BACKWARD = 4, 16
"""Blocks of a rank's share. In the backward their gradients travel, too, and more tensors are held."""
_LEAST = 256
"""The fewest tokens of a block where there are enough: a call for fewer would take longer to begin than to compute."""


def blocks_of(spans: list[Stretch], most: int) -> list[Stretch]:
    """The stretches of a rank, cut into at most so many blocks of consecutive tokens."""
    found: list[Stretch] = []
    for start, stop in spans:
        count = max(1, min(most // len(spans), (stop - start) // _LEAST))
        found += pairwise(start + (stop - start) * index // count for index in range(count + 1))
    return found


@dataclass(frozen=True)
class RingStep:
    """What one rank does in a step.

    Attributes:
        source: the rank whose block it gets, and the block; None if no query sees it.
        target: the rank to which it sends a block of its own, and which of its blocks.
    """

    source: tuple[int, Stretch] | None
    target: tuple[int, Stretch] | None


@dataclass
class Schedule:
    """The steps of one rank.

    Attributes:
        rank: its number. spans: the stretches of every rank.
        masks: of all tokens: a pair may attend where all of them allow it.
        most: blocks of a rank's share, at most.
    """

    rank: int
    spans: list[list[Stretch]]
    masks: tuple[Mask, ...]
    device: torch.device
    most: int
    blocks: list[list[Stretch]] = field(init=False)

    def __post_init__(self) -> None:
        self.blocks = [blocks_of(spans, self.most) for spans in self.spans]

    @cached_property
    def _read(self) -> list[dict[tuple[Stretch, Stretch], Reach]]:
        """What is read from the masks' tensors: not before it is known that keys come in blocks."""
        every = sorted(span for spans in self.spans for span in spans)
        keys = sorted({*every, *(block for blocks in self.blocks for block in blocks)})
        return [reach_table(mask, every, keys, self.device) for mask in self.masks if not mask.is_interval]

    @property
    def own(self) -> list[Stretch]:
        """The stretches of this rank."""
        return self.spans[self.rank]

    def reach(self, queries: Stretch, keys: Stretch) -> Reach:
        """How many pairs of a stretch of queries and a stretch or block of keys are allowed, at most."""
        found = [reach_of(mask, queries, keys) for mask in self.masks if mask.is_interval]
        return min([Reach.ALL, *found, *(table[queries, keys] for table in self._read)])

    def needs(self, rank: int, keys: Stretch) -> bool:
        """Whether some query of a rank sees some key of a block."""
        return any(self.reach(queries, keys) is not Reach.NONE for queries in self.spans[rank])

    def pairs(self, keys: Stretch) -> list[tuple[Stretch, Stretch]]:
        """The pairs that this rank computes of some keys."""
        return [(queries, keys) for queries in self.own if self.reach(queries, keys) is not Reach.NONE]

    def all_pairs(self) -> Iterator[tuple[Stretch, Stretch]]:
        """The pairs that this rank computes, in order: of its own keys, then of the blocks that come."""
        arriving = (step.source[1] for step in self.steps() if step.source is not None)
        for keys in (*self.own, *arriving):
            yield from self.pairs(keys)

    def steps(self) -> list[RingStep]:
        """What is sent and received, in order; no step for what nobody of this rank's partners needs."""
        size, found = len(self.blocks), []
        for t in range(1, size):
            source, target = (self.rank - t) % size, (self.rank + t) % size
            for theirs, own in zip(self.blocks[source], self.blocks[self.rank], strict=True):
                comes, goes = self.needs(self.rank, theirs), self.needs(target, own)
                found.append(RingStep((source, theirs) if comes else None, (target, own) if goes else None))
        return found

    def tokens_sent(self, rank: int) -> int:
        """How many keys a rank sends in all."""
        size = len(self.blocks)
        return sum(
            stop - start
            for t in range(1, size)
            for start, stop in self.blocks[rank]
            if self.needs((rank + t) % size, (start, stop))
        )
