"""Read untrusted files: only regular ones, no larger than expected, and only valid JSON.

A pipe or a device would hang or never end, a sparse file can claim any size, and `json` accepts `NaN` and a thousand
brackets. Each raises a `FileError`, whose message says what the file is and follows its name: "it is a named pipe". The
caller adds what was expected and what to do.
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

from relpos.core.checks import fail, shape_of
from relpos_command.visible import visible

MIB = 2**20
DEEPEST = 100
"""The deepest allowed nesting of lists and objects."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class FileError(ValueError):
    """A file that cannot be read; the message, without its name, says why."""


def open_file(path: Path, at_most: int, remedy: str = "") -> io.BufferedReader:
    """Open a regular file for reading.

    Args:
        at_most: the most bytes allowed. remedy: advice if the file is larger, which follows a semicolon.

    Raises:
        FileError: it is something else, larger, or not readable.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FileError(f"it is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no regular file')}")
        if status.st_size > at_most:
            came = f"it has {status.st_size:,} bytes, more than {at_most:,}"
            raise FileError(f"{came}; {remedy}" if remedy else came)
        return path.open("rb")
    except OSError as error:
        raise FileError(f"it cannot be read: {error.strerror}") from None


def read_file(path: Path, at_most: int) -> bytes:
    """The bytes of a regular file, as many as its size states; errors as in `open_file`."""
    with open_file(path, at_most) as file:
        try:
            return file.read(os.fstat(file.fileno()).st_size)  # some in /proc state 0, and reading them blocks
        except OSError as error:
            raise FileError(f"it cannot be read: {error.strerror}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(digits: str) -> float:
    return number if math.isfinite(number := float(digits)) else _no_number(digits)


def _require_shallow(tree: Any) -> None:
    level = [tree]
    for _ in range(DEEPEST):
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [one for these in inside for one in these]
    if any(isinstance(one, dict | list) for one in level):
        raise ValueError(f"its brackets are nested more than {DEEPEST} deep")


def parse_json(text: bytes) -> Any:
    """Parse a JSON text.

    Raises:
        FileError: it is no JSON, has a NaN or an infinity, or is nested more than `DEEPEST` deep.
    """
    try:
        tree = json.loads(text.decode("utf-8"), parse_float=_finite, parse_constant=_no_number)
        _require_shallow(tree)
    except RecursionError:
        raise FileError(f"it is not readable JSON (its brackets are more than {DEEPEST} deep)") from None
    except ValueError as error:  # from JSON, UTF-8, or a number with thousands of digits
        raise FileError(f"it is not readable JSON ({error})") from None
    return tree


def read_json(path: Path, at_most: int) -> Any:
    """The value in a JSON file; errors as in `read_file` and `parse_json`."""
    return parse_json(read_file(path, at_most))


def path_of(x: object, what: str) -> Path:
    """The given path; it need not exist. `what` includes its article.

    Raises:
        ValueError: it is no path, or not a possible one.
    """
    remedy = "Pass a path as text, or a pathlib.Path."
    given = os.fspath(x) if isinstance(x, str | os.PathLike) else None
    if not isinstance(given, str) or "\0" in given:
        fail(what, shape_of(x), remedy)
    try:
        os.stat(given or ".")
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            fail(what, f"{given}: {error.strerror}", "Choose another.")
    return Path(given)


def require_utf8(path: Path, what: str) -> None:
    """Raise unless a path can be encoded for a page. `what` includes its article."""
    try:
        str(path).encode("utf-8")
    except UnicodeEncodeError:
        fail(f"{what} with a name in UTF-8", visible(str(path)), "Rename it.")


def fail_to_read(expected: str, path: Path, why: object, remedy: str) -> NoReturn:
    """Raise a `ValueError` that names the file, its fault, and the remedy."""
    fail(expected, f"{visible(str(path))} ({why})", remedy)
