"""What was learned as pictures: where offsets lie, and that an SVG suits any page."""

import numpy as np

from relpos.report.drawing.attention_maps import attention_figure, overlay
from relpos.report.drawing.learned_positions import learned_svgs
from relpos.report.drawing.mechanism_picture import Bars, Maps, alone, sheet
from relpos.results import Attention, Learned

PLANE = Learned("bias", layer="shared", axes=2, offsets=[[-1, 1], [-1, 1]], values=np.eye(3)[None].tolist())


def test_svgs_take_the_pages_ink_and_have_names_of_their_own() -> None:
    (first, second) = (learned_svgs([PLANE], name=name, mechanism="a<b")[0][1] for name in ("x", "y"))
    assert "currentColor" in first
    assert "a&lt;b" in first
    ids = [{part.split('"')[0] for part in svg.split('id="')[1:]} for svg in (first, second)]
    assert not ids[0] & ids[1]


def test_the_lowest_offset_stands_at_the_top_left() -> None:
    values = np.arange(9.0).reshape(1, 3, 3)
    from relpos.report.drawing.learned_positions import _bias

    strip = _bias(Learned("bias", layer=0, axes=2, offsets=[[-1, 1], [-1, 1]], values=values.tolist()))
    assert isinstance(strip, Maps)
    axes, _ = alone(strip).axes
    assert axes.images[0].get_extent() == [-1.5, 1.5, 1.5, -1.5]
    line = _bias(Learned("bias", layer=0, axes=1, along="bytes", offsets=[[0, 3]], values=[[1.0, 2.0, 3.0, 4.0]]))
    assert isinstance(line, Bars)
    assert line.along.first == 0


def test_similarity_lies_as_the_patches_lie() -> None:
    similarity = np.arange(16.0).reshape(4, 4) / 16
    whole = sheet(similarity, 2, 2, "t", "l").values[0]
    assert whole.shape == (5, 5)
    assert whole[0, 3] == similarity[1, 0], "the second patch stands to the right"
    assert np.isnan(whole[2]).all()


def test_attention_has_a_row_a_layer_and_outlines_the_query() -> None:
    maps = np.full((1, 2, 3, 2, 2), 0.25).tolist()
    look = Attention([np.zeros((4, 4)).tolist()], ["cat"], ["dog"], [1, 0], [2, 2], maps)
    (axes,) = attention_figure(look, 0).axes
    assert len(axes.patches) == 6
    assert axes.patches[0].get_xy() == (-0.5, 1.5)
    glow = overlay(np.zeros((4, 4)), np.asarray([[1.0, 0.0], [0.0, 0.0]]))
    assert glow[0, 0, 0] > glow[3, 3, 0]
