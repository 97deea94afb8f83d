"""A random call from a seed: valid by construction, small in the mean, and strange in every way that calls can be."""

from __future__ import annotations

from dataclasses import replace

from fuzz.description import Described
from fuzz.draw_content import with_content
from fuzz.draw_masks import MaskChoices
from fuzz.draw_memory import MemoryChoices
from fuzz.draw_terms import PAIRS, TermChoices
from fuzz.draw_tokens import TokenChoices
from fuzz.draw_turning import with_turning
from fuzz.draw_vectors import with_vectors


class Drawing(TokenChoices, TermChoices, MaskChoices, MemoryChoices):
    """The call of one seed."""

    def call(self) -> Described:
        queries, keys = self.tokens()
        described = Described(self.seed, queries=queries, keys=keys)
        n, m = described.counts
        while n * m > 4 * PAIRS and self.sometimes(0.6):  # large calls are rare, since they are slow
            queries, keys = self.tokens()
            described = replace(described, queries=queries, keys=keys)
            n, m = described.counts
        cut = None
        if self.sometimes(0.08) and queries.kind != "nowhere" and n > 1 and m > 1:
            cut = (self._part(n), self._part(m))
            described = replace(described, cut=cut)
            n, m = described.counts
        room = 4 if self.few else max(1, PAIRS // max(1, n * m))
        batch = min(self.of(1, 1, 2, 2, 3), room)
        if any(side.batched for side in described.sides):
            batch = max(batch, 2)
        groups = min(self.of(1, 1, 2, 2, 3), max(1, room // batch))
        heads = groups * self.of(1, 1, 1, 2, 3)
        width = self.width()
        value_width = width if self.sometimes(0.6) else self.width()
        dtype = self.r.choices(("float64", "float32", "bfloat16", "float16"), (36, 40, 16, 8))[0]
        described = replace(
            described, dtype=dtype, batch=batch, heads=heads, groups=groups, width=width, value_width=value_width,
            gain=self.of(1.0, 1.0, 0.3, 2.0), lse=self.sometimes(0.35),
        )  # fmt: skip
        if described.lse:
            described = replace(described, upstream=self.of("both", "both", "out", "lse"))
        if self.sometimes(0.06):
            described = self._shared(described)
        terms = self.terms(described)
        terms = terms if self.as_frozen else self.with_newer(described, terms)
        described = replace(described, terms=terms)
        if self.sometimes(0.62):
            described = replace(described, masks=self.masks(described))
        if self.sometimes(0.1):
            described = replace(described, scale=self.of(1.0, 0.1, 0.5))
        if self.sometimes(0.07):
            described = replace(described, dropout=self.of(0.1, 0.5, 0.9))
        if dtype == "float32" and self.sometimes(0.06):
            described = replace(described, autocast=True)
        described = replace(described, layouts=self.layouts(described), frozen=self.frozen(described))
        if self.sometimes(0.5):
            described = replace(described, tiles=self.tiles(described))
        rules = any(part.kind == "RowRule" or part.options.get("preset") in ("cope", "fire") for part in terms)
        if described.masks and not rules and self.sometimes(0.12):
            described = replace(described, poison=self.of("nan", "inf"))
        return described

    def _part(self, count: int) -> tuple[int, int]:
        if self.sometimes(0.3):
            return 0, count
        start = self.of(0, self.r.randrange(count))
        return start, self.r.randint(start + 1, count)

    def _shared(self, call: Described) -> Described:
        n, m = call.counts
        call = replace(call, value_width=call.width, shared="kv")
        if n == m and self.sometimes(0.5):
            return replace(call, groups=call.heads, shared="qkv")
        return call


def draw(seed: int, engines: tuple[str, ...] = ()) -> Described:
    """The call of a seed; where Triton is among the engines, one that its interpreter can do in time."""
    call = Drawing(seed, few="triton" in engines).call()
    return with_content(with_vectors(call)) if "triton" in engines else with_turning(with_content(call))


def draw_as_frozen(seed: int, engines: tuple[str, ...] = ()) -> Described:
    """The same without what came after calls were frozen (`tests/frozen`)."""
    return Drawing(seed, few="triton" in engines, as_frozen=True).call()
