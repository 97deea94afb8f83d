"""Work as jobs of Slurm, by submitit. All is in a folder that every node sees:

    DIR/spool/KEY.parcel      what a job is to do, written by this process
    DIR/spool/KEY.claim       says that a process submits its job, or has
    DIR/spool/KEY.job         the number of its job
    DIR/spool/KEY.answer      what it answered, written whole by the job
    DIR/spool/KEY.said        how far it is
    DIR/spool/SHA.shared      what parcels have in common, by the checksum of its content
    DIR/submitit/             submitit's own files, with the output of jobs

An answer is read from the spool as bytes (`answer.py`); submitit's pickled results are never opened. Jobs go on without
this process, and the same command finds them by their keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relpos.comparison.answer import BYTES_AT_MOST, opened
from relpos.comparison.executors import ClusterExecutor, GivenUp
from relpos.comparison.trial import head_of, trial
from relpos.core.checks import fail
from relpos.files.reading import MIB, FileError, read_file, read_json
from relpos.files.writing import (
    UnwritableError,
    WriteError,
    make_folder,
    named,
    require_writable,
    write_json,
    write_whole,
)

SLURM = "slurm"
_POLL = 2.0
"""Seconds between two looks into the spool."""
_PATIENCE = 60.0
"""Seconds after which a job that has ended counts as lost if its answer is not seen: shared disks are late."""
_CLAIM_POLL = 0.1
"""Seconds between two looks whether another process has submitted a job."""
_BETWEEN = 10.0
"""Seconds between two questions to Slurm."""
_ALIVE = {
    "COMPLETING", "CONFIGURING", "PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESIZING", "RUNNING",
    "SIGNALING", "STAGE_OUT", "STOPPED", "SUSPENDED", "UNKNOWN",
}  # fmt: skip
_OF_THE_USER = {
    "TIMEOUT": "reached its time limit; allow more: --slurm timeout_min=MINUTES",
    "CANCELLED": "was cancelled",
}
"""Ends of a job that another job would not change."""
_NODE = re.compile(r"\w[\w.-]*", re.ASCII)
"""The name of a node, which becomes a line of a job's script."""


@dataclass
class _SpooledWork:
    """A piece of work: its job, and when that was first seen to have ended without an answer."""

    key: str
    future: Future[bytes]
    job: Any = None
    sent: float = field(default_factory=time.monotonic)
    ended: float | None = None


class SlurmExecutor(ClusterExecutor):
    """Submits work as jobs.

    Args:
        folder: a folder that all nodes see. parameters: submitit's.
        cost_node: the node that measures costs; by default that of the first answer.
        cluster: "slurm", or "local" for processes of this machine. poll, patience: seconds.

    Raises:
        ValueError: submitit refuses a parameter, or there is no Slurm. One line.
        WriteError: the folder cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        parameters: dict[str, Any],
        *,
        cost_node: str | None = None,
        cluster: str = SLURM,
        poll: float = _POLL,
        patience: float = _PATIENCE,
    ) -> None:
        import submitit

        try:
            require_writable(folder)
        except UnwritableError as error:
            why = f"{folder}: {os.strerror(error.errno or 0)}"
            fail("a folder for --shared that can be written", why, "Choose another --shared.")
        make_folder(folder.absolute() / "spool")
        self._spool, self._poll, self._patience = folder.absolute() / "spool", poll, patience
        self._jobs_folder, self._cluster = (
            folder.absolute() / "submitit",
            cluster,
        )
        self._parameters, self._cost_node = parameters, cost_node
        self.note = "A first, short job says what a node computes with; this waits until it has run."
        self.machines = repr((cost_node, sorted(parameters.items())))
        try:
            self._executor({})
        except (RuntimeError, NameError, AssertionError, ValueError, TypeError) as error:
            why = (str(error).splitlines() or [type(error).__name__])[0]
            fail("Slurm, with parameters that submitit knows", why, "Correct --slurm, or run this where sbatch is.")
        self._job_class = submitit.SlurmJob if cluster == SLURM else submitit.LocalJob
        self._work: dict[str, _SpooledWork] = {}
        self._after: list[str] = []
        self._queue: dict[str, str] = {}
        self._asked = 0.0
        self._lock, self._stopped = threading.RLock(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def submit(self, fn: Any, /, *args: Any, **_: Any) -> Future[Any]:
        """Submit `trial(parcel, shared)`; if the spool has its answer or its job, take those."""
        parcel, shared = args
        head = head_of(parcel)
        one = _SpooledWork(head["key"], Future())
        with self._lock:
            self._attach(one)
            if not self._is_answered(one) and not self._attach(one) and self._claims(one):
                try:
                    one.job = self._spooled(head, parcel, shared)
                except BaseException:
                    with contextlib.suppress(OSError):
                        self._path(one.key, "claim").unlink()
                    raise
                write_json(self._path(one.key, "job"), {"id": one.job.job_id})
                self.sent += 1
            self._work[one.key] = one
        return one.future

    def _spooled(self, head: dict[str, Any], parcel: bytes, shared: bytes) -> Any:
        """The job of a piece of work, submitted with what it reads."""
        common = self._spool / f"{hashlib.sha256(shared).hexdigest()}.shared"
        if not common.exists():
            write_whole(common, shared)
        here = self._path(head["key"], "parcel")
        write_whole(here, parcel)
        return self._send(head, here, common, self._path(head["key"], "answer"))

    def drop_ended(self, keys: Sequence[str]) -> None:
        """Remove what is left of jobs that ended without an answer, perhaps of another process."""
        with self._lock:
            attached = [one for one in (_SpooledWork(key, Future()) for key in keys) if self._attach(one)]
            if attached:
                self._ask(after=time.monotonic())  # an older queue lacks what another process submitted just now
            for one in attached:
                ended = self._state(one) not in _ALIVE
                if not self._is_answered(one) and ended:  # in this order: a job answers before it ends
                    self._remove(one)

    def _path(self, key: str, kind: str) -> Path:
        return self._spool / f"{key}.{kind}"

    def _is_answered(self, one: _SpooledWork) -> bool:
        """Whether the spool has the answer of finished work; another answer is removed, with its job."""
        if not self._path(one.key, "answer").exists():
            return False
        try:
            finished = opened(read_file(self._path(one.key, "answer"), BYTES_AT_MOST), one.key).kind == "finished"
        except FileError:
            finished = False
        if not finished:
            self._remove(one)
        return finished

    def _attach(self, one: _SpooledWork) -> bool:
        """Take the job that another command submitted, if there is one; it may have ended."""
        number = _number_in(self._path(one.key, "job"))
        one.job = None if number is None else self._job_class(folder=self._jobs_folder, job_id=number)
        return one.job is not None

    def _claims(self, one: _SpooledWork) -> bool:
        """Whether this process is to submit a job: of several, the one that makes a file, which on NFS, too, only one
        can. Another takes the job of that, and submits it where that has died."""
        claim, deadline = self._path(one.key, "claim"), time.monotonic() + self._patience
        while True:
            with contextlib.suppress(FileExistsError), named(claim):
                os.close(os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
                return True
            if self._attach(one):
                return False
            if time.monotonic() > deadline:
                return True
            time.sleep(_CLAIM_POLL)

    def _remove(self, one: _SpooledWork) -> None:
        """Remove a job that has ended from the spool, unless another process has: it may have submitted the next."""
        if one.job is not None:
            path = self._path(one.key, "job")
            taken = path.with_name(f"{path.name}-{secrets.token_hex(8)}")
            try:
                os.rename(path, taken)  # only one can
                if _number_in(taken) != one.job.job_id:
                    os.rename(taken, path)
                    return
                taken.unlink()
            except OSError:
                return
        self.forget(one.key)

    def _executor(self, more: dict[str, Any]) -> Any:
        """Submitit's executor with the parameters and some more."""
        import submitit

        executor = submitit.AutoExecutor(self._jobs_folder, cluster=self._cluster)
        generic = executor._typed_parameters()
        own = {**self._parameters, **more}
        named = {name if name in generic else f"slurm_{name}": value for name, value in own.items()}
        executor.update_parameters(**{"name": "relpos", **named})
        return executor

    def _send(self, head: dict[str, Any], *files: Path) -> Any:
        """Submit a job; one that measures goes to the machine of measurements, one that times is alone there."""
        more: dict[str, Any] = {}
        added = {"nodelist": self._cost_node} if head["cost"] and self._cost_node is not None else {}
        if self._after and self._cluster == SLURM:
            added["dependency"] = f"afterany:{':'.join(self._after)}"
        if added:
            more["additional_parameters"] = {**(self._parameters.get("additional_parameters") or {}), **added}
        if head["alone"]:
            more["exclusive"] = True
        try:
            return self._executor(more).submit(_do, *files)
        except RuntimeError as error:  # of sbatch
            raise GivenUp(f"Slurm does not take its job: {' '.join(str(error).split())}") from None

    def _watch(self) -> None:
        """Until `shutdown`: complete the futures."""
        while not self._stopped.wait(self._poll):
            with self._lock:
                waiting = [one for one in self._work.values() if not one.future.done()]
                self._ask()
                try:
                    there = {path.name for path in self._spool.iterdir()}  # newer than what a shared disk remembers
                except OSError:  # the disk is away; the next look may succeed
                    continue
                for one in waiting:
                    with contextlib.suppress(InvalidStateError):  # cancelled meanwhile
                        self._look(one, there)

    def _look(self, one: _SpooledWork, there: set[str]) -> None:
        """See whether a piece of work is answered, or its job lost."""
        if f"{one.key}.answer" in there:
            try:
                data = read_file(self._path(one.key, "answer"), BYTES_AT_MOST)
                if self._cost_node is None:
                    answer = opened(data, one.key)
                    if answer.kind == "finished" and _NODE.fullmatch(answer.worker):
                        self._cost_node = answer.worker
            except (FileError, MemoryError) as error:
                self._lose(one, ValueError(f"its answer cannot be used: {error}"))
            else:
                one.future.set_result(data)
        elif one.job is not None and (state := self._state(one)) not in _ALIVE:
            one.ended = time.monotonic() if one.ended is None else one.ended
            if state in _OF_THE_USER:
                self._lose(one, GivenUp(f"its job {one.job.job_id} {_OF_THE_USER[state]}"))
            elif time.monotonic() - one.ended > self._patience:
                said = f"its job {one.job.job_id} ended without an answer; {one.job.paths.stderr} may say why"
                self._lose(one, RuntimeError(said))

    def _state(self, one: _SpooledWork) -> str:
        """The state of a job in Slurm's words."""
        if self._cluster != SLURM:
            return str(one.job.state).upper()
        return self._queue.get(one.job.job_id, "GONE" if one.sent < self._asked else "UNKNOWN")

    def _ask(self, after: float = 0.0) -> None:
        """Read the queue, unless it was read just now, and after a time: `sacct`, which submitit asks, needs a data
        base."""
        if self._cluster != SLURM or (time.monotonic() - self._asked < _BETWEEN and self._asked >= after):
            return
        begun = time.monotonic()
        command = ["squeue", "--me", "--noheader", "--states=all", "--format=%i %T"]
        try:
            found = subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE, check=True).stdout
        except (OSError, subprocess.SubprocessError):  # Slurm is away; jobs may go on
            return
        lines = [line.split() for line in found.splitlines()]
        self._queue, self._asked = {line[0]: line[1] for line in lines if len(line) == 2}, begun

    def _lose(self, one: _SpooledWork, error: Exception) -> None:
        self._work.pop(one.key, None)
        self._remove(one)
        one.future.set_exception(error)

    def wait_with_the_next(self) -> None:
        """Let later jobs depend on the end of these."""
        with self._lock:
            waiting = [one for one in self._work.values() if one.job is not None and not one.future.done()]
            self._after = [str(one.job.job_id) for one in waiting]

    def running(self) -> dict[str, str]:
        """The jobs that run."""
        with self._lock:
            known = [one for one in self._work.values() if one.job is not None and not one.future.done()]
            return {one.key: f"job {one.job.job_id}" for one in known if self._state(one) == "RUNNING"}

    def said(self) -> dict[str, Any]:
        """What jobs that run say."""
        said = {}
        for key in self.running():
            with contextlib.suppress(FileError):
                said[key] = read_json(self._path(key, "said"), MIB)
        return said

    def forget(self, key: str) -> None:
        """Remove a piece of work from the spool."""
        with self._lock:
            self._work.pop(key, None)
        for kind in ("job", "answer", "parcel", "said", "claim"):  # the last lets another process submit the next
            with contextlib.suppress(OSError):  # it is a folder, say, or the disk is away
                self._path(key, kind).unlink()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Stop looking; jobs go on."""
        self._stopped.set()
        self._watcher.join()


def _number_in(path: Path) -> str | None:
    """The number of a job, which a file has; None if it has none."""
    try:
        number = read_json(path, MIB)["id"]
    except (FileError, KeyError, TypeError):
        return None
    return number if isinstance(number, str) and number.isdecimal() else None


def _do(parcel: Path, shared: Path, answer: Path) -> None:
    """A job.

    It works until it is killed, as do its processes, which inherit this: submitit would end it at the signal before the
    time limit, and a process that ends earlier than its job would be an answer, which hides why the job ends.
    """
    for number in (signal.SIGTERM, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)

    def tell(said: Any) -> None:
        with contextlib.suppress(WriteError, ArithmeticError):
            write_json(answer.with_suffix(".said"), said)

    write_whole(answer, trial(parcel.read_bytes(), shared.read_bytes(), tell))
