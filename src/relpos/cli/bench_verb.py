"""`relpos bench`: time and memory of the attention engines beside their peers; tables, JSON and a picture."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from relpos.bench.run import Bench, Settings


LIBRARIES = ("relpos.bench.run",)
LIMITS = {"repeats": 1000, "threads": 1024}


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's arguments."""
    parser.add_argument(
        "--cases", type=str, default="target", help="cases or families, joined by commas (relpos bench --list)"
    )
    parser.add_argument(
        "--engines",
        type=str | None,
        default=None,
        help="engines, joined by commas (relpos list backends). Default: auto; all for many windows",
    )
    parser.add_argument(
        "--repeats",
        type=int,
        default=7,
        help="rounds that count; 3 at most from 8,192 tokens on, three times as many up to 512",
    )
    parser.add_argument("--threads", type=int | None, default=None, help="CPU threads. Default: PyTorch's own choice")
    parser.add_argument("--out", type=str | None, default=None, help="folder for results. Default: under runs/")
    parser.add_argument("--quick", action="store_true", help="every case at 256 tokens or fewer, one round")
    parser.add_argument("--no-memory", action="store_true", help="leave memory out")
    parser.add_argument("--list", action="store_true", help="list families and cases, and run none")


def default_folder(settings: Settings) -> Path:
    """A folder named by settings, source and machine, so that the same call finds its results again."""
    from relpos.bench.run import surroundings

    whole = json.dumps([settings.to_json(), surroundings(settings.device)], sort_keys=True)
    quick = "-quick" if settings.quick else ""
    return Path("runs") / f"bench{quick}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _list() -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from relpos.bench.cases import all_families

    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("family", no_wrap=True, style="bold")
    table.add_column("cases")
    for family, cases in all_families().items():
        table.add_row(family, Text("\n".join(case.name for case in cases)))
        table.add_section()
    Console().print(table)


def run(arguments: Namespace) -> None:
    """Carry the verb out."""
    if arguments.list:
        _list()
        return
    from rich.console import Console

    from relpos.bench.cases import find_cases
    from relpos.bench.run import Bench, Settings

    console = Console()
    named = arguments.engines
    engines = None if named is None else tuple(name.strip() for name in named.split(",") if name.strip())
    settings = Settings.make(
        find_cases(arguments.cases),
        engines,
        arguments.repeats,
        threads=arguments.threads,
        memory=not arguments.no_memory,
        quick=arguments.quick,
    )
    folder = default_folder(settings) if arguments.out is None else Path(arguments.out)
    measure(Bench(settings, folder), console)


def measure(bench: Bench, console: Any) -> dict[str, Any]:
    """Run a benchmark under a bar, print its tables and draw its pictures."""
    from relpos.bench.picture import drawable, save_picture
    from relpos.bench.table import render

    folder, cases = bench.store.folder, bench.settings.cases
    left = sum(len(bench.tasks(case)) for case in cases)
    line = f"{len(cases)} cases on {bench.settings.threads} threads: {left} pieces of work, in {folder}/"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    results = _watched(bench, left, console)
    console.print(render(results))
    console.print(f"Results: {folder / 'results.json'}", highlight=False, soft_wrap=True)
    for what in drawable(results):
        path = folder / f"{what}.png"
        save_picture(results, path, what)
        console.print(f"Picture: {path}", highlight=False, soft_wrap=True)
    return results


def _watched(bench: Bench, left: int, console: Any) -> dict[str, Any]:
    """Run it under a progress bar that says which piece is under way."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.description}"),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("", total=left, note="")

        def watch(event: Any) -> None:
            if event.kind == "started":
                bars.update(bar, description=event.task.name, note="")
            elif event.kind == "finished":
                bars.advance(bar)
                if not console.is_terminal:
                    console.print(f"finished {event.task.name}", highlight=False)
            else:
                bars.update(bar, note=str(event.value))

        return bench.run(watch)
