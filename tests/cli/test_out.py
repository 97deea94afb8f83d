"""What the command writes: a folder that cannot be written is known before the work, a full disk is one line."""

from __future__ import annotations

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

import relpos.cli.train_verb as train_verb
import relpos.comparing.call as call
import relpos.viz.strips as drawing
from relpos.cli import main

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
TRAIN = ["train", "--position", "none", "--steps", "1", "--device", "cpu", "--out"]


def fail_with(number: int, monkeypatch: Patch, *, after: int = 0) -> None:
    """From the write after so many on, every one fails, and nothing is free."""
    real, usage, calls = os.fsync, shutil.disk_usage, []

    def failing(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    def free(folder: Path) -> Any:
        found = usage(folder)
        return found._replace(free=0) if len(calls) > after else found

    monkeypatch.setattr(os, "fsync", failing)
    monkeypatch.setattr(shutil, "disk_usage", free)


def line(typed: list[str], capsys: Captured) -> str:
    with pytest.raises(SystemExit) as caught:
        main(typed)
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said.startswith("relpos: error: ")
    return said.removeprefix("relpos: error: ").rstrip("\n")


@pytest.fixture(autouse=True)
def no_work(monkeypatch: Patch, tmp_path: Path) -> None:
    """No images are read, nothing is trained, measured or drawn."""
    monkeypatch.chdir(tmp_path)

    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("it works before it looks whether it may write")

    monkeypatch.setattr(train_verb, "choose_task", work)
    monkeypatch.setattr(call, "find_data", work)
    monkeypatch.setattr(drawing, "picture", work)
    monkeypatch.setattr("relpos.cli.bench_verb.watched", work)


@pytest.mark.parametrize(
    "typed",
    [
        [*TRAIN, "out"],
        ["compare", "--out", "out"],
        ["compare"],
        ["bench", "--cases", "windows", "--quick", "--out", "out"],
        ["bench", "--cases", "windows", "--quick"],
        ["show", "none", "--out", "x.png"],
        ["show", "none"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC])
def test_where_nothing_can_be_written_is_known_first(
    typed: list[str], number: int, tmp_path: Path, monkeypatch: Patch, capsys: Captured
) -> None:
    fail_with(number, monkeypatch)
    said = line(typed, capsys)
    assert re.fullmatch(
        rf"expected a folder that can be written; got .+: {os.strerror(number)}\. Choose another --out\.", said
    )
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def test_a_file_in_the_way_is_known_first(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "mine").write_text("mine")
    for typed in ([*TRAIN, "mine/out"], ["compare", "--out", "mine/out"]):
        assert line(typed, capsys) == (
            "expected a folder that can be written; got mine/out: Not a directory. Choose another --out."
        )


def test_too_little_space_for_the_weights_is_known_first(monkeypatch: Patch, capsys: Captured) -> None:
    from relpos.data import find_task

    monkeypatch.setattr(train_verb, "choose_task", lambda *_: find_task("digits"))
    monkeypatch.setattr("relpos.train.train", lambda *_, **__: pytest.fail("it trains first"))
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 0, 100))
    said = line([*TRAIN, "out"], capsys)
    assert re.fullmatch(
        r"expected [\d.]+ KiB free in out; got 100 bytes\. Free some space, or choose another --out\.", said
    )


def test_a_disk_that_fills_up_while_a_model_is_saved(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    from relpos.data import find_task

    monkeypatch.setattr(train_verb, "choose_task", lambda *_: find_task("digits"))
    fail_with(errno.ENOSPC, monkeypatch, after=3)
    said = line([*TRAIN, "out"], capsys)
    assert re.fullmatch(
        r"expected [\d.]+ KiB free for out/model\.safetensors; got .* \(No space left on device\)\. Free some space\. "
        r"What checkpoints hold is kept\.",
        said,
    )
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_fills_up_while_it_compares(tmp_path: Path, monkeypatch: Patch, capsys: Captured) -> None:
    from relpos.data import find_task
    from relpos.files.writing import write_json

    def working(tasks: Any, shown: Any) -> None:
        fail_with(errno.ENOSPC, monkeypatch)
        write_json(Path("out/results.json"), {})

    monkeypatch.setattr(call, "find_data", lambda *_, **__: find_task("digits"))
    monkeypatch.setattr("relpos.cli.console.watching", working)
    said = line(["compare", "--quick", "--positions", "none", "--out", "out"], capsys)
    assert re.fullmatch(
        r"expected 3 bytes free for out/results\.json; got .* \(No space left on device\)\. Free some space\. "
        r"What was finished is kept; the same command continues from there\.",
        said,
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.json", "records"]


def test_an_error_of_the_system_names_its_file(monkeypatch: Patch, capsys: Captured) -> None:
    def run(_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/socket")

    monkeypatch.setattr("relpos.cli.list_verb.run", run)
    assert line(["list", "positions"], capsys) == "No space left on device: /tmp/socket"
