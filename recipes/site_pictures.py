"""Draw the pictures of README and site: what shifts and lengths cost, from the tables of docs/, and the atlas.

    python recipes/site_pictures.py

Each has a narrow version for phones, whose names stand below.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "website"))

import matplotlib  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from thumbnails import pixels  # noqa: E402

from relpos.position import find  # noqa: E402
from relpos.report.drawing.canvas import drawing, to_png  # noqa: E402
from relpos.report.drawing.charts import Chart, Point, draw  # noqa: E402
from relpos.report.drawing.explorer_data import explored  # noqa: E402
from relpos.report.drawing.palette import styles  # noqa: E402
from relpos.report.drawing.paper import paper_figure  # noqa: E402
from relpos.report.drawing.trained_examples import trained  # noqa: E402

DOCS, INK = ROOT / "docs", "#22262b"
DIGITS = ("rotary_2d", "t5", "relative_2d", "none", "learned+relative_2d", "learned")
TEXT = ("t5", "alibi", "kerple_log", "sandwich", "xpos", "rotary_1d", "none", "learned")
SHOWN = ("learned", "sinusoidal_1d", "t5", "alibi", "kerple_log", "relative_2d", "rotary_1d", "rotary_2d", "shaw",
         "transformer_xl", "deberta", "tupe")  # fmt: skip


def main() -> None:
    """Draw them all."""
    shifts = {"test": (0, "test images"), "+1 px": (1, "+1 px"), "+2 px": (2, "+2 px"), "+3 px": (3, "+3 px")}
    lines = read("results-digits.md", shifts, DIGITS, 0.01)
    save("comparison", Chart("", "shifted farther than in training", lines, True, chance=0.1))
    lengths = {"256, trained": (256, "256, trained"), "512": (512, "512"), "1,024": (1024, "1,024")}
    lines = read("results-text.md", lengths | {"2,048": (2048, "2,048")}, TEXT, 1.0)
    save("text", Chart("", "bytes read at once", lines, False, log=True))
    for name, across, width in (("atlas", 6, 9.0), ("atlas-narrow", 3, 4.2)):
        to_png(atlas(across, width), DOCS / f"{name}.png", dots_per_inch=160)


def read(
    page: str, columns: dict[str, tuple[int, str]], names: tuple[str, ...], scale: float
) -> dict[str, list[Point]]:
    """The figures of these columns and rows in the first table of a page, with intervals where it has them."""
    table = re.search(r"(?:^\|.*\n)+", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert table is not None
    heads, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines())
    by_name = {cells[0].strip("`"): dict(zip(heads, cells, strict=True)) for cells in rows}
    lines: dict[str, list[Point]] = {}
    for name in names:
        for column, (x, label) in columns.items():
            mean, *ends = (scale * float(number) for number in re.findall(r"[\d.]+", by_name[name][column])[:3])
            low, high = ends if len(ends) == 2 else (mean, mean)
            lines.setdefault(name, []).append(Point(x, mean, low, high, label))
    return lines


def save(name: str, chart: Chart) -> None:
    """Draw a chart for wide and for narrow pages."""
    looks = styles(chart.lines)
    with matplotlib.rc_context({"text.color": INK}):
        to_png(draw(chart, looks, size=(7.2, 3.6), ink=INK), DOCS / f"{name}.png", dots_per_inch=200)
        with drawing(ink=INK, size=8.5):
            to_png(paper_figure(chart, looks, 3.6), DOCS / f"{name}-narrow.png", dots_per_inch=240)


def atlas(across: int, width: float) -> Figure:
    """What a dozen mechanisms do to scores."""
    with drawing(ink=INK, size=8.5):
        down = -(-len(SHOWN) // across)
        figure = Figure(figsize=(width, down * (width / across + 0.12)), layout="constrained")
        for axes, name in zip(figure.subplots(down, across).flat, SHOWN, strict=True):
            preset = find(name)
            entry = explored(preset, lambda site, name=name: trained(name, site))
            axes.imshow(pixels(entry), interpolation="nearest", aspect="auto")
            axes.set_title(name)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.spines[:].set_visible(True)
    return figure


if __name__ == "__main__":
    main()
