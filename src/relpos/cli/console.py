"""A comparison's display on a console: bars and lines that fit its width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from relpos.cli.progress import say, watching
from relpos.comparison.display import Display
from relpos.comparison.workers import Event, WorkerTask
from relpos.data import Watch


class ConsoleDisplay(Display):
    """A bar while files are read, lines, and bars for running work.

    Args:
        console: where to print.
    """

    def __init__(self, console: Console) -> None:
        super().__init__(lambda line: say(console, line))
        self._console = console

    @contextmanager
    def reading(self) -> Iterator[Watch | None]:
        with reading(self._console) as watch:
            yield watch

    @contextmanager
    def working(self, tasks: Sequence[WorkerTask]) -> Iterator[Callable[[Event], None]]:
        with watching(tasks, self._console) as take:
            yield take


@contextmanager
def reading(console: Console) -> Iterator[Watch]:
    """A bar while files are read, on a terminal; it appears with the first file."""
    columns = (TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task("images", total=None, visible=False)
        yield lambda done, of: bars.update(bar, completed=done, total=of, visible=True)
