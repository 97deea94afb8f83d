"""The comparison in a terminal of 100 to 120 columns: the chosen columns of the table, then the verdict in words."""

from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from relpos.report.results import Results, largest_canvas, largest_shift
from relpos.report.table import Cell, Column, ComparisonTable, build_table
from relpos.report.verdict import judge
from relpos.report.wording import cautions, headline, sentences

SHIFTS_AT_MOST = 3


def render_terminal(results: Results) -> Group:
    """The table and, under it, the headline, the verdict's sentences and its cautions: for `console.print`."""
    verdict = judge(results)
    lines: list[RenderableType] = [Text(sentence.text) for sentence in sentences(verdict)]
    warnings: list[RenderableType] = [Text(caution, style="yellow") for caution in cautions(verdict)]
    spoken = [Padding(line, (0, 0, 0, 2)) for line in [*lines, *warnings]]
    return Group(render_table(results), Text(headline(verdict), style="bold"), *spoken)


def render_table(results: Results) -> Table:
    """The columns that decide; with names of a dozen letters it fits 112 columns."""
    table = build_table(results)
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    columns = _chosen(results, table)
    for column in columns:
        numeric = column.group not in ("name", "canvas")
        shown.add_column(_heading(column), justify="right" if numeric else "left", no_wrap=True, vertical="bottom")
    shift = largest_shift(results)
    spread = {"test", shift["id"] if shift else "test"}
    for row in table.rows:
        shown.add_row(*(Text(_words(row.cells[column.key], spread=column.key in spread)) for column in columns))
    shown.caption = "Accuracy in %, \N{PLUS-MINUS SIGN} half the width of its 95% interval."
    shown.caption_justify = "left"
    return shown


def _chosen(results: Results, table: ComparisonTable) -> list[Column]:
    canvas = largest_canvas(results)
    shifts = table.group("shift")
    return [
        *table.group("name", "parameters", "test"),
        *shifts[-SHIFTS_AT_MOST:],
        *(column for column in table.group("canvas") if canvas is not None and column.key == canvas["id"]),
        *table.group("step", "memory"),
    ]


def _heading(column: Column) -> str:
    if column.group == "parameters":
        return "position\nparams"
    if column.group == "canvas":
        return column.title.replace(", ", "\n")
    return column.title.replace(" at ", "\n")


def _words(cell: Cell, *, spread: bool) -> str:
    lines = []
    for value in cell.values:
        text = value.text
        if spread and value.low is not None and value.high is not None:
            text += f" \N{PLUS-MINUS SIGN}{50 * (value.high - value.low):.1f}"
        lines.append(f"{text} {value.rule}" if value.rule else text)
    return "\n".join(lines)
