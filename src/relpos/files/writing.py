"""Write files completely or not at all; if that fails, one line says why.

A file is written to the same folder under a unique name, synced, and renamed. So readers always find the old or a new
file, at any moment, and however many processes write it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from relpos_command.visible import visible

PART = ".relpos-"
"""The prefix of an unfinished file's name, which ends in .part."""
_OLD = 3600.0
"""Seconds after which an unfinished file counts as abandoned."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class WriteError(OSError):
    """A file cannot be written; the message says which, why, and what it needs."""

    def __init__(self, message: str, number: int | None) -> None:
        super().__init__(visible(message))
        self.errno = number

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.errno)


class UnwritableError(WriteError):
    """A folder is not writable, found before anything was written."""


@contextlib.contextmanager
def named(path: Path, size: int | None = None) -> Iterator[None]:
    """While a file is written, turn an `OSError` into a `WriteError` that names the file.

    Args:
        size: bytes that it needs, if known.
    """
    try:
        yield
    except (FileExistsError, WriteError):
        raise
    except OSError as error:
        why = error.strerror or str(error)
        message = f"expected to write {path}; got {why}."
        if error.errno in _FULL:
            message = _of_full_disk(path, why, size)
        raise WriteError(message, error.errno) from error


def _of_full_disk(path: Path, why: str, size: int | None) -> str:
    try:
        free = shutil.disk_usage(path.parent).free
    except OSError:  # the folder or its file system is gone
        size = None
    if size is None:
        return f"expected to write {path}; got {why}. Free some space."
    if free < size:
        return f"expected {_size(size)} free for {path}; got {_size(free)} ({why}). Free some space."
    full = f"{why}, with {_size(free)} free: the disk accepts no more files, or a quota is used up"
    return f"expected to write {path}; got {full}. Remove some files."


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents.

    Raises:
        UnwritableError: it cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RecursionError) as error:  # RecursionError: too many nested folders for Python
        why = (error.strerror if isinstance(error, OSError) else None) or "too many nested folders"
        message = f"expected a folder that can be made; got {folder}: {why}. Choose another."
        raise UnwritableError(message, getattr(error, "errno", None)) from error


def write_whole(path: Path, content: str | bytes, *, new: bool = False) -> None:
    """Write a file so that at every moment either the old or the new one exists completely.

    Args:
        new: do not replace an existing file, even if another process creates it meanwhile.

    Raises:
        WriteError: it cannot be written; nothing has changed.
        FileExistsError: it exists although `new` is set.
    """
    data = content.encode() if isinstance(content, str) else content
    beside = _beside(path.parent)
    with named(path, len(data)):
        try:
            with beside.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            _place(beside, path, new=new)
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()


def write_json(path: Path, tree: Any, *, indent: int | None = None, new: bool = False) -> None:
    """Write plain values as JSON, in the way of `write_whole`.

    Raises:
        ArithmeticError: a number is nan or inf, which JSON does not support.
        WriteError, FileExistsError: as in `write_whole`.
    """
    text = as_json(path, tree, indent=indent)
    write_whole(path, text + "\n", new=new)


def as_json(path: Path, tree: Any, *, indent: int | None = None) -> str:
    """Plain values as the JSON text of a file.

    Raises:
        ArithmeticError: a number is nan or inf, which JSON does not support.
    """
    try:
        return json.dumps(tree, allow_nan=False, indent=indent, separators=None if indent else (",", ":"))
    except ValueError as error:
        raise ArithmeticError(f"expected finite numbers in {path}; got nan or inf") from error


def require_writable(folder: Path, *, size: int = 0) -> None:
    """Raise an `UnwritableError` unless files of `size` bytes can be written in a folder.

    It leaves no trace: a missing folder is created as a test, then removed.
    """
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    beside = _beside(folder)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with beside.open("xb") as file:
                file.write(b"relpos")
                file.flush()
                os.fsync(file.fileno())
            free = shutil.disk_usage(folder).free
        finally:
            with contextlib.suppress(OSError):
                beside.unlink()
            for one in missing:  # deepest first
                with contextlib.suppress(OSError):
                    one.rmdir()
    except OSError as error:
        came = f"{folder}: {error.strerror or error}"
        message = f"expected a folder that can be written; got {came}. Choose another --out."
        raise UnwritableError(message, error.errno) from error
    if free < size:
        message = (
            f"expected {_size(size)} free in {folder}; got {_size(free)}. Free some space, or choose another --out."
        )
        raise UnwritableError(message, errno.ENOSPC)


def is_part(path: Path) -> bool:
    """Whether a file is an unfinished one of some writer."""
    return path.name.startswith(PART) and path.suffix == ".part"


def sweep(folder: Path) -> None:
    """Remove files that killed writers left in a folder."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            if is_part(path) and time.time() - path.stat().st_mtime > _OLD:
                path.unlink()


def _beside(folder: Path) -> Path:
    """A unique name, chosen before the file exists, so that an interruption leaves no file."""
    return folder / f"{PART}{secrets.token_hex(8)}.part"


def _place(beside: Path, path: Path, *, new: bool) -> None:
    if not new:
        os.replace(beside, path)
        return
    try:
        os.link(beside, path)
    except FileExistsError:
        raise
    except OSError:  # the file system has no links
        if path.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.replace(beside, path)


def _size(count: float) -> str:
    """ "312 bytes", "3.0 MiB"."""
    if count < 1024:
        return f"{count:.0f} bytes"
    for unit in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.1f} {unit}"
    return f"{count / 1024:.1f} EiB"
