"""The comparison: jobs to workers, records to the store, results gathered.

Training runs come first, several at a time on one thread each, then memory, in a process a mechanism and size. Timings
come last, alone on the machine, mechanisms interleaved.
"""

from __future__ import annotations

import math
import os
import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from relpos import data
from relpos.comparison import cost
from relpos.comparison.run import run
from relpos.comparison.settings import ComparisonSettings, Job, describe, environment
from relpos.comparison.store import Store
from relpos.comparison.workers import Event, WorkerTask, run_tasks
from relpos.files.writing import write_json
from relpos.results import SCHEMA_VERSION, Results, plain, read

_MEMORY_WEIGHT, _TIMING_WEIGHT = 0.05, 0.4
"""What they take, measured on two cores, as a multiple of a training run: of one of two at once."""


def _train(job: Job, settings: ComparisonSettings, packed: bytes, report: Callable[[Any], None]) -> dict[str, Any]:
    made: dict[str, Any] = plain(run(job, settings, pickle.loads(packed), watch=report))
    return made


def _memory(name: str, index: int, settings: ComparisonSettings, packed: bytes) -> float | None:
    return cost.memory_of_step(name, index, settings, pickle.loads(packed))


def _time(settings: ComparisonSettings, packed: bytes, report: Callable[[Any], None]) -> list[dict[str, Any]]:
    return [plain(entry) for entry in cost.time_steps(settings, pickle.loads(packed), watch=report)]


class Comparison:
    """A comparison in a folder; making one opens the folder or says why it cannot.

    Args:
        settings: what is compared. task: on what, as `settings` has it.
        folder: where; a comparison begun there with the same settings is resumed.
    """

    def __init__(self, settings: ComparisonSettings, task: data.Task, folder: Path) -> None:
        self.settings, self.task = settings, task
        self.environment = environment(settings.device)
        self.store = Store(folder, settings.to_json(), plain(self.environment))
        self.jobs = settings.jobs(task)
        asked = task.describe()
        self.described = replace(asked, probes=asked.probes[: len(settings.probes(task))])
        self.mechanisms = [describe(name, settings, task) for name in settings.names]

    @cached_property
    def _packed(self) -> bytes:
        """The task with its data, made once. As bytes, since tensors travel by shared memory, which may be scarce."""
        return pickle.dumps(self.task)

    def tasks(self) -> list[list[WorkerTask]]:
        """The work that is not finished, in stages; those of a stage may run side by side."""
        settings, packed = self.settings, self._packed
        training = [
            WorkerTask(job.id, _train, (job, settings, packed), reports=True, label=f"train {job.label}")
            for job in self.jobs
        ]
        sizes = cost.sizes(settings, self.task)
        memory = [
            WorkerTask(
                f"memory--{name}--{index}",
                _memory,
                (name, index, settings, packed),
                label=f"measure memory of {name}, {math.prod(sizes[index].grid):,} tokens",
                weight=_MEMORY_WEIGHT,
            )
            for index in cost.memory_sizes(settings, self.task)
            for name in settings.names
        ]
        weight = _TIMING_WEIGHT * len(settings.names)
        timing = [
            WorkerTask("timing", _time, (settings, packed), reports=True, label="time training steps", weight=weight)
        ]
        stages = (training + memory, timing)  # timings want the machine to themselves
        return [[task for task in stage if not self.store.finished(task.name)] for stage in stages]

    def run(self, watch: Callable[[Event], None] | None = None) -> Results:
        """Do what is left to do and return the results; finished pieces are kept as they finish."""
        at_once = 1 if self.settings.device.startswith("cuda") else max(1, (os.cpu_count() or 1))
        for stage in self.tasks():
            for event in run_tasks(stage, min(at_once, 8)):
                if event.kind == "finished":
                    self.store.add(event.task.name, event.value)
                    self._gather()
                if watch is not None:
                    watch(event)
        return self._gather()

    def results(self) -> Results:
        """Everything finished so far, as docs/results.md describes it."""
        records = [self.store.get(job.id) for job in self.jobs if self.store.has(job.id)]
        return read(
            {
                "schema_version": SCHEMA_VERSION,
                "settings": self.settings.describe(),
                "environment": self.environment,
                "task": self.described,
                "mechanisms": self.mechanisms,
                "records": records,
                "costs": self._costs(),
            }
        )

    def _costs(self) -> list[dict[str, Any]]:
        if not self.store.has("timing"):
            return []
        entries: list[dict[str, Any]] = self.store.get("timing")
        for number, entry in enumerate(entries):  # size by size, what is compared at each in order
            index = number // len(self.settings.names)
            name = f"memory--{entry[self.settings.key]}--{index}"
            entry["peak_memory_mib"] = self.store.get(name) if self.store.has(name) else None
        return entries

    def _gather(self) -> Results:
        results = self.results()
        write_json(self.store.folder / "results.json", plain(results))
        return results
