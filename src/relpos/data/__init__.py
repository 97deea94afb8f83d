"""Tasks: data with probes. `find_data` makes one from the user's data, `find_task` from a `results.json`."""

from __future__ import annotations

from typing import Any

from relpos.core.checks import require_name
from relpos.data.canvas import CanvasTask
from relpos.data.datasets import Datasets, ImageDatasets
from relpos.data.digits import Digits
from relpos.data.documents import Documents
from relpos.data.finding import KINDS_OF_DATA, SOURCES, find_data, notes
from relpos.data.from_sources import from_hf, from_wds
from relpos.data.images import ImageFolder
from relpos.data.sampled_images import SampledImages
from relpos.data.streams import StreamedImages
from relpos.data.task import ImageProbe, ImageTask, Probe, Split, Task, Watch
from relpos.data.text import Text, TextProbe

_KINDS: tuple[type[Task], ...] = (Digits, ImageFolder, SampledImages, StreamedImages, Text)
TASKS: dict[str, type[Task]] = {task.name: task for task in _KINDS}


def find_task(name: str, options: dict[str, Any] | None = None, watch: Watch | None = None) -> Task:
    """A task by name.

    Args:
        options: plain values to build the task from: `settings.task_options` of a `results.json`.
        watch: receives progress if building the task takes long.

    Raises:
        ValueError: no such name (the message suggests the nearest), or options that do not fit.
    """
    require_name(name, TASKS, "a task")
    return TASKS[name].from_options({} if options is None else options, watch)


__all__ = [
    "KINDS_OF_DATA",
    "SOURCES",
    "TASKS",
    "CanvasTask",
    "Datasets",
    "Digits",
    "Documents",
    "ImageDatasets",
    "ImageFolder",
    "ImageProbe",
    "ImageTask",
    "Probe",
    "SampledImages",
    "Split",
    "StreamedImages",
    "Task",
    "Text",
    "TextProbe",
    "Watch",
    "find_data",
    "find_task",
    "from_hf",
    "from_wds",
    "notes",
]
