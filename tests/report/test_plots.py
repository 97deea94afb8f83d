"""Pictures: their scales, their directions, their sizes."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relpos.report.charts import front, robustness_charts, training_charts
from relpos.report.palette import styles
from relpos.report.plots import attention_svgs, learned_svgs, save_overview
from relpos.report.plots.attention import attention_figure, overlay
from relpos.report.plots.learned import bias_1d, bias_2d, embedding, symmetric_limit
from relpos.report.table import build_table

FAST_SHARE = 3  # of its tests, in the fast part

ELEVEN = ("none", "learned", "sinusoidal_2d", "relative_1d", "relative_2d", "t5", "alibi", "rotary_1d", "rotary_2d")


def learned(results: Any, position: str) -> Any:
    return next(record["learned"] for record in results["records"] if record["position"] == position)


def test_heads_share_one_symmetric_scale(make: Any) -> None:
    (entry,) = learned(make(("relative_2d",), seeds=1), "relative_2d")
    figure = bias_2d(entry)
    images = [axes.images[0] for axes in figure.axes if axes.get_title().startswith("head")]
    limit = float(np.abs(np.asarray(entry["values"])).max())
    assert len(images) == 4
    assert {image.get_clim() for image in images} == {(-limit, limit)}
    assert symmetric_limit(np.zeros(3)) == 1.0


def test_lowest_offset_stands_at_the_top_left(make: Any) -> None:
    (entry,) = learned(make(("relative_2d",), seeds=1), "relative_2d")
    axes = bias_2d(entry).axes[0]
    image = axes.images[0]
    assert image.get_extent() == [-7.5, 7.5, 7.5, -7.5]
    assert image.origin == "upper"
    np.testing.assert_array_equal(np.asarray(image.get_array()), np.asarray(entry["values"][0]))


def test_lines_of_heads_differ_without_colour(make: Any) -> None:
    (entry,) = learned(make(("relative_1d",), seeds=1), "relative_1d")
    lines = [line for line in bias_1d(entry).axes[0].lines if str(line.get_label()).startswith("head")]
    assert len({str(line._dash_pattern) for line in lines}) == len(lines) == 4
    assert all(len(line.get_xdata()) == 127 for line in lines)


def test_similarity_lies_as_the_patches_lie(make: Any) -> None:
    (entry,) = learned(make(("learned",), seeds=1), "learned")
    sheet = np.asarray(embedding(entry).axes[0].images[0].get_array())
    similarity = np.asarray(entry["similarity"])
    # Patch (2, 5) against patch (3, 1): map at row 2, column 5 of the sheet, with a gap of one after each map of eight.
    assert sheet[2 * 9 + 3, 5 * 9 + 1] == similarity[2 * 8 + 5, 3 * 8 + 1]


def test_attention_has_a_row_a_layer_and_outlines_the_query(make: Any) -> None:
    results = make(("none",), seeds=1)
    attention = results["records"][0]["attention"]
    figure = attention_figure(attention, 2, results["task"]["classes"])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.texts if "layer" in text.get_text()] == ["layer 0", "layer 1", "layer 2"]
    assert [text.get_text() for text in axes.texts if "head" in text.get_text()] == [f"head {n}" for n in range(4)]
    assert len(axes.patches) == 12
    assert axes.patches[0].get_xy() == (3 * 2 - 0.5, 4 * 2 - 0.5)
    assert (axes.patches[0].get_width(), axes.patches[0].get_height()) == (2, 2)
    # The last panel, layer 2 and head 3, stands two panels of 16 + 4 down and three of 16 + 1 across.
    sheet = np.asarray(axes.images[0].get_array())
    expected = overlay(np.asarray(attention["image"][2]), np.asarray(attention["maps"][2][2][3]))
    np.testing.assert_allclose(sheet[40:56, 51:67, :3], expected)
    assert figure.get_suptitle() == "8, taken for 6"


def test_overlay_glows_where_attention_is() -> None:
    attention = np.zeros((2, 2))
    attention[1, 0] = 1.0
    mixed = overlay(np.zeros((4, 4)), attention)
    assert mixed.shape == (4, 4, 3)
    assert mixed[3, 1, 0] > 0.7
    assert mixed[0, 3, 0] == pytest.approx(0.14)


def test_svgs_take_the_page_colour_and_have_names_of_their_own(make: Any) -> None:
    results = make(("relative_2d",), seeds=1)
    pictures = [svg for _, svg in learned_svgs(learned(results, "relative_2d"), name="a", mechanism='<"&>')]
    pictures += attention_svgs(results["records"][0]["attention"], ["$x"] * 10, name="b", mechanism="m")
    assert len(pictures) == 4
    for svg in pictures:
        assert svg.startswith('<svg role="img" aria-label="')
        assert "currentColor" in svg
        assert "#12a0fe" not in svg
        assert "DejaVu" not in svg
        assert "<text" in svg
    assert "&lt;&quot;&amp;" in pictures[0].split(">")[0]


def test_prefix_bias_is_told_in_the_caption(make: Any) -> None:
    (entry,) = learned(make(("relative_2d",), seeds=1), "relative_2d")
    entry["prefix"] = [[0.5, -0.25, 0.0]] * 4
    ((caption, _),) = learned_svgs([entry], name="a", mechanism="m")
    assert "head 3: 0.50, \N{MINUS SIGN}0.25, 0.00" in caption


@pytest.mark.parametrize("names", [("none", "learned", "relative_2d"), ("none", "relative_1d"), ("none",), ELEVEN])
def test_overview_is_1600_by_900(names: tuple[str, ...], make: Any, tmp_path: Path) -> None:
    path = tmp_path / "overview.png"
    save_overview(make(names, seeds=1), path)
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", content[16:24]) == (1600, 900)


def test_mechanisms_differ_without_colour() -> None:
    looks = [(look.dash, look.marker) for look in styles([f"m{index}" for index in range(56)]).values()]
    assert len(set(looks)) == 56


def test_hue_tells_the_family_and_shade_the_member(make: Any) -> None:
    names = make.__globals__["ELEVEN"]
    looks = styles(names)
    assert len({look.light for look in looks.values()}) == len({look.dark for look in looks.values()}) == 11
    for name in ("relative_1d", "relative_2d", "t5", "alibi"):
        red, green, blue = (int(looks[name].light[at : at + 2], 16) for at in (1, 3, 5))
        assert blue == max(red, green, blue)


def test_of_many_mechanisms_the_best_of_each_family_stands_in_front(make: Any) -> None:
    results = make(make.__globals__["ELEVEN"], seeds=1)
    ranked = [row.position for row in build_table(results).rows]
    best = ["rotary_2d+relative_2d", "rotary_2d", "relative_2d", "none", "sinusoidal_2d"]
    assert front(ranked) == best
    assert front(ranked[:6]) == ranked[:6]
    charts = [*robustness_charts(results, best), *training_charts(results, best)]
    assert all(series["front"] == (series["mechanism"] in best) for chart in charts for series in chart["series"])


def test_dashes_stand_for_growth_rules_whatever_the_mechanism(make: Any) -> None:
    results = make(("none", "relative_2d", "rotary_2d+relative_2d"), seeds=1)
    chart = robustness_charts(results, [])[1]
    dashes = {rule["label"]: rule["dash"] for rule in chart["rules"]}
    assert list(dashes) == ["as is", "interpolated", "clipped"]
    assert len(set(dashes.values())) == 3
    for series in chart["series"]:
        assert series["style"]["dash"] == dashes[series["label"].split("(")[1].rstrip(")")]
