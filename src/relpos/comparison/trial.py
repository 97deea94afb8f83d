"""A piece of work on another machine: what is sent, how a worker does it, what it answers.

    trial(parcel, shared) -> answer

is the only function that an executor is given. The parcel has the task and its arguments; `shared`, which many parcels
have in common, the data and the functions. Both are pickled: a worker trusts whoever sends it work. The answer is not
(`answer.py`): whoever sends work need not trust the files of workers. Each piece runs in a process of its own, as on
one machine, and in a temporary folder. Threads of a worker share nothing, and it survives a crash of the work.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from relpos.adapters.library_models import LibraryModel
from relpos.comparison.answer import BYTES_AT_MOST, WorkerAnswer, sealed
from relpos.comparison.workers import WorkerTask, main_left_out
from relpos.data import Task
from relpos.files.reading import read_file
from relpos.files.writing import WriteError, write_whole
from relpos.train import Procedure
from relpos.version import __version__

_LENGTH = 8
_ANSWER, _FILES, _LOG = "answer", "files", "log"
_LINES = 3
"""How many last lines of a silent process's output are shown."""


@dataclass(frozen=True)
class SharedWork:
    """What pieces of work have in common: the task with its data, and the functions, pickled for other processes.

    Bytes avoid shared memory, which carries tensors and may be scarce.
    """

    packed: bytes | None = None
    here: tuple[Task, Procedure] | None = None

    def opened(self) -> tuple[Task, Procedure]:
        """The task and the procedure that builds, trains and measures."""
        if self.here is not None:
            return self.here
        assert self.packed is not None
        task, procedure, _ = pickle.loads(self.packed)  # the third makes mechanisms of files known in this process
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
        head: JSON values to be read without unpickling: "key", which names the work; "versions"; "cost", whether it
            measures time or memory; "alone", whether nothing may run beside it; "folder", the one within `folder` whose
            files come back; "model", the name of a library's model, and how it describes itself.
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


def trial(parcel: bytes, shared: bytes) -> bytes:
    """Do a piece of work in a process and a temporary folder of its own; its errors are answers, too."""
    head, where = head_of(parcel), worker_name()
    refused = differing(head["versions"], where)
    if refused is not None:
        return sealed(WorkerAnswer(head["key"], where, "refused", error=refused))
    try:
        with tempfile.TemporaryDirectory(prefix="relpos-trial-") as folder:
            return _answered(Path(folder), parcel, shared, where)
    except OSError as error:
        return sealed(WorkerAnswer(head["key"], where, "lost", error=f"{error} ({where})"))


def _answered(folder: Path, parcel: bytes, shared: bytes, where: str) -> bytes:
    program = "from relpos.comparison.trial import main; main()"
    path = os.pathsep.join(one or os.getcwd() for one in sys.path)  # as of this process, which may have added to it
    with (
        (folder / _LOG).open("wb") as log,
        subprocess.Popen(
            [sys.executable, "-P", "-c", program, folder, where],
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
            process.wait()  # its input stays open: its end tells the process that this one has ended
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
        work = SharedWork(packed=shared)
        function, arguments, reports = _Unpickler(io.BytesIO(packed), work, files).load()
        record = function(*arguments, *([_nothing] if reports else []))
        own = files / head["folder"] if head.get("folder") else None
        kept = {path.name: read_file(path, BYTES_AT_MOST) for path in sorted(own.iterdir())} if own else {}
        answer = sealed(WorkerAnswer(head["key"], where, record=record, files=kept))
    except WriteError as error:  # a full disk is no bug, and its one line needs no traceback
        answer = sealed(WorkerAnswer(head["key"], where, "lost", error=f"{error} ({where})"))
    except Exception:
        answer = sealed(WorkerAnswer(head["key"], where, "failed", error=traceback.format_exc()))
    write_whole(folder / _ANSWER, answer)


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


def _nothing(_: Any) -> None:
    pass
