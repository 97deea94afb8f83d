"""What the suites of mechanisms are written with: which cases, a grid's raster order, loops over pairs of tokens."""

import functools
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Site
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle
from relpos.testing.invariance_tests import InvarianceTests

OF_A_CORNER = InvarianceTests.test_a_part_of_a_grid_reads_the_same_numbers.__name__


class PositionSuite(LibrarySuite):
    """`LibrarySuite` whose oracle says what the mechanism puts in place of attention's arguments.

    Attributes:
        every: one in so many of the cases is run: a variant is the same code around one other line.
        raster: whether a grid's cells are numbered row by row. Cells in any order then have no number, and a corner of
            a grid has no offsets of its own.
    """

    every: ClassVar[int] = 1
    raster: ClassVar[bool] = False

    @classmethod
    def asked(cls) -> dict[str, bool]:
        asked = super().asked()
        return {**asked, OF_A_CORNER: asked[OF_A_CORNER] and not cls.raster}

    def takes(self, case: SuiteCase) -> bool:
        return super().takes(case) and not (self.raster and case.axes > 1 and case.irregular)

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        """Arguments of `oracle.attention` under the mechanism: q, k, bias, scale, value_vectors."""
        bias = self.oracle_bias(own, queries, keys)
        return {} if bias is None else {"bias": bias[None]}

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        said = {"q": q, "k": k, **self.said(mechanism, q, k, queries, keys)}
        return oracle.attention(v=v, allowed=allowed, **said)[0]

    def places(self, coordinates: Coordinates) -> list[Any]:
        """The tokens as the mechanism sees them; None for a prefix."""
        return oracle.raster(coordinates) if self.raster else oracle.places(coordinates)

    def by_offset(
        self, queries: Coordinates, keys: Coordinates, at: Callable[..., Tensor], prefixed: Tensor
    ) -> list[list[Tensor]]:
        """`at(*(query - key))` of every pair of tokens, asked once an offset; `prefixed` where a prefix takes part."""
        once = functools.cache(at)

        def pair(a: Any, b: Any) -> Tensor:
            return prefixed if a is None or b is None else once(*(x - y for x, y in zip(a, b, strict=True)))

        return [[pair(a, b) for b in self.places(keys)] for a in self.places(queries)]


class OffsetSuite(PositionSuite):
    """A bias of the offset.

    Attributes:
        prefixed: the bias of a pair with a prefix token.
    """

    prefixed: ClassVar[float] = 0.0

    def value(self, own: Any, *offset: int) -> Tensor:
        """The bias at query - key, `[H]`."""
        raise NotImplementedError

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        dtype = next(mechanism.parameters()).dtype
        prefixed = torch.full((mechanism.num_heads,), self.prefixed, dtype=dtype)
        rows = self.by_offset(queries, keys, functools.partial(self.value, mechanism), prefixed)
        return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def cover(site: Site) -> Any:
    """The window whose table holds every offset that the coordinates' bounds allow."""
    queries, keys = site.queries, site.queries if site.keys is None else site.keys
    sides = zip(queries.low, queries.high, keys.low, keys.high, strict=True)
    return tuple(max(qh - kl, kh - ql) + 1 for ql, qh, kl, kh in sides)


def stretched(table: Tensor, rows: int) -> list[Tensor]:
    """So many rows, linear between those of the table: each at the middle of its share of them, or on an end."""
    old, out = len(table), []
    for r in range(rows):
        place = min(max(Fraction(2 * r + 1, 2) * old / rows - Fraction(1, 2), Fraction(0)), Fraction(old - 1))
        below = math.floor(place)
        above, share = min(below + 1, old - 1), place - below
        out.append(table[below] * float(1 - share) + table[above] * float(share))
    return out
