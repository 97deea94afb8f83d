"""Named cases of the conformance suite: the smallest coordinates that show each way of going wrong."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from relpos.core import Coordinates, Grid, Positions, Sequence


@dataclass(frozen=True)
class SuiteCase:
    """Queries and keys, and the numbers of their heads.

    Attributes:
        keys: None where they are the queries themselves.
        groups: number of key heads; `heads` where None.
    """

    name: str
    queries: Coordinates
    keys: Coordinates | None = None
    heads: int = 3
    groups: int | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def axes(self) -> int:
        """Number of axes of the queries' coordinates."""
        return self.queries.axes

    @property
    def prefix(self) -> int:
        """The longest prefix of queries and keys."""
        return max(self.queries.prefix, 0 if self.keys is None else self.keys.prefix)

    @property
    def irregular(self) -> bool:
        """Whether queries or keys are `Positions`."""
        return any(isinstance(one, Positions) for one in (self.queries, self.keys))


SHUFFLED = Positions(torch.tensor([4, 0, 3, 3]), low=0, high=5)
CELLS = Positions(torch.tensor([[1, 0], [0, 2], [1, 2]]), low=(0, 0), high=(1, 2))

CASES: list[SuiteCase] = [
    SuiteCase("one token", Sequence(1)),
    SuiteCase("odd length", Sequence(7)),
    SuiteCase("prime length, 6 heads", Sequence(13), heads=6),
    SuiteCase("grouped keys", Sequence(5), heads=6, groups=2),
    SuiteCase("more keys", Sequence(4), Sequence(9)),
    SuiteCase("more queries", Sequence(6), Sequence(2)),
    SuiteCase("a cache", Sequence(1, start=6), Sequence(7)),
    SuiteCase("queries that start late", Sequence(3, start=5), Sequence(8)),
    SuiteCase("both start below 0", Sequence(4, start=-6), Sequence(5, start=-4)),
    SuiteCase("a prefix token", Sequence(5, prefix=1)),
    SuiteCase("three prefix tokens", Sequence(4, prefix=3)),
    SuiteCase("a prefix of queries", Sequence(3, prefix=1), Sequence(4)),
    SuiteCase("a prefix of keys", Sequence(3), Sequence(4, prefix=3)),
    SuiteCase("shuffled", SHUFFLED),
    SuiteCase("shuffled queries", SHUFFLED, Sequence(5)),
    SuiteCase("1 x 1", Grid(1, 1)),
    SuiteCase("1 x n", Grid(1, 5)),
    SuiteCase("n x 1", Grid(4, 1), heads=6),
    SuiteCase("3 x 6", Grid(3, 6)),
    SuiteCase("4 x 3 with a prefix token", Grid(4, 3, prefix=1)),
    SuiteCase("2 x 3 with three prefix tokens", Grid(2, 3, prefix=3)),
    SuiteCase("unequal grids", Grid(3, 2), Grid(2, 4)),
    SuiteCase("unequal grids and prefixes", Grid(2, 2, prefix=1), Grid(3, 2, prefix=3)),
    SuiteCase("some cells", CELLS, Grid(2, 3)),
    SuiteCase("2 x 3 x 2", Grid(2, 3, 2)),
]
"""Every declared pair of engine and dtype meets the first and some others of these; one pair meets them all."""
