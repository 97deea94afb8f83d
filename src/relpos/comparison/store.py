"""The folder of a comparison: a crash loses no finished work, and no other file is overwritten.

    DIR/comparison.json        settings and environment, written first
    DIR/records/*.json         one file per finished piece of work, written once and never changed
    DIR/results.json           all records together, rewritten whenever a piece finishes
    DIR/report.html            the page

Files appear whole (`files.writing`), even if two processes use one folder: an existing record stays. It is stored with
its checksum, `{"sha256": ..., "record": ...}`, because a digit that changed on the disk would be a wrong figure on the
page.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from pathlib import Path
from typing import Any

from relpos.core.checks import fail
from relpos.files.reading import MIB, FileError, fail_to_read, read_file, read_json
from relpos.files.writing import as_json, is_part, require_writable, sweep, write_json, write_whole
from relpos.results import SCHEMA_VERSION

_HEAD = "comparison.json"
_HEAD_AT_MOST, _RECORD_AT_MOST = 16 * MIB, 1024 * MIB
_SEALED = re.compile(rb'\{"sha256":"([0-9a-f]{64})","record":(.*)\}\n', re.DOTALL)
_NAMED, _LETTERS = 8, 100
"""How many settings a message names, and how many letters of each it shows."""
_NAME_AT_MOST = 160
"""Letters of a file's name; a schedule may name many layers, and systems take 255 bytes."""


def file_name(name: str) -> str:
    """A name as that of a file: without `~`, which shells and systems read in their own ways, and not too long."""
    plain = name.replace("~", ".")
    if len(plain) <= _NAME_AT_MOST:
        return plain
    digest = hashlib.sha256(name.encode()).hexdigest()[:12]
    return f"{plain[: _NAME_AT_MOST // 2]}-{digest}-{plain[-_NAME_AT_MOST // 4 :]}"


class OtherSettingsError(ValueError):
    """The folder holds a comparison with other settings, or something else."""


def _sealed(text: str) -> str:
    """The file's text: a record with its checksum."""
    return f'{{"sha256":"{hashlib.sha256(text.encode()).hexdigest()}","record":{text}}}\n'


def _unsealed(data: bytes) -> Any:
    """The record in a file's bytes.

    Raises:
        FileError: the bytes differ from those written.
    """
    found = _SEALED.fullmatch(data)
    if found is None:
        raise FileError("it is damaged, or of an earlier relpos: no record beside its checksum")
    if hashlib.sha256(found[2]).hexdigest() != found[1].decode():
        raise FileError("it is damaged: the record does not have the checksum beside it")
    return json.loads(found[2])


def _shown(value: Any) -> str:
    """A value, or the beginning of a long one, on one line."""
    text = repr(value)
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def _flat(tree: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict):
        return {name: tree}
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{name}.{key}" if name else str(key))
    return flat


def require_usable(folder: Path) -> None:
    """Raise if the folder cannot hold a comparison of any settings, or is not writable."""
    if folder.exists() and not folder.is_dir():
        raise OtherSettingsError(f"expected a folder for --out; {folder} is a file. Choose another --out.")
    begun = (folder / _HEAD).exists()
    if folder.exists() and not begun and not all(is_part(there) for there in folder.iterdir()):
        raise OtherSettingsError(
            f"expected an empty folder or a comparison to resume; {folder} holds other files. Choose another --out."
        )
    require_writable(folder)


class Store:
    """A comparison's folder, opened for one set of settings on one environment.

    Raises:
        OtherSettingsError: the folder holds other settings (the message says which differ), or other files.
        ValueError: its comparison.json is damaged.
        WriteError: nothing can be written there.
    """

    def __init__(self, folder: Path, settings: dict[str, Any], environment: dict[str, Any]) -> None:
        self.folder = folder
        self.head = {"schema_version": SCHEMA_VERSION, "settings": settings, "environment": environment}
        path = folder / _HEAD
        require_usable(folder)
        if path.exists():
            self._same(self._begun_with(path))
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():  # first, so that a folder interrupted here still counts as empty
            self._begin(path)
        records = folder / "records"
        if records.exists() and not records.is_dir():
            fail("a folder of records", f"the file {records}", "Choose another --out.")
        records.mkdir(exist_ok=True)
        require_writable(records)
        sweep(folder)
        sweep(records)

    def _begin(self, path: Path) -> None:
        try:
            write_json(path, self.head, indent=1, new=True)
        except FileExistsError:  # another process began at the same time
            self._same(self._begun_with(path))

    def _begun_with(self, path: Path) -> dict[str, Any]:
        expected, remedy = f"the {_HEAD} that a comparison begins with", "Choose another --out."
        try:
            there = read_json(path, _HEAD_AT_MOST)
        except FileError as error:
            fail_to_read(expected, path, error, remedy)
        if not isinstance(there, dict):
            fail_to_read(expected, path, f"it is {_shown(there)}, no object", remedy)
        return there

    def _same(self, there: dict[str, Any]) -> None:
        old, new = _flat(there), _flat(json.loads(json.dumps(self.head)))
        differing = [
            f"{_shown(name.removeprefix('settings.'))[1:-1]} was {_shown(old.get(name))}, now {_shown(new.get(name))}"
            for name in [*old, *(name for name in new if name not in old)]
            if old.get(name) != new.get(name)
        ]
        if differing:
            more = f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else ""
            raise OtherSettingsError(
                f"expected the settings that {self.folder} was begun with; these differ: "
                f"{'; '.join(differing[:_NAMED])}{more}. "
                "Choose another --out, or repeat the command it was begun with."
            )

    def _path(self, name: str) -> Path:
        return self.folder / "records" / f"{file_name(name)}.json"

    def has(self, name: str) -> bool:
        """Whether a piece of work is finished."""
        return self._path(name).exists()

    def finished(self, name: str) -> bool:
        """Whether a piece of work is finished and its record is intact.

        Raises:
            ValueError: the record is damaged.
        """
        if not self.has(name):
            return False
        self.get(name)
        return True

    def add(self, name: str, record: Any) -> None:
        """Store a finished piece of work; a record that another process stored meanwhile stays."""
        path = self._path(name)
        with contextlib.suppress(FileExistsError):
            write_whole(path, _sealed(as_json(path, record)), new=True)

    def get(self, name: str) -> Any:
        """The record of a finished piece of work.

        Raises:
            ValueError: the record is damaged.
        """
        path = self._path(name)
        try:
            return _unsealed(read_file(path, _RECORD_AT_MOST))
        except FileError as error:
            fail_to_read("a record that relpos wrote", path, error, "Remove it: the same command recreates it.")


def steps_of(folder: Path) -> int | None:
    """The training steps of the comparison begun in a folder; None if there is none to be read."""
    try:
        steps = read_json(folder / _HEAD, _HEAD_AT_MOST)["settings"]["recipe"]["steps"]
    except (FileError, OSError, KeyError, TypeError):
        return None
    return steps if isinstance(steps, int) else None
