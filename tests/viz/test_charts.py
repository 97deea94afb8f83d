"""Charts: names that do not cover one another, axes that hold what there is, looks that need no colour."""

from __future__ import annotations

import numpy as np
import pytest

from relpos.viz.charts import Chart, Point, draw, spread
from relpos.viz.palette import COLOURS, pairs, styles, stylesheet

FAMILIES = {"none": "none", "a": "bias", "b": "bias", "c": "rotation"}


def chart(percent: bool = True, **more: object) -> Chart:
    lines = {
        name: [Point(x, 0.5 + 0.1 * at + 0.01 * x, 0.45, 0.95, str(x)) for x in (0, 1, 2)]
        for at, name in enumerate(FAMILIES)
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
    (axes,) = draw(chart(), styles(FAMILIES)).axes
    assert {text.get_text() for text in axes.texts} == {"none 52.0", "a 62.0", "b 72.0", "c 82.0"}


def test_bits_do_not_start_at_zero_and_chance_stands_where_it_is_in_sight() -> None:
    (axes,) = draw(chart(percent=False), styles(FAMILIES)).axes
    assert axes.get_ylim()[0] > 0.4
    assert axes.get_ylabel() == "bits per byte (lower is better)"
    (axes,) = draw(chart(chance=0.1), styles(FAMILIES)).axes
    assert "chance" not in {text.get_text() for text in axes.texts}, "far below what is shown"


def test_mechanisms_differ_without_colour() -> None:
    names = {f"m{index}": "bias" for index in range(8)}
    looks = styles(names).values()
    assert len({(look.dash, look.marker) for look in looks}) == 8
    family = {colour for colour, _ in COLOURS["bias"]}
    assert {look.colour for look in looks} == family


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    css = stylesheet()
    assert len({light for light, _ in pairs()}) == len(pairs()), "a colour names its variable"
    assert all(f"--c{light[1:]}:{light}" in css and f"--c{light[1:]}:{dark}" in css for light, dark in pairs())
