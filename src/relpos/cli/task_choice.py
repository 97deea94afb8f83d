"""Find the requested data."""

from __future__ import annotations

from typing import TYPE_CHECKING

from relpos.cli.progress import reading, say

if TYPE_CHECKING:
    from rich.console import Console

    from relpos.data import Task
    from relpos_command.option_groups import DataOptions


def choose_task(request: DataOptions, console: Console) -> Task:
    """The task for the requested data; shows a bar while images are read, and notes on files left out."""
    from relpos.data import find_data, notes

    with reading(console) as watch:
        task = find_data(request.data, watch=watch, **request.of_images(), **request.of_text())
    for note in notes(task):
        say(console, note)
    return task
