"""The comparison in a terminal: the lines the page opens with, and as much of the table as the width has room for."""

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from relpos.report.advice import advise
from relpos.report.measure import measure_of
from relpos.report.table import Column, build_table
from relpos.results import Results, read

WIDTH = 112
"""With names of a dozen letters every column of digits has room."""


def render_terminal(results: Results | Mapping[str, Any], *, width: int = WIDTH) -> Group:
    """The table, then the advice and its cautions: for `console.print`. Names and figures are never cut."""
    results = read(results)
    advice = advise(results)
    lines: list[RenderableType] = [Text(line, style="bold") for line in advice.lines]
    lines += [Padding(Text(caution, style="yellow"), (0, 0, 0, 2)) for caution in advice.cautions]
    return Group(render_table(results, width=width), *lines)


def render_table(results: Results, *, width: int = WIDTH) -> Table:
    """The columns that decide, or those of them that `width` has room for."""
    built, measure = build_table(results), measure_of(results)
    kept = [index for index, column in enumerate(built.columns) if column.keep > 0]
    left_out: list[Column] = []

    def drawn() -> Table:
        shown = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, collapse_padding=True)
        # A terminal narrower than it was said to be folds a cell over lines rather than cut it.
        shown.add_column(results.settings.what, overflow="fold")
        for index in kept:
            shown.add_column(built.columns[index].title.replace(", ", "\n"), justify="right", overflow="fold")
        for row in built.rows:
            if not any(row.cells[index].text for index in kept):
                continue
            name = row.contender.name if row.main else f"\N{MIDDLE DOT} {row.rule}"
            cells = [row.cells[index] for index in kept]
            wide = [f"{cell.text} {cell.half}" if built.columns[index].keep > 6 else cell.text
                    for index, cell in zip(kept, cells, strict=True)]  # fmt: skip
            shown.add_row(Text(name), *(Text(text.strip()) for text in wide))
        return shown

    shown = drawn()
    while Console(width=10_000).measure(shown).maximum > width and len(kept) > 2:
        least = min(kept, key=lambda index: (built.columns[index].keep, -index))
        if built.columns[least].keep > 6:
            break
        kept.remove(least)
        left_out.append(built.columns[least])
        shown = drawn()
    what = "Accuracy in %" if measure.is_share else "Bits per byte, fewer are better"
    shown.caption = f"{what}, \N{PLUS-MINUS SIGN} half the width of the 95% interval."
    if left_out:
        shown.caption += f"\nLeft out for width: {'; '.join(column.title for column in left_out)}."
    shown.caption_justify = "left"
    return shown
