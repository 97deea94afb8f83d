"""The masks of a random call."""

from __future__ import annotations

import math

from fuzz.chance import Chance
from fuzz.description import Described, Options, Part


class MaskChoices(Chance):
    """Masks by their fields, and patterns by their names."""

    def masks(self, call: Described) -> tuple[Part, ...]:
        n, m = (side.count for side in call.sides)
        if n != m or n == 0 or self.sometimes(0.6) or call.cut is not None:
            return (Part("fields", "m0", self._fields(call)),)
        pattern = self._pattern(call)
        masks = [pattern]
        lifted = pattern.kind not in ("block_sparse", "big_bird", "windows", "strided")
        if self.sometimes(0.35):
            masks.append(Part("fields", "m1", {"right": 0}))
        elif not lifted and self.sometimes(0.3):
            masks.append(Part("fields", "m1", {"left": self.r.randint(0, n)}))
        if pattern.kind not in ("windows", "strided", "dilated") and self.sometimes(0.3):
            masks.append(Part("fields", "m2", self._segments(call)))
        return tuple(masks)

    def _pattern(self, call: Described) -> Part:
        n, r = call.counts[0], self.r
        kinds = ("local", "dilated", "fixed", "fixed", "strided", "windows", "longformer", "block_sparse", "big_bird")
        kind = self.of(*(kinds[:-3] if self.few else kinds))
        causal = self.sometimes(0.4)
        odd = 2 * r.randint(0, max(1, n // 4)) + 1
        if kind == "windows":
            sizes = call.queries.sizes if call.queries.kind == "grid" and not call.queries.prefix else (n,)
            if math.prod(sizes) != n:
                sizes = (n,)
            size = tuple(r.randint(1, max(1, one)) for one in sizes)
            shift = tuple(r.randrange(one) for one in size)
            return Part(kind, "m0", {"grid": sizes, "size": size, "shift": shift})
        stride = r.randint(1, max(1, min(n, self.of(8, 8, n))))
        options: Options
        match kind:
            case "local":
                options = {"window_size": r.randint(1, n) if causal else odd, "causal": causal}
            case "dilated":
                window = 2 * r.randint(0, 6) + 1
                options = {"window_size": window, "dilation": r.randint(1, max(1, min(8, n))), "causal": causal}
            case "fixed":
                options = {"stride": stride, "summaries": r.randint(1, min(stride, 3)), "causal": causal}
            case "strided":
                options = {"stride": stride, "causal": causal}
            case "longformer":
                tokens = sorted(r.sample(range(n), min(n, self.of(0, 1, 1, 3))))
                options = {"window_size": odd, "global_tokens": tokens}
            case "block_sparse":
                options = {"size": self.of(1, 2, 3, 8, 16), "share": self.of(20, 50, 80), "a_head": self.sometimes(0.5)}
            case _:
                options = {
                    "size": self.of(2, 3, 8, 16), "window": self.of(1, 3), "global_blocks": self.of(0, 1, 2),
                    "random_blocks": self.of(0, 1, 2), "seed": r.randint(0, 99),
                }  # fmt: skip
        return Part(kind, "m0", options)

    def _batch(self) -> int:
        return self.of(0, 0, 1, 2, 2)

    def _segments(self, call: Described) -> Options:
        kind = self.of("documents", "documents", "remainder", "random", "padding")
        options: Options = {"segments": (kind, self.r.randint(1, 5)), "int": self.of("int64", "int64", "int32")}
        for side in ("query", "key"):
            options[f"{side}_segments_batch"] = self._batch()
        if call.sides[0].count == call.sides[1].count and self.sometimes(0.7):
            options["one_segments"] = True
            if self.sometimes(0.4):  # scattered over the tokens, of all elements of the batch alike
                options["segments"] = (self.of("remainder", "random"), self.r.randint(1, 5))
                options["query_segments_batch"] = self.of(0, 1)
            options["key_segments_batch"] = options["query_segments_batch"]
        return options

    def _fields(self, call: Described) -> Options:
        n, m = (side.count for side in call.sides)
        most = max(n, m, 1)
        x = self.r.random()
        if x < 0.12:
            return self._orders(call, {"right": 0})
        if x < 0.27:
            return self._orders(call, self._window(most))
        if x < 0.42:
            return self._segments(call)
        options: Options = {}
        if self.sometimes(0.45):
            options |= self._window(most)
        if self.sometimes(0.35):
            options["interval"] = self.r.randint(0, most)
            options["interval_batch"] = self._batch()
            if self.sometimes(0.25):
                options[self.of("low", "high")] = False
        if self.sometimes(0 if self.few else 0.35):
            for side in ("query", "key"):
                if self.sometimes(0.7):
                    options[f"{side}_global"] = self.of(4, 15, 40)
                    options[f"{side}_global_batch"] = self._batch()
            if self.sometimes(0.4):
                options["limit"] = self.of(0, 0, 2, -1)
        if self.sometimes(0.35):
            options |= self._segments(call)
        if self.sometimes(0 if self.few else 0.25):
            size = self.of(1, 2, 3, 4, 8, 16, 64)
            if call.cut is not None:  # at a block's border
                size = math.gcd(size, *(start for start, _ in call.cut))
            options["blocks"] = (size, self.of(20, 50, 80), self.sometimes(0.4))
        return self._orders(call, options)

    def _window(self, most: int) -> Options:
        options: Options = {}
        for bound in ("left", "right"):
            if self.sometimes(0.7):
                options[bound] = self.r.randint(0, most) if self.sometimes(0.85) else self.r.randint(-3, 2 * most)
        return options

    def _orders(self, call: Described, options: Options) -> Options:
        """The same with orders, where they are needed or wanted."""
        n, m = (side.count for side in call.sides)
        bounded = any(x in options for x in ("left", "right", "limit", "interval"))
        if not bounded or (n == m and self.sometimes(0.6)):
            return options
        for side in ("query", "key"):
            if n != m or self.sometimes(0.7):
                late = max(0, m - n) if side == "query" else 0
                options[f"{side}_order"] = self.of(late, late, "random", self.r.randint(-5, 5))
                options[f"{side}_order_batch"] = self._batch()
        return options
