"""The progress display of a comparison; the command has its own, with progress bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from relpos.comparison.workers import Event, WorkerTask
from relpos.data import Watch
from relpos_command.visible import visible


def failure(event: Event) -> str:
    """The line of a failed event: the last of its error."""
    lines = str(event.value).strip().splitlines()
    return f"Failed: {event.task.label or event.task.name}: {lines[-1] if lines else 'no message'}"


class Display:
    """Writes one line per event.

    Args:
        write: receives each line. `Display(lambda line: None)` is silent.
    """

    def __init__(self, write: Callable[[str], object] = print) -> None:
        self._write = write

    def say(self, line: str) -> None:
        """Show a line."""
        self._write(visible(line))

    @contextmanager
    def reading(self) -> Iterator[Watch | None]:
        """While data are read: a callback for how many files are read, of how many."""
        yield None

    @contextmanager
    def working(self, tasks: Sequence[WorkerTask]) -> Iterator[Callable[[Event], None]]:
        """While the tasks run: a callback for every event."""
        done = 0

        def take(event: Event) -> None:
            nonlocal done
            if event.kind == "failed":
                self.say(failure(event))
            if event.kind == "finished":
                done += 1
                self.say(f"Done: {event.task.label or event.task.name} ({done} of {len(tasks)} done)")

        yield take
