"""The terms of a random call."""

from __future__ import annotations

from fuzz.chance import Chance
from fuzz.description import Described, Options, Part

PAIRS = 60_000
"""Scores of all heads that most calls stay below."""

ANYWHERE = (
    "alibi", "alibi_learned", "clipped", "kerple_log", "kerple_power", "relative_1d", "sandwich", "t5", "shaw",
    "deberta", "transformer_xl", "cope", "fire", "rotary_1d", "rotary_linear", "rotary_yarn", "xpos",
)  # fmt: skip
"""Mechanisms of sequences, which see a grid in raster order."""
ON_GRIDS = (
    "alibi_manhattan", "alibi_axes", "decomposed", "factored_2d", "irpe_product", "irpe_euclidean", "log_cpb",
    "relative_2d", "rotary_2d", "rotary_mixed", "rotary_2d+relative_2d", "rotary_multimodal", "tupe",
)  # fmt: skip
ROTARY = ("rotary", "xpos", "carope", "selective_rope")
BRINGS_SCALE = ("t5", "deberta", "tupe")


class TermChoices(Chance):
    """Terms as they are, and mechanisms that make some."""

    def terms(self, call: Described) -> tuple[Part, ...]:
        number = self.r.choices((0, 1, 2, 3, 4), (12, 52, 22, 9, 5))[0]
        found: list[Part] = []
        for place in range(number):
            part = self._term(call, f"t{place}", found)
            if part is not None:
                found.append(part)
        return tuple(found)

    def with_newer(self, call: Described, known: tuple[Part, ...]) -> tuple[Part, ...]:
        """The terms with kinds and options that came later: a factor and a sink of each query, a mechanism that is made
        from hidden states, a bias by an index of each pair, and rotations of trailing dimensions and of values."""
        chance = self.newer
        found = []
        for part in known:
            if part.kind == "Sinks" and chance.random() < 0.5 and not self.few:
                part = Part("Sinks", part.name, part.options | {"of_queries": True, "batched": chance.random() < 0.6})
            found.append(part)
        if chance.random() < 0.12:
            options: Options = {"batched": chance.random() < 0.5, "heads": chance.random() < 0.6}
            options["on"] = chance.choice(("content", "scores"))
            found.insert(chance.randint(0, len(found)), Part("QueryScale", "t9", options))
        lined = all(side.kind == "sequence" for side in call.sides)
        if lined and not self.few and chance.random() < 0.15:
            turned = any(part.options.get("preset", part.kind).startswith(("Rotation", *ROTARY)) for part in known)
            turning = () if turned or call.width % 4 else ("carope", "selective_rope")
            found.append(Part("Mechanism", "t8", {"preset": chance.choice(("fox", "inkling", "cable", *turning))}))
        if not self.few and chance.random() < 0.12:
            options = {"batched": chance.random() < 0.5, "heads": chance.random() < 0.7}
            options |= {"rows": chance.choice((1, 3, 40)), "index_dtype": chance.choice(("uint8", "int16", "int64"))}
            found.append(Part("IndexedBias", "t7", options))
        return tuple(self._turning(call, part) if part.kind == "Rotation" else part for part in found)

    def _turning(self, call: Described, part: Part) -> Part:
        """A rotation of a slice that does not start at 0, or of values too."""
        options = part.options
        room = call.width - 2 * options["pairs"]
        more: Options = {"start": self.newer.randint(1, room)} if room and self.newer.random() < 0.4 else {}
        sized = "magnitude" in options or "magnitudes" in options
        by_head = call.groups != call.heads and options.get("heads", True) and options.get("key_heads", True)
        wide = more.get("start", 0) + 2 * options["pairs"] <= call.value_width
        if wide and not sized and not by_head and self.newer.random() < 0.6:
            more["values"] = True
        return Part(part.kind, part.name, options | more)

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
            served = ["LineBias", "Rotation", "QueryBias", "Scale", "Sinks", "Mechanism"]
            served += [] if self.as_frozen else ["LowRank"]
            weights = {kind: weight if kind in served else 0 for kind, weight in weights.items()}
            weights["LineBias"] = 0 if {"LineBias", "Mechanism"} & once else weights["LineBias"]
            if not any(weights.values()):
                return None
        if n * m > 2 * PAIRS:
            weights |= {"RowRule": 0, "AxisVectors": 0, "LowRank": 2}
        kind = self.r.choices(list(weights), list(weights.values()))[0]
        if kind == "Mechanism":
            return self._mechanism(call, name, rotary, once, presets)
        options: Options = {} if kind in ("QueryBias", "Sinks") else getattr(self, f"_{kind.lower()}")(call)
        if not self.sometimes(0.75):
            options["heads"] = False
        if kind in ("QueryBias", "LineVectors", "AxisVectors", "LowRank", "DenseBias", "Sinks") and self.sometimes(0.1):
            options["dtype"] = self.of("float32", "bfloat16", "float64")
        alike = [part.name for part in known if part.kind == kind]
        if alike and self.sometimes(0.4):
            options["same"] = self.r.choice(alike)
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

    def _linevectors(self, call: Described) -> Options:
        options = self._raster(call) | {
            "side": self.of("query", "query", "key", "value"),
            "rows": self.r.randint(1, 12),
        }
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

    def _mechanism(self, call: Described, name: str, rotary: bool, known: set[str], presets: list[str]) -> Part | None:
        kinds = {side.kind for side in call.sides}
        on_grid = kinds == {"grid"} and call.queries.axes == 2
        flat = all(side.kind == "sequence" or side.axes == 1 or side.kind == "grid" for side in call.sides)
        choices = [x for x in ANYWHERE if flat] + [x for x in ON_GRIDS if on_grid]
        if self.few:
            unserved = ("cope", "fire", "tupe", "shaw", "deberta", "transformer_xl", "decomposed", "irpe")
            biased = "LineBias" in known or bool(presets)
            choices = [x for x in choices if not x.startswith(unserved) and not (biased and not x.startswith(ROTARY))]
        choices = [
            x
            for x in choices
            if not (rotary and x.startswith(ROTARY))
            and not (("Scale" in known or presets) and x.startswith(BRINGS_SCALE))
            and not (x.startswith(ROTARY) and call.width % 4)
            and not (x in ("cope", "fire") and (call.dtype != "float64" or call.poison or call.cut is not None))
            and not (x == "transformer_xl" and call.width % 2)
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
