"""Rotations by pair and polar embeddings, put into the call of a seed after all else.

By a chance of its own, so that the frozen calls keep what seeds draw.
"""

from __future__ import annotations

from dataclasses import replace

from fuzz.description import Described, Options, Part
from fuzz.draw_memory import MemoryChoices
from fuzz.draw_terms import ROTARY

BY_OFFSET = ("rerope", "self_extend", "dual_chunk")


class TurningChoices(MemoryChoices):
    """The choices about such rotations of one seed."""

    def changed(self, call: Described) -> Described:
        turned = [part for part in call.terms if self._turns(part)]
        if turned:
            mine = [part for part in turned if part.kind == "Rotation" and not part.options.get("values")]
            if not mine or not self.sometimes(0.55):
                return call
            part = self._by_pairs(call, mine[0])
            terms = tuple(part if one is mine[0] else one for one in call.terms)
        elif self.sometimes(0.07) and not any(self._adds_to_queries(part) for part in call.terms):
            part = Part("Polar", "t6", self._polar())
            terms = (*call.terms, part)
        elif self.sometimes(0.12) and self._sequences(call):
            return replace(call, terms=(*call.terms, Part("Mechanism", "t6", {"preset": self.of(*BY_OFFSET)})))
        else:
            return call
        names = [name for name in self.names(part) if self.sometimes(0.3)]
        frozen = tuple(name for name in self.names(part) if call.frozen and self.sometimes(0.5))
        layouts = {name: self.layout(2 if name.endswith("phase") else 4) for name in names}
        return replace(call, terms=terms, layouts=call.layouts | layouts, frozen=call.frozen + frozen)

    @staticmethod
    def names(part: Part) -> list[str]:
        """Its tensors that are laid out in other ways."""
        if part.kind == "Polar":
            return [f"{part.name}.{side}" for side in ("query", "key", "phase")]
        return [f"{part.name}.{place}.{side}" for place in range(part.options["parts"]) for side in ("query", "key")]

    @staticmethod
    def _turns(part: Part) -> bool:
        return part.options.get("preset", part.kind).startswith(("Rotation", *ROTARY))

    @staticmethod
    def _adds_to_queries(part: Part) -> bool:
        return part.kind == "QueryBias" or part.options.get("preset") == "transformer_xl"

    @staticmethod
    def _sequences(call: Described) -> bool:
        plain = all(side.kind == "sequence" and side.prefix == 0 for side in call.sides)
        return plain and call.width % 4 == 0 and not any(part.kind == "Mechanism" for part in call.terms)

    def _polar(self) -> Options:
        options: Options = {"phase": self.of(None, 1, "heads")}
        for option in ("query_batched", "key_batched", "magnitudes"):
            if self.sometimes(0.25):
                options[option] = True
        for option in ("query_heads", "key_heads"):
            if self.sometimes(0.6):
                options[option] = False
        if self.sometimes(0.25):
            options["magnitude"] = self.of(0.7, 1.3)
        return options

    def _by_pairs(self, call: Described, part: Part) -> Part:
        """Two or three rotations, the pairs between them shared out by offset, of tokens or of orders of their own."""
        most = max(*call.counts, 1)
        borders = tuple(sorted({self.r.randint(-most, most) for _ in range(self.of(1, 1, 2))}))
        options = part.options | {"borders": borders, "parts": len(borders) + 1}
        ordered = any(x.endswith("_order") for mask in call.masks for x in mask.options)
        if call.counts[0] != call.counts[1] or self.sometimes(0.3):
            options["orders"] = self.of(1, 1, 2) if not ordered else 1
        return Part("PairRotations", part.name, options)


def with_turning(call: Described) -> Described:
    """The call, with such a rotation in place of a plain one, or beside what it has."""
    return TurningChoices(2**41 + call.seed).changed(call)
