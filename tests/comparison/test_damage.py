"""Damage to a comparison's files: each is one line that names the file, fault and remedy, before training."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from damage import changed, cut_or_flipped, odd_files
from relpos.cli import main
from relpos.comparison import Comparison, ComparisonSettings
from relpos.comparison.store import OtherSettingsError, Store
from relpos.data import find_task

SETTINGS: dict[str, Any] = {"task": "digits", "seeds": 2, "recipe": {"steps": 400, "learning_rate": 0.003}}
HERE = {"torch": "2.13.0", "cores": 2}
RECORD: dict[str, Any] = {
    "id": "none--recipe--seed0",
    "position": "none",
    "seed": 0,
    "curve": {"step": [1, 2], "loss": [2.25, 1.5]},
    "metrics": [{"probe": "test", "growth": None, "accuracy": 0.5, "correct": [1, 0, 1]}],
    "learned": [],
    "what": "naïve\udcff",
}


def store_with(folder: Path, record: Any = RECORD) -> tuple[Store, Path]:
    store = Store(folder, SETTINGS, HERE)
    store.add("x", record)
    return store, folder / "records" / "x.json"


def refused(store: Store, path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        store.finished("x")
    says = rf"^expected a record that relpos wrote; got {re.escape(str(path))} \([^\n]*\)\. "
    assert re.search(says + r"Remove it: the same command recreates it\.$", str(caught.value)), str(caught.value)


@pytest.mark.parametrize("record", [RECORD, 12.5, None, [{"position": "none", "step_ms": None}]])
def test_a_record_comes_back_to_the_bit(record: Any, tmp_path: Path) -> None:
    store, path = store_with(tmp_path, record)
    assert store.finished("x")
    assert store.get("x") == record
    assert json.loads(path.read_text(encoding="utf-8"))["record"] == record


def test_cut_and_flipped_records_are_refused(tmp_path: Path) -> None:
    store, path = store_with(tmp_path)
    for damaged in cut_or_flipped(path.read_bytes(), 100):
        path.write_bytes(damaged)
        refused(store, path)


def test_records_with_anything_changed_are_refused(tmp_path: Path) -> None:
    store, path = store_with(tmp_path)
    whole = json.loads(path.read_text(encoding="utf-8"))
    trees = list(changed(whole))
    assert len(trees) > 200
    for tree in (*trees, RECORD, [], None, {}):
        path.write_text(json.dumps(tree, separators=(",", ":")) + "\n", encoding="utf-8")
        refused(store, path)


def test_a_record_is_a_regular_file(tmp_path: Path) -> None:
    store, path = store_with(tmp_path)
    for says in odd_files(path):
        refused(store, path)
        with pytest.raises(ValueError, match=rf"\({says}\)"):
            store.get("x")


def test_the_head_is_a_regular_file_with_json(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE)
    path = tmp_path / "comparison.json"
    for says in odd_files(path):
        with pytest.raises(
            ValueError, match=rf"^expected the comparison\.json .*; got .*comparison\.json \({says}\)\. "
        ):
            Store(tmp_path, SETTINGS, HERE)


def test_a_damaged_head_is_named_or_its_settings_are(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE)
    path = tmp_path / "comparison.json"
    whole = path.read_bytes()
    trees = [json.dumps(tree).encode() for tree in changed(json.loads(whole))]
    odd = [b"[]", b"null", b"3", b'{"a":' * 200 + b"1" + b"}" * 200, b"[" * 100_000, b'{"seeds": NaN}', b"1" * 5000]
    for damaged in (*trees, *odd, *cut_or_flipped(whole, 60)):
        path.write_bytes(damaged)
        try:
            same = json.loads(damaged) == json.loads(whole)
        except (ValueError, RecursionError):
            same = False
        if same:  # a blank that became another, or a key that is there twice
            continue
        with pytest.raises(ValueError) as caught:
            Store(tmp_path, SETTINGS, HERE)
        message = str(caught.value)
        assert "comparison.json" in message or isinstance(caught.value, OtherSettingsError), message
        assert "Choose another --out" in message
        assert "\n" not in message
        assert len(message) < 2000


def test_settings_of_any_length_make_a_short_message(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE)
    long = {"settings": {**SETTINGS, "task": "x" * 10**6, **{f"a{n}": n for n in range(1000)}}, "environment": HERE}
    (tmp_path / "comparison.json").write_text(json.dumps(long))
    with pytest.raises(OtherSettingsError, match=r"task was 'xxx.*and 99\d more") as caught:
        Store(tmp_path, SETTINGS, HERE)
    assert len(str(caught.value)) < 2000


def test_a_file_for_the_records_is_named(tmp_path: Path) -> None:
    Store(tmp_path, SETTINGS, HERE)
    (tmp_path / "records").rmdir()
    (tmp_path / "records").write_text("mine")
    with pytest.raises(
        ValueError, match=r"expected a folder of records; got the file .*records\. Choose another --out"
    ):
        Store(tmp_path, SETTINGS, HERE)


@pytest.mark.parametrize("name", ["records/none--recipe--seed0.json", "records/timing.json", "comparison.json"])
def test_the_command_names_the_file_before_it_trains(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, task = tmp_path / "out", find_task("digits")
    asked = (("none",), 1, 3, "cpu", "float32")
    store = Comparison(ComparisonSettings.make(task, *asked, quick=True), task, out).store
    for record in ("none--recipe--seed0", "timing"):
        store.add(record, RECORD)
    (out / name).write_text('{"half')
    with pytest.raises(SystemExit) as caught:
        main(["compare", "--positions", "none", "--steps", "3", "--quick", "--device", "cpu", "--out", str(out)])
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert len(printed.err.splitlines()) == 1
    assert str(out / name) in printed.err
    assert "bug" not in printed.err
