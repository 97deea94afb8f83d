"""Data that workers read themselves: the same by name and path, refused where they differ."""

import pickle
import sys
from pathlib import Path

import pytest
import torch
import work
from test_elsewhere import parcel

from relpos.comparison.answer import opened
from relpos.comparison.data_by_name import DataByName, OtherDataError
from relpos.comparison.trial import head_of, trial
from relpos.comparison.workers import WorkerTask
from relpos.data import Digits, Text, find_data
from relpos.train import OURS


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "own.txt"
    path.write_bytes(bytes(range(32, 127)) * 600)
    return path


def test_a_file_is_read_by_its_path_once(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    task, kept = Text(text.name), tmp_path / "kept"
    kept.mkdir()
    by_name = DataByName.of(task)
    assert by_name is not None
    monkeypatch.chdir("/")
    read = by_name.read(kept)
    assert torch.equal(next(read.batches(4, 0))[0], next(task.batches(4, 0))[0])
    text.unlink()
    assert by_name.read(kept).options == read.options, "it is kept"


def test_other_data_are_one_line(text: Path, tmp_path: Path) -> None:
    by_name = DataByName.of(Text(text))
    assert by_name is not None
    text.write_bytes(text.read_bytes()[:-1] + b"!")
    with pytest.raises(OtherDataError, match=r"^expected the text with which the comparison started; got another"):
        by_name.read(tmp_path)
    text.unlink()
    with pytest.raises(OtherDataError, match=r"own\.txt"):
        by_name.read(tmp_path)


def test_only_data_with_a_name_have_one() -> None:
    assert DataByName.of(Text()) is None, "it is small, and sent"
    assert DataByName.of(Digits()) == DataByName("digits", Digits().options)
    images = torch.zeros(8, 1, 16, 16), torch.zeros(8, dtype=torch.long)
    assert DataByName.of(find_data((images, images, images), patch=8)) is None


@pytest.mark.slow
def test_a_worker_without_the_data_refuses(text: Path, warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(warm))
    shared = pickle.dumps((DataByName.of(Text(text)), OURS, {}))
    task = WorkerTask("double", work.double, (21,))
    done = opened(trial(parcel(task), shared), head_of(parcel(task))["key"])
    assert (done.kind, done.record) == ("finished", 42)
    text.write_bytes(b"others")
    monkeypatch.setattr("relpos.comparison.trial._kept", lambda: str(text.parent))  # as of a worker that begins
    answer = opened(trial(parcel(task), shared), head_of(parcel(task))["key"])
    assert answer.kind == "refused"
    assert answer.error.endswith("must see the data by this path; or send them: --send-data.")
