"""Documents of a text: packed with their borders or joined, of a file or handed over."""

from pathlib import Path
from typing import Any

import pytest
import torch

from relpos.data import Text, find_data, find_task
from relpos.data.documents import SOURCES, Documents, in_three
from relpos.data.text import IGNORED, LENGTHS, PackedTokens

ONE = "Once upon a time, there was a wolf. " * 30
TALES = {split: [f"{split} {number}: {ONE}" for number in range(count)] for split, count in (
    ("train", 9), ("validation", 5), ("test", 9)
)}  # fmt: skip


def tales(**changes: Any) -> Documents:
    return Documents(**{"splits": TALES, "title": "tales", "what": "Tales", "options": {"text": "hf:tales"}, **changes})


class Halves:
    """Two characters a token, for ASCII."""

    vocab_size = 2**14

    def encode(self, text: str) -> list[int]:
        return [ord(a) * 128 + ord(b) for a, b in zip(text[::2], text[1::2], strict=False)] + [
            ord(one) for one in text[len(text) // 2 * 2 :]
        ]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(one // 128) * (one >= 128) + chr(one % 128) for one in ids)


def test_joined_documents_are_the_same_text_as_a_file(tmp_path: Path) -> None:
    splits = {split: "".join(f"{one}\n\n" for one in each).encode() for split, each in TALES.items()}
    task = Text(tales())
    for split, text in splits.items():
        assert bytes(task.stream(split).tolist()) == text  # type: ignore[arg-type]
    whole = b"".join(splits.values()) * 8
    path = tmp_path / "tales.txt"
    path.write_bytes(whole)
    thirds = in_three(whole, whole_characters=False)
    again = Text(tales(splits={split: [one.decode() for one in each] for split, each in thirds.items()}))
    for split in splits:  # but for the blank line at each end
        assert torch.equal(again.stream(split)[:-2], Text(path).stream(split))  # type: ignore[arg-type]


@pytest.mark.parametrize("tokenizer", ["bytes", Halves()])
def test_packed_documents_keep_their_borders(tokenizer: object) -> None:
    task = Text(tales(), tokenizer=tokenizer, documents="packed")
    border = task.vocabulary - 1
    tokens = task.stream("train")
    begins = (tokens == border).nonzero()[:, 0].tolist()
    assert len(begins) == len(TALES["train"])
    documents = [tokens[low + 1 : high].tolist() for low, high in zip(begins, [*begins[1:], len(tokens)], strict=True)]
    assert [task.tokenizer.decode(one) for one in documents] == TALES["train"]
    assert task.decode(tokens.tolist()) == "\n\n".join(TALES["train"])
    inputs, follows = next(task.batches(64, 0))
    assert isinstance(inputs, PackedTokens)
    assert torch.equal(inputs.tokens[:, 1:], follows[:, :-1])
    new = inputs.segments.diff(dim=1)
    assert torch.equal(new == 1, inputs.tokens[:, 1:] == border)
    assert ((new == 0) | (new == 1)).all()
    assert (follows == border).any(), "the end of a document is learned"
    assert task.noise((512,), 3)[0].segments.shape == (3, 512)


def test_every_byte_of_packed_documents_is_predicted_once() -> None:
    for tokenizer in ("bytes", Halves()):
        task = Text(tales(), tokenizer=tokenizer, documents="packed")
        _, follows = task.blocks("test")
        sizes = task.block_bytes("test")
        assert sizes.shape == follows.shape
        assert torch.equal(follows == IGNORED, sizes == 0), "only what begins a document has no bytes"
        text = task.decode([*task.stream("test")[: follows.numel() + 1].tolist()])
        borders = int((follows == IGNORED).sum())
        assert sizes.sum() == len(text.encode()) - 2 * borders


def test_lines_separate_the_documents_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tales.txt"
    documents = [f"Tale {number}, naïve.\nIt ends.\n" + ONE for number in range(60)]
    path.write_text("\n<|endoftext|>\n".join(documents) + "\n<|endoftext|>\n", encoding="utf-8")
    task = Text(path, documents="packed")
    found = [task.decode(task.stream(split).tolist()).split("\n\n") for split in ("train", "validation", "test")]
    assert [one for split in found for one in split] == documents
    assert [len(split) for split in found] == [53, 3, 4]
    assert "60 documents are packed: attention stays within each." in task.description
    assert find_task("text", task.options).options == task.options
    path.write_text(ONE * 100)
    with pytest.raises(ValueError, match=r"lines of <\|endoftext\|> between them; got one document in .*tales\.txt"):
        Text(path, documents="packed")


def test_a_file_is_cut_between_characters() -> None:
    data = "東".encode() * 1000
    cut = in_three(data, whole_characters=True)
    assert b"".join(cut["train"] + cut["validation"] + cut["test"]) == data
    assert all(one.decode() for each in cut.values() for one in each)
    assert 2600 < len(cut["train"][0]) <= 2610


def test_a_tokenizer_and_documents_are_options_of_the_task(tmp_path: Path) -> None:
    task = find_data("text", documents="packed")
    assert task.options["documents"] == "packed"
    assert Text().options.keys() == {"contents"}, "as before there were tokenizers"
    by_halves = Text(tales(), tokenizer=Halves())
    assert by_halves.options["tokenizer"] == "Halves"
    assert by_halves.options["text"] == "hf:tales"
    assert by_halves.options["contents"] == Text(tales()).options["contents"]
    other = Halves()
    other.vocab_size += 1
    assert Text(tales(), tokenizer=other).options["tokens"] != by_halves.options["tokens"]
    assert "Tales as tokens by Halves (vocabulary 16,384, 2.00 bytes a token): " in by_halves.description
    assert [probe.label for probe in by_halves.probes] == ["256 tokens", "512 tokens", "1,024 tokens", "2,048 tokens"]
    record = by_halves.describe()
    assert (record.tokenizer, record.vocabulary, record.documents) == ("Halves", 16384, None)
    assert record.bytes_per_token == pytest.approx(2, abs=0.01)
    for data in ("digits", tmp_path, task):
        with pytest.raises(ValueError, match="expected a text as data with tokenizer; got "):
            find_data(data, tokenizer="bytes")
    with pytest.raises(ValueError, match="documents"):
        Text(documents="glued")


def test_other_sources_are_read_again_from_their_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SOURCES, "hf:", lambda options: tales(title=options["text"]))
    task = Text(tales(), documents="packed")
    again = find_task("text", task.options)
    assert again.options == task.options
    assert again.title == "hf:tales"
    with pytest.raises(ValueError, match="expected the text with which the comparison started; got another"):
        find_task("text", {**task.options, "contents": "another"})
    with pytest.raises(ValueError, match="expected the tokens with which the comparison started; got others"):
        find_task("text", {**task.options, "tokens": "another"})


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": ["a"], "test": ["b"]}, "documents for train, validation and test; got train, test"),
        ({**TALES, "test": ["a", None]}, r"text as a document \(test, number 1\); got None"),
        ({**TALES, "test": ["\ud800"]}, r"text in Unicode as a document \(test, number 0\)"),
        ({**TALES, "validation": [""]}, r"at least 2,049 bytes of text for validation; got 0 in Tales"),
        ({**TALES, "test": TALES["test"][:2]}, rf"at least {2 * LENGTHS[-1] + 1:,} bytes of text for test; got 2,\d+"),
    ],
)
def test_documents_that_are_no_text(splits: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Text(tales(splits=splits))
