"""What a comparison shows of itself while it works; the command has a display of its own, with bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from relpos.comparison.workers import Event, WorkerTask
from relpos.data import Watch
from relpos_command.visible import visible


class Display:
    """Lines, one for each thing that happened.

    Args:
        write: takes a line. `Display(lambda line: None)` is silent.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write

    def say(self, line: str) -> None:
        """Show a line."""
        self._write(visible(line))

    @contextmanager
    def reading(self) -> Iterator[Watch | None]:
        """While data are read: what is told how many files are, of how many."""
        yield None

    @contextmanager
    def working(self, tasks: Sequence[WorkerTask]) -> Iterator[Callable[[Event], None]]:
        """While these are carried out: what is told of every event."""
        done = 0

        def take(event: Event) -> None:
            nonlocal done
            if event.kind == "finished":
                done += 1
                self.say(f"Done: {event.task.label or event.task.name} ({done} of {len(tasks)} done)")

        yield take
