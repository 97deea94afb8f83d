"""A bias that each pair reads from a table by an index of its own: distances in a graph, relations of words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from relpos.core.algebra import Keys, Queries, Term
from relpos.core.checks import WHOLE, fail, known_value, require_device, require_tensor, require_wide, shape_of
from relpos.core.pair_table import read_pairs
from relpos.core.terms.fitting import check_device, check_heads, check_shape, heads_first
from relpos.core.tree import changed, register


@register("relpos.core.terms.IndexedBias")
@dataclass(frozen=True, eq=False)
class IndexedBias(Term):
    """Adds `values[h, index[b, i, j]]`: a learned number for each kind of pair, where no line of coordinates tells it.

    So do the distance of two nodes in a graph (Graphormer, section 3.1.2), the relation of two words in a tree, or the
    bucket of a distance on a page. An index of one or two bytes a pair is all of size N x M that the `streaming` engine
    holds: it reads the numbers a block of rows at a time. The gradient of `values` is summed in a fixed order.

    Attributes:
        values: `[H, R]`, or `[1, R]` for all heads alike; float32 or wider, in units of the score: it is not scaled.
        index: `[1 or B, N, M]`, integers from 0 to R - 1 in any integer dtype. On a CPU others raise; elsewhere they
            are not checked, for that would synchronize.

    Raises:
        ValueError: no table or no integers, an index beyond the table; in attention, for other heads or tokens.

    Examples:
        >>> distance = torch.tensor([[[0, 1, 2], [1, 0, 1], [2, 1, 0]]], dtype=torch.uint8)  # of three nodes in a row
        >>> values = torch.tensor([[0.0, -1.0, -2.0]], requires_grad=True)
        >>> q = k = v = torch.zeros(1, 2, 3, 8)
        >>> relpos.attention(q, k, v, position=relpos.IndexedBias(values, distance)).sum().backward()
        >>> relpos.attention_weights(q, k, position=relpos.IndexedBias(values, distance))[0, 0, 0]
        tensor([0.6652, 0.2447, 0.0900], grad_fn=<SelectBackward0>)
    """

    meets_plain = False
    values: Float[Tensor, "H R"]
    index: Integer[Tensor, "#B N M"]

    def __post_init__(self) -> None:
        heads_first(self.values, "IndexedBias values", "R")
        require_wide(self.values, "IndexedBias values", "Half precision rounds close biases to one value.")
        require_tensor(self.index, "IndexedBias index", dims=3)
        if self.index.dtype not in WHOLE:
            wanted = "integers as IndexedBias index"
            fail(wanted, shape_of(self.index), "Convert it with .long(); for a boolean mask use Mask.")
        require_device(self.index, "IndexedBias index", self.values.device, "Move it to the device of the values.")
        known = None if 0 in self.index.shape else known_value(self.index, lambda x: torch.stack(x.aminmax()))
        if known is not None and (known[0] < 0 or known[1] >= self.values.shape[1]):
            wanted = f"an IndexedBias index from 0 to {self.values.shape[1] - 1}"
            fail(wanted, f"{known[0]} to {known[1]}", "Add columns for the others to the values.")

    def join(self, other: Self) -> IndexedBias | None:
        """Values that are read by the same index add up."""
        if self.index is not other.index or self.values.shape != other.values.shape:
            return None
        return IndexedBias(self.values + other.values, self.index)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.values, "IndexedBias", q)
        check_heads(self.values, "IndexedBias values", q)
        check_shape(self.index, "IndexedBias index", ((1, q.shape[0]), (q.shape[2],), (k.shape[2],)))

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "#B #H N M"]:
        return read_pairs(self.values, self.index)

    def narrow(self, queries: slice, keys: slice) -> IndexedBias:
        return changed(self, index=self.index[:, queries, keys])
