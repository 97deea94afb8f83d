"""Pictures of positions: signs without colour, one scale for all heads."""

import numpy as np

from relpos.report.drawing.mechanism_picture import Axis, Bars, Maps, picture, short_number, signed_number


def one_map(values: list[list[float]], **more: object) -> list[object]:
    array = np.asarray([values], dtype=np.float64)
    strip = Maps("t", ("",), array, Axis("r"), Axis("c"), "s", **more)  # type: ignore[arg-type]
    return list(picture("title", "note", [strip]).axes)


def test_large_cells_print_their_numbers() -> None:
    axes = one_map([[0.5, -0.25], [0.0, 2.0]])[0]
    texts = [text.get_text() for text in axes.texts]  # type: ignore[attr-defined]
    assert texts == ["+0.50", "\N{MINUS SIGN}0.25", "0", "+2.00"]
    assert axes.images[0].get_clim() == (-2.0, 2.0)  # type: ignore[attr-defined]


def test_smaller_cells_carry_signs() -> None:
    values = np.zeros((20, 20))
    values[3, 4], values[5, 6], values[7, 8] = 1.0, -0.03, -0.01
    axes = one_map(values.tolist())[0]
    marks = {}
    for marker, collection in zip("++--", axes.collections, strict=True):  # type: ignore[attr-defined]
        marks.setdefault(marker, []).extend(collection.get_offsets().tolist())
    assert marks == {"+": [[4, 3]], "-": [[6, 5]]}, "x is the column; a hundredth of the scale carries no sign"


def test_the_smallest_cells_are_hatched_below_zero() -> None:
    values = np.ones((80, 80))
    values[10, 20:30] = -1.0
    axes, bar = one_map(values.tolist())
    (patch,) = axes.patches  # type: ignore[attr-defined]
    assert patch.get_hatch()
    assert (patch.get_xy(), patch.get_width(), patch.get_height()) == ((19.5, 9.5), 10, 1)
    assert [one.get_hatch() is not None for one in bar.patches] == [True], "the scale says what hatching means"  # type: ignore[attr-defined]


def test_heads_stand_side_by_side_on_one_symmetric_scale() -> None:
    values = np.arange(-12.0, 13.0).repeat(16)[: 6 * 4 * 4].reshape(6, 4, 4)
    names = tuple(f"head {head}" for head in range(6))
    found = picture("t", "n", [Maps("t", names, values, Axis("r"), Axis("c"), "s")]).axes
    images = [axes.images[0] for axes in found if axes.images and axes.get_title()]  # type: ignore[attr-defined]
    assert len(images) == 6
    assert {image.get_clim() for image in images} == {(-12.0, 12.0)}
    tops = {round(image.axes.get_position().y1, 3) for image in images[:4]}
    assert len(tops) == 1, "four heads stand in a row"


def test_own_scales() -> None:
    values = np.asarray([[[1.0, -1.0]], [[10.0, 5.0]]])
    strip = Maps("t", ("a", "b"), values, Axis("r"), Axis("c"), "s", own_scales=True)
    found = picture("t", "n", [strip]).axes
    assert [axes.images[0].get_clim() for axes in found] == [(-1.0, 1.0), (-10.0, 10.0)]  # type: ignore[attr-defined]


def test_bars_share_one_scale_with_zero_in_it() -> None:
    strip = Bars("t", ("a", "b"), np.asarray([[1.0, 3.0], [2.0, 4.0]]), Axis("offset", -1), "s")
    first, second = picture("t", "n", [strip]).axes
    assert first.get_ylim() == second.get_ylim()  # type: ignore[attr-defined]
    low, high = first.get_ylim()  # type: ignore[attr-defined]
    assert low < 0 < 4 < high
    assert first.get_xlim() == (-1.5, 0.5)  # type: ignore[attr-defined]


def test_numbers_have_signs() -> None:
    assert [short_number(x) for x in (0.0, -0.001, 0.126, -12.34)] == ["0", "0", "+0.13", "\N{MINUS SIGN}12.3"]
    assert [signed_number(x) for x in (0.0, 0.5, -0.25)] == ["0", "+0.5", "\N{MINUS SIGN}0.25"]
