"""Output of verbs: lines wrapped at words for a terminal of any width, lists, and progress of work."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Column
from rich.text import Text

from relpos_command.visible import visible

if TYPE_CHECKING:
    from relpos.comparison.workers import Event, WorkerTask
    from relpos.data import Watch

Done = TypeVar("Done")

WIDTH_FOR_BAR = 60
"""A narrower terminal shows no bar."""
_ESTIMATE_FROM = 0.05
"""The share of finished work from which the remaining time is shown."""


def wrapped(text: str, console: Console, *, first: str = "", indent: str = "") -> str:
    """The text after `first`, wrapped at words to the terminal's width; one line if there is no terminal."""
    width = console.width if console.is_terminal else 10**6
    return textwrap.fill(
        text,
        max(width, len(indent) + 1),
        initial_indent=first,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def say(console: Console, text: str) -> None:
    """Print a line; names in it are plain text without terminal commands."""
    _print(console, wrapped(visible(text), console))


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)  # rich would parse a str for markup, emoji names and numbers


def say_list(console: Console, entries: Mapping[str, Iterable[str]]) -> None:
    """Print names in a column, their lines in a second column; on a narrow terminal the lines are below each name."""
    entries = {visible(name): [visible(line) for line in lines] for name, lines in entries.items()}
    width = max(map(len, entries)) + 2
    in_columns = not console.is_terminal or console.width >= width + 30
    indent = " " * (width if in_columns else 2)
    for name, lines in entries.items():
        first = name.ljust(width)
        if not in_columns:
            first = indent
            say(console, name)
        for line in lines:
            text = wrapped(line, console, first=first, indent=indent)
            _print(console, text)
            first = indent


def in_words(seconds: float) -> str:
    """A rounded duration as text."""
    if seconds < 100:
        return f"{max(1, round(seconds, -1 if seconds >= 10 else 0)):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


class Description(ProgressColumn):
    """A task's description in a progress bar as plain text: names may contain neither markup nor terminal commands."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        """The description."""
        return Text(visible(task.description))


@contextmanager
def reading(console: Console) -> Iterator[Watch]:
    """A bar while files are read, on a terminal; it appears with the first file."""
    columns = (TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("images", total=None, visible=False)
        yield lambda done, of: bars.update(bar, completed=done, total=of, visible=True)


class Work:
    """The progress of the work, and the estimated time left at the same speed.

    Args:
        tasks: all the work; each task counts by its `weight`.
    """

    def __init__(self, tasks: Iterable[WorkerTask], clock: Callable[[], float] = time.monotonic) -> None:
        self.weights = {task.name: task.weight for task in tasks}
        self.finished = 0
        self._shares: dict[str, float] = {}
        self._clock, self._started = clock, clock()

    def take(self, event: Event) -> None:
        """Update the progress with an event."""
        name, value = event.task.name, event.value
        if event.kind == "finished":
            self.finished += 1
            self._shares[name] = 1.0
        elif event.kind == "progress" and hasattr(value, "steps"):
            self._shares[name] = value.step / value.steps

    def __str__(self) -> str:
        total = sum(self.weights.values())
        done = sum(self.weights.get(name, 0.0) * share for name, share in self._shares.items())
        counted = f"{self.finished} of {len(self.weights)} done"
        if done < _ESTIMATE_FROM * total or done >= total:
            return counted
        left = (self._clock() - self._started) * (total - done) / done
        return f"{counted}, about {in_words(left)} left"


@contextmanager
def watching(tasks: Iterable[WorkerTask], console: Console) -> Iterator[Callable[[Event], None]]:
    """Show one line for all work and one for each running task; without a terminal, one line per finished task.

    Yields:
        The callback for every event.
    """
    from relpos.comparison.display import failure

    work = Work(tasks)
    if not work.weights:  # nothing to do: avoid a line that flashes
        yield lambda event: None
        return
    bar = [BarColumn(bar_width=24)] if console.width >= WIDTH_FOR_BAR else []
    with Progress(*bar, Description(), console=console, transient=True) as bars:
        overall = bars.add_task(str(work), total=max(1, len(work.weights)))
        live: dict[str, Any] = {}
        labels: dict[str, str] = {}

        def watch(event: Event) -> None:
            name, label, value = event.task.name, event.task.label or event.task.name, event.value
            work.take(event)
            if event.kind == "started":
                labels[name] = f"{label} on {value}" if isinstance(value, str) and value else label  # another machine
                live[name] = bars.add_task(labels[name], total=None)
            elif event.kind == "failed":
                bars.remove_task(live.pop(name))
                say(console, failure(event))
            elif event.kind == "finished":
                bars.remove_task(live.pop(name))
                if not console.is_terminal:
                    say(console, f"Done: {label} ({work})")
            elif isinstance(value, str):
                bars.update(live[name], description=f"{labels[name]}: {value}")
            else:
                note = f"step {value.step} of {value.steps}, loss {value.loss:.3f}"
                bars.update(live[name], completed=value.step, total=value.steps, description=f"{labels[name]}: {note}")
            bars.update(overall, completed=work.finished, description=str(work))

        yield watch


def watched(run: Callable[[Callable[[Event], None]], Done], tasks: Iterable[WorkerTask], console: Console) -> Done:
    """Run pieces of work under `watching`.

    Args:
        run: does all the work, passes every event to its argument, and returns the results.
    """
    with watching(tasks, console) as watch:
        return run(watch)
