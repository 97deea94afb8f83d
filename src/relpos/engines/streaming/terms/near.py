"""Which keys a block of queries meets with vectors. Others read rows of zeros (a bias that ends at some distance)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from relpos.core import LineVectors
from relpos.engines.call import Call
from relpos.engines.streaming.plan.tiles import Block, Tile
from relpos.engines.streaming.terms.vector_term import origin_of, reading

_LEAST_FAR = 512
"""Minimum keys that are cut off because no row meets them with vectors: a tile has a fixed cost."""


class Near:
    """The keys that vectors reach, for a call whose first query has the line coordinate `start`.

    A row of the coordinate c meets vectors at keys c + low to c + high - 1 alone.

    Args:
        apart: whether other keys have tiles of their own, where they are many.
    """

    def __init__(self, call: Call, start: int, apart: bool) -> None:
        self.apart = apart
        self.low = self.high = 0
        ends = [(first - origin, stop - origin) for first, stop, origin in _reached(call, start)]
        self.is_nowhere = not ends
        if ends:
            self.low, self.high = min(low for low, _ in ends), max(high for _, high in ends)

    def keys(self, block: Block) -> tuple[int, int]:
        """The first of the keys that some row of a block meets with vectors, and the first after them."""
        return block.first_coordinate - block.count + 1 + self.low, block.first_coordinate + self.high

    def has(self, block: Block, tile: Tile) -> bool:
        """Whether some row of a block meets vectors in a tile."""
        if self.is_nowhere:
            return False
        first, stop = self.keys(block)
        return bool(tile.keys.start < stop and tile.keys.stop > first)

    def cut(self, block: Block, spans: Iterable[slice]) -> Iterator[slice]:
        """Spans of keys, cut where many keys before or after are far from the vectors."""
        if self.is_nowhere or not self.apart:
            yield from spans
            return
        first, stop = self.keys(block)
        for span in spans:
            begin = min(first, span.stop) if first - span.start >= _LEAST_FAR else span.start
            end = max(stop, begin) if span.stop - stop >= _LEAST_FAR else span.stop
            parts = ((span.start, begin), (begin, end), (end, span.stop))
            yield from (slice(*part) for part in parts if part[1] > part[0])


def _reached(call: Call, start: int) -> Iterator[tuple[int, int, int]]:
    """For each term, the first entry that may read more than zeros, the first after them, and its origin."""
    for term in call.terms.of(LineVectors):
        first, stop = (0, term.lines.length) if term.side == "key" else reading(term)
        yield first, stop, origin_of(term, start)
