"""A comparison on text: bits per byte, fewer are better, over the length of what is read."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from text_results import BITS, LENGTHS, make_text

from relpos.report import render_terminal
from relpos.report.charts import robustness_charts, training_charts
from relpos.report.claims import judge_claims
from relpos.report.measure import ACCURACY
from relpos.report.measure import BITS as MEASURE
from relpos.report.page import build_page
from relpos.report.plots.overview import save_overview
from relpos.report.results import Contender, far_probe, outcomes
from relpos.report.statistics import Interval
from relpos.report.table import build_table
from relpos.report.text_explanations import explain_text
from relpos.report.verdict import judge
from relpos.report.wording import headline, sentences

FAST_SHARE = 3  # of its tests, in the fast part

ALL = tuple(BITS)


def interval(low: float, high: float) -> Interval:
    return Interval((low + high) / 2, low, high, 14, (0, 1), True)


# the measure


def test_fewer_bits_are_ahead() -> None:
    few, many = {0: np.full(6, 2.4)}, {0: np.linspace(2.5, 2.7, 6)}
    assert MEASURE.ahead(few, many).mean == pytest.approx(0.2)
    assert ACCURACY.ahead(few, many).mean == pytest.approx(-0.2)
    assert sorted([2.5, None, 2.4], key=MEASURE.rank) == [2.4, 2.5, None]
    assert sorted([0.5, None, 0.6], key=ACCURACY.rank) == [0.6, 0.5, None]


def test_figures_of_bits() -> None:
    assert MEASURE.figure(2.4123) == "2.412 bits"
    assert MEASURE.gap(-0.0304) == "\N{MINUS SIGN}0.030 bits"
    assert MEASURE.bounds(interval(0.1, 0.14)) == "0.10 to 0.14"
    assert MEASURE.bounds(interval(-0.002, 0.04)) == "\N{MINUS SIGN}0.002 to 0.040", "no false zero"
    assert MEASURE.bounds(interval(0.0004, 0.02)) == "0.0004 to 0.0200"
    assert MEASURE.span(2.41, 2.43) == "2.410 to 2.430 bits"
    assert ACCURACY.span(0.885, 0.894) == "88.5% to 89.4%"
    assert ACCURACY.span(0.894, 0.8941) == "89.4%"


def test_bits_are_not_held_below_one() -> None:
    found = MEASURE.interval({0: np.linspace(2, 3, 9), 1: np.linspace(2.1, 3.1, 9)})
    assert found.mean == pytest.approx(2.55)
    assert found.high > 2.55


# the verdict


def test_the_verdict_ranks_by_fewest_bits() -> None:
    verdict = judge(make_text(ALL))
    test, far = verdict.probe("test"), verdict.probe("length")
    assert test is not None
    assert far is not None
    assert [standing.contender.label for standing in test.standings][:2] == ["rotary_1d+t5", "t5"]
    assert far.standings[0].contender == Contender("t5", "as is")
    assert far.standings[-1].contender == Contender("learned", "interpolated")
    assert all(one.difference is None or one.difference.mean > 0 for one in far.standings), "the best is ahead"
    assert far.chance is None
    assert verdict.without_growth == ("fixed",)
    rules = [standing.contender.growth for standing in far.standings if standing.contender.position == "rotary_1d"]
    assert rules == ["ntk", "as is"], "each rule competes for itself"


def test_the_order_turns_round_in_longer_inputs() -> None:
    reversal = judge(make_text(("alibi", "rotary_1d"))).reversals[0]
    assert (reversal.first, reversal.second) == ("rotary_1d (as is)", "alibi (as is)")
    assert reversal.here_difference.mean == pytest.approx(0.11, abs=0.03)
    assert reversal.there_difference.mean == pytest.approx(-0.44, abs=0.03)


def test_the_words_have_bits_and_no_percent() -> None:
    verdict = judge(make_text(ALL))
    said = [headline(verdict), *(sentence.text for sentence in sentences(verdict))]
    assert said[0].startswith("t5 (as is) and alibi (as is) cannot be told apart at 2,048 bytes (2.")
    assert any("The order turns round: rotary_1d (as is) is ahead of alibi (as is) at 256 bytes" in one for one in said)
    assert not re.search(r"(?<!9)\d%|points|image|chance|shift|95 %", " ".join(said).replace("95%", ""))


def test_one_alone_is_best_at_both_ends() -> None:
    results = make_text(("none", "t5"))
    assert headline(judge(results)).startswith("t5 (as is) is best: 2.5")
    assert " at 2,048 bytes, and 2.4" in headline(judge(results))


# table, charts, terminal


def test_the_table_has_every_length_and_rule() -> None:
    table = build_table(make_text(ALL))
    assert [column.title for column in table.group("test", "length")] == [f"{length:,} bytes" for length in LENGTHS]
    assert [row.position for row in table.rows][:2] == ["t5", "alibi"]
    assert table.rows[-1].position == "fixed", "what has no figure comes last"
    (rotary,) = (row for row in table.rows if row.position == "rotary_1d")
    cell = rotary.cells["length/2048"]
    assert [value.rule for value in cell.values] == ["as is", "ntk"]
    assert cell.sort == pytest.approx(2.6, abs=0.1), "sorted by the better of the two"


def test_the_curves_run_from_the_trained_length_to_the_longest() -> None:
    length, place = robustness_charts(make_text(ALL), ALL)
    assert length["x"] == list(LENGTHS)
    assert length["log"] is True
    assert (length["percent"], length["chance"], length["better"]) == (False, None, "lower")
    assert length["ticks"]["256"] == "256, trained"
    lowest, highest = length["range"]
    for series in length["series"]:
        ends = [value for value in (*series["low"], *series["high"]) if value is not None]
        assert lowest < min(ends) <= max(ends) < highest, "every whisker has room"
    (alibi,) = (series for series in length["series"] if series["mechanism"] == "alibi")
    assert alibi["mean"] == pytest.approx([2.56, 2.55, 2.545, 2.54], abs=0.1)
    assert place["trained"] == 256
    assert len(place["x"]) == 32
    assert all(series["low"] is None for series in place["series"])


def test_training_shows_bits() -> None:
    loss, validation = training_charts(make_text(), ("none",))
    assert validation["title"] == "Validation bits per byte"
    assert (validation["percent"], validation["better"], loss["better"]) == (False, "lower", "lower")


def test_the_terminal_says_that_fewer_are_better() -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_terminal(make_text(ALL), width=120))
    said = console.export_text()
    assert "Bits per byte, fewer are better" in said
    assert re.search(r"alibi +2\.\d{3} .*2\.\d{3} ±0\.\d{3} as is", said)


# claims and explanations


def by_quote(results: dict[str, Any]) -> dict[str, str]:
    return {outcome.claim.quote.split(" (")[0]: outcome.word for outcome in judge_claims(results)}


def test_the_claims_about_text() -> None:
    found = by_quote(make_text(ALL, seeds=5))
    assert found["Absolute embeddings: don't generalize to longer sequences than trained on."] == "held"
    assert found["RoPE: extrapolates best."] == "did not hold", "t5 and alibi are ahead of it"
    assert found["ALiBi: excellent extrapolation"] == "held"
    assert found["T5's bias works well for long sequences."] == "did not hold", "0.09 bits more is more than 0.05"
    assert found["Relative methods generalize to longer sequences."] == "held"
    flat: Any = {"t5": {None: (2.42,), "as is": (2.42, 2.42, 2.42)}}
    assert by_quote(make_text(ALL, seeds=5, bits=flat))["T5's bias works well for long sequences."] == "held"


def test_a_mechanism_is_judged_by_its_own_first_rule() -> None:
    """Unless that resamples: then by one that does not."""
    own: Any = {
        "rotary_yarn": {None: (2.45,), "yarn": (2.45, 2.45, 2.45), "as is": (2.55, 2.8, 2.98)},
        "learned": {None: (3.2,), "interpolated": (3.9, 4.6, 5.3), "repeated": (3.2, 3.2, 3.2)},
    }
    results = make_text((*own, "none"), seeds=5, bits=own)
    found = {one.title: one.text for one in explain_text(results)}
    assert "rotary_yarn (yarn) needs" in found["What goes on"]
    assert "learned (repeated) needs" in found["What goes on"]
    assert "rotary_yarn" not in found.get("What does not go on", "")


def test_explanations_follow_the_figures() -> None:
    found = {one.title: one.text for one in explain_text(make_text(ALL, seeds=5))}
    assert "none is ahead of learned by 0." in found["Why none beats learned places"]
    assert "learned (interpolated) needs 2.1" in found["What does not go on"]
    assert "alibi (as is) needs 0.02" in found["What goes on"]
    assert "by ntk is ahead of as is by 0." in found["What rescaling does for rotary_1d"]
    assert "Absolute positions that were not put to use" in found, "both are behind none here"
    far: Any = {name: {None: (2.4,), "as is": (2.4, 2.4, 2.4)} for name in ("learned", "sinusoidal_1d")}
    used = [one.title for one in explain_text(make_text(ALL, seeds=5, bits=far))]
    assert "Absolute positions that were not put to use" not in used
    turned: Any = {"none": {None: (3.5,), "as is": (3.5, 3.5, 3.5)}}
    titles = [one.title for one in explain_text(make_text(ALL, seeds=5, bits=turned))]
    assert "What places are worth" in titles
    assert "Why none beats learned places" not in titles
    assert explain_text(make_text(ALL, quick=True)) == []
    assert not explain_text(make_text(ALL, seeds=1)), "one seed is about models, not mechanisms"


# the page


def test_the_page_of_a_text() -> None:
    page = build_page(make_text(ALL))
    assert "which position mechanism reads on beyond what it was trained on?" in page
    assert 'id="samples"' in page
    assert 'id="attention"' not in page
    assert "The &lt;b&gt;import&lt;/b&gt; " in page, "what a model writes is text, never markup"
    assert "&amp;amp; the the the" in page
    assert "How alike the position vectors of two places are" in page
    assert "in bytes" in page
    visible = re.sub(r"<[^>]*>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", page))
    assert not re.search(r"test images|\bpatch|\bpixels|chance", visible)


def test_the_page_of_an_unfinished_text() -> None:
    results = make_text(("none", "alibi"), seeds=2)
    results["records"] = results["records"][:1]
    results["costs"] = []
    assert "Unfinished" in build_page(results)


def test_the_overview_of_a_text(tmp_path: Path) -> None:
    save_overview(make_text(ALL), tmp_path / "o.png")
    assert (tmp_path / "o.png").stat().st_size > 20_000


def test_the_longest_text_is_farthest() -> None:
    results = make_text(("alibi",))
    far = far_probe(results)
    assert far is not None
    assert far["id"] == "length/2048"
    scored = outcomes(results, Contender("alibi", "as is"), "length/2048")
    assert sorted(scored) == [0, 1, 2]
    assert all(len(values) == 14 for values in scored.values())


def test_of_many_the_best_and_the_worst_of_each_family_stand_in_front() -> None:
    page = build_page(make_text(ALL))
    (data,) = re.findall(r'(?s)<script type="application/json" id="comparison">(.*?)</script>', page)
    length, *_ = json.loads(data)["robustness"]
    shown = {series["mechanism"] for series in length["series"] if series["front"]}
    assert shown == {"none", "learned", "sinusoidal_1d", "t5", "alibi", "rotary_1d", "rotary_1d+t5"}
    assert "the best and the worst of each family" in page
