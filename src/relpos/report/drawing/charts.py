"""Curves over a condition, and accuracy against cost; names are to the right of the axes, each beside its line's look.

No line leads across data: a point is found by its marker and colour, a curve by its dash, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from relpos.report.drawing.canvas import INK, drawing
from relpos.report.drawing.palette import Style
from relpos_command.visible import visible

WIDTH, HEIGHT = 4.9, 3.1
LABEL = 7.6
"""Font size of the names to the right of the axes, in points."""
MARKED_AT_MOST = 12
"""Up to this many points, a curve has a marker and an error bar at each."""
MARKS = 6
"""About how many markers a longer curve has."""


@dataclass(frozen=True)
class Point:
    """One figure with its interval; `label` is its tick label on a curve's axis."""

    x: float
    mean: float
    low: float
    high: float
    label: str = ""


@dataclass(frozen=True)
class Chart:
    """A picture of several mechanisms: lines over x, or points if each has only one.

    Attributes:
        across: the label of x.
        lines: the points by name, best first. bold: names that the advice mentions.
        percent: figures are shares. log: logarithmic x. chance: where to draw a dotted line.
        figure: the label of figures that are neither shares nor bits.
    """

    title: str
    across: str
    lines: Mapping[str, Sequence[Point]]
    percent: bool
    log: bool = False
    chance: float | None = None
    bold: Sequence[str] = field(default_factory=tuple)
    figure: str = ""

    @property
    def up(self) -> str:
        """The label of the vertical axis."""
        return self.figure or ("accuracy" if self.percent else "bits per byte (lower is better)")


def draw(
    chart: Chart, looks: Mapping[str, Style], *, size: tuple[float, float] = (WIDTH, HEIGHT), ink: str = INK
) -> Figure:
    """One chart as a figure."""
    with drawing(ink=ink, size=8.5):
        figure = Figure(figsize=size)
        wide = max((len(visible(name)) for name in chart.lines), default=0) + 6
        right = 1 - 0.0125 - wide * 0.0118 * WIDTH / size[0]
        left = 0.135 * WIDTH / size[0]
        axes = figure.add_axes((left, 0.15, right - left - 0.07 * WIDTH / size[0], 0.80))
        draw_on(axes, chart, looks)
    return figure


def draw_on(axes: Axes, chart: Chart, looks: Mapping[str, Style], *, named: bool = True) -> None:
    """Draw a chart in given axes, with the names to their right if `named`."""
    points = [point for line in chart.lines.values() for point in line]
    ticks = {point.x: point.label for point in points if point.label}
    ink = rcParams["text.color"]
    few, scattered = len(ticks) <= MARKED_AT_MOST and bool(ticks), is_scattered(chart)
    _scale(axes, chart, points)
    for index, (name, line) in enumerate(chart.lines.items()):
        look, bold = looks[name], name in chart.bold
        xs, means = (np.asarray([getattr(point, key) for point in line]) for key in ("x", "mean"))
        apart = 0.0 if scattered or not few else (index - (len(chart.lines) - 1) / 2) * 0.011
        span = float(np.ptp([point.x for point in points])) or 1.0
        shifted = xs * (1 + apart) if chart.log else xs + apart * span
        if few or scattered:
            ends = np.abs(np.asarray([[point.low, point.high] for point in line]).T - means)
            axes.errorbar(shifted, means, ends, fmt="none", ecolor=look.colour, elinewidth=0.8, alpha=0.55)
        apart_by = None if few or scattered else (index % MARKS, max(1, len(line) // MARKS))
        (drawn,) = axes.plot(shifted, means, color=look.colour, linewidth=_width(bold), marker=look.marker,
                             markersize=6.5 if bold and scattered else 4.5, markerfacecolor=look.fill,
                             markevery=apart_by)  # fmt: skip
        if look.dash and not scattered:
            drawn.set_dashes(look.dash)
    if chart.chance is not None and axes.get_ylim()[0] < chart.chance:
        axes.axhline(chart.chance, color=ink, linewidth=0.8, linestyle=(0, (1, 3)), alpha=0.7)
        axes.text(
            0.5, chart.chance, "chance", fontsize=7, ha="center", va="bottom", transform=axes.get_yaxis_transform()
        )
    axes.grid(axis="y", color=ink, alpha=0.12, linewidth=0.6)
    axes.set_xlabel(chart.across)
    axes.set_ylabel(chart.up)
    if ticks and few:
        axes.set_xticks(sorted(ticks), labels=[visible(ticks[x]) for x in sorted(ticks)])
        axes.minorticks_off()
    if named:
        _name(axes, chart, looks)


def is_scattered(chart: Chart) -> bool:
    """Whether every mechanism is a single point."""
    return all(len(line) == 1 for line in chart.lines.values())


def _width(bold: bool) -> float:
    return 2.0 if bold else 1.3


def _scale(axes: Axes, chart: Chart, points: Sequence[Point]) -> None:
    """Fit the vertical axis to the data; it need not start at 0."""
    low, high = min(point.low for point in points), max(point.high for point in points)
    margin = 0.05 * (high - low) or 0.01
    axes.set_ylim(max(0.0, low - margin), min(1.01, high + margin) if chart.percent else high + margin)
    if chart.log:
        axes.set_xscale("log", base=2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    if chart.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.3g}%"))
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))


def _name(axes: Axes, chart: Chart, looks: Mapping[str, Style]) -> None:
    """Write looks, names and last figures to the right of the axes, at the height of the ends if there is room."""
    if not chart.lines:
        return
    figure = axes.get_figure(root=True)
    assert figure is not None
    box = axes.get_position()
    point = 1 / (box.width * figure.get_figwidth() * 72)  # along the axes
    low, high = axes.get_ylim()
    entries = [(name, line[-1]) for name, line in chart.lines.items()]
    wanted = np.asarray([(point.mean - low) / (high - low) for _, point in entries])
    heights = spread(wanted, (LABEL + 2.2) / (box.height * figure.get_figheight() * 72))
    scattered, last = is_scattered(chart), max(point.x for _, point in entries)
    limits = axes.get_xlim()
    for (name, end), at, height_of_end in zip(entries, heights, wanted, strict=True):
        look, bold = looks[name], name in chart.bold
        figured = f"{100 * end.mean:.1f}" if chart.percent else f"{end.mean:.3f}"
        outside: dict[str, Any] = {"transform": axes.transAxes, "color": look.colour, "clip_on": False}
        if not scattered and end.x == last:
            axes.plot([1.0, 1 + 6 * point], [height_of_end, at], linewidth=0.5, alpha=0.45, **outside)
        begin, middle, stop = (1 + distance * point for distance in ((6, 6, 6) if scattered else (6, 13, 20)))
        (sample,) = axes.plot([begin, stop], [at, at], linewidth=0 if scattered else _width(bold), **outside)
        axes.plot([middle], [at], marker=look.marker, markersize=4.5, markerfacecolor=look.fill, **outside)
        if look.dash and not scattered:
            sample.set_dashes(look.dash)
        axes.text(stop + 5 * point, at, f"{name} {figured}", fontsize=LABEL, weight="bold" if bold else "normal",
                  va="center", **outside)  # fmt: skip
    axes.set_xlim(limits)
    axes.set_ylim(low, high)


def spread(wanted: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Heights close to `wanted`, at least `gap` apart, and between 0 and 1 if they fit."""
    order = np.argsort(wanted, kind="stable")
    up, down = wanted[order].copy(), wanted[order].copy()
    for index in range(1, len(up)):
        up[index] = max(up[index], up[index - 1] + gap)
        down[-1 - index] = min(down[-1 - index], down[-index] - gap)
    heights = (up + down) / 2
    heights[-1] = min(heights[-1], 1.0)
    for index in range(len(heights) - 2, -1, -1):
        heights[index] = min(heights[index], heights[index + 1] - gap)
    if heights[0] < 0:
        heights += max(-heights[0], 0.0) if heights[-1] - heights[0] < 1 else (1 - heights[-1] - heights[0]) / 2
    placed = np.empty_like(heights)
    placed[order] = heights
    return placed


def paired_figures(charts: Sequence[Chart], looks: Mapping[str, Style], title: str) -> Figure:
    """Charts side by side under a title, 12.8 inches wide, for a file with a white background."""
    with drawing(ink="#22262b", size=10.0):
        figure = Figure(figsize=(12.8, 4.9))
        figure.text(0.03, 0.96, fill(title, 105), fontsize=13, weight="bold", va="top")
        for index, chart in enumerate(charts):
            axes = figure.add_axes((0.055 + index / len(charts), 0.12, 0.62 / len(charts), 0.66))
            axes.set_title(chart.title[:1].upper() + chart.title[1:], loc="left", weight="bold")
            draw_on(axes, chart, looks)
    return figure
