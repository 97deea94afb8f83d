"""The comparison in a terminal: the page's first lines, and as much of the table as fits the width."""

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from relpos.report.advice import advise
from relpos.report.measure import by_tokens, measure_of
from relpos.report.table import Column, Row, build_table
from relpos.report.table import Table as Built
from relpos.results import Results, read
from relpos_command.visible import visible

WIDTH = 112
"""All columns for digits fit if names have about a dozen letters."""
DECIDES = 6
"""Columns with a higher `keep` stay at any width, and show their interval."""


def render_terminal(results: Results | Mapping[str, Any], *, width: int = WIDTH) -> Group:
    """The table, the advice, its cautions, and the command that would decide, for `console.print(..., crop=False)`.

    Names and figures are never cut or folded.
    """
    results = read(results)
    advice = advise(results)
    shown = render_table(results, width=width)
    shown += [_wrapped(line, width, "bold") for line in advice.lines]
    shown += [_wrapped(caution, width, "yellow", indent="  ") for caution in advice.cautions]
    if advice.verdict.command is not None:  # in one piece, to be copied
        command = Text(visible(advice.verdict.command, keep="\n"), no_wrap=True, overflow="ignore")
        shown += [_wrapped(advice.verdict.lead, width), command]
    return Group(*shown)


def render_table(results: Results, *, width: int = WIDTH) -> list[RenderableType]:
    """The table with the columns that fit `width`; if the deciding columns do not fit, lists instead."""
    built, measure = build_table(results), measure_of(results)
    columns = [index for index, column in enumerate(built.columns) if column.keep > 0]
    left_out: list[Column] = []
    shown = _table(results, built, columns)
    while _wide(shown) > width and len(columns) > 1:
        least = min(columns, key=lambda index: (built.columns[index].keep, -index))
        if built.columns[least].keep > DECIDES:
            break
        columns.remove(least)
        left_out.append(built.columns[least])
        shown = _table(results, built, columns)
    parts: list[RenderableType] = [shown] if _wide(shown) <= width else _lists(built, columns, width)
    what = "Accuracy in %" if measure.is_share else f"Bits per byte{by_tokens(results.task)}, lower is better"
    what = f"The figure, {measure.better} is better" if measure.key == "figure" else what
    half = "\N{PLUS-MINUS SIGN} half the width of the 95% interval"
    cut_off = any("(" in _figure(built, row, index) for row in built.rows for index in columns)
    ends = f", or (its ends) where it stops at {'0 or 100' if measure.is_share else '0'}" if cut_off else ""
    parts.append(_wrapped(f"{what}, {half}{ends}.", width, "italic"))
    if left_out:
        names = "; ".join(column.title for column in left_out)
        parts.append(_wrapped(f"Left out to fit the width: {names}.", width, "italic"))
    return parts


def _table(results: Results, built: Built, columns: Sequence[int]) -> Table:
    shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
    shown.add_column(results.settings.what, no_wrap=True)
    for index in columns:
        title = visible(built.columns[index].title).replace(", ", "\n")
        shown.add_column(Text(title), justify="right", no_wrap=True)
    for row in _rows(built, columns):
        shown.add_row(Text(_name(row)), *(Text(_figure(built, row, index)) for index in columns))
    return shown


def _wide(table: Table) -> int:
    return Console(width=10_000).measure(table).maximum


def _lists(built: Built, columns: Sequence[int], width: int) -> list[RenderableType]:
    """One line per name, and below it one line per figure."""
    parts: list[RenderableType] = []
    for row in _rows(built, columns):
        parts.append(_wrapped(_name(row), width))
        figures = [(built.columns[index].title, _figure(built, row, index)) for index in columns]
        parts += [_wrapped(f"{title}: {figure}", width, indent="  ") for title, figure in figures if figure]
    return parts


def _rows(built: Built, columns: Sequence[int]) -> list[Row]:
    return [row for row in built.rows if any(row.cells[index].text for index in columns)]


def _name(row: Row) -> str:
    return visible(row.contender.name if row.main else f"\N{MIDDLE DOT} {row.rule}")


def _figure(built: Built, row: Row, index: int) -> str:
    cell = row.cells[index]
    return f"{cell.text} {cell.half}".strip() if built.columns[index].keep > DECIDES else cell.text


def _wrapped(line: str, width: int, style: str = "", *, indent: str = "") -> Text:
    """Wrap a line between words; a word wider than the terminal stays whole."""
    wide = max(width, len(indent) + 1)
    line = visible(line)
    text = fill(
        line, wide, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )
    return Text(text, style=style, no_wrap=True, overflow="ignore")
