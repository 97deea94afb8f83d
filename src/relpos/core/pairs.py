"""Which pairs of query and key a mask allows, except for its block layout: the only definition in Python.

Dense masks ask about all pairs of some rows and keys, FlexAttention about one pair by index. FlexAttention compiles
this code, so it may only use tensor operations.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Compared:
    """The parts of a mask for some queries, `[1 or B, n]`, and keys, `[1 or B, m]`; None if the mask lacks one.

    Attributes:
        low, high: the lowest and highest key order that a query sees.
        most: the highest key order that a query sees, global keys included.
        order: the order of the keys.
        query_global, query_segments, key_global, key_segments: as in `Mask`.
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
        """Which pairs are allowed.

        Args:
            every: True for each pair in question. of_query, of_key: broadcast a tensor of queries or keys to the pairs.
        """
        allowed = every
        if self.order is not None:
            order = of_key(self.order)
            if self.low is not None:
                allowed = allowed & (of_query(self.low) <= order)
            if self.high is not None:
                allowed = allowed & (order <= of_query(self.high))
        if self.query_global is not None:
            allowed = allowed | of_query(self.query_global)
        if self.key_global is not None:
            allowed = allowed | of_key(self.key_global)
        if self.most is not None and self.order is not None:
            allowed = allowed & (of_key(self.order) <= of_query(self.most))
        if self.query_segments is not None and self.key_segments is not None:
            mine = of_query(self.query_segments)
            allowed = allowed & (mine == of_key(self.key_segments)) & (mine >= 0)
        return allowed
