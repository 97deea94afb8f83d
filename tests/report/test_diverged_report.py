"""Runs that diverged: the table, the verdict and the page say so, whoever it was and however many."""

from __future__ import annotations

import io
import re
from typing import Any

import choice_results
import pytest
import text_results
from rich.console import Console

from relpos.report import build_page, judge, render_terminal
from relpos.report.choice_claims import judge_choices
from relpos.report.claims import judge_claims
from relpos.report.plots.overview import overview
from relpos.report.table import build_table
from relpos.report.wording import cautions, headline


def diverge(
    results: dict[str, Any], *names: str, seeds: tuple[int, ...] | None = None, variant: str | None = None
) -> dict[str, Any]:
    """Let runs of these diverge: of some seeds, of one variant, or all."""
    for record in results["records"]:
        of_it = record.get("choice", record["position"]) in names
        if of_it and (seeds is None or record["seed"] in seeds) and variant in (None, record["variant"]):
            curve = {key: [] for key in record.get("curve", ())}
            record |= {"metrics": [], "learned": [], "curve": curve, "validation_accuracy": None}
            record["diverged"] = {"step": 12, "rate": 0.003, "what": "loss", "value": "nan"}
            for shown in ("attention", "sample"):
                record.pop(shown, None)
    return results


def printed(results: dict[str, Any]) -> str:
    console = Console(width=112, record=True, file=io.StringIO())
    console.print(render_terminal(results))
    return " ".join(console.export_text().split())


def banners(page: str) -> str:
    return " ".join(re.findall(r'<p class="banner" role="note">(.*?)</p>', page))


def test_one_mechanism_that_diverged_is_in_the_table_and_the_words(make: Any) -> None:
    results = diverge(make(), "learned")
    rows = {row.position: row for row in build_table(results).rows}
    for key in ("test", "shift/3", "canvas/24/anywhere", "x1/test"):
        (value,) = rows["learned"].cells[key].values
        assert (value.text, value.number) == ("diverged", None), key
    assert rows["learned"].cells["parameters"].values[0].text == "3,072", "the model is known"
    verdict = judge(results)
    assert verdict.unfinished == 0
    assert {probe.seeds for probe in verdict.probes} == {(0, 1, 2)}, "the others lose nothing"
    (said,) = [caution for caution in cautions(verdict) if "diverged" in caution]
    assert said == (
        "learned diverged in all 6 of its runs, first with seed 0 at step 12, at the learning rate 3.0e-03, where the "
        "loss was nan: it has no figure."
    )
    page = build_page(results)
    assert said in banners(page)
    assert '<span class="value nothing" title="diverged">diverged</span>' in page
    assert "learned: diverged" in page, "beside the standings"
    assert "diverged" in printed(results)


def test_a_seed_that_diverged_is_left_out_for_all_and_said(make: Any) -> None:
    results = diverge(make(), "learned", seeds=(1,), variant="recipe")
    verdict = judge(results)
    assert verdict.unfinished == 0
    assert {probe.seeds for probe in verdict.probes} == {(0, 2)}
    (said,) = [caution for caution in cautions(verdict) if "diverged" in caution]
    assert said.startswith("learned diverged in 1 of its 6 runs, with seed 1 at step 12")
    assert said.endswith("its figures are of the others alone.")
    page = build_page(results)
    assert said in banners(page)
    seed_by_seed = page[page.index("Seed by seed") :]
    assert "<td>diverged</td>" in seed_by_seed


def test_the_first_seed_that_finished_gives_the_pictures(make: Any) -> None:
    whole, cut = build_page(make()), build_page(diverge(make(), "relative_2d", seeds=(0,)))
    for section in ("learned", "attention"):
        count = whole.split(f'<h2 id="{section}">')[1].split("</section>")[0].count("<details")
        assert cut.split(f'<h2 id="{section}">')[1].split("</section>")[0].count("<details") == count


@pytest.mark.parametrize("quick", [False, True])
def test_all_diverged_is_the_answer(make: Any, quick: bool) -> None:
    results = diverge(make(quick=quick), "none", "learned", "relative_2d")
    assert "very training run diverged" in headline(judge(results))
    page = build_page(results)
    assert "very training run diverged" in page
    assert "nothing to compare yet" not in page
    assert "very training run diverged" in printed(results)
    overview(results)


def test_one_alone_that_diverged(make: Any) -> None:
    results = diverge(make(("learned",), seeds=1), "learned")
    assert headline(judge(results)) == "Every training run diverged."
    build_page(results)
    overview(results)


def test_none_that_diverged_leaves_the_others_compared(make: Any) -> None:
    results = diverge(make(), "none")
    assert "relative_2d" in headline(judge(results))
    build_page(results)


def test_seeds_that_nobody_shares_are_no_comparison(make: Any) -> None:
    results = diverge(make(("none", "learned"), seeds=2), "none", seeds=(0,))
    results = diverge(results, "learned", seeds=(1,))
    assert any("share no finished seed" in caution for caution in cautions(judge(results)))
    build_page(results)
    printed(results)


def test_text(make: Any) -> None:
    names = ("none", "alibi", "rotary_1d")
    for gone in (("alibi",), names):
        results = diverge(text_results.make_text(names), *gone)
        page = build_page(results)
        assert "diverged" in banners(page)
        overview(results)
        printed(results)


@pytest.mark.parametrize("gone", [("local",), ("full",), choice_results.NAMES])
def test_choices(gone: tuple[str, ...]) -> None:
    results = diverge(choice_results.make(), *gone)
    page, words = build_page(results), printed(results)
    assert f"{gone[0]} diverged in all 3 of its runs" in banners(page)
    assert page.count("<td>diverged</td>") == len(gone)
    assert f"{gone[0]} diverged" in words
    assert ("Every training run diverged" in page) == (len(gone) == 3)
    assert "Unfinished" not in words


def words_of(claims: list[Any], start: str) -> tuple[str, list[str]]:
    (found,) = [one for one in claims if one.claim.quote.startswith(start)]
    return found.word, [finding.figure for finding in found.findings if "diverged" in finding.figure]


def test_who_diverged_holds_no_claim_on_quality_or_steadiness(make: Any) -> None:
    results = make(("none", "relative_2d", "rotary_2d"))
    assert words_of(judge_claims(results), "RoPE: memory low")[1] == []
    whole = words_of(judge_claims(diverge(results, "rotary_2d")), "RoPE: memory low")
    assert whole == ("held in part", ["diverged in 3 of 3 runs"])
    steady = words_of(judge_claims(diverge(results, "relative_2d", seeds=(0,))), "Additive bias: simple, stable")
    assert steady == ("did not hold", ["diverged in 1 of 3 runs"])
    assert words_of(judge_claims(results), "RoPE: no new parameters") == ("held", [])


def test_a_choice_that_diverged_holds_no_claim_on_quality() -> None:
    held = words_of(judge_choices(diverge(choice_results.make(), "local")), "Local Attention")
    assert held == ("held in part", ["diverged in 3 of 3 runs"])
    alone = words_of(judge_choices(diverge(choice_results.make(seeds=1), "local")), "Local Attention")
    assert alone == ("held in part", ["diverged in 1 of 1 runs"]), "one seed leaves it open"
    beside = words_of(judge_choices(diverge(choice_results.make(), "full")), "Local Attention")
    assert beside == ("held in part", ["has no full beside it, which diverged"])


def test_there_are_no_empty_charts(make: Any) -> None:
    assert 'id="chart-canvas' not in build_page(diverge(make(), "none", "learned", "relative_2d"))
