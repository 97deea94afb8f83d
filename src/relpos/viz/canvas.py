"""Drawing with matplotlib without its global state: figures made, turned into SVG for the page or into PNG for a file.

In the page the ink is drawn in a stand-in colour that becomes `currentColor`, and the palette's colours become
variables of the page, so that one SVG suits a light and a dark page. Names inside an SVG get a prefix, since a page
holds many SVGs and names are shared.
"""

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.text import Text

from relpos.files.writing import write_whole
from relpos.viz.palette import pairs, variable
from relpos_command.visible import visible

INK = "#12a0fe"
"""Stands for the page's own text colour while matplotlib draws; no palette has it."""


LAID_OUT = "\n\t\r"
"""Characters that lay a page out, which are shown as nothing else."""


def legible(figure: Figure) -> None:
    """Write out what is hidden in a figure's texts: no font has a control character. Whatever writes a figure calls
    this. The labels of ticks are made anew after it; who gives words to them makes them visible."""
    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text(), keep="\n"))


@contextmanager
def drawing(*, ink: str = INK, size: float = 9.0) -> Iterator[None]:
    """Calm defaults: thin lines, no box around axes, text as text. `ink` colours text and axes."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "relpos",
        # A class or a mechanism may have a dollar sign in its name, which is no formula.
        "text.parse_math": False,
        "font.family": "DejaVu Sans",
        "font.size": size,
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "axes.titlesize": size,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": ink,
        "ytick.color": ink,
        "xtick.major.width": 0.6,
        "ytick.major.width": 0.6,
        "xtick.major.size": 2.5,
        "ytick.major.size": 2.5,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings):
        yield


@contextmanager
def readers_fonts() -> Iterator[None]:
    """While an SVG is written, whose text stays text: a letter that our font lacks is drawn by the reader's."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        yield


def to_svg(figure: Figure, *, name: str, title: str) -> str:
    """The figure as an `<svg>` to stand in a page, read aloud as `title`. The same figure gives the same text."""
    FigureCanvasSVG(figure)
    legible(figure)
    buffer = io.StringIO()
    with drawing(), readers_fonts():
        # The settings of SVG, such as text as text, are read while the figure is written, not while it is drawn.
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    for light, _ in pairs():
        text = text.replace(light, variable(light))
    text = text.replace(INK, "currentColor").replace("'DejaVu Sans'", "system-ui, sans-serif")
    text = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{name}-\1)", text)
    text = re.sub(r'xlink:href="#([^"]+)"', rf'xlink:href="#{name}-\1"', text)
    described = title.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    text = text.replace("<svg", f'<svg role="img" aria-label="{described}"', 1)
    return visible(text, keep=LAID_OUT)


def to_png(figure: Figure, path: Path, *, dots_per_inch: float) -> None:
    """The figure as a PNG file with a white ground; the folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, png_bytes(figure, dots_per_inch=dots_per_inch))


def png_bytes(figure: Figure, *, dots_per_inch: float) -> bytes:
    """The figure as a PNG with a white ground."""
    FigureCanvasAgg(figure)
    legible(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()
