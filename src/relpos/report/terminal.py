"""The comparison in a terminal of 80 columns or more: as much of the table as fits, then the verdict in words."""

from typing import Literal

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from relpos.report.choice_claims import judge_choices
from relpos.report.choice_words import choice_cautions, choice_headline, choice_sentences
from relpos.report.choices import amount, rows
from relpos.report.measure import Measure, measure_of
from relpos.report.results import (
    DIVERGED,
    Results,
    far_probe,
    largest_canvas,
    largest_shift,
    positions,
    token_counts,
    what,
)
from relpos.report.statistics import Interval
from relpos.report.table import COLUMN_GROUPS, NOTHING, Cell, Column, ComparisonTable, build_table
from relpos.report.verdict import judge
from relpos.report.wording import cautions, headline, sentences

SHIFTS_AT_MOST = 3
WIDTH = 112
"""With names of a dozen letters every chosen column has room."""


def render_terminal(results: Results, *, width: int = WIDTH) -> Group:
    """The table, the headline, the verdict's sentences and its cautions: for `console.print`.

    `width` is the console's: columns are left out until the table fits, names and figures are never cut.
    """
    if what(results) != "position":
        return _choices(results)
    verdict = judge(results)
    lines: list[RenderableType] = [Text(sentence.text) for sentence in sentences(verdict)]
    warnings: list[RenderableType] = [Text(caution, style="yellow") for caution in cautions(verdict)]
    spoken = [Padding(line, (0, 0, 0, 2)) for line in [*lines, *warnings]]
    return Group(render_table(results, width=width), Text(headline(verdict), style="bold"), *spoken)


def _choices(results: Results) -> Group:
    """The same of anything but position: the table of choices, and the words about them and the document's claims."""
    measure, first = measure_of(results), positions(results)[0]
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    kind = what(results)
    for heading in (kind, "test", f"ahead of\n{first}", "ms a\nstep", "MiB", "time\nx", "MiB\nx", "time\n~ N^"):
        table.add_column(heading, justify="left" if heading == kind else "right", no_wrap=True)

    def ratio(value: float | None) -> str:
        return NOTHING if value is None else f"{value:.2f}"

    for row in rows(results):
        step, memory = (amount(row.trained, figure) for figure in ("time", "memory"))
        table.add_row(
            row.name,
            (DIVERGED if row.diverged else NOTHING) if row.reached is None else _spread(row.reached, measure),
            NOTHING if row.ahead is None else _spread(row.ahead, measure, signed=True),
            NOTHING if step is None else f"{step:,.1f}",
            NOTHING if memory is None else f"{memory:,.0f}",
            *map(ratio, (row.ratio, row.memory_ratio, row.time_growth)),
        )
    most = token_counts(results)
    table.caption = f"x: as a multiple of {first}'s at {most[-1]:,} tokens." if most else ""
    table.caption_justify = "left"
    spoken = [Text(sentence) for sentence in choice_sentences(results)]
    spoken += [Text(f"\u201c{one.claim.quote}\u201d {one.word}") for one in judge_choices(results)]
    spoken += [Text(caution, style="yellow") for caution in choice_cautions(results)]
    headline = Text(choice_headline(results), style="bold")
    return Group(table, headline, *(Padding(line, (0, 0, 0, 2)) for line in spoken))


def _spread(interval: Interval, measure: Measure, *, signed: bool = False) -> str:
    """A mean and half the width of its interval."""
    mean = measure.size(interval.mean) if signed else measure.number(interval.mean)
    return f"{mean} \N{PLUS-MINUS SIGN}{measure.size((interval.high - interval.low) / 2)}"


def render_table(results: Results, *, width: int = WIDTH) -> Table:
    """The columns that decide, or those of them that `width` has room for."""
    table = build_table(results)
    columns, left_out = _chosen(results, table), []
    shown = _drawn(results, table, columns)
    for column in _in_order_of_leaving(results, columns):
        if _width(shown) <= width:
            break
        columns.remove(column)
        left_out.append(column.title)
        shown = _drawn(results, table, columns)
    measure = measure_of(results)
    what = "Accuracy in %" if measure.is_share else "Bits per byte, fewer are better"
    shown.caption = f"{what}, \N{PLUS-MINUS SIGN} half the width of the 95% interval."
    if left_out:
        shown.caption += f"\nLeft out for width: {'; '.join(left_out)}."
    shown.caption_justify = "left"
    return shown


def _drawn(results: Results, table: ComparisonTable, columns: list[Column]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    for column in columns:
        justify: Literal["left", "right"] = "left" if column.group in ("name", "canvas", "length") else "right"
        # A terminal narrower than it was said to be folds a cell over lines rather than cut it.
        shown.add_column(_heading(column), justify=justify, overflow="fold")
    far, measure = far_probe(results), measure_of(results)
    spread = {"test", far["id"] if far else "test"}
    for row in table.rows:
        cells = (_words(row.cells[column.key], measure, spread=column.key in spread) for column in columns)
        shown.add_row(*map(Text, cells))
    return shown


def _width(table: Table) -> int:
    """What the table takes where nothing holds it in."""
    console = Console(width=10_000)
    return console.measure(table).maximum


def _chosen(results: Results, table: ComparisonTable) -> list[Column]:
    canvas = largest_canvas(results)
    shifts = table.group("shift")
    return [
        *table.group("name", "parameters", "test"),
        *shifts[-SHIFTS_AT_MOST:],
        *table.group("length"),
        *table.others()[-1:],
        *(column for column in table.group("canvas") if canvas is not None and column.key == canvas["id"]),
        *table.group("step", "memory"),
    ]


def _in_order_of_leaving(results: Results, columns: list[Column]) -> list[Column]:
    """What a narrow terminal does without, first to go first; the name, the test and the largest shift always stay."""
    shift, far = largest_shift(results), far_probe(results)

    def of(group: str) -> list[Column]:
        return [column for column in columns if column.group == group]

    smaller_shifts = [column for column in of("shift") if shift is None or column.key != shift["id"]]
    steps = of("step")
    middle, ends = steps[1:-1], [*steps[:1], *steps[1:][-1:]]
    others = [column for column in columns if column.group not in COLUMN_GROUPS]
    lengths = [column for column in of("length") if far is None or column.key != far["id"]]
    return [*smaller_shifts, *of("memory"), *middle, *of("parameters"), *others, *ends, *lengths, *of("canvas")]


def _heading(column: Column) -> str:
    if column.group == "parameters":
        return "position\nparams"
    if column.group == "canvas":
        return column.title.replace(", ", "\n")
    return column.title.replace(" at ", "\n")


def _words(cell: Cell, measure: Measure, *, spread: bool) -> str:
    lines = []
    for value in cell.values:
        text = value.text
        if spread and value.low is not None and value.high is not None:
            text += f" \N{PLUS-MINUS SIGN}{measure.size((value.high - value.low) / 2)}"
        lines.append(f"{text} {value.rule}" if value.rule else text)
    return "\n".join(lines)
