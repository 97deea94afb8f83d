"""Documents of a text in three splits: Python's own documentation, a file, or those of another source."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from relpos.core.checks import fail, shape_of
from relpos.data.task import Split
from relpos.files.reading import FileError, fail_to_read, read_file, require_utf8

BYTES_AT_MOST = 2**30
"""The largest text: training needs nine times its size in memory, in each process."""
SHARES: dict[Split, float] = {"validation": 0.05, "test": 0.08}
SPLITS: tuple[Split, ...] = ("train", "validation", "test")
BETWEEN = "<|endoftext|>"
"""The line between documents of a file, as in GPT-2's data."""
BLANK_LINE = "\n\n"
"""What follows each document if they are joined."""
_REPEATED = 40
"""A repeated paragraph of at least this many characters is left out."""


@dataclass(frozen=True)
class Documents:
    """Documents of another source, for `Text`. Each split is read once, and all its text is held in memory.

    Attributes:
        splits: the documents of "train", "validation" and "test"; empty ones are left out.
        title: the source in a few words. what: the source as the first words of a sentence.
        options: plain values that name the source, to read it again.
    """

    splits: Mapping[Split, Iterable[str]]
    title: str
    what: str
    options: dict[str, Any] = field(default_factory=dict)

    def read(self) -> dict[Split, list[bytes]]:
        """The documents in UTF-8.

        Raises:
            ValueError: a split is missing, a document is no text, or there are too many bytes.
        """
        if sorted(self.splits) != sorted(SPLITS):
            fail("documents for train, validation and test", ", ".join(self.splits) or "none", "Pass all of them.")
        left = BYTES_AT_MOST
        found: dict[Split, list[bytes]] = {}
        for split in SPLITS:
            found[split] = []
            for number, document in enumerate(self.splits[split]):
                data = _in_utf8(document, f"{split}, number {number}")
                left -= len(data)
                if left < 0:
                    fail(f"documents of at most {BYTES_AT_MOST:,} bytes", "more", "Take fewer of them.")
                if data:
                    found[split].append(data)
        return found


def _in_utf8(document: object, where: str) -> bytes:
    if not isinstance(document, str):
        fail(f"text as a document ({where})", shape_of(document), "Name the column of text.")
    try:
        return document.encode()
    except UnicodeEncodeError as error:
        fail(f"text in Unicode as a document ({where})", str(error.reason), "Leave it out.")


def joined(splits: Mapping[Split, list[bytes]]) -> dict[Split, list[bytes]]:
    """The documents of each split as one, a blank line after each."""
    return {split: [b"".join(one + BLANK_LINE.encode() for one in each)] for split, each in splits.items()}


def topics() -> dict[Split, list[bytes]]:
    """Python's topics, each in one split, in a seeded random order. Paragraphs of several topics are kept once."""
    from pydoc_data.topics import topics as known_topics

    names = sorted(known_topics)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    seen: set[str] = set()
    texts = {}
    for name in names:
        kept = []
        for paragraph in re.split(r"\n{2,}", known_topics[name]):
            known = paragraph.strip()
            if len(known) < _REPEATED or known not in seen:
                kept.append(paragraph)
            seen.add(known)
        texts[name] = BLANK_LINE.join(kept).strip().encode()
    sizes = {name: len(text) + len(BLANK_LINE) for name, text in texts.items()}
    whole = sum(sizes.values())
    filled = dict.fromkeys(SPLITS, 0)
    splits: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    for index in order:
        name = names[index]  # a long topic would make a split much larger than its share
        half = sizes[name] / 2
        open_yet = (one for one, share in SHARES.items() if filled[one] + half < share * whole)
        split: Split = next(open_yet, "train")
        filled[split] += sizes[name]
        splits[split].append(texts[name])
    return splits


def read_text(path: Path) -> bytes:
    """A file of text.

    Raises:
        ValueError: it does not exist, or cannot be read.
    """
    expected = "a file of text"
    require_utf8(path, "a file")
    if not path.exists():
        fail(expected, f"{path}, which does not exist", "Pass an existing one.")
    try:
        return read_file(path, BYTES_AT_MOST)
    except FileError as error:
        fail_to_read(expected, path, error, "Name another, or a part of it.")


def in_three(data: bytes, *, whole_characters: bool) -> dict[Split, list[bytes]]:
    """Consecutive pieces of a text: the last 8% for the test, the 5% before it for validation.

    Args:
        whole_characters: whether to cut before a character in UTF-8, at most three bytes earlier.
    """
    validation, test = _cuts(len(data))
    if whole_characters:
        validation, test = (_before_character(data, at) for at in (validation, test))
    return {"train": [data[:validation]], "validation": [data[validation:test]], "test": [data[test:]]}


def between_lines(data: bytes, path: Path) -> dict[Split, list[bytes]]:
    """The documents of a text, separated by lines of `BETWEEN`. A document is in the split in which it begins.

    Raises:
        ValueError: there is no such line.
    """
    splits: dict[Split, list[bytes]] = {split: [] for split in SPLITS}
    validation, test = _cuts(len(data))
    parts = re.split(rb"(?m)^" + re.escape(BETWEEN.encode()) + rb"\r?$", data)
    if len(parts) == 1:
        fail(
            f"documents with lines of {BETWEEN} between them", f"one document in {path}", "Leave out documents=packed."
        )
    start = 0
    for part in parts:
        if document := part.strip(b"\r\n"):
            splits["train" if start < validation else "validation" if start < test else "test"].append(document)
        start += len(part) + len(BETWEEN)
    return splits


def _cuts(size: int) -> tuple[int, int]:
    return int(size * (1 - sum(SHARES.values()))), int(size * (1 - SHARES["test"]))


def _before_character(data: bytes, at: int) -> int:
    return next(
        (at - back for back in range(4) if data[at - back : at - back + 1] and data[at - back] & 0xC0 != 0x80), at
    )


Source = Callable[[dict[str, Any]], Documents]
SOURCES: dict[str, Source] = {}
"""Other sources of documents by the beginning of `text` in a task's options, such as "hf:"; each reads them again."""


def source_of(options: Mapping[str, Any]) -> Source | None:
    """The source of a task's options; None for a file or Python's documentation."""
    text = options.get("text")
    return next((read for start, read in SOURCES.items() if isinstance(text, str) and text.startswith(start)), None)
