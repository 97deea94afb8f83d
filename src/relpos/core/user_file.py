"""Read and run a Python file that the user named: `FILE.py:NAME`. Nothing else in relpos runs a file."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from relpos.core.checks import fail


def split_file(text: str) -> tuple[Path, str] | None:
    """The file and the name in it of `FILE.py:NAME`; None for other text."""
    file, colon, name = text.rpartition(":")
    if not colon or not file.endswith(".py") or not name.isidentifier():
        return None
    return Path(file).expanduser().resolve(), name


def read_source(path: Path) -> bytes:
    """The file's content.

    Raises:
        ValueError: it does not exist, or cannot be read.
    """
    if not path.is_file():
        fail("FILE.py:NAME of a file that is there", f"{path}, which is not", "Name another.")
    try:
        return path.read_bytes()
    except OSError as error:
        fail(f"{path} to be read", str(error.strerror), "Name another file.")


def load_name(path: Path, name: str, source: bytes, what: str = "a function") -> Any:
    """What a file defines under a name; the content given is run, once a process.

    Raises:
        ValueError: the file fails, or has no such name.
    """
    folder = str(path.parent)
    if folder not in sys.path:  # the file may import its neighbours
        sys.path.append(folder)
    digest = hashlib.sha256(str(path).encode() + b"\0" + source).hexdigest()[:16]
    module_name = f"_relpos_{path.stem}_{digest}"
    if module_name not in sys.modules:
        module = ModuleType(module_name)
        module.__file__ = str(path)
        sys.modules[module_name] = module
        try:
            exec(compile(source, path, "exec"), vars(module))
        except Exception as error:
            del sys.modules[module_name]
            said = f"{type(error).__name__}: {error}"
            raise ValueError(f"expected {path} to be imported; got {said}. Mend the file.") from error
    found = getattr(sys.modules[module_name], name, None)
    if found is None:
        fail(f"{what} {name} in {path}", "none", "Name one that the file has.")
    return found
