"""The folder of a comparison: written so that a crash loses nothing finished, and nothing of anyone's is overwritten.

    DIR/comparison.json        settings and environment, written first
    DIR/records/*.json         one file a finished piece of work, written once and never again
    DIR/results.json           everything gathered, rewritten as pieces finish
    DIR/report.html            the page

Files appear whole: they are written beside their place, synchronised, and moved there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
_HEAD = "comparison.json"


class OtherSettingsError(ValueError):
    """The folder holds a comparison with other settings, or something else."""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that at every moment the old or the new one is there, whole."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{name}.{key}" if name else str(key))
    return flat


def require_usable(folder: Path) -> None:
    """Raise where no comparison can be in a folder, whatever its settings."""
    if folder.exists() and not folder.is_dir():
        raise OtherSettingsError(f"expected a folder for --out; {folder} is a file. Choose another --out.")
    begun = (folder / _HEAD).exists()
    if folder.exists() and not begun and any(there.name != _HEAD + ".part" for there in folder.iterdir()):
        raise OtherSettingsError(
            f"expected an empty folder or a comparison to go on with; {folder} holds other files. Choose another --out."
        )


class Store:
    """A comparison's folder, opened for one set of settings on one environment.

    Raises:
        OtherSettingsError: the folder holds other settings (the message says which differ), or other files.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], environment: dict[str, Any]) -> None:
        self.folder = folder
        self.head = {"schema_version": SCHEMA_VERSION, "settings": settings, "environment": environment}
        path = folder / _HEAD
        require_usable(folder)
        if path.exists():
            self._same(json.loads(path.read_text(encoding="utf-8")))
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # before anything else, so that a folder cut short here is still taken for an empty one
            write_whole(path, json.dumps(self.head, indent=1) + "\n")
        (folder / "records").mkdir(exist_ok=True)

    def _same(self, there: dict[str, Any]) -> None:
        old, new = _flat(there), _flat(json.loads(json.dumps(self.head)))
        differing = [
            f"{name.removeprefix('settings.')} was {old.get(name)!r}, now {new.get(name)!r}"
            for name in [*old, *(name for name in new if name not in old)]
            if old.get(name) != new.get(name)
        ]
        if differing:
            raise OtherSettingsError(
                f"expected the settings that {self.folder} was begun with; these differ: {'; '.join(differing)}. "
                "Choose another --out, or repeat the call it was begun with."
            )

    def _path(self, name: str) -> Path:
        return self.folder / "records" / f"{name}.json"

    def has(self, name: str) -> bool:
        """Whether a piece of work is finished."""
        return self._path(name).exists()

    def add(self, name: str, record: Any) -> None:
        """Keep a finished piece of work, for good."""
        write_whole(self._path(name), json.dumps(record, separators=(",", ":")) + "\n")

    def get(self, name: str) -> Any:
        """A finished piece of work."""
        return json.loads(self._path(name).read_text(encoding="utf-8"))
