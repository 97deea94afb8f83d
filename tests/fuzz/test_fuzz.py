"""The fuzzer on fixed seeds, the calls that once failed, and what holds of the fuzzer itself."""

from __future__ import annotations

import ast
import itertools
import math
import pathlib
import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from fuzz.building import build
from fuzz.description import Described, Layout, Part, Tokens, read, shown
from fuzz.drawing import draw
from fuzz.mutating import mutants
from fuzz.once_failed import ONCE_FAILED
from fuzz.plain_pairs import kept_pairs
from fuzz.running import ENGINES, check, share_of_allowed, truth_of
from fuzz.shrinking import shrink
from fuzz.tiles import FAR, STREAMING, TRITON, set_to
from relpos.testing import oracle

CALLS, AT_ONCE, FAST = 300, 20, 2


def _chunks() -> list[Any]:
    starts = range(0, CALLS, AT_ONCE)
    return [pytest.param(start, marks=[] if i < FAST else pytest.mark.slow) for i, start in enumerate(starts)]


def failures(calls: Iterable[Described], engines: tuple[str, ...] = ENGINES) -> dict[int, dict[str, str]]:
    """Seed to engine to what is wrong."""
    found = {call.seed: check(call, engines).failures for call in calls}
    return {seed: wrong for seed, wrong in found.items() if wrong}


@pytest.mark.parametrize("first", _chunks())
def test_calls_agree_with_the_oracle_in_every_engine(first: int) -> None:
    """300 seeds; any number of others by `python -m tests.fuzz --seeds A:B`."""
    assert not failures(map(draw, range(first, first + AT_ONCE)))


@pytest.mark.parametrize("axes", [("rows",), ("columns",), ("rows", "columns")], ids=" and ".join)
def test_dense_biases_of_one_row_or_column(axes: tuple[str, ...]) -> None:
    """Calls of the seeds that have a dense bias, with axes of it of size 1; frozen calls keep what seeds draw."""

    def narrowed(part: Part) -> Part:
        one = dict.fromkeys(axes, False) if part.kind == "DenseBias" else {}
        return replace(part, options=part.options | one)

    biased = (call for call in map(draw, itertools.count()) if any(part.kind == "DenseBias" for part in call.terms))
    calls = (replace(call, terms=tuple(map(narrowed, call.terms))) for call in itertools.islice(biased, 12))
    assert not failures(calls)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_calls_agree_in_tritons_kernels(first: int) -> None:
    engines = ("triton",)
    assert not failures((draw(seed, engines) for seed in range(first, first + 3)), engines)


@pytest.mark.parametrize("call", ONCE_FAILED.values(), ids=ONCE_FAILED.keys())
def test_what_once_failed(call: Described) -> None:
    assert not check(call).failures


# the fuzzer itself


def test_a_seed_gives_one_call_which_can_be_written_and_read() -> None:
    for seed in range(200):
        call = draw(seed)
        assert call == draw(seed)
        assert read(shown(call)) == call == read(repr(call))


def test_a_call_has_the_same_numbers_whatever_else_it_has() -> None:
    call = draw(3)
    whole, part = build(call), build(replace(call, terms=(), masks=(), layouts={}))
    assert torch.equal(whole.arguments["q"], part.arguments["q"])


FACTS: dict[str, Callable[[Described], bool]] = {
    "grouped": lambda call: call.heads > call.groups > 1,
    "unequal widths": lambda call: call.width != call.value_width,
    "no keys": lambda call: call.counts[1] == 0,
    "more keys": lambda call: call.counts[1] > call.counts[0],
    "more queries": lambda call: call.counts[0] > call.counts[1] > 0,
    "far": lambda call: max(call.counts) > 500,
    "other prefixes": lambda call: call.sides[0].prefix != call.sides[1].prefix,
    "both prefixes": lambda call: min(side.prefix for side in call.sides) > 0,
    "batched places": lambda call: any(side.batched for side in call.sides),
    "keys on a grid": lambda call: call.sides[1].kind == "grid",
    "one column": lambda call: call.sides[1].kind == "grid" and call.sides[1].sizes[-1] == 1 < call.sides[0].sizes[-1],
    "three axes": lambda call: call.queries.axes == 3,
    "late start": lambda call: call.queries.start > 0,
    "negative start": lambda call: call.queries.start < 0,
    "wide head": lambda call: max(call.width, call.value_width) == 128,
    "cut": lambda call: call.cut is not None,
    "scale": lambda call: call.scale is not None,
    "dropout": lambda call: call.dropout > 0,
    "shared": lambda call: bool(call.shared),
    "all frozen": lambda call: "q" in call.frozen,
    "several biases": lambda call: sum(part.kind == "LineBias" for part in call.terms) > 1,
    "3 masks": lambda call: len(call.masks) == 3,
}
WORDS = {
    "float64", "float32", "bfloat16", "float16", "both", "lse", "nan", "inf", "sequence", "grid", "positions",
    "nowhere", "fields", "local", "dilated", "fixed", "strided", "longformer", "windows", "block_sparse", "big_bird",
    *("LineBias", "Rotation", "QueryBias", "LineVectors", "AxisVectors", "LowRank", "DenseBias", "RowRule", "Scale"),
    *("PairRotations", "PairRotations orders", "PairRotations keys", "Polar", "Polar phase", "Polar magnitudes"),
    *("IndexedBias", "Softcap", "Sinks", "Sinks of_queries", "QueryScale", "QueryScale on", "Mechanism"),
    *(f"fields {x}" for x in ("left", "right", "interval", "limit", "blocks", "query_order", "key_order")),
    *("fields query_global", "fields key_global"),
    *(f"segments {x}" for x in ("documents", "remainder", "random", "padding")),
    *(f"LineVectors {x}" for x in ("query", "key", "value", "random", "clip", "bias", "scaled", "more", "heads")),
    *(f"LineVectors {x}" for x in ("near", "content", "content_heads", "content_batched")),
    *(f"Rotation {x}" for x in ("keys", "magnitude", "magnitudes", "query_batched", "key_heads", "start", "values")),
    *(
        f"{name} {x}"
        for name in ("q", "k", "v", "d_out")
        for x in ("across", "in steps", "with an offset", "behind tokens", "expanded 0", "expanded 1", "expanded 3")
    ),
    *STREAMING,
    *FAR,
}  # fmt: skip
"""What calls, parts and layouts are to show between them, beside `FACTS`."""


def _words(call: Described) -> set[str]:
    found = {call.dtype, call.upstream, call.poison, call.queries.kind, *call.tiles}
    for part in (*call.terms, *call.masks):
        found |= {part.kind} | {f"{part.kind} {option}" for option in part.options}
        found |= {f"{part.kind} {part.options.get(option)}" for option in ("side", "index")}
        found |= {f"segments {part.options['segments'][0]}"} if "segments" in part.options else set()
    for name, layout in call.layouts.items():
        found |= {f"{name} across"} if layout.order[-1] != len(layout.order) - 1 else set()
        found |= {f"{name} in steps"} if max(layout.step) > 1 else set()
        found |= {f"{name} with an offset"} if max(layout.start) > 0 else set()
        found |= {f"{name} behind tokens"} if layout.order == (0, 2, 1, 3) else set()
        found |= {f"{name} expanded {dim}" for dim in layout.expanded}
    return found


def test_everything_appears_in_two_thousand_seeds() -> None:
    calls = [draw(seed) for seed in range(2000)]
    assert not WORDS - set().union(*map(_words, calls))
    assert not {fact for fact, holds in FACTS.items() if not any(map(holds, calls))}


def test_small_tiles_are_those_of_the_engines_and_are_put_back() -> None:
    from relpos.engines.streaming.plan import planning

    before = planning.ROWS
    with set_to({name: values[0] for name, values in {**STREAMING, **FAR, **TRITON}.items()}):
        assert STREAMING["streaming.plan.planning.ROWS"][0] == planning.ROWS
    assert before == planning.ROWS


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_an_error_of_eight_in_a_thousand_is_seen_anywhere(dtype: str) -> None:
    """Of the largest number of a result, at that number itself and at the smallest."""
    seen = tried = 0
    for seed in range(60):
        call = replace(draw(seed), dtype=dtype, poison="", autocast=False)
        if call.counts[1] == 0 or any(part.options.get("dtype") == "bfloat16" for part in call.terms):
            continue
        built = build(call)
        judged = truth_of(built)
        truth = judged[0]
        results: dict[str, Tensor] = {"output": truth.out, **truth.gradients}
        for name, exact in results.items():
            x = exact.to(getattr(torch, dtype)).clone().flatten()
            if not x.numel() or x.abs().max() < 1e-6:
                continue
            for place in (int(x.abs().argmax()), int(x.abs().argmin())):
                wrong = x.clone()
                wrong[place] += 0.008 * x.abs().max()
                tried += 1
                seen += share_of_allowed(judged, name, wrong.view(exact.shape)) > 1
    assert tried > 200
    assert seen >= (1 if dtype == "float64" else 0.98) * tried


BY_LOOPS = {
    "a line bias, a rotation and sinks": Described(
        1, batch=2, heads=4, groups=2, width=4, value_width=3, queries=Tokens("sequence", (5,)), lse=True,
        terms=(Part("LineBias", "t0"), Part("Rotation", "t1", {"pairs": 2, "layout": "half"}), Part("Sinks", "t2")),
        masks=(Part("fields", "m0", {"right": 0}),),
    ),
    "a grid, a cap and dropout": Described(
        2, heads=2, groups=1, width=6, value_width=2, queries=Tokens("grid", (2, 2), prefix=1), lse=True,
        keys=Tokens("grid", (3, 1), prefix=2), dropout=0.4,
        terms=(
            Part("LineBias", "t0", {"heads": False}), Part("Softcap", "t1", {"cap": 3.0}),
            Part("Rotation", "t2", {"pairs": 2, "layout": "interleaved", "magnitude": 1.3}),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("given", BY_LOOPS.values(), ids=BY_LOOPS.keys())
def test_the_oracle_says_what_the_loops_say(given: Described) -> None:
    """`relpos.testing.oracle` goes over pairs one at a time, from the coordinates."""
    built = build(given)
    truth, _ = truth_of(built)
    numbers, told = {name: x.detach() for name, x in built.plain.numbers.items()}, dict(built.plain.entries)
    queries, keys = (_places(side) for side in given.sides)
    q, k = numbers["q"], numbers["k"]
    turn = told["rotation"]
    q = oracle.rotate(q, numbers[turn["query"]], turn["layout"], turn["magnitude"])
    k = oracle.rotate(oracle.heads_of(k, given.heads), numbers[turn["key"]], turn["layout"], turn["magnitude"])
    values, index = numbers[told["line"]["values"]], _line(given, queries, keys)
    causal = torch.ones(len(queries), len(keys), dtype=torch.bool).tril()[None, None]
    out, lse = oracle.attention(
        q,
        k,
        oracle.heads_of(numbers["v"], given.heads),
        bias=values[:, index][None],
        allowed=causal if given.masks else None,
        softcap=told.get("softcap", {}).get("cap"),
        sinks=None if "sinks" not in told else numbers[told["sinks"]["logits"]],
        kept=None if built.plain.kept is None else built.plain.kept > 0,
        dropout=given.dropout,
    )
    torch.testing.assert_close(truth.out, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(truth.lse, lse, rtol=1e-12, atol=1e-12)


def _places(side: Tokens) -> list[oracle.Place]:
    cells = itertools.product(*(range(size) for size in side.sizes))
    return [*[None] * side.prefix, *cells]


def _line(call: Described, queries: list[oracle.Place], keys: list[oracle.Place]) -> Tensor:
    """The regions of a line as the documentation has them, a pair at a time."""
    sizes = [side.sizes for side in call.sides]
    spans = [a + b - 1 for a, b in zip(*sizes, strict=True)]
    strides = [math.prod(spans[axis + 1 :]) for axis in range(len(spans))]
    count = math.prod(spans)
    origin = sum((size - 1) * stride for size, stride in zip(sizes[1], strides, strict=True))

    def place(token: oracle.Place, prefix: int) -> int:
        return prefix if token is None else sum(x * stride for x, stride in zip(token, strides, strict=True))

    rows = [[place(a, count) - place(b, -(count + 1)) + origin for b in keys] for a in queries]
    return torch.tensor(rows)


def test_the_oracle_finds_the_dropped_pairs_that_relpos_drops() -> None:
    from relpos.core.random import kept_pairs as drawn_pairs

    rows, columns = torch.arange(5), torch.arange(7)
    for seed in (0, 7, 2**31 + 12345, 2**32 - 1):
        kept = drawn_pairs(torch.tensor(seed), 2, 3, rows, columns, 0.3)
        assert torch.equal(kept_pairs(seed, (2, 3, 5, 7), 0.3) > 0, kept)


def test_a_failing_call_is_made_small() -> None:
    def fails(call: Described) -> bool:
        lined = any(part.kind == "LineBias" for part in call.terms)
        return lined and call.counts[0] >= 3 and "v" in call.layouts

    large = replace(
        draw(11), queries=Tokens("grid", (6, 5), prefix=2), keys=None, terms=(Part("LineBias", "t0", {"gain": 4.0}),)
    )
    large = replace(large, layouts={name: Layout((0, 1, 3, 2), (0,) * 4, (1,) * 4, (0,) * 4) for name in ("q", "v")})
    small = shrink(large, fails)
    assert fails(small)
    assert small.counts[0] == 3
    assert max(small.heads, small.batch, small.width) <= 1
    assert (small.masks, small.tiles) == ((), {})
    assert list(small.layouts) == ["v"]


@pytest.mark.parametrize("wrong", ["forgets the scale", "returns NaN", "raises", "changes its input"])
def test_an_engine_that_is_wrong_is_told(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from relpos.engines.reference import REFERENCE

    true = REFERENCE.run

    def run(call: Any) -> Any:
        if wrong == "raises":
            raise ZeroDivisionError("no")
        if wrong == "forgets the scale":
            return true(replace(call, scale=1.0))
        if wrong == "changes its input":
            with torch.no_grad():
                call.q.mul_(1)
        out, lse = true(call)
        return (out / 0 if wrong == "returns NaN" else out), lse

    monkeypatch.setattr(REFERENCE, "run", run)
    call = Described(0, width=4, value_width=4, queries=Tokens("sequence", (5,)))
    assert list(check(call, ENGINES).failures) == ["reference"]


def test_mutants_are_valid_and_leave_messages_alone() -> None:
    source = pathlib.Path(relpos.__file__).parent.parent
    found = mutants(source)
    assert len(found) > 1000
    assert {mutant.path for mutant in found} > {"relpos/core/mask.py", "relpos/engines/streaming/plan/hankel.py"}
    assert not any("theirs.shape" in mutant.before for mutant in found), "an elif that asks whether to fail"
    for mutant in random.Random(0).sample(found, 100):
        text = (source / mutant.path).read_text()
        assert " ".join(text[mutant.start : mutant.stop].split()) == mutant.before != mutant.after
        ast.parse(text[: mutant.start] + mutant.after + text[mutant.stop :])
        assert "fail(" not in mutant.before
