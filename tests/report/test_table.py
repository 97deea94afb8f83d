"""The table's order and cells, and its looks in a terminal."""

from typing import Any

import pytest
from rich.console import Console

from relpos.report.robustness import canvas_curves
from relpos.report.table import build_table
from relpos.report.terminal import render_terminal

FAST_SHARE = 3  # of its tests, in the fast part


def test_sorted_by_the_largest_shift(make: Any) -> None:
    table = build_table(make())
    assert [row.position for row in table.rows] == ["relative_2d", "none", "learned"]
    figures = [row.cells["shift/3"].sort for row in table.rows]
    assert figures == sorted(figures, key=lambda figure: -(figure or 0.0))


def test_ties_at_the_shift_are_broken_by_the_test_images(make: Any) -> None:
    full = {"shift/1": 1.0, "shift/2": 1.0, "shift/3": 1.0, "canvas": {"as is": 0.5, "interpolated": 0.5}}
    accuracy = {"none": {**full, "test": 0.5}, "learned": {**full, "test": 0.9}}
    table = build_table(make(("none", "learned"), accuracy=accuracy))
    assert [row.position for row in table.rows] == ["learned", "none"]


def test_unmeasured_come_last(make: Any) -> None:
    results = make()
    results["records"] = [record for record in results["records"] if record["position"] != "relative_2d"]
    rows = build_table(results).rows
    assert rows[-1].position == "relative_2d"
    assert rows[-1].cells["shift/3"].values[0].reason == "no finished run"
    assert rows[-1].cells["parameters"].values[0].number is None


def test_cells_hold_a_value_for_each_growth_rule(make: Any) -> None:
    row = build_table(make()).rows[0]
    values = row.cells["canvas/24/anywhere"].values
    assert [value.rule for value in values] == ["interpolated", "clipped"]
    assert row.cells["canvas/24/anywhere"].sort == max(value.number or 0.0 for value in values)
    assert all(value.low is not None and value.low < (value.number or 0.0) < (value.high or 0.0) for value in values)


def test_no_growth_rule_has_a_reason(make: Any) -> None:
    rows = {row.position: row for row in build_table(make(("none", "relative_1d"))).rows}
    (value,) = rows["relative_1d"].cells["canvas/20/centred"].values
    assert (value.number, value.reason) == (None, "no rule for a larger grid")


def test_milliseconds_where_none_was_not_timed(make: Any) -> None:
    results = make(("learned", "relative_2d"))
    for entry in results["costs"]:
        entry["ratio"] = None
    table = build_table(results)
    assert table.group("step")[0].title == "step ms at 64"
    assert table.rows[0].cells["step/64"].values[0].text == "15.7"


def test_terminal_fits_and_cuts_nothing_off(make: Any) -> None:
    console = Console(width=112, record=True, color_system=None)
    with console.capture() as capture:
        console.print(render_terminal(make(("none", "learned", "relative_2d", "relative_1d"))))
    text = capture.get()
    assert max(len(line) for line in text.splitlines()) <= 112
    assert "…" not in text
    assert "relative_2d is best" in text
    assert "clipped" in text


LONG = ("none", "learned", "relative_2d", "learned+relative_2d")


def printed(results: Any, width: int, *, asked: int | None = None) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(render_terminal(results) if asked is None else render_terminal(results, width=asked))
    return capture.get()


def make_long(make: Any) -> Any:
    figures = make.__globals__["ACCURACY"]["relative_2d"]
    long = LONG[-1]
    return make(LONG, accuracy={long: figures}, growth={long: ["interpolated", "clipped"]})


@pytest.mark.parametrize("width", [80, 90, 100, 112, 140])
def test_terminal_cuts_no_name_and_no_figure(make: Any, width: int) -> None:
    results = make_long(make)
    text = printed(results, width, asked=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    rows: dict[str, str] = {}
    for line in filter(str.strip, text.splitlines()):
        rows.setdefault(line.split()[0], line)
    for row in build_table(results).rows:
        assert row.position in rows
        assert row.cells["shift/3"].values[0].text in rows[row.position].split()
    assert "Left out for width" in text or width == 140


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 120])
def test_eleven_mechanisms_stand_in_a_terminal(make: Any, width: int) -> None:
    text = printed(make(make.__globals__["ELEVEN"]), width, asked=width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    table = text.split("Accuracy in %")[0]
    assert [line.split()[0] for line in table.splitlines()[4:] if line.strip() and line[1] != " "] == [
        row.position for row in build_table(make(make.__globals__["ELEVEN"])).rows
    ]
    assert ("+2" in table) == (width == 120)
    assert len(text.splitlines()) < (75 if width == 80 else 60)


@pytest.mark.slow
def test_narrow_terminals_lose_the_small_shifts_first_then_memory_then_the_middle_step(make: Any) -> None:
    results = make(("none", "learned", "relative_2d"))
    lost: list[str] = []
    for width in range(112, 60, -1):
        _, said, rest = printed(results, 200, asked=width).partition("Left out for width: ")
        names = rest.splitlines()[0].strip().removesuffix(".").split("; ") if said else []
        lost += [name for name in names if name not in lost]
    assert lost[:4] == ["+1", "+2", "MiB at 4,096", "step \N{MULTIPLICATION SIGN} at 1,024"]
    assert "test" not in lost
    assert "+3" not in lost


def test_at_112_columns_every_column_of_an_ordinary_comparison_stands(make: Any) -> None:
    assert "Left out" not in printed(make(("none", "learned", "relative_2d")), 112)


def test_a_terminal_narrower_than_told_folds_rather_than_cuts(make: Any) -> None:
    text = printed(make_long(make), 60)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= 60


def test_the_trained_canvas_stands_by_its_rows(make: Any) -> None:
    results = make()
    results["task"]["probes"][0]["image_size"] = [16, 40]
    for _, curves in canvas_curves(results):
        for curve in curves:
            places = [point.x for point in curve.points]
            assert places[0] == 16
            assert places == sorted(places)
