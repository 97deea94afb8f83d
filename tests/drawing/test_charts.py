"""Charts: names that do not cover one another, axes that hold what there is, looks that need no colour."""

import numpy as np
import pytest

from relpos.comparison import CHOICES as compared
from relpos.data import ImageTask, Task, Text
from relpos.position import presets
from relpos.report.drawing.charts import Chart, Point, draw, spread
from relpos.report.drawing.palette import CHOICES, NUMBERS, pairs, styles, stylesheet

NAMES = ("none", "a", "b", "c")


def chart(percent: bool = True, **more: object) -> Chart:
    lines = {
        name: [Point(x, 0.5 + 0.1 * at + 0.01 * x, 0.45, 0.95, str(x)) for x in (0, 1, 2)]
        for at, name in enumerate(NAMES)
    }
    return Chart("t", "x", lines, percent, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("wanted", [[0.5] * 8, [0.0] * 8, [1.0] * 8, [0.9, 0.91, 0.1, 0.92, 0.5]])
def test_names_are_spread_in_their_order_and_stay_inside(wanted: list[float]) -> None:
    heights = spread(np.asarray(wanted), 0.06)
    order = np.argsort(wanted, kind="stable")
    assert (np.diff(heights[order]) >= 0.06 - 1e-9).all()
    assert heights.min() >= -1e-9
    assert heights.max() <= 1 + 1e-9


def test_each_line_is_named_with_its_last_figure() -> None:
    (axes,) = draw(chart(), styles(NAMES)).axes
    assert {text.get_text() for text in axes.texts} == {"none 52.0", "a 62.0", "b 72.0", "c 82.0"}


def test_bits_do_not_start_at_zero_and_chance_stands_where_it_is_in_sight() -> None:
    (axes,) = draw(chart(percent=False), styles(NAMES)).axes
    assert axes.get_ylim()[0] > 0.4
    assert axes.get_ylabel() == "bits per byte (lower is better)"
    (axes,) = draw(chart(chance=0.1), styles(NAMES)).axes
    assert "chance" not in {text.get_text() for text in axes.texts}, "far below what is shown"


def test_mechanisms_differ_without_colour() -> None:
    for names in (list(presets()), [f"m{index}" for index in range(8)], *CHOICES):
        looks = styles(names)
        assert len({(look.dash, look.marker, look.fill == "none") for look in looks.values()}) == len(names)


@pytest.mark.parametrize("task", [ImageTask, Text])
def test_those_compared_by_default_have_a_marker_and_a_colour_each(task: type[Task]) -> None:
    looks = styles(task.positions).values()
    assert len({look.colour for look in looks}) == len(task.positions)
    marks = {(look.marker, look.fill == "none") for look in styles(task.standard).values()}
    assert len(marks) == len(task.standard), "points have no dash"


def test_a_mechanism_looks_the_same_in_every_comparison() -> None:
    known = set(presets())
    assert known <= set(NUMBERS), "give a new mechanism a number"
    assert {name for names in CHOICES for name in names} == {name for names in compared.values() for name in names}
    every = styles(known)
    for name in known:
        assert styles(["mine", name, "yours"])[name] == every[name]
    assert styles(["mine"])["mine"] == styles(["none", "mine", "t5"])["mine"]


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    css = stylesheet()
    assert len({light for light, _ in pairs()}) == len(pairs()), "a colour names its variable"
    assert all(f"--c{light[1:]}:{light}" in css and f"--c{light[1:]}:{dark}" in css for light, dark in pairs())
