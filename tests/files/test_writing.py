"""Files appear whole or not at all, by however many processes, and where they cannot be written one line says why."""

import errno
import os
import pickle
import shutil
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relpos.files.writing import PART, WriteError, require_writable, sweep, write_json, write_whole


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_text_and_bytes(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "ü")
    write_whole(tmp_path / "b", b"\xff")
    assert ((tmp_path / "a").read_bytes(), (tmp_path / "b").read_bytes()) == ("ü".encode(), b"\xff")


@pytest.mark.parametrize("name", ["replace", "fsync"])
@pytest.mark.parametrize(("failure", "raised"), [(killed, KeyboardInterrupt), (full, WriteError)])
def test_a_write_that_fails_leaves_the_old_file_whole_and_nothing_beside_it(
    name: str, failure: Any, raised: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.json"
    write_whole(path, "old")
    with monkeypatch.context() as context:
        context.setattr(os, name, failure)
        with pytest.raises(raised):
            write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
    write_whole(path, "new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("free", "said"),
    [
        (2**20, "expected 3.0 MiB free for {}; got 1.0 MiB (No space left on device). Free some space."),
        (2**30, "expected to write {}; got No space left on device, with 1.0 GiB free: the disk accepts no more "
                "files, or a quota is used up. Remove some files."),
        (None, "expected to write {}; got No space left on device. Free some space."),
    ],
    ids=["full", "no more files", "the folder is gone"],
)  # fmt: skip
def test_a_write_without_space_is_one_line_with_the_file_and_what_it_needs(
    free: int | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", full)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: full() if free is None else SimpleNamespace(free=free))
    with pytest.raises(WriteError) as caught:
        write_whole(tmp_path / "results.json", "x" * 3 * 2**20)
    assert (str(caught.value), caught.value.errno) == (said.format(tmp_path / "results.json"), errno.ENOSPC)


def test_an_error_of_writing_travels_between_processes() -> None:
    error = pickle.loads(pickle.dumps(WriteError("expected; got. Do.", errno.ENOSPC)))
    assert (str(error), error.errno, type(error)) == ("expected; got. Do.", errno.ENOSPC, WriteError)


def test_another_failure_names_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match=r"expected to write .*/file/x\.json; got Not a directory"):
        write_whole(tmp_path / "file" / "x.json", "x")


def test_files_are_synchronised_before_they_take_their_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real: (calls.append(name), real(*a))[1])
    write_whole(tmp_path / "x", "text")
    assert calls == ["fsync", "replace"]


def test_writers_of_one_file_do_not_meet(tmp_path: Path) -> None:
    """Each has a file of its own beside it: what stands in the end, and at every moment, is one of theirs, whole."""
    path = tmp_path / "results.json"
    texts = {letter * 50_000 for letter in "abcd"}
    wrong: list[str] = []

    def write(text: str) -> None:
        try:
            for _ in range(25):
                write_whole(path, text)
                if path.read_text() not in texts:
                    wrong.append("torn")
        except OSError as error:
            wrong.append(str(error))

    threads = [threading.Thread(target=write, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("links", [True, False])
def test_a_new_file_replaces_none(links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not links:  # as on some file systems

        def no_links(*_: object) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
    write_whole(tmp_path / "x", "first", new=True)
    with pytest.raises(FileExistsError):
        write_whole(tmp_path / "x", "second", new=True)
    assert (tmp_path / "x").read_text() == "first"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_file_is_readable_by_whoever_may_read_a_new_one(tmp_path: Path) -> None:
    write_whole(tmp_path / "a", "x")
    (tmp_path / "b").write_text("x")
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_a_long_name_leaves_room_for_none_beside_it(tmp_path: Path) -> None:
    write_whole(tmp_path / ("x" * 250 + ".json"), "x")


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_no_json_has_a_number_that_is_none(number: float, tmp_path: Path) -> None:
    with pytest.raises(ArithmeticError, match=r"expected finite numbers in .*x\.json"):
        write_json(tmp_path / "x.json", {"a": [1.0, number]})
    assert not list(tmp_path.iterdir())


def test_what_killed_writers_left_is_swept_once_it_is_old(tmp_path: Path) -> None:
    old, fresh, other = (tmp_path / name for name in (f"{PART}1.part", f"{PART}2.part", "mine.part"))
    for path in (old, fresh, other):
        path.write_text("half")
    for path in (old, other):
        os.utime(path, (time.time() - 7200,) * 2)
    sweep(tmp_path)
    assert set(tmp_path.iterdir()) == {fresh, other}


def test_a_folder_that_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    require_writable(tmp_path)
    require_writable(tmp_path / "deep" / "er")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("made", [True, False])
def test_a_folder_that_cannot_be_written_is_refused(
    made: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    if made:
        folder.mkdir()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(WriteError, match=r"^expected a folder that can be written; got .*out: No space left on dev"):
        require_writable(folder)
    assert folder.exists() == made
    assert not made or not list(folder.iterdir())


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(WriteError, match=r"expected a folder that can be written; got .*file/out: Not a directory"):
        require_writable(tmp_path / "file" / "out")


def test_too_little_space_is_known_before(tmp_path: Path) -> None:
    with pytest.raises(WriteError, match=r"expected 8\.0 EiB free in .*; got .*\. Free some space"):
        require_writable(tmp_path / "out", size=2**63)
    assert not list(tmp_path.iterdir())
