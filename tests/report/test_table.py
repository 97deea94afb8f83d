"""The table: its order, its rows for rules, its reasons, and what a terminal has room for."""

import io
from typing import Any

import pytest
from choice_results import make as make_choices
from image_results import ELEVEN, diverge
from rich.console import Console
from text_results import BITS, make_text

from relpos.report.table import Table, build_table
from relpos.report.terminal import render_terminal
from relpos.results import read

FAST_CASES = 2  # of each of its tests, in the fast part


def cells(table: Table, name: str, rule: str | None = None) -> dict[str, str]:
    """The texts of a row by column."""
    row = next(
        row
        for row in table.rows
        if row.contender.name == name and (row.main if rule is None else row.contender.growth == rule)
    )
    return {column.title: cell.text for column, cell in zip(table.columns, row.cells, strict=True)}


def printed(tree: dict[str, Any], width: int = 112) -> list[str]:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(render_terminal(read(tree), width=width), crop=False)
    return console.export_text().splitlines()


def test_best_at_the_largest_shift_first_and_a_quick_run_as_asked(make: Any) -> None:
    def order(tree: dict[str, Any]) -> list[str]:
        return [row.contender.name for row in build_table(read(tree)).rows if row.main]

    assert order(make()) == ["relative_2d", "none", "learned"]
    assert order(make(quick=True)) == ["none", "learned", "relative_2d"]
    assert order(make_text(("none", "learned", "t5"))) == ["t5", "none", "learned"], "fewer bits are better"


def test_a_row_for_the_best_rule_and_one_for_every_other(make: Any) -> None:
    table = build_table(read(make()))
    named = [(row.contender.label, row.main) for row in table.rows if row.contender.name == "relative_2d"]
    assert named == [("relative_2d (clipped)", True), ("relative_2d (interpolated)", False)]
    best, other = cells(table, "relative_2d"), cells(table, "relative_2d", "interpolated")
    assert float(best["24 x 24, anywhere"]) > float(other["24 x 24, anywhere"])
    assert best["test"].startswith("94.")
    assert [title for title, text in other.items() if text] == ["24 x 24, anywhere"], "the rest is the same"


def test_every_rule_of_text_has_its_row() -> None:
    table = build_table(read(make_text(tuple(BITS))))
    rules = [row.contender.growth for row in table.rows if row.contender.name == "rotary_1d"]
    assert rules == ["ntk", "as is"], "best first"
    assert cells(table, "rotary_1d", "as is")["2,048 bytes"].startswith("2.9")


def test_what_has_no_figure_has_a_reason(make: Any) -> None:
    table = build_table(read(make(("none", "relative_1d"))))
    assert cells(table, "relative_1d")["24 x 24, anywhere"] == "\N{EN DASH}"
    row = next(row for row in table.rows if row.contender.name == "relative_1d")
    assert {cell.reason for cell in row.cells if cell.reason} == {"no rule for a larger grid", "would need more memory"}
    gone = build_table(read(diverge(make(), "learned")))
    assert cells(gone, "learned")["test"] == cells(gone, "learned")["+3 px"] == "diverged"
    assert cells(gone, "learned")["position parameters"] == "3,072", "the model is known"


def test_milliseconds_where_none_was_not_timed(make: Any) -> None:
    results = make(("learned", "t5"))
    for entry in results["costs"]:
        entry["ratio"] = None
    assert cells(build_table(read(results)), "learned")["step ms, 64 tokens"] == "14.1"


def test_choices_stand_beside_the_first_of_their_kind() -> None:
    table = build_table(read(make_choices()))
    full, local = cells(table, "full"), cells(table, "local")
    assert full["ahead of full"] == "\N{EN DASH}"
    assert local["ahead of full"] == "\N{MINUS SIGN}30.0"
    assert (full["time ~ N^"], local["time ~ N^"], local["memory ~ N^"]) == ("2.00", "1.00", "1.00")
    assert cells(build_table(read(make_choices(seeds=1))), "full")["test"] == "90.0"


@pytest.mark.parametrize("width", [20, 30, 60])
def test_a_narrow_terminal_keeps_names_and_figures_whole(make: Any, width: int) -> None:
    lines = printed(make(ELEVEN), width)
    assert all(len(line) <= width or " " not in line.strip() for line in lines), "wrapped at words"
    words = " ".join(lines).split()
    assert set(ELEVEN) <= set(words)
    assert "\N{HORIZONTAL ELLIPSIS}" not in "".join(lines)
    assert sum(word.startswith("\N{PLUS-MINUS SIGN}") for word in words) >= 2 * len(ELEVEN), "test and +3 px of each"


def test_an_interval_that_stops_at_100_has_its_ends(make: Any, share: Any) -> None:
    results = make(("none", "relative_2d"), images=36)
    share(results, "relative_2d", "test", (1.0, 1.0, 1.0))
    row = next(row for row in build_table(read(results)).rows if row.contender.name == "relative_2d")
    every = [(cell.text, cell.small) for cell in row.cells if cell.text == "100.0"]
    assert every == [("100.0", "92 to 100")], "36 images that are all right are no certainty"
    text = "\n".join(printed(results))
    assert "100.0 (92 to 100)" in text
    assert "100.0 \N{PLUS-MINUS SIGN}" not in text
    assert "or (its ends) where it stops at 0 or 100." in text
    assert "its ends" not in "\n".join(printed(make())), "said only where there is one"


@pytest.mark.parametrize("width", [80, 112, 200])
def test_a_terminal_cuts_no_name_and_keeps_what_decides(make: Any, width: int) -> None:
    lines = printed(make(ELEVEN), width)
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    for name in ELEVEN:
        assert name in text
    assert "+3 px" in text
    assert ("MiB, 4,096 tokens" in text) == (width < 200), "what was left out is named"


def test_a_terminal_says_what_the_page_opens_with() -> None:
    text = " ".join(" ".join(printed(make_text(("none", "t5", "alibi")))).split())
    assert "Choose t5" in text
    assert "Bits per byte, lower is better" in text
    assert "Choose full: 90.2% on the test images" in " ".join(" ".join(printed(make_choices())).split())
