"""What stands beside a bar."""

from __future__ import annotations

from rich.progress import ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from relpos_command.visible import visible


class Description(ProgressColumn):
    """What a task is called, as it is: a name is no markup, and commands the terminal nothing."""

    def __init__(self) -> None:
        super().__init__(table_column=Column(no_wrap=False))

    def render(self, task: Task) -> Text:
        """The description."""
        return Text(visible(task.description))
