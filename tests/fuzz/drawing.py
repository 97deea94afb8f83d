"""A random call from a seed: valid by construction, small in the mean, and strange in every way that calls can be."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

from fuzz.description import Described, Layout, Options, Part, Tokens
from fuzz.tiles import STREAMING, TRITON

BORDERS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
FAR = (255, 256, 257, 511, 512, 513, 700)
MOST = 700
PAIRS = 60_000
"""Scores of all heads that most calls stay below."""

ANYWHERE = (
    "alibi", "alibi_learned", "clipped", "kerple_log", "kerple_power", "relative_1d", "sandwich", "t5", "shaw", "deberta",
    "transformer_xl", "rotary_1d", "rotary_linear", "rotary_yarn", "xpos",
)  # fmt: skip
"""Mechanisms of sequences, which see a grid in raster order."""
ON_GRIDS = (
    "alibi_manhattan", "alibi_axes", "decomposed", "factored_2d", "irpe_product", "irpe_euclidean", "log_cpb", "relative_2d",
    "rotary_2d", "rotary_mixed", "rotary_2d+relative_2d", "rotary_multimodal",
)  # fmt: skip
ROTARY = ("rotary", "xpos")
BRINGS_SCALE = ("t5", "deberta", "tupe")


class Drawing:
    """The choices of one seed.

    Args:
        few: whether a call is to be small and simple, for engines that an interpreter runs step by step.
    """

    def __init__(self, seed: int, few: bool = False) -> None:
        self.r = random.Random(seed)
        self.seed = seed
        self.few = few

    def sometimes(self, share: float) -> bool:
        return self.r.random() < share

    def of(self, *choices: Any) -> Any:
        return self.r.choice(choices)

    # sizes

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
            m = 0 if self.sometimes(0.06) else m
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
                return replace(queries, start=length - queries.sizes[0]), Tokens("sequence", (length,), 0, queries.prefix)
            return queries, self.sequence()
        axes = self.r.choices((1, 2, 3), (15, 65, 20))[0]
        if family == "grid":
            queries = self.grid(axes, self.count())
            if alike:
                return queries, None
            x = self.r.random()
            if x < 0.2:
                return queries, replace(queries, prefix=self.prefix(9))
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

    # the call

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
        terms = self._terms(described)
        described = replace(described, terms=terms)
        if self.sometimes(0.62):
            described = replace(described, masks=self._masks(described))
        if self.sometimes(0.1):
            described = replace(described, scale=self.of(1.0, 0.1, 0.5))
        if self.sometimes(0.07):
            described = replace(described, dropout=self.of(0.1, 0.5, 0.9))
        described = replace(described, layouts=self._layouts(described), frozen=self._frozen(described))
        if self.sometimes(0.5):
            described = replace(described, tiles=self._tiles(described))
        rules = any(part.kind == "RowRule" for part in terms)
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

    # terms

    def _terms(self, call: Described) -> tuple[Part, ...]:
        number = self.r.choices((0, 1, 2, 3, 4), (12, 52, 22, 9, 5))[0]
        found: list[Part] = []
        for place in range(number):
            part = self._term(call, f"t{place}", found)
            if part is not None:
                found.append(part)
        return tuple(found)

    def _term(self, call: Described, name: str, known: list[Part]) -> Part | None:
        lined, (n, m) = call.queries.kind != "nowhere", call.counts
        once = {part.kind for part in known}
        presets = [part.options["preset"] for part in known if part.kind == "Mechanism"]
        rotary = "Rotation" in once or any(x.startswith(ROTARY) for x in presets)
        weights: dict[str, float] = {
            "QueryBias": 4, "LowRank": 6, "DenseBias": 8, "RowRule": 3, "Scale": 3,
            "LineBias": 40 if lined else 0, "LineVectors": 16 if lined else 0, "AxisVectors": 6 if lined else 0,
            "Mechanism": 18 if lined else 0, "Rotation": 0 if rotary or call.width < 2 else 8,
            "Softcap": 0 if "Softcap" in once else 4, "Sinks": 0 if "Sinks" in once else 5,
        }  # fmt: skip
        if any(x.startswith(BRINGS_SCALE) for x in presets) or "Scale" in once:
            weights["Scale"] = 0
        if call.cut is not None and call.cut[1][0]:
            weights["RowRule"] = 0
        if self.few:
            served = ("LineBias", "Rotation", "QueryBias", "Scale", "Sinks", "Mechanism")
            weights = {kind: weight if kind in served else 0 for kind, weight in weights.items()}
            weights["LineBias"] = 0 if {"LineBias", "Mechanism"} & once else weights["LineBias"]
            if not any(weights.values()):
                return None
        if n * m > 2 * PAIRS:
            weights |= {"RowRule": 0, "AxisVectors": 0, "LowRank": 2}
        kind = self.r.choices(list(weights), list(weights.values()))[0]
        if kind == "Mechanism":
            return self._mechanism(call, name, rotary, once, presets)
        options: Options = getattr(self, f"_{kind.lower()}")(call)
        if not self.sometimes(0.75):
            options["heads"] = False
        if kind in ("QueryBias", "LineVectors", "AxisVectors", "LowRank", "DenseBias", "Sinks") and self.sometimes(0.1):
            options["dtype"] = self.of("float32", "bfloat16", "float64")
        return Part(kind, name, options)

    def _raster(self, call: Described) -> Options:
        rastered = all(side.kind != "positions" or side.axes == 1 for side in call.sides)
        return {"raster": True} if rastered and self.sometimes(0.3) else {}

    def _linebias(self, call: Described) -> Options:
        options = self._raster(call)
        if self.sometimes(0.2):
            options["gain"] = self.of(0.1, 4.0)
        if self.sometimes(0.1):
            options["dtype"] = self.of("float32", "float64")
        return options

    def _rotation(self, call: Described) -> Options:
        options: Options = {"pairs": self.r.randint(1, call.width // 2), "layout": self.of("half", "interleaved")}
        if self.sometimes(0.5):
            options["pairs"] = call.width // 2
        if self.sometimes(0.25):
            options["magnitude"] = self.of(0.7, 1.3)
        if self.sometimes(0.25):
            options["magnitudes"] = True
        if self.sometimes(0.15):
            options["keys"] = False
        for option in ("query_batched", "key_batched"):
            if self.sometimes(0.25):
                options[option] = True
        for option in ("query_heads", "key_heads"):
            if self.sometimes(0.6):
                options[option] = False
        return options

    def _querybias(self, call: Described) -> Options:
        return {}

    def _linevectors(self, call: Described) -> Options:
        options = self._raster(call) | {"side": self.of("query", "query", "key", "value"), "rows": self.r.randint(1, 12)}
        large = max(call.counts) > 150 or any(side.kind == "positions" and side.axes > 1 for side in call.sides)
        grown = any(side.kind == "grid" and side.axes > 1 for side in call.sides) and max(call.counts) > 60
        options["index"] = self.of("random", "clip") if large or grown else self.of(None, "random", "clip")
        if options["index"] is None and self.sometimes(0.4):
            options["more"] = self.of(-3, -1, 2)
        if options["index"] == "random" and self.sometimes(0.2):
            options["index_dtype"] = "int32"
        if self.sometimes(0.4):
            options["scaled"] = False
        if options["side"] != "value" and self.sometimes(0.35):
            options["bias"] = True
        return options

    def _axisvectors(self, call: Described) -> Options:
        return {"more": self.of(-2, 1)} if self.sometimes(0.25) else {}

    def _lowrank(self, call: Described) -> Options:
        options: Options = {"rank": self.of(1, 3, 8)}
        for side in ("query", "key"):
            if self.sometimes(0.5):
                options[f"{side}_wide"] = True
                options[f"{side}_batched"] = self.sometimes(0.6)
            if self.sometimes(0.3):
                options[f"{side}_heads"] = False
        return options

    def _densebias(self, call: Described) -> Options:
        options: Options = {"batched": self.sometimes(0.4)}
        if self.sometimes(0.2):
            options["gain"] = 4.0
        return options

    def _rowrule(self, call: Described) -> Options:
        return {"rule": self.of("gate", "slope", "before")}

    def _scale(self, call: Described) -> Options:
        return {"value": self.of(1.0, 0.25)}

    def _softcap(self, call: Described) -> Options:
        return {"cap": self.of(0.7, 3.0, 20.0)}

    def _sinks(self, call: Described) -> Options:
        return {}

    def _mechanism(self, call: Described, name: str, rotary: bool, known: set[str], presets: list[str]) -> Part | None:
        kinds = {side.kind for side in call.sides}
        on_grid = kinds == {"grid"} and call.queries.axes == 2
        flat = all(side.kind == "sequence" or side.axes == 1 or side.kind == "grid" for side in call.sides)
        choices = [x for x in ANYWHERE if flat] + [x for x in ON_GRIDS if on_grid]
        if self.few:
            unserved = ("shaw", "deberta", "transformer_xl", "decomposed", "irpe")
            biased = "LineBias" in known or bool(presets)
            choices = [x for x in choices if not x.startswith(unserved) and not (biased and not x.startswith(ROTARY))]
        choices = [
            x
            for x in choices
            if not (rotary and x.startswith(ROTARY))
            and not (("Scale" in known or presets) and x.startswith(BRINGS_SCALE))
            and not (x.startswith(ROTARY) and call.width % 4)
            and not (x == "shaw" and call.width != call.value_width)
            and self._takes(x, call)
        ]
        if not choices:
            return None
        return Part("Mechanism", name, {"preset": self.r.choice(choices)})

    @staticmethod
    def _takes(preset: str, call: Described) -> bool:
        """Whether a mechanism's preset serves these coordinates."""
        first, second = call.sides
        plain = first.kind in ("sequence", "grid") and second.kind in ("sequence", "grid")
        same = call.keys is None or first == second
        if preset in ("alibi", "alibi_learned", "kerple_log", "kerple_power", "t5", "clipped", "sandwich"):
            return True
        if preset in ("shaw", "deberta", "transformer_xl", "rotary_1d", "rotary_linear", "rotary_yarn"):
            return True
        return plain and same and first.prefix == 0 and min(first.sizes) > 1

    # masks

    def _masks(self, call: Described) -> tuple[Part, ...]:
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
        if call.sides[0].count == call.sides[1].count and self.sometimes(0.6):
            options["one_segments"] = True
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

    # memory

    def _frozen(self, call: Described) -> tuple[str, ...]:
        if self.sometimes(0.5):
            return ()
        names = self._names(call)
        share = self.of(0.2, 0.5, 0.8, 1.0)
        return tuple(name for name in names if self.sometimes(share))

    @staticmethod
    def _names(call: Described) -> dict[str, int]:
        """Tensors that may learn, and their numbers of dimensions, as far as they are known beforehand."""
        names = {"q": 4, "k": 4, "v": 4}
        known = {
            "LineBias": {"values": 2}, "QueryBias": {"u": 2}, "LineVectors": {"vectors": 3, "bias": 2}, "Sinks": {"logits": 1},
            "Rotation": {"query": 4, "key": 4, "query_magnitude": 4, "key_magnitude": 4}, "DenseBias": {"bias": 4},
            "RowRule": {"w": 2}, "AxisVectors": {"0": 3, "1": 3, "2": 3},
        }  # fmt: skip
        for part in call.terms:
            for name, dims in known.get(part.kind, {}).items():
                names[f"{part.name}.{name}"] = dims
            if part.kind == "LowRank":
                for side in ("query", "key"):
                    names[f"{part.name}.{side}"] = 4 if part.options.get(f"{side}_wide", False) else 3
            if part.kind == "Mechanism":
                for place in range(2):
                    for name, dims in (("values", 2), ("vectors", 3), ("u", 2), ("query", 4), ("bias", 2)):
                        names[f"{part.name}.{place}.{name}"] = dims
        return names

    def _layouts(self, call: Described) -> dict[str, Layout]:
        found: dict[str, Layout] = {}
        if self.sometimes(0.25):
            return found
        names = self._names(call) | {"d_out": 4, "d_lse": 3}
        share = self.of(0.3, 0.6, 1.0)
        alike = self.layout(4) if self.sometimes(0.3) else None
        for name, dims in names.items():
            if self.sometimes(share):
                found[name] = alike if alike is not None and name in ("q", "k", "v") else self.layout(dims)
        others = {"m0.query_order", "m0.key_order", "m0.query_segments", "m0.key_segments", "m0.low", "m0.high"}
        others |= {f"{part.name}.index" for part in call.terms} | {f"{part.name}.query" for part in call.terms}
        for name in sorted(others):
            if self.sometimes(0.2):
                dims = self.of(1, 2) if name.startswith("m0") else 1
                found[name] = replace(self.layout(dims), expanded=())
        return found

    def layout(self, dims: int) -> Layout:
        """How a tensor may lie in memory."""
        ones, nought = (1,) * dims, (0,) * dims
        straight = tuple(range(dims))
        known = Layout(straight, nought, ones, nought)
        x = self.r.random()
        if dims >= 2 and x < 0.22:  # the last two dimensions exchanged
            return replace(known, order=(*straight[:-2], dims - 1, dims - 2))
        if dims == 4 and x < 0.4:  # heads behind tokens, alone or among those of q, k and v
            fused = self.sometimes(0.6)
            return replace(known, order=(0, 2, 1, 3), start=(0, self.of(0, 2, 4), 0, 0) if fused else nought, extra=(0, 3, 0, 0))
        if x < 0.52:  # expanded
            place = self.r.randrange(dims)
            return replace(known, expanded=(0,) if self.sometimes(0.5) else (place,))
        if x < 0.62:
            order = list(straight)
            self.r.shuffle(order)
            return replace(known, order=tuple(order))
        place = self.r.randrange(dims)
        return Layout(
            straight,
            tuple(self.of(0, 1, 3) if dim == place or self.sometimes(0.2) else 0 for dim in straight),
            tuple(self.of(1, 2, 3) if dim == place else 1 for dim in straight),
            tuple(self.of(0, 1) if dim == place else 0 for dim in straight),
        )

    # tiles

    def _tiles(self, call: Described) -> dict[str, int]:
        """Few tiles of large calls, which are slow enough."""
        most = max(call.counts)
        share = self.of(0.3, 0.7, 1.0)
        found = {}
        for name, values in (TRITON if self.few else STREAMING).items():
            if self.sometimes(share):
                value = self.r.choice(values)
                if name.endswith(("ROWS", "WIDTH", "AT_ONCE")):
                    value = max(value, most // 12)
                if name.endswith(("PAIRS", "PAIRS_AT_ONCE")):
                    value = max(value, call.counts[0] * call.counts[1] // 12)
                found[name] = value
        if "triton.spans.COARSE" in found:  # which tiles divide
            found["triton.launch.SHAPES"] = 16
        return found


def draw(seed: int, engines: tuple[str, ...] = ()) -> Described:
    """The call of a seed; where Triton is among the engines, one that its interpreter can do in time."""
    return Drawing(seed, few="triton" in engines).call()
