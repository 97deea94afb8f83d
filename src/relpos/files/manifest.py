"""A folder with a manifest of all its files, with size and SHA-256: damage is found before any file is used.

manifest.json   {"format": ..., "files": {"model.safetensors": {"size": 1024, "sha256": "9f86d0..."}, ...}, ...}
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

from relpos.files.reading import MIB, FileError, fail_to_read, open_file, read_json
from relpos.files.writing import write_json

MANIFEST = "manifest.json"
_FORMAT = "relpos manifest 1"
_AT_MOST = 16 * MIB
_PIECE = 4 * MIB


def seal(folder: Path, about: dict[str, Any]) -> None:
    """Write the manifest of the files in a folder, and sync the folder to the disk.

    Args:
        about: more entries for the manifest.

    Raises:
        WriteError: it cannot be written.
    """
    files = {path.name: {"size": path.stat().st_size, "sha256": digest_of(path)} for path in sorted(folder.iterdir())}
    write_json(folder / MANIFEST, {"format": _FORMAT} | about | {"files": files}, indent=1, new=True)
    sync(folder)


def sync(folder: Path) -> None:
    """Sync a folder's file names to the disk, if the system supports it."""
    if os.name == "nt":
        return  # Windows cannot open a folder
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fault_of(folder: Path) -> str | None:
    """Why the files of a folder differ from its manifest, or None if they agree."""
    try:
        listed = _listed(folder)
        for name, wanted in listed.items():
            _compare(folder / name, wanted)
        more = sorted(
            path.name
            for path in folder.iterdir()
            if path.name not in listed and path.name != MANIFEST and not path.name.startswith(".")  # system files
        )
    except (FileError, OSError) as error:
        return str(error)
    return f"it has {more[0]}, which its {MANIFEST} does not name" if more else None


def require_sound(path: Path, remedy: str) -> None:
    """Raise if a file differs from the manifest beside it; without a manifest of relpos, do nothing."""
    if not (path.parent / MANIFEST).exists():
        return
    try:
        tree = read_json(path.parent / MANIFEST, _AT_MOST)
        if not isinstance(tree, dict) or tree.get("format") != _FORMAT:
            return  # of another program
        listed = _listed(path.parent)
        if path.name not in listed:
            raise FileError(f"the {MANIFEST} beside it does not name it")
        _compare(path, listed[path.name])
    except FileError as error:
        fail_to_read(f"the file that the {MANIFEST} beside it names", path, error, remedy)


def _listed(folder: Path) -> dict[str, dict[str, Any]]:
    tree = read_json(folder / MANIFEST, _AT_MOST)
    files = tree.get("files") if isinstance(tree, dict) else None
    if not isinstance(files, dict) or not files:
        raise FileError(f"its {MANIFEST} names no files")
    for name, wanted in files.items():
        plain = Path(name).name == name and isinstance(wanted, dict)
        if not plain or not isinstance(wanted.get("size"), int) or not isinstance(wanted.get("sha256"), str):
            raise FileError(f"its {MANIFEST} does not say what {name!r} is")
    return files


def _compare(path: Path, wanted: dict[str, Any]) -> None:
    if not path.exists():
        raise FileError(f"{path.name} is missing")
    size = path.stat().st_size
    if size != wanted["size"]:
        raise FileError(f"{path.name} has {size:,} bytes, not {wanted['size']:,}")
    if digest_of(path) != wanted["sha256"]:
        raise FileError(f"{path.name} has another SHA-256")


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    found = hashlib.sha256()
    with open_file(path, path.stat().st_size) as file:
        while piece := file.read(_PIECE):
            found.update(piece)
    return found.hexdigest()
