"""A comparison's display with progress bars that fit the width of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console

from relpos.cli.progress import reading, say, watching
from relpos.comparison.display import Display
from relpos.comparison.workers import Event, WorkerTask
from relpos.data import Watch


class BarDisplay(Display):
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
