"""A comparison's folder: files appear whole, records stay, other settings and other people's files are refused."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from damage import changed, cut_or_flipped, odd_files
from relpos.cli import main
from relpos.comparison import Comparison, ComparisonSettings, store
from relpos.comparison.settings import Job
from relpos.comparison.store import OtherSettingsError, Store, require_usable
from relpos.comparison.training import folder_of
from relpos.data import find_task
from relpos.files.writing import PART, WriteError
from relpos.results import SCHEMA_VERSION
from relpos_command.requests import CompareRequest

SETTINGS: dict[str, Any] = {"task": "digits", "seeds": 2, "recipe": {"steps": 400, "learning_rate": 0.003}}
HERE = {"torch": "2.13.0", "cores": 2}


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_folder_is_made_and_says_what_it_was_begun_with(tmp_path: Path) -> None:
    assert not Store(tmp_path / "a" / "b", SETTINGS, HERE).has("x")
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


@pytest.mark.parametrize(("file", "message"), [("out/thesis.tex", "holds other files"), ("out", "is a file")])
def test_what_is_anyones_is_refused_and_left_alone(file: str, message: str, tmp_path: Path) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text("mine")
    with pytest.raises(OtherSettingsError, match=rf"{message}. Choose another --out"):
        Store(tmp_path / "out", SETTINGS, HERE)
    assert contents(tmp_path) == {file: b"mine"}


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


# Damage: each is one line that names the file, fault and remedy, before training


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
    for damaged in cut_or_flipped(path.read_bytes(), 60):
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


def test_a_schedule_names_its_file_and_goes_on(tmp_path: Path) -> None:
    """Its name in a file has no `~`; a long one is cut, and stays its own."""
    names = [Job(name, 0, "recipe", 1.0).id for name in ("rotary_1d~none", "t5~" * 90 + "none", "t5~" * 91 + "none")]
    for number, name in enumerate(names):
        Store(tmp_path, SETTINGS, HERE).add(name, number)
    files = sorted(path.name for path in (tmp_path / "records").iterdir())
    assert len(files) == 3
    assert files[0] == "rotary_1d.none--recipe--seed0.json"
    assert all(len(name) < 180 and name.endswith("--seed0.json") and "~" not in name for name in files)
    assert [Store(tmp_path, SETTINGS, HERE).get(name) for name in names] == [0, 1, 2]
    assert sorted(f"{folder_of(name)}.json" for name in names) == [f"training/{file}" for file in files]


def test_files_are_regular(tmp_path: Path) -> None:
    store, path = store_with(tmp_path)
    for says in odd_files(path):
        refused(store, path)
        with pytest.raises(ValueError, match=rf"\({says}\)"):
            store.get("x")
    head = tmp_path / "comparison.json"
    for says in odd_files(head):
        with pytest.raises(ValueError, match=rf"^expected the comparison\.json .*; got .*{head} \({says}\)\. "):
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
    request = CompareRequest(positions=("none",), steps=3, device="cpu", quick=True)
    store = Comparison(ComparisonSettings.make(task, request), task, out).store
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
