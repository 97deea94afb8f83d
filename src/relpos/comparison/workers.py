"""Run pieces of work in separate processes, a few at a time, and receive their reports.

Processes come from a fork server that has only imported the libraries, so that each starts at once and with the same
memory. It also imports `torch._dynamo`, because otherwise the first optimizer of a process does, which takes longer
than a quick run's training. A worker whose parent has ended notices at its next report and stops.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any

import numpy as np
import torch

from relpos.files.writing import WriteError

MOST_AT_ONCE = 8
"""Processes at once, at most, however many cores there are."""

RemoteFunction = Callable[..., Any]


@dataclass(frozen=True)
class WorkerTask:
    """A piece of work: `function(*arguments)`, or `function(*arguments, report)` if it reports progress.

    Attributes:
        name: the name of its record. label: its name for display; if empty, `name` is shown.
        weight: its duration relative to a training run.
    """

    name: str
    function: RemoteFunction
    arguments: tuple[Any, ...]
    reports: bool = False
    label: str = ""
    weight: float = 1.0


@dataclass(frozen=True)
class Event:
    """An event of a piece of work.

    Attributes:
        kind: "started" (value: the worker's number, or its name), "progress" (value: the report), "finished" (value:
            the result) or, on other machines, "failed" (value: why).
    """

    task: WorkerTask
    kind: str
    value: Any = None


class WorkerError(RuntimeError):
    """A piece of work failed; the message holds its traceback."""


def _work(task: WorkerTask, connection: Connection, gpu: int | None = None) -> None:
    try:
        if gpu is not None:
            torch.cuda.set_device(gpu)  # the device "cuda" of this process
        if task.reports:
            result = task.function(*task.arguments, lambda report: connection.send(("progress", report)))
        else:
            result = task.function(*task.arguments)
        connection.send(("finished", result))
    except (BrokenPipeError, ConnectionResetError):  # the parent has ended
        return
    except WriteError as error:  # a full disk is no bug, and its one line needs no traceback
        connection.send(("unwritten", error))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))


@contextlib.contextmanager
def _interruptions_held_back() -> Iterator[None]:
    """Processes started in this block, and their children, never receive Ctrl-C; this process receives it afterwards.

    A terminal sends it to every process, and each would print a traceback. This process stops the others.
    """
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # else the fork server starts it, which unblocks SIGINT
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["relpos.comparison.experiment", "accelerate", "sklearn.datasets", "torch._dynamo"])
    with _interruptions_held_back():
        forkserver.ensure_running()
    # Loading its libraries takes seconds. Wait for an empty process, because that wait can be interrupted.
    first = context.Process(target=_nothing, daemon=True)
    with main_left_out():
        first.start()
    first.join()
    return context


@contextlib.contextmanager
def main_left_out() -> Iterator[None]:
    """Processes started in this block do not run this process's `__main__`; objects pickled here may not refer to it.

    No worker needs it, and a script that compares at its top level would compare in every worker.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _nothing() -> None:
    pass


def run_here(tasks: Sequence[WorkerTask], tell: Callable[[Event], None]) -> None:
    """Run every task in this process, one after another, and pass every event to `tell`.

    It restores the process's thread count and random state.
    """
    threads = torch.get_num_threads()
    try:
        with random_state_kept():
            for task in tasks:
                tell(Event(task, "started"))
                report = [partial(_progress, task, tell)] if task.reports else []
                tell(Event(task, "finished", task.function(*task.arguments, *report)))
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the random states of Python, NumPy and PyTorch after this block."""
    python, array = random.getstate(), np.random.get_state()  # noqa: NPY002 - the one that others draw from
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(gpus):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(array)  # noqa: NPY002


def _progress(task: WorkerTask, tell: Callable[[Event], None], report: Any) -> None:
    tell(Event(task, "progress", report))


def run_tasks(tasks: Sequence[WorkerTask], at_once: int, *, a_gpu_each: bool = False) -> Iterator[Event]:
    """Run every task in its own process, `at_once` at a time, and yield events as they come.

    Args:
        a_gpu_each: whether tasks that run at once each get their own GPU as the device "cuda".

    Raises:
        WorkerError: a task failed; the others are stopped.
        WriteError: a task could not write its files; the others are stopped.
    """
    if not tasks:
        return
    context = _context()
    waiting = list(tasks)
    running: dict[Connection, tuple[WorkerTask, BaseProcess, int]] = {}
    free = list(range(at_once))
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                number = free.pop(0)
                given = (task, theirs, number if a_gpu_each else None)
                process = context.Process(target=_work, args=given, daemon=True)
                with _interruptions_held_back(), main_left_out():
                    process.start()
                theirs.close()
                running[ours] = (task, process, number)
                yield Event(task, "started", number)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                task, process, number = running[ready]
                try:
                    kind, value = ready.recv()
                except EOFError:
                    process.join()
                    kind, value = "failed", f"the process ended with code {process.exitcode} and said nothing"
                if kind == "unwritten":
                    raise value
                if kind == "failed":
                    raise WorkerError(f"{task.name} failed:\n{value}")
                if kind == "finished":
                    del running[ready]
                    free.append(number)
                    ready.close()
                    process.join()
                yield Event(task, kind, value)
    finally:
        for connection, (_, process, _) in running.items():
            process.terminate()
            process.join()
            connection.close()
