"""A comparison whose coordinator runs in the background: `relpos compare --cluster tcp://HOST:8786 --detach`.

    DIR/coordinator.log      what it prints, for whoever attaches
    DIR/coordinator.json     its process, and the machine, which it writes as soon as it has all that it needs

The log is locked as long as that process has it open, so that the same command finds the coordinator, and finds none
where it has died.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from relpos.core.checks import fail
from relpos.files.reading import MIB, FileError, read_json
from relpos.files.writing import named, write_json

LOG, ABOUT = "coordinator.log", "coordinator.json"
_ITSELF = "RELPOS_COORDINATOR"
"""Set in the environment of a coordinator in the background."""
_POLL = 0.2
_ATTEMPTS = 5
_PATIENCE = 120.0
"""Seconds after which nobody waits for it to begin."""


def is_itself() -> bool:
    """Whether this process is a coordinator in the background."""
    return _ITSELF in os.environ


def begin(folder: Path) -> None:
    """Say that this process coordinates from now on, if it is one in the background."""
    if is_itself():
        write_json(folder / ABOUT, {"process": os.getpid(), "host": platform.node()})


def start(folder: Path, arguments: Sequence[str]) -> str:
    """Start `relpos` with these arguments in the background; the line that names it.

    Raises:
        ValueError: it ended at once; its last line says why. Or another began just now, or there are no locks here.
    """
    _require_locks()
    path = folder / LOG
    with named(path), path.open("ab") as log:
        _lock(log, path)
        log.truncate(0)
        (folder / ABOUT).unlink(missing_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-m", "relpos", *arguments],
            env=os.environ | {_ITSELF: "1", "PYTHONUNBUFFERED": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's signals are not for it
        )
    deadline = time.monotonic() + _PATIENCE
    while process.poll() is None and not (folder / ABOUT).exists() and time.monotonic() < deadline:
        time.sleep(_POLL)
    if process.poll():
        last = (path.read_text(errors="replace").strip().splitlines() or ["nothing"])[-1]
        fail("a coordinator in the background", f"one that ended with: {last}", f"{path} has all that it said.")
    process.returncode = 0  # it is left to itself; else Python warns that it still runs
    return (
        f"In the background: process {process.pid} on {platform.node()}; it writes {path}. The same command attaches."
    )


def running(folder: Path) -> str | None:
    """The coordinator that runs in the background for a folder, in words; None if there is none."""
    path = folder / LOG
    if is_itself() or sys.platform == "win32" or not path.exists():
        return None
    with path.open("rb") as log:
        if not _is_locked(log):
            return None
    try:
        about = read_json(folder / ABOUT, MIB)
        return f"process {about['process']} on {about['host']}"
    except (FileError, KeyError, TypeError):  # it has just begun
        return "another process"


def follow(folder: Path, say: Callable[[str], None]) -> None:
    """Pass on the lines of the coordinator in the background until it ends. An interruption ends only this."""
    with (folder / LOG).open(encoding="utf-8", errors="replace") as log:
        while True:
            ended = running(folder) is None
            for line in log:
                say(line.rstrip("\n"))
            if ended:
                return
            time.sleep(_POLL)


def _lock(log: IO[bytes], path: Path) -> None:
    """Lock the log, which whoever looks whether it is locked may hold for a moment.

    Raises:
        ValueError: another process has it, or its disk knows no locks. One line.
    """
    import fcntl

    for left in reversed(range(_ATTEMPTS)):
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                fail("one coordinator in the background", f"another that has {path}", "The same command attaches.")
            time.sleep(_POLL)
        except OSError as error:
            came = f"{path}: {error.strerror}"
            fail("a disk with locks of files for --detach", came, "Choose another --out, or leave --detach out.")
        else:
            return


def _is_locked(log: IO[bytes]) -> bool:
    """Whether a process has the log locked: by a lock that others may share, and that a file need not be written for.

    On NFS, a file that is opened for reading takes no other.
    """
    import fcntl

    try:
        fcntl.flock(log, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this disk, and no coordinator
        return False
    return False


def _require_locks() -> None:
    if sys.platform == "win32":
        fail("a system that locks files for --detach", "Windows", "Leave --detach out.")
