"""The fuzzer on fixed seeds, the calls that once failed, and what holds of the fuzzer itself."""

from __future__ import annotations

import ast
import itertools
import math
import pathlib
import random
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
from fuzz.tiles import STREAMING, TRITON, set_to
from relpos.testing import oracle

CALLS, AT_ONCE, FAST = 300, 20, 2


def _chunks() -> list[Any]:
    starts = range(0, CALLS, AT_ONCE)
    return [pytest.param(start, marks=[] if i < FAST else pytest.mark.slow) for i, start in enumerate(starts)]


@pytest.mark.parametrize("first", _chunks())
def test_calls_agree_with_the_oracle_in_every_engine(first: int) -> None:
    """300 seeds; any number of others by `python -m tests.fuzz --seeds A:B`."""
    failures = {}
    for seed in range(first, first + AT_ONCE):
        failures |= {(seed, engine): wrong for engine, wrong in check(draw(seed)).failures.items()}
    assert not failures


@pytest.mark.parametrize("axes", [("rows",), ("columns",), ("rows", "columns")], ids=" and ".join)
def test_dense_biases_of_one_row_or_column(axes: tuple[str, ...]) -> None:
    """Calls of the seeds that have a dense bias, with axes of it of size 1; frozen calls keep what seeds draw."""
    calls = (draw(seed) for seed in itertools.count())
    failures = {}
    for call in itertools.islice((x for x in calls if any(part.kind == "DenseBias" for part in x.terms)), 30):
        terms = tuple(
            replace(part, options={**part.options, **dict.fromkeys(axes, False)}) if part.kind == "DenseBias" else part
            for part in call.terms
        )
        failures |= {(call.seed, engine): wrong for engine, wrong in check(replace(call, terms=terms)).failures.items()}
    assert not failures


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 12, 3))
def test_calls_agree_in_tritons_kernels(first: int) -> None:
    failures = {}
    for seed in range(first, first + 3):
        outcome = check(draw(seed, ("triton",)), ("triton",))
        failures |= {(seed, engine): wrong for engine, wrong in outcome.failures.items()}
    assert not failures


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


def _features(call: Described) -> set[str]:
    """What a call shows, in words."""
    n, m = call.counts
    found = {call.dtype, f"queries {call.queries.kind}", f"upstream {call.upstream}", f"{len(call.masks)} masks"}
    found |= {f"term {part.kind}" for part in call.terms} | {f"mask {part.kind}" for part in call.masks}
    for part in call.terms:
        found |= {f"{part.kind} {option}" for option in part.options}
        found |= {f"{part.kind} {x}" for x in (part.options.get("side"), part.options.get("index")) if x}
        found |= {f"preset {part.options['preset']}"} if part.kind == "Mechanism" else set()
    for part in call.masks:
        found |= {f"mask {option}" for option in part.options}
        found |= {f"segments {part.options['segments'][0]}"} if "segments" in part.options else set()
    for name, layout in call.layouts.items():
        if name in ("q", "k", "v", "d_out"):
            found |= {f"{name} across"} if layout.order[-1] != 3 else set()
            found |= {f"{name} in steps"} if max(layout.step) > 1 else set()
            found |= {f"{name} with an offset"} if max(layout.start) > 0 else set()
            found |= {f"{name} expanded {dim}" for dim in layout.expanded}
            found |= {f"{name} behind tokens"} if layout.order == (0, 2, 1, 3) else set()
    for name, holds in {
        "grouped": call.heads > call.groups > 1,
        "unequal widths": call.width != call.value_width,
        "no keys": m == 0,
        "more keys": m > n,
        "more queries": n > m > 0,
        "other prefixes": call.sides[0].prefix != call.sides[1].prefix,
        "both prefixes": min(side.prefix for side in call.sides) > 0,
        "batched places": any(x.batched for x in call.sides),
        "one column": call.sides[1].kind == "grid" and call.sides[1].sizes[-1] == 1 < call.sides[0].sizes[-1],
        "keys on a grid": call.sides[1].kind == "grid",
        "cut": call.cut is not None,
        "scale": call.scale is not None,
        "dropout": call.dropout > 0,
        "lse": call.lse,
        "frozen": bool(call.frozen),
        "all frozen": "q" in call.frozen,
        "small tiles": bool(call.tiles),
        "nan": call.poison == "nan",
        "inf": call.poison == "inf",
        "far": max(n, m) > 500,
        "shared": bool(call.shared),
        "three axes": call.queries.axes == 3,
        "several biases": sum(part.kind == "LineBias" for part in call.terms) > 1,
        "late start": call.queries.start > 0,
        "negative start": call.queries.start < 0,
        "wide head": max(call.width, call.value_width) == 128,
    }.items():
        found |= {name} if holds else set()
    return found | {f"tile {name}" for name in call.tiles}


def test_everything_appears_in_two_thousand_seeds() -> None:
    seen = set().union(*(_features(draw(seed)) for seed in range(2000)))
    terms = (
        "LineBias Rotation QueryBias LineVectors AxisVectors LowRank DenseBias RowRule Scale Softcap Sinks Mechanism"
    )
    masks = (
        "fields local dilated fixed strided longformer windows block_sparse big_bird left right interval limit blocks"
    )
    masks += " query_order key_order query_global key_global"
    expected = {f"term {kind}" for kind in terms.split()} | {f"mask {kind}" for kind in masks.split()}
    expected |= {f"segments {kind}" for kind in ("documents", "remainder", "random", "padding")}
    expected |= {
        f"LineVectors {x}" for x in ("query", "key", "value", "random", "clip", "bias", "scaled", "more", "heads")
    }
    expected |= {f"Rotation {x}" for x in ("keys", "magnitude", "magnitudes", "query_batched", "key_heads")}
    expected |= {
        f"{name} {x}"
        for name in ("q", "k", "v", "d_out")
        for x in ("across", "in steps", "with an offset", "behind tokens", "expanded 0", "expanded 1", "expanded 3")
    }
    expected |= {"float64", "float32", "bfloat16", "float16", "upstream both", "upstream lse", "3 masks"}
    expected |= {f"queries {kind}" for kind in ("sequence", "grid", "positions", "nowhere")}
    expected |= {f"tile {name}" for name in STREAMING}
    expected |= {
        "grouped",
        "unequal widths",
        "no keys",
        "more keys",
        "more queries",
        "other prefixes",
        "both prefixes",
        "one column",
        "batched places",
        "keys on a grid",
        "cut",
        "scale",
        "dropout",
        "lse",
        "frozen",
        "all frozen",
        "small tiles",
        "nan",
        "inf",
        "far",
        "shared",
        "three axes",
        "several biases",
        "late start",
        "negative start",
        "wide head",
    }
    assert not expected - seen


def test_small_tiles_are_those_of_the_engines_and_are_put_back() -> None:
    from relpos.engines.streaming import planning

    before = planning.ROWS
    with set_to({name: values[0] for name, values in {**STREAMING, **TRITON}.items()}):
        assert STREAMING["streaming.planning.ROWS"][0] == planning.ROWS
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


@pytest.mark.parametrize(
    "given",
    [
        Described(
            1,
            batch=2,
            heads=4,
            groups=2,
            width=4,
            value_width=3,
            queries=Tokens("sequence", (5,)),
            lse=True,
            terms=(Part("LineBias", "t0"), Part("Rotation", "t1", {"pairs": 2, "layout": "half"}), Part("Sinks", "t2")),
            masks=(Part("fields", "m0", {"right": 0}),),
        ),
        Described(
            2,
            heads=2,
            groups=1,
            width=6,
            value_width=2,
            queries=Tokens("grid", (2, 2), prefix=1),
            lse=True,
            keys=Tokens("grid", (3, 1), prefix=2),
            dropout=0.4,
            terms=(
                Part("LineBias", "t0", {"heads": False}),
                Part("Softcap", "t1", {"cap": 3.0}),
                Part("Rotation", "t2", {"pairs": 2, "layout": "interleaved", "magnitude": 1.3}),
            ),
        ),
    ],
    ids=["a line bias, a rotation and sinks", "a grid, a cap and dropout"],
)
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
    from relpos.core.random import keep

    rows, columns = torch.arange(5), torch.arange(7)
    for seed in (0, 7, 2**31 + 12345, 2**32 - 1):
        kept = keep(torch.tensor(seed), 2, 3, rows, columns, 0.3)
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
    assert (small.heads, small.batch, small.width, small.masks, small.tiles) == (1, 1, 1, (), {})
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
    assert {mutant.path for mutant in found} > {"relpos/core/mask.py", "relpos/engines/streaming/hankel.py"}
    for mutant in random.Random(0).sample(found, 100):
        text = (source / mutant.path).read_text()
        assert " ".join(text[mutant.start : mutant.stop].split()) == mutant.before != mutant.after
        ast.parse(text[: mutant.start] + mutant.after + text[mutant.stop :])
        assert "fail(" not in mutant.before
