"""A training run in several processes, as `relpos train --devices N` starts them.

This process is the launcher: it serves the store by which the processes find each other, as torchrun does, and ends
all of them if one fails. Process 0 trains, measures and answers; the others train with it and end.

    launcher  --  store (TCP)       rank 0, 1, ..., N - 1 find each other
              --  connection        rank 0 reports, and sends its record
              --  standard input    of each: its end tells it that the launcher has ended
"""

from __future__ import annotations

import contextlib
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from relpos.comparison.workers import WorkerError, main_left_out

_WORK, _LOG = "work", "log"
_POLL = 0.1
_LATE = 30.0
"""Seconds in which the answer of a process that has ended must be read."""
_LINES = 3
"""How many last lines of a silent process's output are shown."""


def run_in_processes(count: int, function: Callable[..., Any], *arguments: Any, report: Callable[[Any], None]) -> Any:
    """Call `function(*arguments, report)` in `count` processes that know each other; the result of the first.

    Args:
        function: of a module, like its arguments; in process r it finds r and `count` in the environment, as torchrun
            sets it. report: receives what the first process reports.

    Raises:
        WorkerError: a process failed; the others are stopped.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    with tempfile.TemporaryDirectory(prefix="relpos-several-") as name:
        folder, key = Path(name), secrets.token_bytes(32)
        with Listener(authkey=key) as listener, contextlib.ExitStack() as started:
            with main_left_out():
                (folder / _WORK).write_bytes(pickle.dumps((listener.address, key, function, arguments)))
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            said: Queue[tuple[str, Any]] = Queue()
            listening = threading.Thread(target=_listen, args=(listener, said), daemon=True)
            listening.start()
            processes = [started.enter_context(_process(rank, count, store.port, folder)) for rank in range(count)]
            while True:
                with contextlib.suppress(Empty):
                    kind, value = said.get(timeout=_POLL)
                    if kind == "finished":
                        return value
                    if kind == "failed":
                        raise WorkerError(value)
                    report(value)
                    continue
                if processes[0].poll() == 0:  # its answer may still be read
                    listening.join(_LATE)
                    if not said.empty():
                        continue
                for rank, process in enumerate(processes):
                    if process.poll() or (rank == 0 and process.poll() == 0 and said.empty()):
                        raise WorkerError(_silent(rank, process.returncode, folder, said))


@contextlib.contextmanager
def _process(rank: int, count: int, port: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the run while this block runs."""
    known = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    environment = {
        **os.environ,
        **{name: str(value) for name, value in known.items()},
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "PYTHONPATH": os.pathsep.join(one or os.getcwd() for one in sys.path),
    }
    program = [sys.executable, "-P", "-c", "from relpos.comparison.several import main; main()", str(folder)]
    with (folder / f"{_LOG}{rank}").open("wb") as log:
        process = subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def _listen(listener: Listener, said: Queue[tuple[str, Any]]) -> None:
    """Queue what the first process sends, until it has ended."""
    with contextlib.suppress(OSError, EOFError), listener.accept() as connection:
        while True:
            said.put(connection.recv())


def _silent(rank: int, code: int, folder: Path, said: Queue[tuple[str, Any]]) -> str:
    """Why a process that ended did so: by the error that the first one sends, or by its last lines."""
    time.sleep(_POLL)
    with contextlib.suppress(Empty):
        while True:
            kind, value = said.get_nowait()
            if kind == "failed":
                return str(value)
    last = (folder / f"{_LOG}{rank}").read_text(errors="replace").strip().splitlines()[-_LINES:]
    return f"process {rank} ended with code {code} {'after: ' if last else 'and said nothing'}{' | '.join(last)}"


def main() -> None:
    """A process of the run."""
    threading.Thread(target=_end_with_the_launcher, daemon=True).start()
    address, key, function, arguments = pickle.loads((Path(sys.argv[1]) / _WORK).read_bytes())
    if os.environ["RANK"] != "0":
        function(*arguments, _nothing)
    else:
        with Client(address, authkey=key) as connection:
            _answer(connection, function, arguments)
    sys.stdout.flush()
    os._exit(0)  # without waiting for the others, which may still train or be gone


def _answer(connection: Connection, function: Callable[..., Any], arguments: Any) -> None:
    try:
        connection.send(("finished", function(*arguments, lambda report: connection.send(("progress", report)))))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        raise


def _end_with_the_launcher() -> None:
    sys.stdin.buffer.read(1)
    os._exit(1)


def _nothing(_: Any) -> None:
    pass
