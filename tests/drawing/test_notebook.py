"""How mechanisms show themselves in a notebook."""

import sys

import pytest
import torch

import relpos
from relpos.position import Mechanism, Site, presets
from relpos.report.drawing import notebook

FAST_CASES = 3  # of each of its tests, in the fast part
WRITTEN = {preset.family: name for name, preset in presets().items()}.values()
"""One of each family."""


def drawn(mechanism: Mechanism) -> str:
    """What a notebook would show."""
    shown = mechanism._repr_html_()  # type: ignore[misc]
    assert isinstance(shown, str)
    return shown


@pytest.mark.parametrize("name", presets())
def test_every_mechanism_shows_itself(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Writing the picture, which is most of the time, is matplotlib's."""
    if name not in WRITTEN:
        monkeypatch.setattr(notebook, "to_svg", lambda figure, **_: f"<svg {len(figure.axes)}")
    preset = presets()[name]
    tokens = relpos.Sequence(8) if 1 in preset.token_axes else relpos.Grid(4, 4)
    mechanism = preset.make(Site(2, 8, 16, tokens))
    before = torch.get_rng_state()
    shown = notebook.mechanism_html(mechanism)
    assert torch.equal(torch.get_rng_state(), before)
    assert shown.startswith("<div><svg")


def test_it_is_drawn_where_it_was_built_with_the_weights_that_it_has() -> None:
    bias = relpos.RelativePositionBias(num_heads=1, window_size=(3, 5))
    assert "Drawn on 3 x 5 patches." in drawn(bias)
    before = drawn(bias)
    with torch.no_grad():
        bias.relative_position_bias_table += torch.linspace(-1, 1, 45)[:, None]
    assert drawn(bias) != before


def test_without_matplotlib_a_notebook_shows_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "relpos.report.drawing.notebook")
    monkeypatch.setitem(sys.modules, "relpos.report.drawing.canvas", None)
    assert relpos.ALiBi(2)._repr_html_() is None  # type: ignore[misc]
