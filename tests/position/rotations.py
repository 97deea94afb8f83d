"""The conformance suite of rotations: attention by loops over queries and keys that a subclass turns by loops."""

from typing import Any, ClassVar

from torch import Tensor

from conformance.suite import LibrarySuite
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle


class RotationSuite(LibrarySuite):
    """`along` is the number of axes that it turns with, `every` says one in how many cases is run."""

    along: ClassVar[int] = 1
    every: ClassVar[int] = 1

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        raster = self.along > 1 or case.axes == 1 or not case.irregular  # what is irregular has no raster order
        return super().takes(case) and raster and not (self.translation_invariant and case.prefix)

    def turned(self, mechanism: Any, x: Tensor, side: Coordinates, other: Coordinates) -> Tensor:
        """Queries or keys of one side, in a call with the other."""
        raise NotImplementedError

    def oracle_attention(self, mechanism, q, k, v, queries, keys, allowed):  # type: ignore[no-untyped-def]
        k, v = (oracle.heads_of(x, q.shape[1]) for x in (k, v))
        q, k = self.turned(mechanism, q, queries, keys), self.turned(mechanism, k, keys, queries)
        return oracle.attention(q, k, v, allowed=allowed)[0]
