"""Text as bytes: what is in a split, what a batch and a block are, and files of one's own."""

import errno
import os
import pickle
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch

from damage import odd_files
from relpos.data import Text, find_task
from relpos.data.documents import SHARES
from relpos.data.text import LENGTHS

LONG = bytes(range(256)) * 400


def test_pythons_documentation() -> None:
    task = Text()
    whole = b"".join(bytes(task.stream(split).tolist()) for split in ("train", "validation", "test"))
    assert task.sizes == {split: len(task.stream(split)) for split in ("train", "validation", "test")}
    every = sum(len(text.encode()) for text in topics.values())
    assert 0.7 * every < len(whole) < every, "a fifth or so is said more than once"
    for split, share in SHARES.items():
        assert 0.6 * share < task.sizes[split] / len(whole) < 1.6 * share
    assert b"for_stmt" in whole
    assert task.title == "Python's documentation"
    assert f"{task.sizes['train']:,} to train on" in task.description


def test_no_long_paragraph_is_in_two_splits() -> None:
    task = Text()
    paragraphs = [
        {part.strip() for part in bytes(task.stream(split).tolist()).split(b"\n\n") if len(part.strip()) >= 40}
        for split in ("train", "validation", "test")
    ]
    assert all(paragraphs)
    assert not paragraphs[0] & paragraphs[1]
    assert not (paragraphs[0] | paragraphs[1]) & paragraphs[2]


def test_batches_predict_the_byte_that_follows() -> None:
    task = Text()
    data = bytes(task.stream("train").tolist())
    batches = task.batches(5, seed=3)
    first, follows = next(batches)
    assert first.shape == follows.shape == (5, LENGTHS[0])
    assert torch.equal(first[:, 1:], follows[:, :-1])
    for row, last in zip(first, follows[:, -1], strict=True):
        assert bytes([*row.tolist(), int(last)]) in data
    assert not torch.equal(first, next(batches)[0])
    again, other = next(task.batches(5, seed=3))[0], next(task.batches(5, seed=4))[0]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_blocks_cover_the_split_once() -> None:
    task = Text()
    read, follows = task.blocks("test")
    data = task.stream("test")
    assert read.shape == follows.shape == ((len(data) - 1) // LENGTHS[-1], LENGTHS[-1])
    assert torch.equal(read.flatten(), data[: read.numel()])
    assert torch.equal(follows.flatten(), data[1 : read.numel() + 1])


def test_probes_ask_for_longer_and_longer_inputs() -> None:
    task = Text()
    assert [probe.length for probe in task.probes] == list(LENGTHS)
    assert [probe.group for probe in task.probes] == ["test", "length", "length", "length"]
    assert task.probes[0].size == task.size == LENGTHS[0]
    assert all(LENGTHS[-1] % length == 0 for length in LENGTHS)


def test_noise_is_a_batch_of_any_length() -> None:
    read, follows = Text().noise((512,), 3)
    assert read.shape == follows.shape == (3, 512)
    assert 0 <= read.min() <= read.max() < 256


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(LONG)
    task = find_task("text", {"text": str(path)})
    assert isinstance(task, Text)
    assert b"".join(bytes(task.stream(split).tolist()) for split in ("train", "validation", "test")) == LONG
    assert task.title == "mine.txt"
    assert task.options["text"] == str(path)
    assert find_task("text", task.options).options == task.options
    path.write_bytes(LONG[1:])
    with pytest.raises(ValueError, match="expected the text with which the comparison started; got another"):
        find_task("text", task.options)


def test_a_file_too_short_or_absent(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(LONG[:20_000])
    with pytest.raises(ValueError, match=r"expected a text of at least 5\d,\d{3} bytes; got .* with 20,000"):
        Text(path)
    with pytest.raises(ValueError, match=r"got .*absent\.txt, which does not exist\. Pass an existing one"):
        Text(tmp_path / "absent.txt")
    with pytest.raises(ValueError, match="expected options of the task text: text; got image_size"):
        find_task("text", {"image_size": 3})


def test_a_text_is_a_regular_file_of_a_size_that_memory_holds(tmp_path: Path) -> None:
    path = tmp_path / "mine.txt"
    path.write_bytes(LONG)
    for reason in odd_files(path):
        with pytest.raises(ValueError, match=rf"got .*mine\.txt.*{reason}.*\. (Name|Join)"):
            Text(path)


def test_a_text_that_may_not_be_read_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.txt").write_bytes(LONG)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)  # whoever runs the tests may be root, who reads everything
    with pytest.raises(ValueError, match=r"mine\.txt \(it cannot be read: Permission denied\)"):
        Text(tmp_path / "mine.txt")


def test_a_text_has_a_name_that_a_page_can_show(tmp_path: Path) -> None:
    path = tmp_path / "mine\udcff.txt"
    path.write_bytes(LONG)
    with pytest.raises(ValueError, match=r"a file with a name in UTF-8; got .*/mine\\udcff\.txt\. Rename it\."):
        Text(path)


def test_the_least_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "least.txt"
    least = int((2 * LENGTHS[-1] + 2) / SHARES["test"]) + 1
    path.write_bytes(b"x" * least)
    assert len(Text(path).blocks("test")[0]) >= 2


def test_it_travels_to_another_process() -> None:
    task = Text()
    other = pickle.loads(pickle.dumps(task))
    assert other.options == task.options
    assert torch.equal(other.stream("test"), task.stream("test"))
