"""Names of a person's own on pages, in pictures and in tables: nothing hidden, and HTML as text."""

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from odd_names import HIDDEN, ODD, SEEN, assert_shown
from relpos.position import NoPosition
from relpos.report.command import command_line
from relpos.report.drawing.canvas import png_bytes
from relpos.report.drawing.charts import Chart, Point, draw
from relpos.report.drawing.mechanism_picture import Words, picture, save_picture
from relpos.report.drawing.notebook import mechanism_html
from relpos.report.drawing.palette import styles
from relpos.report.page import build_page, notebook_html
from relpos.report.terminal import render_terminal
from relpos.results import read


@pytest.fixture(scope="module")
def odd(make: Any) -> dict[str, Any]:
    """A comparison in which all that can come from a person's data has the name."""
    results: dict[str, Any] = make(("none", "relative_2d"), seeds=2)
    task, settings = results["task"], results["settings"]
    task |= {"title": f"title {ODD}", "description": f"described {ODD}", "classes": [ODD, "b"]}
    task |= {"skipped": [{"path": f"skipped {ODD}", "reason": ODD}], "ignored": [f"ignored {ODD}"]}
    for probe in task["probes"]:
        probe |= {"label": f"{probe['label']} {ODD}", "description": f"{probe['description']} {ODD}"}
    settings |= {"task": "images", "model": f"{ODD}.py:build", "task_options": {"images": f"/my/{ODD}"}}
    results["environment"]["processor"] = ODD
    for record in results["records"]:
        record["attention"] |= {"label": [ODD, "b", "b"], "predicted": ["b", ODD, "b"]}
    return results


@pytest.mark.slow
def test_a_page_shows_names_as_they_are(odd: dict[str, Any]) -> None:
    page = build_page(odd)
    assert_shown(page, "the page")
    assert "\x1b" not in page
    for words in ("title", "described", "skipped", "ignored", "over an image of"):
        assert f"{words} {SEEN}" in page, words
    assert f">{SEEN}, taken for b<" in page, "the picture of attention"
    assert_shown(notebook_html(odd), "a notebook")


def test_a_table_in_a_terminal_shows_names_as_they_are(odd: dict[str, Any]) -> None:
    console = Console(record=True, width=400, color_system=None)
    with console.capture() as captured:
        console.print(render_terminal(odd, width=400), crop=False)
    assert_shown(captured.get(), "the table")
    assert "\x1b" not in captured.get()


def test_the_command_on_a_page_can_be_typed(odd: dict[str, Any]) -> None:
    """As bash and zsh read it."""
    line = command_line(read(odd))
    assert not [one for one in HIDDEN if one in line]
    quoted = "$'" + SEEN
    assert f" {quoted}.py:build'" in line
    assert " $'/my/" in line


def test_pictures_show_names_as_they_are(tmp_path: Path) -> None:
    save_picture(picture(ODD, ODD, [Words(ODD, ODD)]), tmp_path / "shown.svg")
    chart = draw(Chart("t", ODD, {ODD: [Point(0, 0.5, 0.4, 0.6, ODD)]}, True), styles([ODD]))
    with pytest.warns(UserWarning, match="Glyph") as of_png:
        png_bytes(chart, dots_per_inch=20)
    with pytest.warns(UserWarning, match="Glyph") as of_pdf:
        save_picture(picture(ODD, ODD, [Words(ODD, ODD)]), tmp_path / "shown.pdf")
    lacking = {str(one.message).partition(" (")[2].partition(")")[0] for one in [*of_png, *of_pdf]}
    assert lacking == {r"\N{CJK UNIFIED IDEOGRAPH-732B}"}, "the one letter that the font lacks"
    drawn = (tmp_path / "shown.svg").read_text("utf-8")
    assert_shown(drawn, "the picture")
    assert "\x1b" not in drawn


def test_a_notebook_shows_a_class_as_it_is() -> None:
    page = mechanism_html(type(ODD, (NoPosition,), {})())
    assert_shown(page)
    assert "\x1b" not in page
