"""The text beside a progress bar."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from relpos_command.visible import visible


class Description(ProgressColumn):
    """A task's description as plain text: names may contain neither markup nor terminal commands."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        """The description."""
        return Text(visible(task.description))
