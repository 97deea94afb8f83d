"""Where the tokens of a random call are."""

from __future__ import annotations

from dataclasses import replace

from fuzz.chance import Chance
from fuzz.description import Tokens

BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = (255, 256, 257, 511, 512, 513, 700)
MOST = 700


class TokenChoices(Chance):
    """Sizes and coordinates."""

    def count(self) -> int:
        x = self.r.random()
        if self.few:
            return self.r.randint(1, 15) if x < 0.6 else self.of(16, 17) if x < 0.85 else self.r.randint(18, 40)
        if x < 0.5:
            return self.r.randint(1, 20)
        if x < 0.78:
            return self.r.randint(21, 80)
        if x < 0.96:
            return self.r.choice(BORDERS)
        return self.r.choice(FAR) if self.sometimes(0.5) else self.r.randint(81, MOST)

    def prefix(self, most: int) -> int:
        x = self.r.random()
        if x < 0.55 or most < 1:
            return 0
        return min(most, 1 if x < 0.75 else self.r.randint(2, 5) if x < 0.97 else self.r.randint(1, most))

    def sequence(self, count: int | None = None) -> Tokens:
        count = self.count() if count is None else count
        prefix = self.prefix(count - 1 if self.sometimes(0.9) else count)
        return Tokens("sequence", (count - prefix,), self.of(0, 0, 0, self.r.randint(-9, 30)), prefix)

    def grid(self, axes: int, about: int) -> Tokens:
        """A grid of about so many cells, some axes of one."""
        sizes, left = [], max(1, about)
        for axis in range(axes):
            rest = axes - axis
            size = round(left ** (1 / rest) * self.of(0.5, 1, 1, 1, 2))
            size = 1 if self.sometimes(0.15) else max(1, min(size, left))
            sizes.append(size)
            left = max(1, left // size)
        self.r.shuffle(sizes)
        # rows that fill tiles of Triton's kernels, or that tiles fill
        if self.few and not self.as_frozen and self.sometimes(0.4):
            sizes = [*(min(size, 5) for size in sizes[:-1]), self.of(8, 8, 16, 16, 32)]
        return Tokens("grid", tuple(sizes), prefix=self.prefix(9))

    def positions(self, axes: int, count: int) -> Tokens:
        span = max(1, min(40, round((2 * count) ** (1 / axes)))) + self.of(0, 1, 3)
        spans = tuple(max(1, span + self.of(-1, 0, 2)) for _ in range(axes))
        return Tokens(
            "positions", (count,), self.of(0, 0, -4, 7), self.prefix(5), spans, self.sometimes(0.4), self.of(0, 0, 0, 2)
        )

    def tokens(self) -> tuple[Tokens, Tokens | None]:
        """Of queries and keys."""
        family = self.r.choices(("sequence", "grid", "positions", "nowhere"), (42, 33, 13, 12))[0]
        alike = self.sometimes(0.45)
        if family == "nowhere":
            n = self.count()
            m = n if alike else self.count()
            n, m = (0 if self.sometimes(0.05) else x for x in (n, m))
            return Tokens("nowhere", (n,)), Tokens("nowhere", (m,))
        if family == "sequence":
            queries = self.sequence()
            if alike:
                return queries, None
            x = self.r.random()
            if x < 0.45:  # the same number of tokens, of which others are the prefix
                return queries, self.sequence(queries.count)
            if x < 0.65:  # a cache
                length = max(queries.sizes[0], self.count())
                return replace(queries, start=length - queries.sizes[0]), Tokens(
                    "sequence", (length,), 0, queries.prefix
                )
            return queries, self.sequence()
        axes = self.r.choices((1, 2, 3), (15, 65, 20))[0]
        if family == "grid":
            queries = self.grid(axes, self.count())
            if alike:
                return queries, None
            x = self.r.random()
            if x < 0.1:
                return queries, replace(queries, prefix=self.prefix(9))
            if x < 0.2:  # as many cells, otherwise
                return queries, replace(queries, sizes=tuple(self.r.sample(queries.sizes, axes)))
            if x < 0.45:  # an axis of one cell, on one side
                place = self.r.randrange(axes)
                sizes = tuple(1 if axis == place else size for axis, size in enumerate(queries.sizes))
                return queries, Tokens("grid", sizes, prefix=self.prefix(5))
            if x < 0.75:
                sizes = tuple(max(1, size + self.of(-2, -1, 0, 0, 1, 3)) for size in queries.sizes)
                return queries, Tokens("grid", sizes, prefix=self.prefix(5))
            return queries, self.grid(axes, self.count()) if self.sometimes(0.7) else self.positions(axes, self.count())
        queries = self.positions(axes, self.count())
        if alike:
            return queries, None
        x = self.r.random()
        if x < 0.3:  # as many tokens elsewhere, of one side for each element of the batch
            return queries, replace(self.positions(axes, queries.sizes[0]), prefix=queries.prefix)
        if x < 0.6:
            return queries, self.positions(axes, 0 if self.sometimes(0.1) else self.count())
        if axes == 1:
            other = self.sequence()
            return (queries, other) if self.sometimes(0.5) else (other, queries)
        other = self.grid(axes, self.count())
        return (queries, other) if self.sometimes(0.5) else (other, queries)

    def width(self) -> int:
        x = self.r.random()
        if self.few:
            return self.r.randint(1, 8) if x < 0.7 else self.of(15, 16, 17, 33)
        return self.r.randint(1, 8) if x < 0.45 else self.of(8, 16, 24, 32, 33) if x < 0.92 else self.of(64, 65, 128)
