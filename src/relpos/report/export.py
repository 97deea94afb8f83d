"""A comparison for a paper: a figure, the table in LaTeX, the numbers as CSV."""

import csv
import io
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from relpos.report.advice import advise
from relpos.report.curves import curves, overview
from relpos.report.drawing.palette import styles
from relpos.report.drawing.paper import write_figure
from relpos.report.measure import MINUS, measure_of
from relpos.report.standings import contenders, outcomes
from relpos.report.table import NOTHING, TIMES, Table, build_table
from relpos.report.terminal import DECIDES
from relpos.results import Results, read
from relpos_command.visible import visible

PLOTS = {
    "cost": "the figure on the test data, against the time of a training step",
    "far-cost": "the same at the largest shift or the longest text",
    "shift": "images shifted farther than in training",
    "canvas": "larger canvases",
    "rotation": "rotated images",
    "length": "longer pieces of text",
    "place": "bits by position in the longest text",
    "training": "validation during training",
}
"""The figures by name; which of them a comparison has depends on what it measured."""
ENDINGS = ("pdf", "svg", "png")
WIDTH = 3.25
"""Inches: a column of a conference paper."""
_NARROWEST, _WIDEST = 2.0, 20.0


def save_figure(
    results: Results | Mapping[str, Any], path: str | Path, plot: str = "cost", width: float = WIDTH
) -> Path:
    """Write one figure of a comparison, for a paper.

    Text has 8 points at every width, and each mechanism its own colour, marker and dash; PDF embeds TrueType fonts.
    An existing file is replaced.

    Args:
        path: ends in .pdf, .svg or .png.
        plot: a name of `PLOTS`.
        width: in inches, from 2 to 20.

    Returns:
        The path.

    Raises:
        ValueError: another ending, name or width, or these results lack what the figure shows; one line.
    """
    results, path = read(results), Path(path)
    if plot not in PLOTS:
        raise ValueError(f"expected a figure of {', '.join(PLOTS)}; got {plot!r:.60}. Choose one of them.")
    if isinstance(width, bool) or not isinstance(width, int | float) or not _NARROWEST <= width <= _WIDEST:
        wanted = f"a width from {_NARROWEST:g} to {_WIDEST:g} inches"
        raise ValueError(f"expected {wanted}; got {width!r:.60}. {WIDTH} is a column of a paper.")
    if path.suffix[1:].lower() not in ENDINGS:
        remedy = f"Write for example {path.stem or plot}.pdf."
        raise ValueError(visible(f"expected a file that ends in .{', .'.join(ENDINGS)}; got {path}. {remedy}"))
    charts = figures_of(results)
    if plot not in charts:
        has = ", ".join(charts) or "none yet"
        came = f"got {plot}; these results have {has}"
        raise ValueError(f"expected a figure whose numbers were measured; {came}. Choose another figure.")
    write_figure(charts[plot], styles(results.names), path, width=width)
    return path


def figures_of(results: Results) -> dict[str, Any]:
    """The charts of a comparison by the names of `PLOTS`."""
    advice = advise(results)
    return overview(results, advice) | (curves(results, advice) if results.settings.what == "position" else {})


def to_latex(results: Results | Mapping[str, Any]) -> str:
    r"""The table that the command prints as a `tabular` of booktabs, one row a mechanism, by its best rule.

    The deciding figures have half the width of their 95% intervals. It needs `\usepackage{booktabs}`.
    """
    results = read(results)
    table, measure = build_table(results), measure_of(results)
    main = [row for row in table.rows if row.main]
    shown = [
        index
        for index, column in enumerate(table.columns)
        if column.keep > 0 and any(row.cells[index].text not in ("", NOTHING) for row in main)
    ]
    what = "accuracy in percent" if measure.is_share else f"{measure.name}, {measure.better} is better"
    titles = [results.settings.what, *(table.columns[index].title for index in shown)]
    lines = [
        f"% relpos {results.environment.relpos}: {what}, +- half the width of the 95% interval",
        rf"\begin{{tabular}}{{l{'r' * len(shown)}}}",
        r"\toprule",
        " & ".join(map(_title, titles)) + r" \\",
        r"\midrule",
        *(" & ".join([_escaped(row.contender.name), *_cells(table, row.cells, shown)]) + r" \\" for row in main),
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(lines)


def _cells(table: Table, cells: Any, shown: list[int]) -> Iterator[str]:
    for index in shown:
        cell = cells[index]
        yield _escaped(f"{cell.text} {cell.half}".strip() if table.columns[index].keep > DECIDES else cell.text)


_LATEX = {
    **{sign: f"\\{sign}" for sign in "#$%&_{}"}, "\\": r"\textbackslash{}", "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", NOTHING: "--", TIMES: r"$\times$", "\N{PLUS-MINUS SIGN}": r"$\pm$", MINUS: "$-$",
}  # fmt: skip


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(sign, sign if sign.isprintable() else " ") for sign in text)


def _title(text: str) -> str:
    """A head of a column, one line below the other where it has a comma."""
    parts = [_escaped(part) for part in text.split(", ")]
    return parts[0] if len(parts) == 1 else r"\shortstack[r]{" + r" \\ ".join(parts) + "}"


CSV_COLUMNS = ("name", "growth", "measure", "probe", "tokens", "seeds", "value", "low", "high")


def to_csv(results: Results | Mapping[str, Any]) -> str:
    """Every number of the table, one a row, at full precision.

    `measure` is the metric, with its probe, growth rule, number of seeds and 95% interval; or `position_parameters`,
    `step_ms` (with its quartiles), `step_ratio`, `peak_memory_mib`, with their number of tokens.
    """
    results = read(results)
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, CSV_COLUMNS, restval="", lineterminator="\n")
    writer.writeheader()
    for row in _rows(results):
        writer.writerow({name: "" if value is None else value for name, value in row.items()})
    return buffer.getvalue().rstrip("\n")


def _rows(results: Results) -> Iterator[dict[str, Any]]:
    measure = measure_of(results)
    for probe in results.task.probes:
        for one in contenders(results, probe):
            scored = outcomes(results, one, probe)
            found = measure.interval(scored)
            yield {
                "name": one.name, "growth": one.growth, "measure": measure.key, "probe": probe.id,
                "seeds": len(scored), "value": found.mean, "low": found.low, "high": found.high,
            }  # fmt: skip
    for name in results.names:
        for run in results.runs(name)[:1]:
            yield {"name": name, "measure": "position_parameters", "value": run.parameters.position}
    for cost in results.costs:
        common = {"name": cost.name, "tokens": cost.tokens}
        if cost.step_ms is not None:
            time = cost.step_ms
            yield {**common, "measure": "step_ms", "value": time.median, "low": time.low, "high": time.high}
        for key, value in (("step_ratio", cost.ratio), ("peak_memory_mib", cost.peak_memory_mib)):
            if value is not None:
                yield {**common, "measure": key, "value": value}
