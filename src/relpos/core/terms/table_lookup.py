"""A line bias whose values an engine reads from a learned table by itself: internal, see `TableBias._unread_terms`."""

from __future__ import annotations

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from relpos.core.algebra import Keys, Queries, Term, Terms
from relpos.core.gather import Rows, at_least_float32, read
from relpos.core.line import Lines
from relpos.core.terms.biases import LineBias
from relpos.core.tree import changed, register, unchecked


@register("relpos.core.terms.TableLookup")
@dataclass(frozen=True, eq=False)
class TableLookup(Term):
    """Adds `table[rows.index[query_line[i] - key_line[j] + origin], h]`.

    Not to be confused with `LineBias`, which has the values that were read: only an engine that says so
    (`Engine.takes_tables`) is given this term; all others get `read()`. Nothing is checked here: the mechanism has.

    Attributes:
        table: `[R, H]`, or `[R, 1]` for all heads alike; any floating dtype.
        rows: the row that each of the L entries of the line reads.
        lines: the line coordinates of queries and keys; `lines.length` is L.
    """

    meets_plain = False
    table: Float[Tensor, "R H"]
    rows: Rows
    lines: Lines

    def read(self) -> LineBias:
        """The same with its values, in float32 or wider; gradients reach the table."""
        return unchecked(LineBias, values=read(at_least_float32(self.table), self.rows), lines=self.lines)

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        self.read().check(q, k, v)

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "*#B #H N M"]:
        return self.read().scores(q, k, scale, allowed)

    def narrow(self, queries: slice, keys: slice) -> TableLookup:
        return changed(self, lines=self.lines.narrow(queries, keys))


def read_tables(terms: Terms) -> Terms:
    """The terms with the values of all tables read; the same object where there is none."""
    if not any(type(term) is TableLookup for term in terms.items):
        return terms
    return terms.each(lambda term: term.read() if isinstance(term, TableLookup) else term)
