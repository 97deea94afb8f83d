"""`relpos compare`: ask, show progress, write the results and the page, print the table."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.saying import say, watched
from relpos.cli.task_choice import choose_task, note_on_batch

if TYPE_CHECKING:
    from jsonargparse import Namespace

    from relpos.comparison import ComparisonSettings


LIBRARIES = ("accelerate", "sklearn.datasets", "relpos.comparison", "relpos.report")


def default_folder(settings: ComparisonSettings) -> Path:
    """A folder named by settings and environment, so that the same command on the same machine finds its results."""
    from relpos.comparison import environment
    from relpos.results import plain

    whole = [settings.to_json(), plain(environment(settings.device))]
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]
    name = settings.task
    for own in ("images", "text"):
        if own in settings.task_options:
            name = re.sub(r"[^\w.-]+", "-", Path(settings.task_options[own]).name) or name
    if settings.what != "position":
        name += f"-{settings.what}"
    return Path("runs") / f"{name}{'-quick' if settings.quick else ''}-{digest}"


def _split(names: str | None) -> tuple[str, ...] | None:
    """Names joined by commas, apart."""
    return None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())


def require_names(arguments: Namespace) -> None:
    """Raise where a mechanism is named that there is not."""
    from relpos.position import find

    named = _split(arguments.positions) or ()
    for name in () if named in (("all",), ("standard",)) else named:
        find(name)


def run(arguments: Namespace) -> None:
    """Carry the verb out."""
    from rich.console import Console

    from relpos.comparison import Comparison, ComparisonSettings, require_asked, require_usable
    from relpos.files.writing import require_writable
    from relpos.report import render_terminal, write_report

    console = Console()
    positions, choices = _split(arguments.positions), _split(arguments.choices)
    what: dict[str, Any] = {"what": arguments.what, "choices": choices}
    asked = (positions, arguments.seeds, arguments.steps, arguments.device, arguments.precision)
    require_asked(*asked, **what)
    # Before many images are read.
    if arguments.out is None:
        require_writable(Path("runs"))
    else:
        require_usable(Path(arguments.out))
    task = choose_task(arguments, console)
    settings = ComparisonSettings.make(task, *asked, quick=arguments.quick, **what)
    folder = default_folder(settings) if arguments.out is None else Path(arguments.out)
    comparison = Comparison(settings, task, folder)
    note_on_batch(settings.recipe.batch_size, task, console)
    tasks = [task for stage in comparison.tasks() for task in stage]
    if tasks:
        done = sum(map(comparison.store.has, [job.id for job in comparison.jobs]))
        begun = f", {done} of {len(comparison.jobs)} training runs finished before" if done else ""
        say(console, f"Comparing {', '.join(settings.names)} on {settings.task}, in {folder}/{begun}")
    else:
        say(console, f"This comparison is finished. Its results, from {folder}/:")
    results = watched(comparison.run, tasks, console)
    page = folder / "report.html"
    write_report(results, page)
    console.print(render_terminal(results, width=console.width), crop=False)
    say(console, f"Page:    {page}")
    say(console, f"Results: {folder / 'results.json'}")
