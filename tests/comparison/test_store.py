"""A comparison's folder: files appear whole, records stay, other settings and other people's files are refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from relpos.comparison import store
from relpos.comparison.store import OtherSettingsError, Store, require_usable
from relpos.files.writing import PART, WriteError
from relpos.results import SCHEMA_VERSION

SETTINGS: dict[str, Any] = {"task": "digits", "seeds": 2, "recipe": {"steps": 400, "learning_rate": 0.003}}
HERE = {"torch": "2.13.0", "cores": 2}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_record_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "a" / "b", SETTINGS, HERE)
    assert not store.has("x--seed0")
    store.add("x--seed0", {"accuracy": 0.5, "curve": [1, 2]})
    assert store.has("x--seed0")
    assert store.get("x--seed0") == {"accuracy": 0.5, "curve": [1, 2]}
    head = json.loads((tmp_path / "a" / "b" / "comparison.json").read_text())
    assert head == {"schema_version": SCHEMA_VERSION, "settings": SETTINGS, "environment": HERE}


def test_the_same_settings_go_on_and_change_nothing(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE).add("x", [1])
    before = contents(tmp_path)
    assert Store(tmp_path, json.loads(json.dumps(SETTINGS)), HERE).get("x") == [1]
    assert contents(tmp_path) == before


def test_tuples_and_lists_are_the_same_settings(tmp_path: Path) -> None:
    Store(tmp_path, {"positions": ("none", "learned")}, HERE)
    Store(tmp_path, {"positions": ["none", "learned"]}, HERE)


@pytest.mark.parametrize(
    ("settings", "here", "named"),
    [
        ({**SETTINGS, "seeds": 3}, HERE, ["seeds was 2, now 3"]),
        (
            {**SETTINGS, "recipe": {"steps": 60, "learning_rate": 0.01}},
            HERE,
            ["recipe.steps was 400, now 60", "recipe.learning_rate was 0.003, now 0.01"],
        ),
        (SETTINGS, {**HERE, "torch": "2.14.0"}, ["environment.torch was '2.13.0', now '2.14.0'"]),
        ({**SETTINGS, "precision": "bf16-mixed"}, HERE, ["precision was None, now 'bf16-mixed'"]),
        ({"task": "digits", "recipe": SETTINGS["recipe"]}, HERE, ["seeds was 2, now None"]),
    ],
)
def test_other_settings_are_refused_by_name(
    settings: dict[str, Any], here: dict[str, Any], named: list[str], tmp_path: Path
) -> None:
    Store(tmp_path, SETTINGS, HERE).add("x", [1])
    before = contents(tmp_path)
    with pytest.raises(OtherSettingsError) as caught:
        Store(tmp_path, settings, here)
    message = str(caught.value)
    for one in named:
        assert one in message
    assert message.count(", now ") == len(named), "only what differs"
    assert "Choose another --out" in message
    assert "\n" not in message
    assert contents(tmp_path) == before


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(OtherSettingsError, match=r"holds other files. Choose another --out"):
        Store(tmp_path, SETTINGS, HERE)
    assert contents(tmp_path) == {"thesis.tex": b"mine"}


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(OtherSettingsError, match=r"is a file. Choose another --out"):
        Store(tmp_path / "out", SETTINGS, HERE)


def test_an_empty_folder_is_fine(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE)


def test_a_folder_cut_short_while_it_was_made_is_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as context:
        context.setattr(os, "link", killed)
        with pytest.raises(KeyboardInterrupt):
            Store(folder, SETTINGS, HERE)
    assert folder.exists()
    Store(folder, SETTINGS, HERE).add("x", [1])
    assert Store(folder, SETTINGS, HERE).get("x") == [1]


def test_a_half_written_record_is_no_record(tmp_path: Path) -> None:
    opened = Store(tmp_path, SETTINGS, HERE)
    half = tmp_path / "records" / f"{PART}0123.part"
    half.write_text('{"accuracy": 0.')
    os.utime(half, (0, 0))
    assert not opened.has("x")
    assert not Store(tmp_path, SETTINGS, HERE).has("x")
    assert not half.exists(), "swept"


def test_two_processes_in_one_folder_keep_the_first_record(tmp_path: Path) -> None:
    one, other = (Store(tmp_path, SETTINGS, HERE) for _ in range(2))
    one.add("timing", [1])
    other.add("timing", [2])
    assert one.get("timing") == other.get("timing") == [1]


def test_two_processes_begin_one_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other begins between the look whether it is begun and the beginning; of equal settings both go on."""
    real = store.write_json

    def overtaken(path: Path, tree: Any, **how: Any) -> None:
        monkeypatch.setattr(store, "write_json", real)
        Store(tmp_path, {**SETTINGS, "seeds": seeds}, HERE)
        real(path, tree, **how)

    seeds = 2
    monkeypatch.setattr(store, "write_json", overtaken)
    Store(tmp_path, SETTINGS, HERE).add("x", [1])
    shutil.rmtree(tmp_path)
    seeds = 5
    monkeypatch.setattr(store, "write_json", overtaken)
    with pytest.raises(OtherSettingsError, match="seeds was 5, now 2"):
        Store(tmp_path, SETTINGS, HERE)


def test_no_record_has_a_number_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match=r"expected finite numbers in .*x\.json"):
        Store(tmp_path, SETTINGS, HERE).add("x", {"loss": float("nan")})


def test_a_folder_that_cannot_be_written_is_known_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Store(tmp_path / "begun", SETTINGS, HERE)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    for name in ("begun", "new"):
        with pytest.raises(WriteError, match="No space left on device"):
            Store(tmp_path / name, SETTINGS, HERE)
        with pytest.raises(WriteError, match="No space left on device"):
            require_usable(tmp_path / name)
