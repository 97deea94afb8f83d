"""A chart as a figure for a paper: vectors, embedded fonts, and a legend below that needs no colour."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from relpos.files.writing import write_whole
from relpos.report.drawing.canvas import drawing, figure_bytes, readers_fonts
from relpos.report.drawing.charts import Chart, draw_on, is_scattered
from relpos.report.drawing.palette import Style
from relpos_command.visible import visible

TEXT = 8.0
"""Size of the text in points, at any width."""
_LINE, _MARGIN = 0.16, 0.06
"""Inches: a line of the legend, and what is left free beside it."""
_EMBEDDED: dict[str, Any] = {"pdf.fonttype": 42, "svg.fonttype": "path"}
"""TrueType in PDF, as publishers ask; outlines in SVG, which look the same everywhere."""


def write_figure(chart: Chart, looks: Mapping[str, Style], path: Path, *, width: float) -> None:
    """Draw a chart and write it as the kind of file that the suffix names.

    Args:
        path: ends in .pdf, .svg or .png (300 dots per inch). An existing file is replaced.
        width: in inches.
    """
    with drawing(ink="#000000", size=TEXT), matplotlib.rc_context(_EMBEDDED), readers_fonts():
        write_whole(path, figure_bytes(paper_figure(chart, looks, width), path.suffix[1:].lower()))


def paper_figure(chart: Chart, looks: Mapping[str, Style], width: float) -> Figure:
    """The figure itself, to be made and written under the same settings."""
    figure = Figure(figsize=(width, 1.0), layout="constrained")
    axes = figure.add_subplot()
    draw_on(axes, chart, looks, named=False)
    axes.set_ylabel(chart.up.replace(" (", "\n("))
    count = len(chart.lines)
    columns = next((n for n in range(count, 1, -1) if _legend(figure, chart, looks, n) <= width - _MARGIN), 1)
    _legend(figure, chart, looks, columns)
    figure.set_figheight(min(0.62 * width, 3.6) + 0.25 + _LINE * -(-count // columns))
    return figure


def _legend(figure: Figure, chart: Chart, looks: Mapping[str, Style], columns: int) -> float:
    """Put the legend below, in so many columns, instead of the one before; its width in inches."""
    for before in list(figure.legends):
        before.remove()
    samples = [_sample(looks[name], scattered=is_scattered(chart)) for name in chart.lines]
    legend = figure.legend(
        samples,
        list(map(visible, chart.lines)),
        loc="outside lower center",
        ncols=columns,
        fontsize=TEXT - 0.5,
        handlelength=2.6,
        columnspacing=1.0,
        labelspacing=0.25,
        borderpad=0.1,
    )
    return float(legend.get_window_extent().width / figure.dpi)


def _sample(look: Style, *, scattered: bool) -> Line2D:
    line = Line2D([], [], color=look.colour, marker=look.marker, markersize=4.5, markerfacecolor=look.fill,
                  linewidth=0.0 if scattered else 1.3)  # fmt: skip
    if look.dash and not scattered:
        line.set_dashes(look.dash)
    return line
