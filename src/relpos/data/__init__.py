"""Tasks: data with probes. Named here so that the command line can list and find them."""

from __future__ import annotations

from relpos.core.checks import require_name
from relpos.data.digits import Digits
from relpos.data.task import Probe, Split, Task

TASKS: dict[str, type[Task]] = {Digits.name: Digits}


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: no such name; the message offers the nearest.
    """
    require_name(name, TASKS, "a task")
    return TASKS[name]()


__all__ = ["TASKS", "Digits", "Probe", "Split", "Task", "find_task"]
