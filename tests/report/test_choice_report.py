"""The report on anything but position: its table, its words, its claims, and what its page leaves out."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from choice_results import NAMES, make
from rich.console import Console

from relpos.report import build_page, render_terminal
from relpos.report.choice_claims import CLAIMS, judge_choices
from relpos.report.choice_words import choice_headline, choice_sentences
from relpos.report.choices import grown_sizes, growth, rows


def words(results: dict[str, Any]) -> dict[str, str]:
    return {outcome.claim.quote.split(":")[0]: outcome.word for outcome in judge_choices(results)}


def test_rows_hold_every_choice_to_the_first() -> None:
    found = {row.name: row for row in rows(make())}
    assert [row.name for row in rows(make())] == ["full", "linear", "local"], "best first"
    assert found["full"].ahead is None
    behind = found["local"].ahead
    assert behind is not None
    assert behind.mean == pytest.approx(-0.3)
    assert behind.low < -0.3 < behind.high < -0.2
    assert found["local"].trained["tokens"] == 64
    assert found["local"].largest["tokens"] == 4096
    assert (found["local"].ratio, found["local"].memory_ratio) == (0.125, 0.25)
    assert found["full"].memory_ratio == 1.0


def test_growth_is_the_exponent_over_sizes_that_differ_in_tokens_alone() -> None:
    results = make()
    assert grown_sizes(results) == [1024, 2048, 4096], "not the task's own, with its batch"
    assert growth(results, "full", "time") == pytest.approx(2.0)
    assert growth(results, "local", "time") == pytest.approx(1.0)
    assert growth(results, "linear", "memory") == pytest.approx(1.5)
    results["costs"] = [entry for entry in results["costs"] if entry["tokens"] != 2048]
    assert growth(results, "full", "time") is None, "two points lie on any line"


def test_claims_follow_from_the_figures() -> None:
    found = words(make())
    assert found["Local Attention"] == "held in part", "memory and time speak for it, quality against"
    speaks = {
        one.claim.quote.split(":")[0]: [finding.speaks for finding in one.findings] for one in judge_choices(make())
    }
    assert speaks["Local Attention"] == ["for", "for", "against"]
    assert speaks["Linear Attention"] == ["for", "open", "for"], "its step times overlap with full's"
    assert found["Sparse Attention"] == "not measured in this comparison"
    better = {**make(shares=(0.90, 0.90, 0.60))}
    assert words(better)["Local Attention"] == "held"
    assert [one.speaks for one in judge_choices(better)[0].findings][2] == "against"


@pytest.mark.parametrize("settings", [{"seeds": 1}, {"quick": True}])
def test_one_seed_and_a_quick_run_decide_nothing_about_quality(settings: dict[str, Any]) -> None:
    for outcome in judge_choices(make(**settings)):
        assert all(finding.speaks == "open" for finding in outcome.findings if "on the test" in finding.figure)


def test_overlapping_intervals_are_not_told_apart() -> None:
    assert (
        choice_headline(make(shares=(0.9, 0.9, 0.9)))
        == "On the test none is told apart from full, the highest at 90.2%."
    )
    clear = choice_headline(make(shares=(0.9, 0.5, 0.9)))
    assert clear == "full comes first on the test, at 90.2%; not told apart from it: linear."
    (behind, time, *_) = choice_sentences(make(shares=(0.9, 0.5, 0.9)))
    assert behind.startswith("Behind full on the test: local by 40.0 points")
    assert "less, local (0.12 times)" in time
    assert "not told apart, linear" in time


def test_the_page_has_the_table_and_nothing_about_positions() -> None:
    page = build_page(make())
    for name in NAMES:
        assert f'<th scope="row">{name}</th>' in page
    assert "time grows as N to the" in page
    assert "--what attention --choices full,local,linear" in page
    assert "Local Attention: memory low, speed fast, quality good." in page
    for absent in ("What position became", "Longer inputs", "Larger grids", "by growth rule", "uPlot"):
        assert absent not in page
    assert build_page(make()) == page


def test_an_unfinished_comparison_has_a_page_too() -> None:
    results = {**make(), "records": make()["records"][:1], "costs": []}
    assert "Unfinished: 8 of the training runs" in build_page(results)
    assert "No run has finished yet" in build_page({**results, "records": []})


def test_the_terminal_shows_the_same() -> None:
    out = io.StringIO()
    Console(file=out, width=100).print(render_terminal(make(), width=100))
    printed = out.getvalue()
    assert "full is best on the test" in printed
    assert "held in part" in printed
    assert max(map(len, printed.splitlines())) <= 100


def renamed(what: str, *names: str, **given: Any) -> Any:
    """The same figures under other names: those of full, local and linear."""
    text = json.dumps(make(**given))
    for old, new in zip(("full", "local", "linear"), names, strict=True):
        text = text.replace(f'"{old}"', f'"{new}"')
    results = json.loads(text)
    results["settings"]["what"] = what
    return results


def by_first_word(results: Any) -> dict[str, str]:
    return {outcome.claim.quote.split(":")[0].split(" ")[0]: outcome.word for outcome in judge_choices(results)}


def test_claims_about_optimizers() -> None:
    assert set(CLAIMS) == {"attention", "norm", "optimizer"}
    results = renamed("optimizer", "adamw", "sophia-g", "lion")
    for kept, word in ((1.0, "held"), (2.0, "did not hold")):
        for entry in results["costs"]:
            entry["state_per_parameter"] = kept if entry["choice"] == "lion" else 2.0
        assert by_first_word(results)["Lion"] == word
    assert by_first_word(results)["Sophia"] == "did not hold", "it is thirty points behind"
    assert by_first_word(results)["New"] == "held in part", "of two, one is not far behind"
    ahead = renamed("optimizer", "adamw", "sophia-g", "lion", shares=(0.6, 0.9, 0.6))
    assert by_first_word(ahead)["Sophia"] == "held"


def test_claims_about_norms() -> None:
    results = renamed("norm", "layernorm", "groupnorm", "rmsnorm")
    found = {outcome.claim.quote: outcome for outcome in judge_choices(results)}
    row = found["RMSNorm: memory low, speed fast, quality good."]
    assert {finding.speaks for finding in row.findings if "the time of" in finding.figure} == {"open"}, "they overlap"
    assert found["RMSNorm and GroupNorm offer alternatives to LayerNorm."].word == "held in part"


def test_nothing_is_judged_without_the_first_of_its_kind() -> None:
    results = renamed("optimizer", "lion", "sophia-g", "sophia-h")
    assert {outcome.word for outcome in judge_choices(results)} == {"not measured in this comparison"}
