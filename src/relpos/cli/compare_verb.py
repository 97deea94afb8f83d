"""`relpos compare`: run the requested comparison; print progress, the table and the page's path."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relpos.cli.progress import say

if TYPE_CHECKING:
    from relpos_command.requests import CompareCommand


LIBRARIES = ("accelerate", "sklearn.datasets", "relpos.comparison.entry")


def require_names(request: CompareCommand) -> None:
    """Raise if a named mechanism does not exist."""
    from relpos.position import find
    from relpos.position.base.outside import with_files

    named = request.positions or ()
    known = ("own",) if request.model is not None else ()
    for name in () if named in (("all",), ("standard",)) else named:
        if name not in known:
            find(with_files(name))


def run(request: CompareCommand) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.cli.bar_display import BarDisplay
    from relpos.comparison.cluster import Coordinator, executor_of
    from relpos.comparison.entry import answer_unless
    from relpos.report.terminal import render_terminal

    console = Console()
    display, coordinator = BarDisplay(console), Coordinator(request)
    if request.cluster is not None and request.out is not None and coordinator.attach(Path(request.out), display.say):
        return
    with executor_of(request) as executor:
        result = answer_unless(coordinator.hand_over, request, display, executor)
    if result is None:
        return
    console.print(render_terminal(result.results, width=console.width), crop=False)
    say(console, f"Page:    {result.page}")
    say(console, f"Results: {result.folder / 'results.json'}")
