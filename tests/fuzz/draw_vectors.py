"""Vectors on offsets, put into the calls that Triton's interpreter is given after all else.

By a chance of its own, so that the frozen calls keep what seeds draw.
"""

from __future__ import annotations

from dataclasses import replace

from fuzz.description import Described, Options, Part
from fuzz.draw_memory import MemoryChoices
from fuzz.draw_terms import TermChoices
from fuzz.tiles import PARTS

_MOST = 3
"""Sets of vectors that the kernels read."""
_BIASES = ("LineBias", "LowRank", "Mechanism")
"""Kinds whose gradient the kernels lack beside vectors, or that may be of them."""


class VectorChoices(TermChoices, MemoryChoices):
    """The choices about vectors of one seed."""

    def changed(self, call: Described) -> Described:
        if call.queries.kind == "nowhere" or self.sometimes(0.6):
            return call
        kept = tuple(part for part in call.terms if part.kind not in _BIASES)
        axes = max(side.axes for side in call.sides)
        if axes <= _MOST and self.sometimes(0.2):
            added = [self._vectors(call, "AxisVectors", 0)]
        else:
            added = [self._vectors(call, "LineVectors", number) for number in range(self.of(1, 1, 2, 3))]
        names = [
            f"{part.name}.{x}" for part in added for x in ("vectors", "bias") if x == "vectors" or x in part.options
        ]
        frozen = tuple(name for name in names if call.frozen and self.sometimes(0.5))
        tiles = {name: self.r.choice(sizes) for name, sizes in PARTS.items() if self.sometimes(0.6)}
        return replace(call, terms=(*kept, *added), frozen=call.frozen + frozen, tiles=call.tiles | tiles)

    def _vectors(self, call: Described, kind: str, number: int) -> Part:
        options: Options = self._linevectors(call) if kind == "LineVectors" else self._axisvectors(call)
        if not self.sometimes(0.75):
            options["heads"] = False
        return Part(kind, f"v{number}", options)


def with_vectors(call: Described) -> Described:
    """The call, perhaps with vectors in place of its biases."""
    return VectorChoices(2**41 + call.seed, few=True).changed(call)
