"""Pieces of work by an executor of other machines: the events of `workers.run_tasks`, from answers as bytes.

Any `concurrent.futures.Executor` does; a `ClusterExecutor` knows its workers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

from relpos.comparison.answer import WorkerAnswer, opened
from relpos.comparison.trial import head_of, trial
from relpos.comparison.workers import Event, WorkerError, WorkerTask
from relpos.files.reading import FileError
from relpos.results import ResultsError
from relpos.results.typed import typed
from relpos.train import Progress
from relpos_command.visible import visible

TRIES = 3
"""How often a piece of work is begun if its workers die, or answer nothing that can be read."""
_LETTERS = 200
"""The most letters of a worker's word on its work."""
_POLL = 0.5
"""Seconds between two looks at what runs."""


def progress_of(said: object) -> Progress | str | None:
    """What a worker says of its work, as an event has it; None if it is something else, as all may be."""
    if isinstance(said, str):
        return said[:_LETTERS]
    try:
        progress: Progress = typed(Progress, said, "progress")
    except ResultsError:
        return None
    return progress if 0 <= progress.step <= progress.steps and progress.steps else None


class GivenUp(Exception):
    """An executor's own error for work that it has tried often enough; the message says why."""


class ClusterExecutor(Executor):
    """An executor that knows its workers.

    Attributes:
        reads_data: whether workers read the data themselves, by name or path, instead of receiving them.
        machines: which machines it asks for, in words. What they said of themselves is kept for the same words only.
        note: what to say before the first machine is asked.
        sent: how much work it has sent, and not found sent by another process.
    """

    reads_data = False
    machines = ""
    note = ""
    sent = 0

    def require_versions(self, wanted: dict[str, str]) -> None:
        """Raise a `ValueError` of one line unless all workers that can be asked have these versions."""

    def running(self) -> dict[str, str]:
        """What runs, by its key, and the name of its worker."""
        raise NotImplementedError

    def wait_with_the_next(self) -> None:
        """Begin what will be submitted when all that is submitted has ended, if this process may end before."""

    def drop_ended(self, keys: Sequence[str]) -> None:
        """Forget work that another process submitted, and that has ended without an answer."""

    def said(self) -> dict[str, Any]:
        """What workers said of work since the last call, by its key: JSON values of anybody."""
        return {}

    def avoid(self, key: str, worker: str) -> None:
        """Try work on another worker next, if there is one: this one lost it."""

    def forget(self, key: str) -> None:
        """Remove what is kept of work that is stored."""

    def leave_out(self, worker: str, why: str) -> bool:
        """Send nothing to a worker any more, which refused work; whether that is possible."""
        return False


class TrialsFailedError(WorkerError):
    """Some pieces of work failed, and the others are finished; the message names them in one line.

    Attributes:
        failed: why, by the name of the work.
    """

    def __init__(self, failed: dict[str, str]) -> None:
        super().__init__(summary(failed))
        self.failed = failed


def run_on(
    executor: Executor,
    tasks: Sequence[WorkerTask],
    parcel: Callable[[WorkerTask], bytes],
    shared: bytes,
    accept: Callable[[WorkerTask, WorkerAnswer], None],
    *,
    keep: bool = False,
    stored: Callable[[WorkerTask], bool] = lambda _: False,
) -> Iterator[Event]:
    """Send every task to an executor and yield events as they come.

    A failed task is an event, too ("failed", value: why), and the others go on.

    Args:
        parcel: what to send for a task. shared: what goes with each.
        accept: receives the answer of finished work, checks it and stores its files. keep: whether the executor keeps
            the answer, too, for the same work to come. stored: whether another process has stored the work meanwhile,
            asked before it is done; the event then has no result.

    Raises:
        WriteError: from `accept`.
    """
    parcels = {task.name: parcel(task) for task in tasks}
    keys = {task.name: head_of(parcels[task.name])["key"] for task in tasks}
    tries: Counter[str] = Counter()
    futures: dict[Future[bytes], WorkerTask] = {}
    waiting, begun, looked = list(tasks), set[str](), 0.0
    try:
        while waiting or futures:
            failed: list[tuple[WorkerTask, str]] = []
            for task in waiting:
                if stored(task):
                    if task.name not in begun:
                        yield Event(task, "started", "")
                    yield Event(task, "finished")
                    continue
                try:
                    futures[executor.submit(trial, parcels[task.name], shared)] = task
                except Exception as error:  # of any executor: a pool of processes that is broken, say
                    failed.append((task, _line(error)))
            waiting = []
            for future in wait(futures, timeout=_POLL, return_when=FIRST_COMPLETED).done:
                task = futures.pop(future)
                answer, why = _outcome(future, keys[task.name])
                if answer is not None and answer.kind == "finished":
                    try:
                        accept(task, answer)
                    except (FileError, ResultsError) as error:
                        why = f"the answer of {answer.worker} cannot be used: {error}"
                    else:
                        if task.name not in begun:
                            yield Event(task, "started", answer.worker)
                        yield Event(task, "finished", answer.record)
                        if not keep and isinstance(executor, ClusterExecutor):  # the event's receiver has stored it
                            executor.forget(keys[task.name])
                        continue
                refused = answer.worker if answer is not None and answer.kind == "refused" else None
                if refused and isinstance(executor, ClusterExecutor) and executor.leave_out(refused, why):
                    waiting.append(task)
                    continue
                if answer is not None and answer.kind == "lost" and isinstance(executor, ClusterExecutor):
                    executor.avoid(keys[task.name], answer.worker)
                tries[task.name] += 1
                given_up = (answer is not None and answer.kind == "failed") or isinstance(_error(future), GivenUp)
                if given_up or tries[task.name] == TRIES:
                    failed.append((task, why))
                else:
                    waiting.append(task)
            for task, why in failed:
                if task.name not in begun:
                    yield Event(task, "started", "")
                yield Event(task, "failed", why)
            if time.monotonic() - looked < _POLL:
                continue
            looked = time.monotonic()
            for task, worker in _started(executor, futures, keys):
                if task.name not in begun:
                    begun.add(task.name)
                    yield Event(task, "started", worker)
            said = executor.said() if isinstance(executor, ClusterExecutor) else {}
            for task in futures.values():
                report = progress_of(said.get(keys[task.name])) if task.name in begun else None
                if report is not None:
                    yield Event(task, "progress", report)
    finally:
        for future in futures:
            future.cancel()


def _error(future: Future[bytes]) -> BaseException | None:
    return None if future.cancelled() else future.exception()


def _outcome(future: Future[bytes], key: str) -> tuple[WorkerAnswer | None, str]:
    """The answer and its error; without one, why there is none."""
    if future.cancelled():
        return None, "it was cancelled"
    error = future.exception()
    if error is not None:
        return None, _line(error)
    try:
        answer = opened(future.result(), key)
    except FileError as damage:
        return None, f"its answer cannot be used: {damage}"
    return answer, answer.error


def _line(error: BaseException) -> str:
    text = visible(" ".join(str(error).split()))
    return text if isinstance(error, GivenUp) else f"{type(error).__name__}: {text}"


def _started(
    executor: Executor, futures: dict[Future[bytes], WorkerTask], keys: dict[str, str]
) -> Iterator[tuple[WorkerTask, str]]:
    """The tasks that a worker has begun, as far as the executor knows."""
    known = executor.running() if isinstance(executor, ClusterExecutor) else None
    for future, task in futures.items():
        if known is None and future.running():
            yield task, ""
        elif known is not None and keys[task.name] in known:
            yield task, known[keys[task.name]]


def last_line(why: str) -> str:
    """The last line of an error, which may be a traceback."""
    return why.strip().splitlines()[-1] if why.strip() else "no message"


def summary(failed: dict[str, str]) -> str:
    """The line that names failed work; the first error stands for all."""
    (name, why), *others = failed.items()
    last = last_line(why)
    more = f" (and {len(others)} more: {', '.join(name for name, _ in others)})" if others else ""
    return f"{name} failed: {last}{more}. The rest is finished and stored; the same command tries again."
