"""`relpos compare`: ask, show progress, write the results and the page, print the table."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relpos.cli.task_choice import LIMITS as _OF_TASKS
from relpos.cli.task_choice import add_task_arguments, choose_task, note_on_batch

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

    from relpos.compare import Settings
    from relpos.results import Results


LIBRARIES = ("accelerate", "sklearn.datasets", "relpos.compare", "relpos.report")
LIMITS = {"seeds": 1000, "steps": 10_000_000, **_OF_TASKS}


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's arguments."""
    add_task_arguments(parser)
    parser.add_argument(
        "--positions",
        type=str | None,
        default=None,
        help="mechanisms, joined by commas; a+b is a sum (relpos list positions); all for every one that suits the "
        "task. Default: the task's own choice",
    )
    parser.add_argument(
        "--what", type=str, default="position", help="what is compared: position, attention, norm or optimizer"
    )
    parser.add_argument(
        "--choices", type=str | None, default=None, help="of these, joined by commas; with --what. Default: all"
    )
    parser.add_argument("--seeds", type=int, default=1, help="training runs of each mechanism")
    parser.add_argument("--steps", type=int | None, default=None, help="training steps. Default: the recipe's")
    parser.add_argument("--out", type=str | None, default=None, help="folder for results. Default: under runs/")
    parser.add_argument("--quick", action="store_true", help="a run of under a minute; no verdict")
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:0")
    parser.add_argument("--precision", type=str, default="float32", help="float32, bf16-mixed or fp16-mixed")


def default_folder(settings: Settings) -> Path:
    """A folder named by settings and environment, so that the same call on the same machine finds its results again."""
    from relpos.compare import environment

    whole = [settings.to_json(), environment(settings.device)]
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]
    name = settings.task
    for own in ("images", "text"):
        if own in settings.task_options:
            name = re.sub(r"[^\w.-]+", "-", Path(settings.task_options[own]).name) or name
    if settings.what != "position":
        name += f"-{settings.what}"
    return Path("runs") / f"{name}{'-quick' if settings.quick else ''}-{digest}"


def run(arguments: Namespace) -> None:
    """Carry the verb out."""
    from rich.console import Console

    from relpos.compare import Comparison, Settings, require_asked, require_usable
    from relpos.files.writing import require_writable
    from relpos.report import render_terminal, write_report

    console = Console()
    positions, choices = (
        None if names is None else tuple(name.strip() for name in names.split(",") if name.strip())
        for names in (arguments.positions, arguments.choices)
    )
    what: dict[str, Any] = {"what": arguments.what, "choices": choices}
    asked = (positions, arguments.seeds, arguments.steps, arguments.device, arguments.precision)
    require_asked(*asked, **what)
    # Before many images are read.
    if arguments.out is None:
        require_writable(Path("runs"))
    else:
        require_usable(Path(arguments.out))
    task = choose_task(arguments, console)
    settings = Settings.make(task, *asked, quick=arguments.quick, **what)
    folder = default_folder(settings) if arguments.out is None else Path(arguments.out)
    comparison = Comparison(settings, task, folder)
    note_on_batch(settings.recipe.batch_size, task, console)
    left = sum(len(stage) for stage in comparison.tasks())
    names = ", ".join(settings.names)
    line = f"Comparing {names} on {settings.task}: {left} pieces of work, in {folder}/"
    console.print(line, markup=False)
    results = _watched(comparison, left, console)
    page = folder / "report.html"
    write_report(results, page)
    console.print(render_terminal(results, width=console.width))
    console.print(f"\nPage:    {page}\nResults: {folder / 'results.json'}", highlight=False, soft_wrap=True)


def _watched(comparison: Any, left: int, console: Any) -> Results:
    """Run the comparison under progress bars: one for all, one for each piece under way."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}", justify="left"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        overall = bars.add_task("all", total=left, note="")
        live: dict[str, Any] = {}

        def watch(event: Any) -> None:
            name = event.task.name
            if event.kind == "started":
                live[name] = bars.add_task(name, total=None, note="")
            elif event.kind == "finished":
                bars.remove_task(live.pop(name))
                bars.advance(overall)
                if not console.is_terminal:
                    console.print(f"finished {name}", highlight=False)
            elif isinstance(event.value, str):
                bars.update(live[name], note=event.value)
            else:
                step = event.value
                note = f"loss {step.loss:.3f}  rate {step.rate:.1e}"
                bars.update(live[name], completed=step.step, total=step.steps, note=note)

        results: Results = comparison.run(watch)
    return results
