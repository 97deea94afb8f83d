"""Tasks: data with probes. Named here so that the command line can list and find them."""

from __future__ import annotations

import difflib

from relpos.core.checks import fail
from relpos.data.digits import Digits
from relpos.data.task import Probe, Split, Task

TASKS: dict[str, type[Task]] = {Digits.name: Digits}


def find_task(name: str) -> Task:
    """The task of a name.

    Raises:
        ValueError: no such name; the message offers the nearest.
    """
    if name not in TASKS:
        near = difflib.get_close_matches(name, TASKS, n=1, cutoff=0.5)
        remedy = f"Did you mean {near[0]!r}?" if near else "relpos list tasks says what each is."
        fail(f"a task among {', '.join(TASKS)}", repr(name), remedy)
    return TASKS[name]()


__all__ = ["TASKS", "Digits", "Probe", "Split", "Task", "find_task"]
