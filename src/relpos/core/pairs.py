"""Which pairs of query and key a mask allows, its block layout apart: said here and nowhere else in Python.

Dense masks ask about all pairs of some rows and keys at once; FlexAttention asks with the numbers of one pair and reads
this as text, so that nothing here may be but tensors' own operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Compared:
    """What a mask compares of queries, `[1 or B, n]`, and of keys, `[1 or B, m]`; None where it does not ask.

    Attributes:
        low, high: the orders that a query sees. most: the highest that it sees even of global keys.
        query_global, query_segments: of the queries.
        order, key_global, key_segments: of the keys.
    """

    low: Tensor | None
    high: Tensor | None
    most: Tensor | None
    query_global: Tensor | None
    query_segments: Tensor | None
    order: Tensor | None
    key_global: Tensor | None
    key_segments: Tensor | None

    def allowed(
        self, every: Tensor, of_query: Callable[[Tensor], Tensor], of_key: Callable[[Tensor], Tensor]
    ) -> Tensor:
        """Which pairs are allowed: the one place that says so.

        Args:
            every: True for each pair that is asked about. of_query, of_key: what a tensor has for these pairs.
        """
        seen = every
        if self.order is not None:
            order = of_key(self.order)
            if self.low is not None:
                seen = seen & (of_query(self.low) <= order)
            if self.high is not None:
                seen = seen & (order <= of_query(self.high))
        if self.query_global is not None:
            seen = seen | of_query(self.query_global)
        if self.key_global is not None:
            seen = seen | of_key(self.key_global)
        if self.most is not None and self.order is not None:
            seen = seen & (of_key(self.order) <= of_query(self.most))
        if self.query_segments is not None and self.key_segments is not None:
            mine = of_query(self.query_segments)
            seen = seen & (mine == of_key(self.key_segments)) & (mine >= 0)
        return seen
