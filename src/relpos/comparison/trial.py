"""A piece of work on another machine: what is sent, how a worker does it, what it answers.

    trial(parcel, shared) -> answer

is the only function that an executor is given. The parcel has the task and its arguments; `shared`, which many parcels
have in common, the data and the functions. Both are pickled: a worker trusts whoever sends it work. The answer is not
(`answer.py`): whoever sends work need not trust the files of workers. Each piece runs in a process of its own, as on
one machine, and in a temporary folder. Threads of a worker share nothing, and it survives a crash of the work.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from relpos.adapters.library_models import LibraryModel
from relpos.comparison.answer import BYTES_AT_MOST, WorkerAnswer, sealed
from relpos.comparison.data_by_name import DataByName, OtherDataError
from relpos.comparison.settings import environment
from relpos.comparison.workers import WorkerTask, main_left_out
from relpos.data import Task
from relpos.files.reading import MIB, FileError, read_file, read_json
from relpos.files.writing import WriteError, write_json, write_whole
from relpos.results import plain
from relpos.train import Procedure
from relpos.version import __version__

_LENGTH = 8
_ANSWER, _FILES, _LOG, _SAID = "answer", "files", "log", "said"
_BEAT = 1.0
"""Seconds between two words of a trial on how far it is."""
_REMEDY = "Every worker must see the data by this path; or send them: --send-data."
TOPIC = "relpos"
"""Of Dask's events, with what trials say: {"key", "worker", "said"}; "said" is null where one begins."""
Tell = Callable[[Any], None]
_LETTERS = 300
"""The most letters of a machine's name."""
_SAID_AT_MOST = MIB
_LINES = 3
"""How many last lines of a silent process's output are shown."""


@dataclass(frozen=True)
class SharedWork:
    """What pieces of work have in common: the task with its data, and the functions, pickled for other processes.

    Bytes avoid shared memory, which carries tensors and may be scarce.
    """

    packed: bytes | None = None
    here: tuple[Task, Procedure] | None = None
    kept: Path | None = None
    """The folder in which this worker keeps data that it has read."""

    def opened(self) -> tuple[Task, Procedure]:
        """The task and the procedure that builds, trains and measures."""
        if self.here is not None:
            return self.here
        assert self.packed is not None
        return _opened(self.packed, self.kept)


@lru_cache(maxsize=1)
def _opened(packed: bytes, kept: Path | None) -> tuple[Task, Procedure]:
    task, procedure, _ = pickle.loads(packed)  # the third makes mechanisms of files known in this process
    if isinstance(task, DataByName):
        assert kept is not None
        task = task.read(kept)
    return task, procedure


def versions(packages: Sequence[str] = ()) -> dict[str, str]:
    """The versions of relpos, torch and other packages here; "none" if one is not installed."""
    found = {"relpos": __version__}
    for name in ("torch", *packages):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "none"
    return found


def differing(wanted: dict[str, str], where: str) -> str | None:
    """The line that refuses a worker because of its versions; None if they are these."""
    here = versions(tuple(wanted.keys() - {"relpos", "torch"}))
    odd = [name for name in wanted if here[name] != wanted[name]]
    if not odd:
        return None
    expected, got = (", ".join(f"{name} {which[name]}" for name in odd) for which in (wanted, here))
    return f"expected {expected} on every worker; got {got} on {where}. Install the same there, or stop that worker."


class _Pickler(pickle.Pickler):
    """Leaves out the shared work and the folder, which are other ones on a worker."""

    def __init__(self, file: io.BytesIO, folder: Path | None) -> None:
        super().__init__(file)
        self._folder = folder

    def persistent_id(self, x: Any) -> str | None:
        if isinstance(x, SharedWork):
            return "work"
        return "folder" if x is self._folder and x is not None else None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, work: SharedWork, folder: Path) -> None:
        super().__init__(file)
        self._known = {"work": work, "folder": folder}

    def persistent_load(self, name: Any) -> Any:
        return self._known[name]


def parcel_of(task: WorkerTask, head: dict[str, Any], folder: Path | None = None) -> bytes:
    """The bytes to send for a task.

    Args:
        head: JSON values to be read without unpickling: "key", which names the work; "name"; "device"; "versions";
            "cost", whether it measures time or memory; "alone", whether nothing may run beside it; "folder", the one
            within `folder` whose files come back; "model", the name of a library's model, and how it describes itself.
        folder: the object among the arguments in whose place a worker has its own folder.
    """
    text, packed = json.dumps(head).encode(), io.BytesIO()
    with main_left_out():
        _Pickler(packed, folder).dump((task.function, task.arguments, task.reports))
    return len(text).to_bytes(_LENGTH, "little") + text + packed.getvalue()


def head_of(parcel: bytes) -> dict[str, Any]:
    """The head of a parcel."""
    return _split(parcel)[0]


def _split(parcel: bytes) -> tuple[dict[str, Any], bytes]:
    end = _LENGTH + int.from_bytes(parcel[:_LENGTH], "little")
    head: dict[str, Any] = json.loads(parcel[_LENGTH:end])
    return head, parcel[end:]


def worker_name() -> str:
    """The address of this Dask worker, or the name of this machine, as Slurm has it."""
    if "distributed" in sys.modules:
        from distributed import get_worker

        try:
            return str(get_worker().address)
        except ValueError:  # this process is none
            pass
    return os.environ.get("SLURMD_NODENAME") or platform.node()


def _dask_tells(key: str, where: str) -> Tell | None:
    """Tells the coordinator by an event of Dask; None if this process is no worker of Dask."""
    if "distributed" not in sys.modules:
        return None
    from distributed import get_worker

    try:
        worker = get_worker()
    except ValueError:
        return None
    return lambda said: worker.log_event(TOPIC, {"key": key, "worker": where, "said": said})


def trial(parcel: bytes, shared: bytes, tell: Tell | None = None) -> bytes:
    """Do a piece of work in a process and a temporary folder of its own; its errors are answers, too.

    Args:
        tell: receives what the work says of itself now and then, as JSON values; by default events of Dask.
    """
    head, where = head_of(parcel), worker_name()
    tell = _dask_tells(head["key"], where) if tell is None else tell
    refused = differing(head["versions"], where)
    if refused is not None:
        return sealed(WorkerAnswer(head["key"], where, "refused", error=refused))
    try:
        with tempfile.TemporaryDirectory(prefix="relpos-trial-") as folder:
            if tell is not None:
                tell(None)
            return _answered(Path(folder), parcel, shared, where, tell)
    except OSError as error:
        return sealed(WorkerAnswer(head["key"], where, "lost", error=f"{error} ({where})"))


def _answered(folder: Path, parcel: bytes, shared: bytes, where: str, tell: Tell | None) -> bytes:
    program = "from relpos.comparison.trial import main; main()"
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)  # as of this process, which may have added to it
    with (
        (folder / _LOG).open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-c", program, folder, where, _kept()],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONPATH": path},
        ) as process,
    ):
        assert process.stdin is not None
        try:
            for block in (parcel, shared):
                process.stdin.write(len(block).to_bytes(_LENGTH, "little"))
                process.stdin.write(block)
            process.stdin.flush()
            _wait(process, folder / _SAID, tell)  # its input stays open: its end tells it that this one has ended
        except BrokenPipeError:  # it ended at once; its output says why
            process.wait()
        except BaseException:
            process.kill()
            raise
    if (folder / _ANSWER).exists():
        return read_file(folder / _ANSWER, BYTES_AT_MOST)
    last = (folder / _LOG).read_text(errors="replace").strip().splitlines()[-_LINES:]
    error = f"its process on {where} ended with code {process.returncode} {'after: ' if last else 'and said nothing'}"
    return sealed(WorkerAnswer(head_of(parcel)["key"], where, "lost", error=error + " | ".join(last)))


@cache
def _kept() -> str:
    """A folder of this worker, which is removed when it ends."""
    folder = tempfile.TemporaryDirectory(prefix="relpos-data-")
    atexit.register(folder.cleanup)
    return folder.name


def _wait(process: subprocess.Popen[bytes], said: Path, tell: Tell | None) -> None:
    """Wait for a process, and pass on what it says."""
    last: Any = None
    while True:
        try:
            process.wait(None if tell is None else _BEAT)
            return
        except subprocess.TimeoutExpired:
            with contextlib.suppress(FileError):
                now = read_json(said, _SAID_AT_MOST)
                if now != last and tell is not None:
                    tell(now)
                    last = now


class _Says:
    """Writes a report into a file, at most one a beat."""

    def __init__(self, path: Path) -> None:
        self._path, self._next = path, 0.0

    def __call__(self, report: Any) -> None:
        if time.monotonic() >= self._next:
            with contextlib.suppress(WriteError, ArithmeticError):  # a loss that is nan is told by the record
                write_json(self._path, plain(report))
            self._next = time.monotonic() + _BEAT


def main() -> None:
    """The process of a trial: the parcel and the shared work come in, the answer is written to the folder."""
    folder, where = Path(sys.argv[1]), sys.argv[2]
    parcel, shared = _block(), _block()
    threading.Thread(target=_end_with_the_worker, daemon=True).start()
    head, packed = _split(parcel)
    files = folder / _FILES
    files.mkdir()
    try:
        if odd := _other_model(head, where):
            write_whole(folder / _ANSWER, sealed(WorkerAnswer(head["key"], where, "refused", error=odd)))
            return
        work = SharedWork(packed=shared or None, kept=Path(sys.argv[3]))
        if shared:
            work.opened()  # first, so that a worker without the data refuses
        function, arguments, reports = _Unpickler(io.BytesIO(packed), work, files).load()
        record = function(*arguments, *([_Says(folder / _SAID)] if reports else []))
        own = files / head["folder"] if head.get("folder") else None
        kept = {path.name: read_file(path, BYTES_AT_MOST) for path in sorted(own.iterdir())} if own else {}
        machine = _machine(head["device"])
        if isinstance(record, dict) and isinstance(record.get("environment"), dict):
            record["environment"]["host"] = machine["host"]
        answer = sealed(WorkerAnswer(head["key"], where, record=record, files=kept, machine=machine))
    except OtherDataError as error:
        answer = sealed(WorkerAnswer(head["key"], where, "refused", error=f"{error} ({where}) {_REMEDY}"))
    except WriteError as error:  # a full disk is no bug, and its one line needs no traceback
        answer = sealed(WorkerAnswer(head["key"], where, "lost", error=f"{error} ({where})"))
    except Exception:
        answer = sealed(WorkerAnswer(head["key"], where, "failed", error=traceback.format_exc()))
    write_whole(folder / _ANSWER, answer)


def _machine(device: str) -> dict[str, str]:
    """The name of this machine, and the processor or card that computes."""
    return {"host": platform.node()[:_LETTERS], "kind": environment(device).kind[:_LETTERS]}


def _other_model(head: dict[str, Any], where: str) -> str | None:
    """The line that refuses this machine because a library's model differs from the coordinator's."""
    name, model = head.get("model") or (None, None)
    here = None if name is None else LibraryModel(name).described()
    if here == model:
        return None
    return f"expected the model {model} on every worker; got {here} on {where}. Copy its folder there."


def _block() -> bytes:
    stream = sys.stdin.buffer
    length = int.from_bytes(stream.read(_LENGTH), "little")
    data = stream.read(length)
    if len(data) < length:  # the worker has ended
        raise SystemExit(1)
    return data


def _end_with_the_worker() -> None:
    sys.stdin.buffer.read(1)
    os._exit(1)
