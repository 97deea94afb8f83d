"""What each rank of a ring sends, receives and computes, step by step.

A rank's tokens are cut into blocks. At step (t, b) rank r gets block b of rank r - t, and sends its own block b to rank
r + t, if a query there sees one of its keys. All ranks count the same steps, so that none waits in a circle. A block goes
straight to the rank that needs it: as many bytes as in a ring of neighbours, and none through ranks that see nothing.

    3 ranks, step t = 1:    0 -> 1 -> 2 -> 0        t = 2:    0 -> 2 -> 1 -> 0
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from relpos.core import Mask
from relpos.parallel.layout import Stretch
from relpos.parallel.reach import Reach, reach_of, reach_table

_BLOCKS, _LEAST = 4, 512
"""Blocks of a rank's share, and the fewest tokens of one where there are enough. More blocks take less memory and more
calls."""


def blocks_of(spans: list[Stretch]) -> list[Stretch]:
    """The stretches of a rank, cut into blocks of consecutive tokens."""
    found = []
    for start, stop in spans:
        count = max(1, min(_BLOCKS // len(spans), (stop - start) // _LEAST))
        edges = [start + (stop - start) * index // count for index in range(count + 1)]
        found += list(zip(edges[:-1], edges[1:], strict=True))
    return found


@dataclass(frozen=True)
class Step:
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
        rank: its number. blocks: those of every rank.
        mask: of all tokens.
    """

    rank: int
    blocks: list[list[Stretch]]
    mask: Mask | None
    device: torch.device
    _read: dict[tuple[Stretch, Stretch], Reach] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mask is not None and not self.mask.is_interval:
            self._read = reach_table(self.mask, sorted(block for own in self.blocks for block in own), self.device)

    def reach(self, queries: Stretch, keys: Stretch) -> Reach:
        """How many pairs of two blocks are allowed."""
        return self._read[queries, keys] if self._read else reach_of(self.mask, queries, keys)

    def needs(self, rank: int, keys: Stretch) -> bool:
        """Whether some query of a rank sees some key of a block."""
        return any(self.reach(queries, keys) is not Reach.NONE for queries in self.blocks[rank])

    def steps(self) -> list[Step]:
        """What is sent and received, in order; no step for what nobody of this rank's partners needs."""
        size, found = len(self.blocks), []
        for t in range(1, size):
            source, target = (self.rank - t) % size, (self.rank + t) % size
            for theirs, own in zip(self.blocks[source], self.blocks[self.rank], strict=True):
                comes, goes = self.needs(self.rank, theirs), self.needs(target, own)
                found.append(Step((source, theirs) if comes else None, (target, own) if goes else None))
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
