"""Calls that once failed, as the fuzzer shrank them: each is run in every engine that serves it."""

from __future__ import annotations

from fuzz.description import Described, Layout, Part, Tokens

_ACROSS = Layout(order=(0, 1, 3, 2), start=(0, 0, 0, 0), step=(1, 1, 1, 1), extra=(0, 0, 0, 0))
_APART = Layout(order=(0, 1, 2, 3), start=(0, 0, 0, 0), step=(1, 1, 1, 3), extra=(0, 0, 0, 0))

ONCE_FAILED = {
    "values whose last dimension is not contiguous": Described(
        seed=76,
        dtype="float32",
        width=2,
        value_width=2,
        queries=Tokens("sequence", (1,)),
        keys=Tokens("sequence", (2,)),
        layouts={"v": _ACROSS},
    ),
    "values whose numbers lie apart": Described(
        seed=105, dtype="float32", width=2, value_width=2, queries=Tokens("sequence", (1,)), layouts={"v": _APART}
    ),
    "keys in one column": Described(
        seed=386, queries=Tokens("grid", (1, 2), prefix=1), keys=Tokens("grid", (2, 1)), terms=(Part("LineBias", "t0"),)
    ),
    "keys in one column, a block of several strips": Described(
        seed=659,
        queries=Tokens("grid", (3, 2)),
        keys=Tokens("grid", (2, 1)),
        terms=(Part("LineBias", "t1", {"gain": 4.0}),),
        tiles={"streaming.plan.planning.ROWS": 5},
    ),
    "one key behind a prefix, a block of several strips": Described(
        seed=3155,
        queries=Tokens("grid", (2, 2)),
        keys=Tokens("grid", (1, 1), prefix=1),
        terms=(Part("LineBias", "t0"),),
        tiles={"streaming.plan.planning.ROWS": 3},
    ),
    "a prefix of queries against keys at equal distances": Described(
        seed=335,
        queries=Tokens("sequence", (1,), prefix=2),
        keys=Tokens("sequence", (17,)),
        terms=(Part("LineBias", "t0"),),
        masks=(Part("fields", "m0", {"segments": ("remainder", 5)}),),
    ),
    "no keys": Described(seed=124, queries=Tokens("nowhere", (1,)), keys=Tokens("nowhere", (0,))),
    "two biases that are on one line within a segment": Described(
        seed=307,
        queries=Tokens("grid", (16, 1)),
        terms=(Part("LineBias", "t0"), Part("LineBias", "t1", {"raster": True})),
        masks=(Part("dilated", "m0", {"window_size": 5, "dilation": 4}),),
    ),
    "a window whose last rows see all keys": Described(
        seed=2066,
        dtype="float32",
        queries=Tokens("sequence", (9,)),
        masks=(Part("fields", "m0", {"right": 6}),),
        tiles={"streaming.cpu.cpu_kernel._CAUSAL_ROWS": 3},
    ),
    "sinks where a layout of blocks for each head allows nothing": Described(
        seed=42397,
        heads=3,
        groups=3,
        queries=Tokens("sequence", (8,)),
        terms=(Part("Sinks", "t0"),),
        masks=(Part("fields", "m0", {"blocks": (4, 0, True)}),),
        lse=True,
        upstream="lse",
    ),
    "two biases in half precision": Described(
        seed=7095, dtype="float16", terms=(Part("DenseBias", "t2"), Part("DenseBias", "t3")), lse=True, upstream="both"
    ),
    "queries that are a prefix alone": Described(
        seed=4806, queries=Tokens("sequence", (0,), prefix=1), terms=(Part("LineBias", "t0"),)
    ),
    "queries that are a prefix alone, under a mask": Described(
        seed=4806,
        queries=Tokens("sequence", (0,), prefix=1),
        terms=(Part("LineBias", "t0"),),
        masks=(Part("fields", "m0", {"right": 0}),),
    ),
    "keys that are a prefix alone": Described(
        seed=980709,
        queries=Tokens("sequence", (1,)),
        keys=Tokens("sequence", (0,), prefix=1),
        terms=(Part("LineBias", "t0"),),
    ),
    "a query bias before rotations by pair": Described(
        seed=460,
        width=2,
        queries=Tokens("sequence", (2,)),
        terms=(
            Part("QueryBias", "t0"),
            Part("PairRotations", "t1", {"pairs": 1, "layout": "half", "borders": (0,), "parts": 2}),
        ),
    ),
    "a dense bias with NaN at forbidden pairs, under a factor of each query": Described(
        seed=2186,
        queries=Tokens("sequence", (5,)),
        terms=(Part("DenseBias", "t0"), Part("QueryScale", "t9", {"heads": True, "on": "scores"})),
        masks=(Part("fields", "m0", {"right": 0}),),
        poison="nan",
    ),
}
