"""A position mechanism as a picture: strips of panels, heads side by side on one scale.

The sign is readable without colour. Large cells of a map contain their numbers. Smaller cells contain + or - if the
value exceeds 2% of the scale. If cells are too small for that, negative values are hatched. Bars for positive values
are above the line, those for negative ones below.

Nothing here depends on mechanisms: callers make `Maps`, `Bars` and `Words` from plain numbers.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
from matplotlib import colormaps, rcParams
from matplotlib.axes import Axes
from matplotlib.axis import XAxis, YAxis
from matplotlib.figure import Figure, SubFigure
from matplotlib.image import AxesImage
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from relpos.files.writing import write_whole
from relpos.report.drawing.canvas import drawing, legible, readers_fonts, to_png

DIVERGING = "PuOr_r"
"""Purple for less, orange for more, nearly white for zero: no need to distinguish red and green."""
HEADS_IN_A_ROW = 4
MINUS = "\N{MINUS SIGN}"
INK = "#22262b"
MUTED = "#5c6670"
ENDINGS = ("png", "svg", "pdf")
"""The file endings that `save_picture` supports."""
DOTS_PER_INCH = 150
MARKED_FROM = 1 / 50
"""The fraction of the scale from which a cell shows its sign."""
NUMBER_POINTS, MARK_POINTS = 25.0, 5.2
"""The smallest width of a cell with a number, and with a sign, in points."""
NUMBERS_FROM = 0.1
"""The smallest scale for which two decimals suffice."""


@dataclass(frozen=True)
class Axis:
    """One axis of a map or of bars: its label, the coordinate of its first cell, and its ticks."""

    label: str
    first: float = 0
    ticks: tuple[tuple[float, str], ...] = ()


@dataclass(frozen=True, eq=False)
class Maps:
    """Heat maps side by side on one scale, symmetric around zero.

    Attributes:
        title: the title of the strip.
        names: the title of each map.
        values: `[maps, rows, columns]`; NaN leaves a cell blank.
        rows, columns: the axes.
        scale: the meaning of the colours.
        limit: the end of the scale; by default the largest magnitude.
        own_scales: each map has its own scale and no colour bar, for incomparable quantities.
        marked: coordinates (row, column) of a cell to outline: the query, or the zero offset.
        shares: indices of maps with softmax weights, shown in percent.
        across: how many maps are side by side.
    """

    title: str
    names: tuple[str, ...]
    values: NDArray[np.float64]
    rows: Axis
    columns: Axis
    scale: str
    limit: float | None = None
    own_scales: bool = False
    marked: tuple[float, float] | None = None
    shares: tuple[int, ...] = ()
    across: int = HEADS_IN_A_ROW


@dataclass(frozen=True, eq=False)
class Bars:
    """Values along one axis, panels side by side on one scale; as in `Maps`, but `values` is `[panels, values]`."""

    title: str
    names: tuple[str, ...]
    values: NDArray[np.float64]
    along: Axis
    scale: str
    across: int = HEADS_IN_A_ROW


@dataclass(frozen=True)
class Words:
    """A strip of text that says why there is nothing to draw."""

    title: str
    text: str


Strip = Maps | Bars | Words


def sheet(likeness: NDArray[np.float64], rows: int, columns: int, title: str, label: str) -> Maps:
    """A small map for each patch, arranged like the patches, one cell apart."""
    whole = np.full((rows * (rows + 1) - 1, columns * (columns + 1) - 1), np.nan)
    for index, one in enumerate(likeness):
        top, left = (index // columns) * (rows + 1), (index % columns) * (columns + 1)
        whole[top : top + rows, left : left + columns] = one.reshape(rows, columns)
    down = tuple((at * (rows + 1) + (rows - 1) / 2, str(at)) for at in range(rows))
    across = tuple((at * (columns + 1) + (columns - 1) / 2, str(at)) for at in range(columns))
    axes = (Axis("row of the patch", 0, down), Axis("column of the patch", 0, across))
    return Maps(title, ("",), whole[None], *axes, label, 1.0)


def alone(strip: Maps | Bars) -> Figure:
    """One strip for a page, which shows the title itself."""
    with drawing(size=8.5):
        figure = Figure(figsize=_size(strip), layout=ConstrainedLayoutEngine(w_pad=0.06, wspace=0.03))
        part: Any = figure.subfigures(1, 1)
        _draw_maps(part, strip) if isinstance(strip, Maps) else _draw_bars(part, strip)
    return figure


def picture(title: str, note: str, strips: list[Strip]) -> Figure:
    """All strips below one another under a title and a note of one or two sentences."""
    width = max([6.4, *(_size(strip)[0] for strip in strips)])
    heights = [_size(strip)[1] for strip in strips]
    letters = int(width * 15.5)
    head, body = fill(title, int(width * 9.5)), fill(note, letters)
    top = 0.28 + 0.22 * (head.count("\n") + 1) + 0.165 * (body.count("\n") + 1)
    with drawing(ink=INK, size=8.5):
        room = ConstrainedLayoutEngine(w_pad=0.06, wspace=0.03)
        figure = Figure(figsize=(width, top + sum(heights)), layout=room)
        parts: Any = figure.subfigures(len(strips) + 1, 1, squeeze=False, height_ratios=[top, *heights])[:, 0]
        inch = 1 / top
        parts[0].text(0.1 / width, 1 - 0.12 * inch, head, fontsize=12, weight="bold", va="top")
        below = 1 - (0.18 + 0.22 * (head.count("\n") + 1)) * inch
        parts[0].text(0.1 / width, below, body, color=MUTED, va="top", linespacing=1.3)
        for part, strip in zip(parts[1:], strips, strict=True):
            # The title is at the left, on the strip's first line.
            headline = fill(strip.title, int(width * 11.5))
            part.suptitle(headline, x=0.1 / width, ha="left", weight="bold", fontsize=9)
            match strip:
                case Maps():
                    needed = _size(strip)[0]
                    # Narrow maps are at the left, under their title.
                    ratios = [needed, width - needed] if width - needed > 0.6 else [1.0]
                    _draw_maps(part.subfigures(1, len(ratios), squeeze=False, width_ratios=ratios)[0, 0], strip)
                case Bars():
                    _draw_bars(part, strip)
                case Words():
                    part.text(0.1 / width, 0.45, fill(strip.text, letters), va="center", linespacing=1.3)
    return figure


def save_picture(figure: Figure, path: Path) -> None:
    """Write the picture in the format of the path's ending, one of `ENDINGS`."""
    if path.suffix.lower() == ".png":
        to_png(figure, path, dots_per_inch=DOTS_PER_INCH)
        return
    dates: dict[str, Any] = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}
    ending = path.suffix.lower().removeprefix(".")
    buffer = io.BytesIO()
    legible(figure)
    with drawing(ink=INK, size=8.5), readers_fonts() if ending == "svg" else nullcontext():
        figure.savefig(buffer, format=ending, facecolor="white", metadata=dates[ending])
    write_whole(path, buffer.getvalue())


def _layout(strip: Maps | Bars) -> tuple[int, int]:
    """Panels down and across."""
    across = min(len(strip.values), strip.across)
    return -(-len(strip.values) // across), across


def _panel(strip: Maps | Bars) -> tuple[float, float]:
    """Width and height of one panel, in inches."""
    _, across = _layout(strip)
    small = strip.across < HEADS_IN_A_ROW  # for a phone, where all is drawn smaller
    if isinstance(strip, Bars):
        return (1.6, 1.3) if small else (6.0, 1.7) if across == 1 else (max(1.85, 6.0 / across), 1.5)
    _, rows, columns = strip.values.shape
    wide = 1.6 if small else {1: 3.6, 2: 2.7, 3: 2.1}.get(across, 1.85)
    if across == 1 and columns > 2.5 * rows:
        wide = 6.0
    elif across == 1 and max(rows, columns) > 40:
        wide = 4.4
    return wide, float(np.clip(wide * rows / columns, 0.28 * wide, min(1.6 * wide, 4.6)))


def _size(strip: Strip) -> tuple[float, float]:
    """Width and height of a strip, in inches, with its titles, labels and colour bar."""
    if isinstance(strip, Words):
        return 6.4, 0.75 + 0.16 * fill(strip.text, 100).count("\n")
    down, across = _layout(strip)
    wide, high = _panel(strip)
    named = 0.2 if any(strip.names) else 0.0
    return across * (wide + 0.12) + 1.35, down * (high + named + 0.12) + 0.9


def _panels(part: SubFigure, strip: Maps | Bars, along: Axis, label: str) -> list[Axes]:
    """The panels of a strip, with titles, and labels at the left and lower edges."""
    down, across = _layout(strip)
    every: list[Axes] = list(part.subplots(down, across, squeeze=False, sharex=True, sharey=True).flat)
    count = len(strip.values)
    for axes in every[count:]:
        axes.set_axis_off()
    for index, axes in enumerate(every[:count]):
        axes.set_title(strip.names[index])
        if index % across == 0:
            axes.set_ylabel(label)
        if index + across >= count:
            axes.set_xlabel(along.label)
            axes.tick_params(labelbottom=True)
    return every


def _set_ticks(axis: XAxis | YAxis, coordinates: Axis) -> None:
    if coordinates.ticks:
        axis.set_ticks([at for at, _ in coordinates.ticks], labels=[text for _, text in coordinates.ticks])


def _draw_maps(part: SubFigure, strip: Maps) -> None:
    panels = _panels(part, strip, strip.columns, strip.rows.label)
    limit = strip.limit or symmetric_limit(np.nan_to_num(strip.values))
    hatched = False
    for index, values in enumerate(strip.values):
        of_map = symmetric_limit(values) if strip.own_scales else limit
        written = short_share if index in strip.shares else short_number
        image, hatched = _draw_map(panels[index], strip, values, of_map, written)
    if strip.own_scales:
        return
    bar = part.colorbar(image, ax=panels, shrink=0.9, pad=0.015, aspect=16)
    bar.outline.set_visible(False)
    bar.set_label(strip.scale)
    bar.locator = MaxNLocator(nbins=5)
    bar.formatter = FuncFormatter(lambda value, _: signed_number(value))
    bar.update_ticks()
    if hatched:
        bar.ax.add_patch(Rectangle((0, -limit), 1, limit, **_HATCH))


def _draw_map(
    axes: Axes, strip: Maps, values: NDArray[np.float64], limit: float, written: Callable[[float], str]
) -> tuple[AxesImage, bool]:
    """Draw one map; return it and whether its negative cells are hatched."""
    rows, columns = values.shape
    left, top = strip.columns.first - 0.5, strip.rows.first - 0.5
    extent = (left, left + columns, top + rows, top)
    wide, high = _panel(strip)
    square = abs(high / rows - wide / columns) < 0.01 * wide / columns
    image = axes.imshow(
        np.ma.masked_invalid(values),
        extent=extent,
        cmap=DIVERGING,
        vmin=-limit,
        vmax=limit,
        interpolation="none",
        aspect="equal" if square else "auto",
    )
    points = 72 * min(wide / columns, high / rows)
    hatched = _mark_signs(axes, values, limit, (left + 0.5, top + 0.5), points, written)
    if strip.marked is not None:
        row, column = strip.marked
        axes.add_patch(Rectangle((column - 0.5, row - 0.5), 1, 1, fill=False, edgecolor="#111111", linewidth=1.4))
    _set_ticks(axes.xaxis, strip.columns)
    _set_ticks(axes.yaxis, strip.rows)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image, hatched


def _mark_signs(
    axes: Axes,
    values: NDArray[np.float64],
    limit: float,
    first: tuple[float, float],
    points: float,
    written: Callable[[float], str],
) -> bool:
    """Show signs without colour: numbers, + and -, or hatching, by the size of a cell. True if hatched."""
    rows, columns = values.shape
    if points >= NUMBER_POINTS and limit >= NUMBERS_FROM:
        for row, column in np.ndindex(rows, columns):
            value = float(values[row, column])
            if np.isfinite(value):
                ink = "white" if abs(value) > 0.6 * limit else INK
                size = min(8.5, points / 2.9)
                x, y = first[0] + column, first[1] + row
                axes.text(x, y, written(value), color=ink, fontsize=size, ha="center", va="center")
        return False
    if points < MARK_POINTS:
        return _hatch_negative(axes, values, limit, first)
    for marker, chosen in (("+", values >= MARKED_FROM * limit), ("_", values <= -MARKED_FROM * limit)):
        for dark in (False, True):
            down, across = np.nonzero(chosen & ((np.abs(values) > 0.6 * limit) == dark))
            look: dict[str, Any] = {"color": "white" if dark else INK, "linewidths": 0.6, "alpha": 0.75}
            axes.scatter(first[0] + across, first[1] + down, s=(0.3 * points) ** 2, marker=marker, **look)
    return False


def _hatch_negative(axes: Axes, values: NDArray[np.float64], limit: float, first: tuple[float, float]) -> bool:
    """Hatch negative cells; neighbours in a row form one rectangle."""
    below = np.nan_to_num(values) <= -MARKED_FROM * limit
    for row in np.flatnonzero(below.any(axis=1)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], below[row].astype(int), [0]])))
        for start, stop in zip(edges[::2], edges[1::2], strict=True):
            corner = (first[0] + start - 0.5, first[1] + row - 0.5)
            axes.add_patch(Rectangle(corner, stop - start, 1, **_HATCH))
    return True


_HATCH: dict[str, Any] = {"fill": False, "hatch": "//////", "edgecolor": "#ffffffaa", "linewidth": 0.0}


def _draw_bars(part: SubFigure, strip: Bars) -> None:
    colours = colormaps[DIVERGING]
    low, high = min(0.0, float(np.nanmin(strip.values))), max(0.0, float(np.nanmax(strip.values)))
    margin = 0.06 * (high - low) or 1.0
    edges = strip.along.first - 0.5 + np.arange(strip.values.shape[1] + 1)
    for line, axes in zip(strip.values, _panels(part, strip, strip.along, strip.scale), strict=False):
        for colour, one in ((colours(0.86), line.clip(min=0)), (colours(0.14), line.clip(max=0))):
            axes.stairs(one, edges, fill=True, color=colour)
        axes.stairs(line, edges, baseline=None, color=rcParams["text.color"], linewidth=0.7)
        axes.axhline(0, color=rcParams["text.color"], linewidth=0.7)
        if strip.along.first < 0:
            axes.axvline(0, color=rcParams["text.color"], linewidth=0.5, alpha=0.35)
        axes.set_ylim(low - margin, high + margin)
        axes.set_xlim(edges[0], edges[-1])
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: signed_number(value)))
        _set_ticks(axes.xaxis, strip.along)


def signed_number(value: float) -> str:
    """+0.5, 0, or -0.5 with a real minus sign, up to four digits."""
    return "0" if abs(value) < 1e-12 else f"{value:+.4g}".replace("-", MINUS)


def short_share(value: float) -> str:
    """A softmax weight for a cell: in percent, never 0."""
    return f"{value:.0%}" if value >= 0.01 else f"{value:.1%}" if value >= 0.001 else "<0.1%"


def short_number(value: float) -> str:
    """A number for a cell: two decimals, or three digits from 10 on, and a sign unless it is zero."""
    text = f"{value:+.2f}" if abs(value) < 10 else f"{value:+.3g}"
    return "0" if float(text) == 0 else text.replace("-", MINUS)


def symmetric_limit(values: NDArray[np.float64]) -> float:
    """The limit of a scale from -limit to limit that contains every value; 1 if all are zero."""
    return float(np.abs(values).max()) or 1.0


def heads_named(count: int) -> tuple[str, ...]:
    """The panels' titles."""
    return tuple(f"head {head}" for head in range(count)) if count > 1 else ("",)


def offsets_of(low: int, span: int) -> tuple[tuple[float, str], ...]:
    """Ticks at the ends, at zero, and half-way if there is room."""
    high = low + span - 1
    ends = {low, 0, high} | ({low // 2, -(-high // 2)} if span > 10 else set())
    return tuple((at, f"{at:+d}".replace("-", MINUS) if at else "0") for at in sorted(ends))


def counted(count: int, every: int = 1) -> tuple[tuple[float, str], ...]:
    """Ticks at whole numbers from 0, about five to nine of them; a cell stands for `every`."""
    step = 1
    while count > 9 * step:
        step *= 2
    return tuple((at, str(at * every)) for at in range(0, count, step))
