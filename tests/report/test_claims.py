"""Claims: each rule fed results that make it speak for, against and neither, and the word that follows."""

from typing import Any

import pytest

from relpos.position import presets
from relpos.report.claims import CLAIMS, Outcome, judge_claims, word
from relpos.report.evidence import more_than, opposite
from relpos.report.families import KINDS, kind, relative
from relpos.report.page import build_page
from relpos.report.statistics import Interval

FAST_SHARE = 4  # of its tests, in the fast part

HELD, PART, NOT, OPEN, UNMEASURED = (
    "held",
    "held in part",
    "did not hold",
    "cannot be told from these data",
    "not measured in this comparison",
)


def judged(results: Any, start: str) -> Outcome:
    (found,) = [outcome for outcome in judge_claims(results) if outcome.claim.quote.startswith(start)]
    return found


def figures(test: float, shift: float, **canvas: float) -> dict[str, Any]:
    rules = {name.replace("_", " "): value for name, value in canvas.items()}
    return {"test": test, "shift/1": shift, "shift/2": shift, "shift/3": shift, "canvas": rules}


@pytest.mark.parametrize(
    ("speak", "expected"),
    [
        ([], UNMEASURED),
        (["for", "for"], HELD),
        (["for", "open"], PART),
        (["for", "against"], PART),
        (["against", "open"], NOT),
        (["against"], NOT),
        (["open", "open"], OPEN),
    ],
)
def test_the_word_follows_from_the_findings(speak: Any, expected: str) -> None:
    assert word(speak) == expected


def test_a_finding_speaks_only_where_its_whole_interval_does(make: Any) -> None:
    results = make(("none",))

    def speaks(low: float, high: float, *, covers_seeds: bool = True) -> str:
        return more_than(results, Interval((low + high) / 2, low, high, 9, (0, 1), covers_seeds), 0.05)

    assert [speaks(0.06, 0.1), speaks(0.0, 0.04)] == ["for", "against"]
    assert [speaks(0.04, 0.08), speaks(0.02, 0.06), speaks(0.05, 0.05)] == ["open", "open", "open"]
    assert speaks(0.06, 0.1, covers_seeds=False) == "open"
    assert [opposite("for"), opposite("against"), opposite("open")] == ["against", "for", "open"]
    results["settings"]["quick"] = True
    assert speaks(0.06, 0.1) == "open"


@pytest.mark.parametrize(
    ("start", "names", "accuracy", "expected"),
    [
        ("Without any positional", ("none", "relative_2d"), {}, HELD),
        ("Without any positional", ("none", "relative_2d"), {"none": figures(0.99, 0.9, as_is=0.5)}, NOT),
        ("Absolute (ViT): trans", ("none", "learned"), {}, HELD),
        ("Absolute (ViT): trans", ("none", "learned"), {"learned": figures(0.9, 0.93, interpolated=0.5)}, NOT),
        ("Relative: translation", ("rotary_2d",), {"rotary_2d": figures(0.9, 0.9, as_is=0.5)}, HELD),
        ("Relative: translation", ("relative_2d", "t5"), {"relative_2d": figures(0.9, 0.9, clipped=0.5)}, PART),
        ("Relative: translation", ("relative_1d", "rotary_1d"), {}, NOT),
        ("Relative methods improve", ("learned", "relative_2d"), {}, HELD),
        ("Relative methods improve", ("learned", "t5"), {"learned": figures(0.9, 0.9, interpolated=0.9)}, NOT),
        ("Relative: needs no", ("relative_2d",), {}, HELD),
        (
            "Relative: needs no",
            ("relative_2d",),
            {"relative_2d": figures(0.9, 0.9, interpolated=0.8, clipped=0.5)},
            NOT,
        ),
        ("Relative methods generalize", ("learned", "rotary_2d"), {}, HELD),
        ("Relative methods generalize", ("learned", "t5"), {"learned": figures(0.9, 0.9, interpolated=0.9)}, NOT),
        ("RoPE: extrapolates", ("rotary_2d", "t5"), {}, HELD),
        ("RoPE: extrapolates", ("rotary_1d", "relative_2d"), {}, NOT),
        ("ALiBi: excellent", ("none", "alibi"), {"alibi": figures(0.8, 0.8, as_is=1.0)}, HELD),
        ("ALiBi: excellent", ("none", "alibi"), {"alibi": figures(0.8, 0.8, as_is=0.65)}, PART),
        ("2-D bias: ideal", ("none", "learned", "relative_2d"), {}, HELD),
        ("2-D bias: ideal", ("rotary_2d", "relative_2d"), {"relative_2d": figures(0.7, 0.7, clipped=0.5)}, NOT),
        ("Modern Transformers", ("relative_2d", "rotary_2d", "rotary_2d+relative_2d"), {}, "any"),
        (
            "Modern Transformers",
            ("relative_2d", "rotary_2d", "rotary_2d+relative_2d"),
            {"rotary_2d+relative_2d": figures(0.6, 0.6, clipped=0.5)},
            NOT,
        ),
        ("Some models combine", ("learned", "relative_2d", "learned+relative_2d"), {}, NOT),
        (
            "Some models combine",
            ("learned", "relative_2d", "learned+relative_2d"),
            {
                "learned": figures(0.95, 0.1, interpolated=0.1),
                "relative_2d": figures(0.6, 0.6, clipped=0.5),
                "learned+relative_2d": figures(0.8, 0.3, clipped=0.5),
            },
            NOT,
        ),
        (
            "Some models combine",
            ("learned", "relative_2d", "learned+relative_2d"),
            {"learned": figures(0.7, 0.1, interpolated=0.1), "relative_2d": figures(0.8, 0.8, clipped=0.5)},
            PART,
        ),
    ],
)
def test_accuracies_flip_the_word(make: Any, start: str, names: Any, accuracy: Any, expected: str) -> None:
    growth = {name: list(entry["canvas"]) for name, entry in accuracy.items()}
    results = make(names, seeds=4, accuracy=accuracy, growth=growth)
    found = judged(results, start).word
    assert found == expected if expected != "any" else found in (HELD, PART, OPEN)
    results["settings"]["quick"] = True
    assert judged(results, start).word == OPEN


def test_a_near_tie_cannot_be_told(make: Any) -> None:
    level = {name: figures(0.9, 0.8, as_is=0.5) for name in ("rotary_2d", "t5")}
    results = make(("rotary_2d", "t5"), accuracy=level, images=60)
    assert judged(results, "RoPE: extrapolates").word == OPEN


def test_one_seed_decides_nothing_about_accuracy(make: Any) -> None:
    words = {outcome.word for outcome in judge_claims(make(("none", "learned", "relative_2d"), seeds=1))}
    counted = {"RoPE: no new", "Parameter efficiency", "Absolute: the cost", "Relative: the cost"}
    for outcome in judge_claims(make(("none", "learned", "relative_2d"), seeds=1)):
        if not outcome.claim.quote.startswith(tuple(counted)):
            assert outcome.word in (OPEN, UNMEASURED)
    assert HELD in words


def test_parameters_are_counted(make: Any) -> None:
    results = make(("learned", "alibi", "rotary_2d", "relative_2d"))
    assert judged(results, "RoPE: no new").word == HELD
    assert judged(results, "Parameter efficiency").word == HELD
    for record in results["records"]:
        if record["position"] in ("alibi", "relative_2d"):
            record["parameters"]["position"] = 5000
    assert judged(results, "RoPE: no new").word == PART
    assert judged(results, "Parameter efficiency").word == PART


def test_costs_are_compared(make: Any) -> None:
    results = make(("none", "learned", "relative_2d", "alibi"))
    assert judged(results, "Absolute: the cost").word == HELD
    assert judged(results, "Relative: the cost").word == PART
    for entry in results["costs"]:
        entry["ratio"] = 1.5
    assert judged(results, "Absolute: the cost").word == NOT
    assert judged(results, "Relative: the cost").word == NOT
    results["costs"] = []
    assert judged(results, "Absolute: the cost").word == UNMEASURED


@pytest.mark.parametrize(("factor", "expected"), [(0.5, HELD), (1.0, OPEN), (2.0, NOT)])
def test_fastest_needs_times_that_do_not_overlap(make: Any, factor: float, expected: str) -> None:
    results = make(("none", "relative_2d", "alibi"))
    steps = {entry["position"]: entry["step_ms"] for entry in results["costs"] if entry["tokens"] == 4096}
    for key in ("low", "median", "high"):
        steps["alibi"][key] = factor * steps["relative_2d"][key]
    assert judged(results, "ALiBi: fastest").word == expected


def test_stability_takes_three_seeds(make: Any, share: Any) -> None:
    assert judged(make(("relative_2d",), seeds=2), "Additive bias: simple").word == OPEN
    results = make(("relative_2d",), seeds=3)
    assert judged(results, "Additive bias: simple").word == HELD
    share(results, "relative_2d", "test", (0.9, 0.9, 0.8))
    assert judged(results, "Additive bias: simple").word == NOT


def test_what_is_not_in_the_comparison_is_not_measured(make: Any) -> None:
    words = {outcome.claim.quote: outcome.word for outcome in judge_claims(make(("none",)))}
    assert set(words.values()) == {UNMEASURED}
    assert len(words) == len(CLAIMS)
    begun = {**make(("none", "learned", "relative_2d")), "records": [], "costs": []}
    assert {outcome.word for outcome in judge_claims(begun)} == {UNMEASURED}


def test_a_task_without_shifts_and_canvases_leaves_their_claims_unmeasured(make: Any) -> None:
    results = make(("none", "learned", "relative_2d", "alibi", "rotary_2d"))
    results["task"]["probes"] = results["task"]["probes"][:1]
    assert judged(results, "Relative: translation").word == UNMEASURED
    assert judged(results, "RoPE: extrapolates").word == UNMEASURED


def test_kinds_are_of_presets_that_exist_and_a_new_mechanism_needs_none(make: Any) -> None:
    from relpos.position import presets

    assert set(KINDS) <= set(presets()), "report/families.py knows a mechanism that is gone"
    assert all(kind(name).family != "other" for name in make.__globals__["ELEVEN"])
    assert kind("somebody's own").family == "other"
    own = {"somebody's own": figures(0.9, 0.9, as_is=0.5)}
    page = build_page(make(tuple(own), seeds=2, accuracy=own, growth={name: ["as is"] for name in own}))
    assert 'value="other"' in page


def test_relative_are_those_that_know_offsets_alone(make: Any) -> None:
    names = ("none", "learned", "t5", "rotary_2d", "learned+relative_2d", "rotary_2d+relative_2d")
    assert relative(make(names, seeds=1)) == ["t5", "rotary_2d", "rotary_2d+relative_2d"]


def test_the_page_gives_quote_word_finding_and_rule(make: Any) -> None:
    page = build_page(make(make.__globals__["ELEVEN"], seeds=2))
    for claim in CLAIMS:
        assert claim.section in page
    assert page.count('<article class="claim">') == len(CLAIMS)
    assert '<p class="word held">held</p>' in page
    assert "shared/" not in page


def test_every_mechanism_of_ours_has_a_family() -> None:
    assert [name for name in presets() if kind(name).family == "other"] == []


@pytest.mark.parametrize(
    ("start", "accuracy", "ratio", "memory", "expected"),
    [
        ("RoPE: memory low", 0.95, 1.0, 1.0, HELD),
        ("RoPE: memory low", 0.95, 1.2, 1.2, PART),
        ("RoPE: memory low", 0.3, 1.2, 1.2, NOT),
        ("ALiBi: memory low", 0.3, 1.0, 1.0, PART),
        ("ALiBi: memory low", 0.3, 1.2, 1.2, NOT),
        ("ALiBi: memory low", 0.95, 1.0, 1.2, PART),
    ],
)
def test_the_rows_of_the_performance_table(
    make: Any, start: str, accuracy: float, ratio: float, memory: float, expected: str
) -> None:
    name = "rotary_2d" if start.startswith("RoPE") else "alibi"
    reached = {name: figures(accuracy, 0.2, as_is=0.2), "relative_2d": figures(0.8, 0.8, clipped=0.5)}
    growth = {one: list(entry["canvas"]) for one, entry in reached.items()}
    results = make(("none", "relative_2d", name), seeds=4, accuracy=reached, growth=growth)
    for entry in results["costs"]:
        if entry["position"] == name:
            entry["ratio"] = ratio
            entry["peak_memory_mib"] = memory * next(
                one["peak_memory_mib"]
                for one in results["costs"]
                if (one["position"], one["tokens"]) == ("none", entry["tokens"])
            )
    assert judged(results, start).word == expected
