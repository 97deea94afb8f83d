"""Data that a worker reads itself: digits by name, a folder of images or a file of text by a path that all see.

Their fingerprint is compared where they are read, once per worker: what was read is kept in a folder of the worker.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.data import TASKS, Task, Text, find_task
from relpos.files.writing import write_whole


class OtherDataError(ValueError):
    """The data are not there, or differ from the coordinator's; one line."""


@dataclass(frozen=True)
class DataByName:
    """Data by their task's name and the options that rebuild it, with absolute paths and a fingerprint."""

    name: str
    options: dict[str, Any]

    @classmethod
    def of(cls, task: Task) -> DataByName | None:
        """The name of a task that has one: digits, a folder of images, a file of bytes; None for other data."""
        options = task.options
        if type(task) is not TASKS.get(task.name):
            return None
        if isinstance(task, Text) and ("tokenizer" in options or not Path(options.get("text", "")).is_file()):
            return None
        paths = {str(name): os.path.abspath(options[name]) for name in ("images", "text") if name in options}
        return cls(task.name, {**options, **paths})

    def read(self, kept: Path) -> Task:
        """The task, from its data, or from what an earlier call left in the folder `kept`.

        Raises:
            OtherDataError: the data are not there, or others.
        """
        digest = hashlib.sha256(json.dumps([self.name, self.options], sort_keys=True).encode()).hexdigest()
        file = kept / digest
        if file.exists():
            task: Task = pickle.loads(file.read_bytes())  # of this worker: the folder is its own
            return task
        try:
            task = find_task(self.name, self.options)
        except (ValueError, OSError) as error:
            raise OtherDataError(" ".join(str(error).split())) from None
        write_whole(file, pickle.dumps(task))
        return task
