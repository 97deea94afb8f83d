"""The options that choose a task: what goes with what, and that nothing is read or written before they fit."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from jsonargparse import Namespace
from rich.console import Console

import relpos.comparing.call as call
import relpos.data
from photographs import make_folder
from relpos.cli import main
from relpos.cli.task_choice import choose_task
from relpos.comparison import ComparisonSettings, default_folder

Captured = pytest.CaptureFixture[str]

USER_ERRORS: list[tuple[str, str]] = [
    ("compare --images DIR", r"unrecognized arguments: --images "),
    ("compare --text DIR", r"unrecognized arguments: --text "),
    ("compare --patch 4", r"a folder of images as data with patch; got digits\. Name the folder, or leave patch out"),
    ("compare --image-size 4 --rotate", r"a folder of images as data with image_size, rotate; got digits"),
    ("compare --data text --bad-images skip", r"a folder of images as data with bad_images; got text"),
    ("train --position none --out OUT --rotate", r"a folder of images as data with rotate; got digits"),
    (
        "compare --data DIR --image-size big",
        r"expected N or HxW for --image-size; got 'big'\. Write --image-size 64,",
    ),
    ("compare --data DIR --image-size -4", r"expected N or HxW for --image-size; got '-4'|expected one argument"),
    ("compare --data DIR --image-size 4x", r"expected N or HxW for --image-size; got '4x'"),
    ("compare --data DIR --patch 2x3x4", r"expected N or HxW for --patch; got '2x3x4'"),
    ("compare --data DIR --patch 0", r"patch to be an integer of at least 1; got int 0"),
    (
        "compare --data DIR --image-size 60",
        r"an image size that patches of 8 x 8 divide; got 60 x 60\. Take 56 or 64",
    ),
    (
        "compare --data DIR --max-pixels 0",
        r"--max-pixels: expected a whole number from 1 to 1,000,000,000,000; got '0'",
    ),
    ("compare --data DIR --max-pixels 1e8", r"argument --max-pixels: expected a whole number; got '1e8'"),
    ("compare --max-pixels 5", r"a folder of images as data with max_pixels; got digits"),
    (
        "compare --data DIR --bad-images leave",
        r"--bad-images: invalid choice: 'leave' \(choose from 'error', 'skip'\)",
    ),
    ("compare --data DIR", r"expected images in .*DIR, in a folder for each class; got no folders in it"),
    ("compare --data DIR/gone", r"expected data as a folder of images, .*; got .*gone, which does not exist"),
    ("train --position none --out OUT --data DIR/gone", r"expected data as .*; got .*gone, which does not exist"),
    ("compare --data", r"argument --data: expected one argument\. See relpos compare --help"),
]


@pytest.mark.parametrize(("typed", "says"), USER_ERRORS, ids=[typed for typed, _ in USER_ERRORS])
def test_a_users_error_is_one_line_and_exit_code_2(
    typed: str, says: str, tmp_path: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "DIR").mkdir()
    with pytest.raises(SystemExit) as caught:
        main(typed.replace("DIR", str(tmp_path / "DIR")).replace("OUT", str(tmp_path / "out")).split())
    assert caught.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("relpos: error: ")
    assert len(printed.err.splitlines()) == 1
    assert re.search(says, printed.err.replace(str(tmp_path), "")), printed.err
    assert [path.name for path in tmp_path.iterdir()] == ["DIR"], "nothing was written"


@pytest.mark.parametrize(
    "typed",
    [
        "compare --data DIR --positions relativ_2d",
        "compare --data DIR --seeds 0",
        "compare --data DIR --device gpu",
        "train --data DIR --position relativ_2d --out OUT",
        "train --data DIR --position none --out OUT --threads 0",
        "train --data DIR --position none --out OUT --device gpu",
    ],
)
def test_nothing_is_read_before_the_rest_fits(
    typed: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    def read(*_: object, **__: object) -> None:
        raise AssertionError("it reads images first")

    monkeypatch.setattr(relpos.data, "find_data", read)
    monkeypatch.setattr(call, "find_data", read)
    with pytest.raises(SystemExit) as caught:
        main(typed.replace("OUT", str(tmp_path / "out")).split())
    assert caught.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("folder", "named"), [("/a/my photos (2)", "my-photos-2-"), ("/a/cats", "cats"), ("/", "images"), ("/é", "é")]
)
def test_results_are_named_after_the_folder(folder: str, named: str) -> None:
    settings = ComparisonSettings("images", ("none",), 1, {"images": folder, "contents": "a"})
    found = default_folder(settings)
    assert re.fullmatch(rf"runs/{re.escape(named)}-[0-9a-f]{{8}}", found.as_posix())
    changed = ComparisonSettings("images", ("none",), 1, {"images": folder, "contents": "b"})
    assert default_folder(changed) != found, "other images, other results"
    assert default_folder(ComparisonSettings("digits", ("none",), 1)).name.startswith("digits-")


def test_reading_shows_how_far_it_is_on_a_terminal(tmp_path: Path) -> None:
    typed = Namespace(
        data=str(make_folder(tmp_path, 4)),
        image_size=None,
        patch=None,
        bad_images=None,
        max_pixels=None,
        rotate=False,
    )
    for terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=terminal, width=300)
        task = choose_task(typed, console)
        assert isinstance(console.file, io.StringIO)
        printed = console.file.getvalue()
        assert ("reading images" in printed) is terminal
        assert ("12/12" in printed) is terminal
        assert task.description in " ".join(printed.split())
