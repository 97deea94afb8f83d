"""`relpos report`: a comparison again, as a table in the terminal, a figure, LaTeX or CSV."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relpos.cli.progress import say

if TYPE_CHECKING:
    from relpos_command.requests import ReportRequest

LIBRARIES = ("relpos.report.export",)


def run(request: ReportRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.cli.free_file import free_file
    from relpos.core.checks import fail
    from relpos.report.export import ENDINGS, WIDTH, save_figure, to_csv, to_latex
    from relpos.report.terminal import render_terminal
    from relpos.results import load_results

    asked = [
        flag
        for flag, is_asked in (("--figure", request.figure), ("--latex", request.latex), ("--csv", request.csv))
        if is_asked
    ]
    if len(asked) > 1:
        fail("one of --figure, --latex and --csv", " and ".join(asked), "Write one command for each.")
    options = (("--plot", request.plot), ("--width", request.width), ("--overwrite", request.overwrite or None))
    of_figure = [flag for flag, value in options if value is not None]
    if of_figure and not request.figure:
        fail(f"{of_figure[0]} with --figure", "no --figure", "Write for example --figure cost.pdf.")
    results = load_results(request.run)
    console = Console()
    if request.latex or request.csv:
        print(to_latex(results) if request.latex else to_csv(results))  # without rich, so that no line is wrapped
    elif request.figure is not None:
        out = free_file(Path(request.figure), ENDINGS, option="--figure", overwrite=request.overwrite)
        plot = request.plot or "cost"
        save_figure(results, out, plot, WIDTH if request.width is None else request.width)
        say(console, f"Drew {plot}: {out}")
    else:
        console.print(render_terminal(results, width=console.width), crop=False)
