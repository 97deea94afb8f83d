"""`relpos bench`: time and memory of the attention engines and their peers; tables, JSON and a picture."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.progress import say, say_list, watched

if TYPE_CHECKING:
    from relpos.bench.run import Bench, BenchSettings
    from relpos_command.requests import BenchRequest


LIBRARIES = ("relpos.bench.run",)


def default_folder(settings: BenchSettings) -> Path:
    """A folder named by settings, source and machine, so that the same command finds its results."""
    from relpos.bench.run import surroundings

    whole = json.dumps([settings.to_json(), surroundings(settings.device)], sort_keys=True)
    quick = "-quick" if settings.quick else ""
    return Path("runs") / f"bench{quick}-{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def _list() -> None:
    from rich.console import Console

    from relpos.bench.cases import all_families

    say_list(Console(), {family: [case.name for case in cases] for family, cases in all_families().items()})


def run(request: BenchRequest) -> None:
    """Run the verb."""
    if request.list:
        _list()
        return
    from rich.console import Console

    from relpos.bench.cases import QUICK, find_cases
    from relpos.bench.run import Bench, BenchSettings

    console = Console()
    unnamed = request.quick and request.cases == type(request).cases
    settings = BenchSettings.make(
        find_cases(",".join(QUICK) if unnamed else request.cases),
        request.engines,
        request.repeats,
        threads=request.threads,
        memory=request.memory and not unnamed,  # each is a process, and small tensors tell little
        quick=request.quick,
    )
    folder = default_folder(settings) if request.out is None else Path(request.out)
    measure(Bench(settings, folder), console)


def measure(bench: Bench, console: Any) -> dict[str, Any]:
    """Run a benchmark with a progress bar, print its tables and draw its pictures."""
    from relpos.bench.picture import drawable, save_picture
    from relpos.bench.table import render

    folder, cases = bench.store.folder, bench.settings.cases
    tasks = [task for case in cases for task in bench.tasks(case)]
    if tasks:
        say(console, f"{len(cases)} cases on {bench.settings.threads} threads, in {folder}/")
    else:
        say(console, f"This benchmark is finished. Its results, from {folder}/:")
    results = watched(bench.run, tasks, console)
    console.print(render(results))
    say(console, f"Results: {folder / 'results.json'}")
    for what in drawable(results):
        path = folder / f"{what}.png"
        save_picture(results, path, what)
        say(console, f"Picture: {path}")
    return results
