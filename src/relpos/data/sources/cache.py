"""A bounded folder of files that were fetched, shared by the processes of one machine.

    DIR/6b86b273ff34fce1.file     a whole file, named by the hash of its key
    DIR/6b86b273ff34fce1.part     the same while it is written, by the one process that holds its lock
    DIR/6b86b273ff34fce1.lock     empty; the system frees its lock when a process ends, however it ends

A file is complete once it has its name, because renaming is atomic. Reading marks it as used (its time of change); if
all files together are larger than the limit, those used longest ago go. A process that still reads one keeps it until
it has closed it. If the disk is full or refuses to write, the cache is turned off with one line and nothing else
changes.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from relpos.core.checks import fail
from relpos_command.visible import visible

BinaryFile = IO[bytes] | io.RawIOBase
_BLOCK = 2**20
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE = "20GB"
"""The usual limit."""


def bytes_of(size: str | int) -> int:
    """`"20GB"` in bytes: a whole number, and kB, MB, GB or TB, which are powers of ten, or nothing for bytes."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?B)?", str(size).strip().upper())
    count = 0 if match is None else int(match[1]) * _UNITS[match[2] or "B"]
    if count < 1:
        fail("a size such as 20GB or 500MB for the cache", repr(size), "Write a number and kB, MB, GB or TB.")
    return count


class DiskCache:
    """See the module's docstring.

    Args:
        folder: made if it is not there. at_most: bytes of all files together.
    """

    def __init__(self, folder: str | Path, at_most: int) -> None:
        self.folder, self.at_most = Path(folder).expanduser().absolute(), at_most
        self._off = False

    def open(self, key: str, fetch: Callable[[], BinaryFile]) -> BinaryFile | None:
        """The file of this key, fetched if it is not there; None if it cannot be kept.

        Args:
            fetch: opens what is kept; its errors are raised.
        """
        if self._off:
            return None
        name = hashlib.sha256(key.encode()).hexdigest()[:16]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            kept = self._kept(name)
            if kept is not None:
                return kept
            with self._locked(name):  # whoever waits here finds the file that another process has written
                kept = self._kept(name)
                return self._written(name, fetch) if kept is None else kept
        except _FullDiskError as error:
            self._turn_off(error.reason)
        except OSError as error:
            self._turn_off(error.strerror or str(error))
        return None

    def _kept(self, name: str) -> BinaryFile | None:
        with suppress(FileNotFoundError):
            file = (self.folder / f"{name}.file").open("rb")
            with suppress(OSError):  # it may have been removed since, or belong to another user
                os.utime(self.folder / f"{name}.file")
            return file
        return None

    def _written(self, name: str, fetch: Callable[[], BinaryFile]) -> BinaryFile | None:
        part, whole = self.folder / f"{name}.part", self.folder / f"{name}.file"
        try:
            with fetch() as source, _writing(part) as write:
                size = 0
                while size <= self.at_most and (block := source.read(_BLOCK)):
                    size += len(block)
                    write(block)
            if size > self.at_most:  # larger than all of the cache
                part.unlink()
                return None
            os.replace(part, whole)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        file = whole.open("rb")
        self._evict(whole)
        return file

    def _evict(self, newest: Path) -> None:
        """Remove the files used longest ago until the others fit."""
        with self._locked("evict"):
            found = []
            for path in self.folder.glob("*.file"):
                with suppress(FileNotFoundError):
                    status = path.stat()
                    found.append((path != newest, status.st_mtime_ns, status.st_size, path))
            left = sum(size for _, _, size, _ in found)
            for part in self.folder.glob("*.part"):  # of a process that was killed
                with self._locked(part.stem, wait=False) as mine:
                    if mine:
                        part.unlink(missing_ok=True)
            for is_older, _, size, path in sorted(found, key=lambda one: one[1]):
                if left > self.at_most and is_older:
                    path.unlink(missing_ok=True)
                    left -= size

    @contextmanager
    def _locked(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of this name; gives whether it is held."""
        try:
            import fcntl
        except ImportError:  # Windows: two processes may fetch the same, and rename it one after the other
            yield wait
            return
        with (self.folder / f"{name}.lock").open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            except BlockingIOError:
                yield False
                return
            yield True

    def _turn_off(self, why: str) -> None:
        self._off = True
        warnings.warn(
            f"the cache {visible(str(self.folder))} is not used: {why}; shards are fetched without it",
            RuntimeWarning,
            stacklevel=2,
        )


class _FullDiskError(Exception):
    """The cache's own file cannot be written."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _writing(part: Path) -> Iterator[Callable[[bytes], object]]:
    """A function that writes to a new file; its errors are told from those of what is read meanwhile."""
    try:
        file = part.open("wb")
    except OSError as error:
        raise _FullDiskError(error.strerror or str(error)) from None

    def write(block: bytes) -> None:
        try:
            file.write(block)
        except OSError as error:
            raise _FullDiskError(error.strerror or str(error)) from None

    try:
        yield write
    finally:
        try:
            file.close()
        except OSError as error:
            raise _FullDiskError(error.strerror or str(error)) from None
