"""What the command writes: a folder that cannot be written is known before the work, a full disk is one line."""

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relpos.cli.train_verb as train_verb
import relpos.comparison.entry as call
import relpos.report.drawing.mechanism_picture as drawing
from relpos.data import find_task
from relpos.files.writing import write_json

Refused = Callable[..., str]
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
    ("typed", "number"),
    [
        ([*TRAIN, "out"], errno.EACCES),
        (["compare", "--out", "out"], errno.EROFS),
        (["compare"], errno.ENOSPC),
        (["bench", "--cases", "windows", "--quick", "--out", "out"], errno.EACCES),
        (["bench", "--cases", "windows", "--quick"], errno.EROFS),
        (["show", "none", "--out", "x.png"], errno.ENOSPC),
        (["show", "none"], errno.EACCES),
    ],
)
def test_where_nothing_can_be_written_is_known_first(
    typed: list[str], number: int, tmp_path: Path, monkeypatch: Patch, refused: Refused
) -> None:
    fail_with(number, monkeypatch)
    wanted = rf"expected a folder that can be written; got .+: {os.strerror(number)}\. Choose another --out\."
    assert re.fullmatch(wanted, refused(typed))
    assert not list(tmp_path.iterdir()), "nothing is left behind"


@pytest.mark.parametrize("typed", [[*TRAIN, "mine/out"], ["compare", "--out", "mine/out"]], ids=["train", "compare"])
def test_a_file_in_the_way_is_known_first(typed: list[str], tmp_path: Path, refused: Refused) -> None:
    (tmp_path / "mine").write_text("mine")
    wanted = "expected a folder that can be written; got mine/out: Not a directory. Choose another --out."
    assert refused(typed) == wanted


def test_too_little_space_for_the_weights_is_known_first(monkeypatch: Patch, refused: Refused) -> None:
    monkeypatch.setattr(train_verb, "choose_task", lambda *_: find_task("digits"))
    monkeypatch.setattr("relpos.train.train", lambda *_, **__: pytest.fail("it trains first"))
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(100, 0, 100))
    wanted = r"expected [\d.]+ KiB free in out; got 100 bytes\. Free some space, or choose another --out\."
    assert re.fullmatch(wanted, refused([*TRAIN, "out"]))


@pytest.mark.slow
def test_a_disk_that_fills_up_while_a_model_is_saved(tmp_path: Path, monkeypatch: Patch, refused: Refused) -> None:
    monkeypatch.setattr(train_verb, "choose_task", lambda *_: find_task("digits"))
    fail_with(errno.ENOSPC, monkeypatch, after=3)
    assert re.fullmatch(
        r"expected [\d.]+ KiB free for out/model\.safetensors; got .* \(No space left on device\)\. Free some space\. "
        r"Checkpoints are kept\.",
        refused([*TRAIN, "out"], begun=True),
    )
    assert not list((tmp_path / "out").iterdir())


def test_a_disk_that_fills_up_while_it_compares(tmp_path: Path, monkeypatch: Patch, refused: Refused) -> None:
    def working(tasks: Any, shown: Any) -> None:
        fail_with(errno.ENOSPC, monkeypatch)
        write_json(Path("out/results.json"), {})

    monkeypatch.setattr(call, "find_data", lambda *_, **__: find_task("digits"))
    monkeypatch.setattr("relpos.cli.bar_display.watching", working)
    assert re.fullmatch(
        r"expected 3 bytes free for out/results\.json; got .* \(No space left on device\)\. Free some space\. "
        r"Finished work is kept; the same command continues from there\.",
        refused("compare --quick --positions none --out out", begun=True),
    )
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["comparison.json", "records"]
