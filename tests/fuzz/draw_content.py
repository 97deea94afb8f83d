"""Vectors that meet a content of their own in place of the queries, put into the call of a seed after all else.

By a chance of its own, so that the frozen calls keep what seeds draw.
"""

from __future__ import annotations

from dataclasses import replace

from fuzz.description import Described, Options, Part
from fuzz.draw_memory import MemoryChoices
from fuzz.tiles import FAR


class ContentChoices(MemoryChoices):
    """The choices about contents of one seed."""

    def changed(self, call: Described) -> Described:
        terms = tuple(self._part(part) for part in call.terms)
        names = [f"{part.name}.content" for part in terms if "content" in part.options]
        if not names:
            return call
        layouts = {name: self.layout(4) for name in names if self.sometimes(0.5)}
        frozen = tuple(name for name in names if call.frozen and self.sometimes(0.5))
        tiles = {name: self.r.choice(sizes) for name, sizes in FAR.items() if call.tiles}
        return replace(
            call, terms=terms, layouts=call.layouts | layouts, frozen=call.frozen + frozen, tiles=call.tiles | tiles
        )

    def _part(self, part: Part) -> Part:
        if part.kind != "LineVectors" or part.options["side"] == "value" or not self.sometimes(0.5):
            return part
        options: Options = {key: x for key, x in part.options.items() if key not in ("bias", "more")}
        options |= {"side": "query", "content": self.of(1, 3, 16), "content_batched": self.sometimes(0.7)}
        if self.sometimes(0.3):
            options["content_heads"] = False
        if self.sometimes(0.6):
            options["index"] = "near"
        return replace(part, options=options)


def with_content(call: Described) -> Described:
    """The call, with a content in some of its vectors."""
    return ContentChoices(2**40 + call.seed).changed(call)
