"""The folder of a comparison: written so that a crash loses nothing finished, and nothing of anyone's is overwritten.

    DIR/comparison.json        settings and environment, written first
    DIR/records/*.json         one file a finished piece of work, written once and never again
    DIR/results.json           everything gathered, rewritten as pieces finish
    DIR/report.html            the page

Files appear whole (`relpos.files`), also where two processes work in one folder: a record that is there stays.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from relpos.files import is_part, require_writable, sweep, write_json

SCHEMA_VERSION = 1
_HEAD = "comparison.json"


class OtherSettingsError(ValueError):
    """The folder holds a comparison with other settings, or something else."""


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{name}.{key}" if name else str(key))
    return flat


def require_usable(folder: Path) -> None:
    """Raise where no comparison can be in a folder, whatever its settings, or where nothing can be written there."""
    if folder.exists() and not folder.is_dir():
        raise OtherSettingsError(f"expected a folder for --out; {folder} is a file. Choose another --out.")
    begun = (folder / _HEAD).exists()
    if folder.exists() and not begun and not all(is_part(there) for there in folder.iterdir()):
        raise OtherSettingsError(
            f"expected an empty folder or a comparison to go on with; {folder} holds other files. Choose another --out."
        )
    require_writable(folder)


class Store:
    """A comparison's folder, opened for one set of settings on one environment.

    Raises:
        OtherSettingsError: the folder holds other settings (the message says which differ), or other files.
        WriteError: nothing can be written there.
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
            self._begin(path)
        (folder / "records").mkdir(exist_ok=True)
        require_writable(folder / "records")
        sweep(folder)
        sweep(folder / "records")

    def _begin(self, path: Path) -> None:
        try:
            write_json(path, self.head, indent=1, new=True)
        except FileExistsError:  # another process has begun at this moment
            self._same(json.loads(path.read_text(encoding="utf-8")))

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
        """Keep a finished piece of work, for good: one that another process has kept meanwhile stays."""
        with contextlib.suppress(FileExistsError):
            write_json(self._path(name), record, new=True)

    def get(self, name: str) -> Any:
        """A finished piece of work."""
        return json.loads(self._path(name).read_text(encoding="utf-8"))
