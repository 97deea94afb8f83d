"""Pieces of work by an executor of other machines: the events of `workers.run_tasks`, from answers as bytes.

Any `concurrent.futures.Executor` does. One that lies beside this file may also have

    running()           {key: the worker that does it}, for the display
    leave_out(worker)   send nothing to a worker any more, which has other versions
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from typing import Any

from relpos.comparison.answer import Answer, opened
from relpos.comparison.trial import head_of, trial
from relpos.comparison.workers import Event, WorkerError, WorkerTask
from relpos.files.reading import FileError
from relpos.results import ResultsError

TRIES = 3
"""How often a piece of work is begun if its workers die, or answer nothing that can be read."""
_POLL = 0.5
"""Seconds between two looks at what runs."""


class GivenUp(Exception):
    """An executor's own error for work that it has tried often enough; the message says why."""


class TrialsFailedError(WorkerError):
    """Some pieces of work failed, and the others are finished; the message names them in one line."""


def run_on(
    executor: Executor,
    tasks: Sequence[WorkerTask],
    parcel: Callable[[WorkerTask], bytes],
    shared: bytes,
    accept: Callable[[WorkerTask, Answer], None],
) -> Iterator[Event]:
    """Send every task to an executor and yield events as they come.

    A failed task is an event, too ("failed", value: why), and the others go on.

    Args:
        parcel: what to send for a task. shared: what goes with each.
        accept: receives the answer of finished work, checks it and stores its files.

    Raises:
        WriteError: from `accept`.
    """
    parcels = {task.name: parcel(task) for task in tasks}
    keys = {task.name: head_of(parcels[task.name])["key"] for task in tasks}
    tries: Counter[str] = Counter()
    futures: dict[Future[bytes], WorkerTask] = {}
    waiting, begun = list(tasks), set[str]()
    try:
        while waiting or futures:
            failed: list[tuple[WorkerTask, str]] = []
            for task in waiting:
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
                        continue
                if answer is not None and answer.kind == "refused" and hasattr(executor, "leave_out"):
                    executor.leave_out(answer.worker)
                    waiting.append(task)
                    continue
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
            for task, worker in _started(executor, futures, keys):
                if task.name not in begun:
                    begun.add(task.name)
                    yield Event(task, "started", worker)
    finally:
        for future in futures:
            future.cancel()


def _error(future: Future[bytes]) -> BaseException | None:
    return None if future.cancelled() else future.exception()


def _outcome(future: Future[bytes], key: str) -> tuple[Answer | None, str]:
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
    text = " ".join(str(error).split())
    return text if isinstance(error, GivenUp) else f"{type(error).__name__}: {text}"


def _started(
    executor: Executor, futures: dict[Future[bytes], WorkerTask], keys: dict[str, str]
) -> Iterator[tuple[WorkerTask, str]]:
    """The tasks that a worker has begun, as far as the executor knows."""
    known: dict[str, Any] | None = executor.running() if hasattr(executor, "running") else None
    for future, task in futures.items():
        if known is None and future.running():
            yield task, ""
        elif known is not None and keys[task.name] in known:
            yield task, str(known[keys[task.name]])


def summary(failed: dict[str, str]) -> str:
    """The line that names failed work; the first error stands for all."""
    (name, why), *others = failed.items()
    last = why.strip().splitlines()[-1] if why.strip() else "no message"
    more = f" (and {len(others)} more: {', '.join(name for name, _ in others)})" if others else ""
    return f"{name} failed: {last}{more}. The rest is finished and stored; the same command tries again."
