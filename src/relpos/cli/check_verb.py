"""`relpos check`: every engine of this machine against the reference; a table to paste into an issue."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relpos.cli.progress import Description

if TYPE_CHECKING:
    from relpos_command.requests import CheckRequest

LIBRARIES = ("relpos.bench.engines",)


def run(request: CheckRequest) -> None:
    """Run the verb. Raises `SystemExit(1)` if an engine differs."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    from relpos.bench.engines import check, count, engines, render

    asked = engines(request.engines)
    columns = (BarColumn(bar_width=24), MofNCompleteColumn(), Description(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:  # so that only the table is piped
        bar = bars.add_task("", total=count(asked))
        for row in check(asked):
            rows.append(row)
            bars.update(bar, advance=1, description=f"{row.engine}, {row.device}, {row.dtype}")
    print(render(rows, every=request.all))
    if any(row.fault for row in rows):
        raise SystemExit(1)
