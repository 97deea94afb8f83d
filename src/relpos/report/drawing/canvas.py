"""Drawing with matplotlib without its global state: make figures, write them as SVG for a page or PNG for a file.

For a page, text and axes have a placeholder colour that becomes `currentColor`, and the palette's colours become CSS
variables, so that one SVG suits a light and a dark page. Ids inside an SVG get a prefix, because all SVGs of a page
share one set of ids.
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
from relpos.report.drawing.palette import pairs, variable
from relpos_command.visible import visible

INK = "#12a0fe"
"""Placeholder for the page's text colour while matplotlib draws; no palette contains it."""


LAID_OUT = "\n\t\r"
"""Layout characters of a page, which `visible` keeps."""


def legible(figure: Figure) -> None:
    """Escape control characters in a figure's texts, as no font has them. Every function that writes a figure calls
    this. Tick labels are created later, so code that sets them must call `visible`."""
    for text in figure.findobj(Text):
        text.set_text(visible(text.get_text(), keep="\n"))


@contextmanager
def drawing(*, ink: str = INK, size: float = 9.0) -> Iterator[None]:
    """Plain defaults: thin lines, no box around axes, text as text. `ink` colours text and axes."""
    settings: dict[str, Any] = {
        "svg.fonttype": "none",
        "svg.hashsalt": "relpos",
        # A dollar sign in the name of a class or a mechanism does not start a formula.
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
    """Ignore missing glyphs while an SVG is written: its text stays text, and the reader's font draws it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph \d+ .* missing from font", UserWarning)
        yield


def to_svg(figure: Figure, *, name: str, title: str) -> str:
    """The figure as an `<svg>` element for a page; screen readers read `title`. Equal figures give equal text."""
    FigureCanvasSVG(figure)
    legible(figure)
    buffer = io.StringIO()
    with drawing(), readers_fonts():
        # SVG settings, such as text as text, apply when the figure is written, not when it is drawn.
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
    """Write the figure as a PNG file with a white background; create the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, png_bytes(figure, dots_per_inch=dots_per_inch))


def png_bytes(figure: Figure, *, dots_per_inch: float) -> bytes:
    """The figure as PNG with a white background."""
    FigureCanvasAgg(figure)
    legible(figure)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dots_per_inch, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def figure_bytes(figure: Figure, kind: str) -> bytes:
    """The figure as a pdf, svg or png file with a white background. Equal figures give equal bytes."""
    FigureCanvasAgg(figure)
    legible(figure)
    metadata = {"pdf": {"Creator": "relpos", "Producer": None, "CreationDate": None}, "svg": {"Date": None}}
    buffer = io.BytesIO()
    figure.savefig(buffer, format=kind, dpi=300, facecolor="white", metadata=metadata.get(kind, {"Software": None}))
    return buffer.getvalue()
