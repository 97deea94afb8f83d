"""The comparison: send jobs to workers, store their records, gather the results.

Training runs come first, several at a time on one thread each, then memory, with one process per mechanism and size.
Timings come last, alone on the machine, mechanisms interleaved.
"""

from __future__ import annotations

import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relpos import data
from relpos.comparison import cost
from relpos.comparison.answer import WorkerAnswer
from relpos.comparison.data_by_name import DataByName
from relpos.comparison.elsewhere import parcel_for
from relpos.comparison.executors import ClusterExecutor, GivenUp, TrialsFailedError, last_line, run_on
from relpos.comparison.run import run
from relpos.comparison.settings import ComparisonSettings, Job, describe
from relpos.comparison.settings import environment as environment_here
from relpos.comparison.several import run_in_processes
from relpos.comparison.store import Store
from relpos.comparison.training import TrainingLog, folder_of, load_run, save_weights, weights_of
from relpos.comparison.trial import SharedWork, head_of, trial
from relpos.comparison.workers import (
    MOST_AT_ONCE,
    Event,
    WorkerTask,
    main_left_out,
    random_state_kept,
    run_here,
    run_tasks,
)
from relpos.core.checks import fail
from relpos.files.reading import FileError
from relpos.files.writing import make_folder, write_json, write_whole
from relpos.position.base.outside import files_in
from relpos.results import SCHEMA_VERSION, Cost, Environment, Failure, Results, ResultsError, plain, read
from relpos.results.typed import typed
from relpos.train import OURS, Procedure, Progress
from relpos.train.processes import is_main

_MEMORY_WEIGHT, _TIMING_WEIGHT = 0.05, 0.4
"""Duration relative to one training run when two run at once, measured on two cores."""


def _train(
    job: Job,
    settings: ComparisonSettings,
    work: SharedWork,
    folder: Path,
    probes: tuple[data.Probe, ...],
    report: Callable[[Any], None],
) -> dict[str, Any]:
    arguments = (job, settings, work, folder, probes)
    record: dict[str, Any] = (
        _train_here(*arguments, report)
        if settings.processes == 1
        else run_in_processes(settings.processes, _train_here, *arguments, report=report)
    )
    return record


def _train_here(
    job: Job,
    settings: ComparisonSettings,
    work: SharedWork,
    folder: Path,
    probes: tuple[data.Probe, ...],
    report: Callable[[Any], None],
) -> Any:
    """Train in this process, perhaps with others, of which the first writes the files."""
    task, procedure = work.opened()
    if not is_main():
        return run(job, settings, task, procedure=procedure, probes=probes)
    run_folder = folder / folder_of(job.id)
    with TrainingLog(run_folder) as log:

        def watch(progress: Progress) -> None:
            log.add(progress)
            report(progress)

        keep = partial(save_weights, run_folder) if job.variant == "recipe" else None
        return plain(run(job, settings, task, watch=watch, procedure=procedure, keep=keep, probes=probes))


def _memory(name: str, index: int, settings: ComparisonSettings, work: SharedWork) -> float | None:
    task, procedure = work.opened()
    return cost.memory_of_step(name, index, settings, task, procedure)


def _time(settings: ComparisonSettings, work: SharedWork, report: Callable[[Any], None]) -> list[dict[str, Any]]:
    task, procedure = work.opened()
    return [plain(entry) for entry in cost.time_steps(settings, task, watch=report, procedure=procedure)]


class Comparison:
    """A comparison in a folder. The constructor opens the folder, or raises an error that says why it cannot.

    Args:
        settings: the settings. task: the task that `settings` names.
        folder: its folder; a comparison begun there with the same settings is resumed.
        procedure: builds, trains and measures.
        executor: machines that do the work instead of this one. environment: theirs.

    Attributes:
        stays_here: why all runs stay in this process, one after another; None if workers do them.
        failed: why other machines could not do some of the work, by its name, since `run` began.
    """

    def __init__(
        self,
        settings: ComparisonSettings,
        task: data.Task,
        folder: Path,
        procedure: Procedure = OURS,
        *,
        executor: Executor | None = None,
        environment: Environment | None = None,
    ) -> None:
        self.settings, self.task, self.procedure, self.executor = settings, task, procedure, executor
        self.environment = environment_here(settings.device) if environment is None else environment
        self.stays_here: str | None = None
        self.failed: dict[str, str] = {}
        self._gather_from = 0.0
        if (executor is not None or settings.processes > 1) and self._work.packed is None:
            expected = "a model and data that can be sent to other processes"
            fail(expected, str(self.stays_here), "Put functions into a file: FILE.py:NAME.")
        self.mechanisms = [describe(name, settings, task, procedure) for name in settings.names]
        self.store = Store(folder, settings.to_json(), plain(self.environment))
        self.jobs = settings.jobs(task, procedure)
        self.probes = settings.probes(task)
        users_model = procedure.build is not None and task.kind != "other"
        if users_model and not any(one.growth for one in self.mechanisms):
            self.probes = tuple(probe for probe in self.probes if probe.size == task.size)  # no model takes others
        self.described = replace(task.describe(), probes=[probe.describe() for probe in self.probes])

    @cached_property
    def _work(self) -> SharedWork:
        """The task with its data and the functions, made once: pickled unless an object prevents it."""
        try:
            with main_left_out():
                files = files_in(self.settings.positions)
                by_name = DataByName.of(self.task) if getattr(self.executor, "reads_data", False) else None
                return SharedWork(packed=pickle.dumps((by_name or self.task, self.procedure, files)))
        except Exception as error:  # the user's objects may raise anything
            if self.procedure.is_ours and self.task.name in data.TASKS:
                raise
            message = re.sub(r" at 0x[0-9a-f]+", "", " ".join(str(error).split())).rstrip(".")
            self.stays_here = message or type(error).__name__
            return SharedWork(here=(self.task, self.procedure))

    def tasks(self) -> list[list[WorkerTask]]:
        """The unfinished work, in stages; the tasks of a stage may run in parallel.

        If runs stay in this process, no memory is measured: earlier allocations would distort it.
        """
        settings, work, folder = self.settings, self._work, self.store.folder
        training = [
            WorkerTask(
                job.id, _train, (job, settings, work, folder, self.probes), reports=True, label=f"train {job.label}"
            )
            for job in self.jobs
        ]
        sizes = cost.sizes(settings, self.task, self.procedure)
        memory = [
            WorkerTask(
                f"memory--{name}--{index}",
                _memory,
                (name, index, settings, work),
                label=f"measure memory of {name}, {math.prod(sizes[index].grid):,} tokens",
                weight=_MEMORY_WEIGHT,
            )
            for index in cost.memory_sizes(settings, self.task, self.procedure)
            for name in settings.names
            if self.stays_here is None
        ]
        weight = _TIMING_WEIGHT * len(settings.names)
        timing = [
            WorkerTask("timing", _time, (settings, work), reports=True, label="time training steps", weight=weight)
        ]
        # Timings need an idle machine. Elsewhere memory follows training, so that the first machine is known then.
        stages = (training + memory, timing) if self.executor is None else (training, memory, timing)
        return [[task for task in stage if not self.store.finished(task.name)] for stage in stages]

    def run(self, watch: Callable[[Event], None] | None = None) -> Results:
        """Do the remaining work and return the results; every piece is stored when it finishes.

        Raises:
            TrialsFailedError: an executor could not do some of it; the rest is stored, and `results` names what failed.
        """
        on_gpu = self.settings.device.startswith("cuda")
        gpus = torch.cuda.device_count() if self.settings.device == "cuda" else 1
        at_once = gpus if on_gpu else max(1, (os.cpu_count() or 1))
        if (processes := self.settings.processes) > 1:  # of each run, which takes the first GPUs
            at_once, gpus = 1 if on_gpu else max(1, at_once // processes), 1

        self.failed = {}

        def take(event: Event) -> None:
            if event.kind == "failed":
                self.failed[event.task.name] = event.value
            if event.kind == "finished":
                self.store.add(event.task.name, event.value)  # which keeps what another coordinator stored
                self._gather_now_and_then()
            if watch is not None:
                watch(event)

        for stage in self.tasks():
            if self.stays_here is not None:
                run_here(stage, take)
                continue
            for event in (
                run_tasks(stage, min(at_once, MOST_AT_ONCE), a_gpu_each=on_gpu and gpus > 1)
                if self.executor is None
                else self._elsewhere(self.executor, stage)
            ):
                take(event)
        results = self._gather()
        if self.failed:
            raise TrialsFailedError(self.failed)
        return results

    def _elsewhere(self, executor: Executor, stage: list[WorkerTask]) -> Iterator[Event]:
        """Do a stage on other machines."""
        assert self._work.packed is not None

        def stored(task: WorkerTask) -> bool:
            return self.store.finished(task.name)

        return run_on(executor, stage, self._parcel, self._work.packed, self._accept, stored=stored)

    def submit(self) -> tuple[int, int]:
        """Submit all work that remains, to an executor whose jobs go on without this process.

        Returns:
            The number of jobs that are new, and of those submitted before.

        Raises:
            ValueError: a job is not taken. One line.
        """
        executor, shared = self.executor, self._work.packed
        assert isinstance(executor, ClusterExecutor)
        assert shared is not None
        stages = [[(task, self._parcel(task)) for task in stage] for stage in self.tasks()]
        executor.drop_ended([head_of(parcel)["key"] for stage in stages for _, parcel in stage])
        before, there = executor.sent, 0
        for stage in stages:
            for task, parcel in stage:
                if self.store.finished(task.name):  # another coordinator has stored it meanwhile
                    continue
                try:
                    executor.submit(trial, parcel, shared)
                except GivenUp as error:
                    fail("to submit all jobs", str(error), "The others go on; the same command submits the rest.")
                there += 1
            executor.wait_with_the_next()
        new = executor.sent - before
        return new, there - new

    def _parcel(self, task: WorkerTask) -> bytes:
        trains = any(job.id == task.name for job in self.jobs)
        return parcel_for(
            task,
            self.store.head,
            self.procedure,
            cost=not trains,
            device=self.settings.device,
            folder=self.store.folder,
            within=folder_of(task.name) if trains else None,
            model=self.settings.model,
        )

    def _accept(self, task: WorkerTask, answer: WorkerAnswer) -> None:
        """Check the record that a worker answered, and store the files of its run.

        Raises:
            ResultsError, FileError: it is not that of this work.
        """
        job = next((one for one in self.jobs if one.id == task.name), None)
        if job is not None:
            (run,) = self._results([answer.record], []).records
            if (run.id, run.seed, run.variant) != (job.id, job.seed, job.variant):
                raise ResultsError(f"expected the record {job.id}; got {run.id}")
        elif (kind := answer.machine.get("kind")) not in (None, self.environment.kind):
            expected = f"time and memory of one kind of machine, {self.environment.kind}"
            raise FileError(f"{expected}; it is of {kind} (--cost-worker names a machine)")
        elif task.name == "timing":
            typed(list[Cost], answer.record, "timing")
        else:
            typed(float | None, answer.record, task.name)
        if answer.files and job is None:
            raise FileError("it has files, and measures only")
        if answer.files:
            make_folder(folder := self.store.folder / folder_of(task.name))
            for name, content in answer.files.items():
                write_whole(folder / name, content)

    @random_state_kept()
    def model(self, name: str, seed: int) -> nn.Module:
        """A trained model in evaluation mode, on the CPU.

        Raises:
            KeyError: no run of that name and seed has finished.
        """
        job = next((one for one in self.jobs if (one.name, one.seed, one.variant) == (name, seed, "recipe")), None)
        if job is None or not weights_of(self.store.folder / folder_of(job.id)).exists():
            known = ", ".join(f"({one.name!r}, {one.seed})" for one in self.trained())
            raise KeyError(f"expected the model of a finished run among {known or 'none'}; got ({name!r}, {seed!r})")
        recipe, position = self.settings.of(name)
        model = self.procedure.model(recipe, self.task, position)
        load_run(self.store.folder / folder_of(job.id), model)
        return model.eval()

    def trained(self) -> list[Job]:
        """The finished runs by the recipe whose trained weights exist."""
        by_recipe = (job for job in self.jobs if job.variant == "recipe")
        return [job for job in by_recipe if weights_of(self.store.folder / folder_of(job.id)).exists()]

    def results(self) -> Results:
        """All finished work so far, as docs/results.md describes it."""
        records = [self.store.get(job.id) for job in self.jobs if self.store.has(job.id)]
        return self._results(records, self._costs(), self._failures())

    def _failures(self) -> list[Failure]:
        jobs = {job.id: job for job in self.jobs}
        return [
            Failure(name, last_line(why), job.name, job.seed, job.variant)
            if (job := jobs.get(name))
            else Failure(name, last_line(why))
            for name, why in self.failed.items()
        ]

    def _results(self, records: list[Any], costs: list[Any], failed: Sequence[Failure] = ()) -> Results:
        return read(
            {
                "schema_version": SCHEMA_VERSION,
                "settings": self.settings.describe(),
                "environment": self.environment,
                "task": self.described,
                "mechanisms": self.mechanisms,
                "records": records,
                "costs": costs,
                "failed": list(failed),
            }
        )

    def _costs(self) -> list[dict[str, Any]]:
        if not self.store.has("timing"):
            return []
        entries: list[dict[str, Any]] = self.store.get("timing")
        for number, entry in enumerate(entries):  # sorted by size, then by name
            index = number // len(self.settings.names)
            name = f"memory--{entry[self.settings.key]}--{index}"
            entry["peak_memory_mib"] = self.store.get(name) if self.store.has(name) else None
        return entries

    def _gather_now_and_then(self) -> None:
        """Gather, unless that would take more than a tenth of the time: it reads every record."""
        begun = time.monotonic()
        if begun >= self._gather_from:
            self._gather()
            self._gather_from = time.monotonic() + 10 * (time.monotonic() - begun)

    def _gather(self) -> Results:
        results = self.results()
        write_json(self.store.folder / "results.json", plain(results))
        return results
