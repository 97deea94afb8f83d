"""Text as bytes: a language model is trained on one length, then tested on longer inputs.

Every probe predicts the same bytes. A test split is cut into blocks of the longest length. Each block is read in
independent pieces of the probe's length, and its bits per byte are the mean over all its bytes. A model that
extrapolates to longer inputs needs fewer bits there, because it sees more context.
"""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Int
from torch import Tensor

from relpos import results
from relpos.core.checks import fail
from relpos.data.task import Probe, Split, Task, TaskKind, Watch
from relpos.files.reading import FileError, fail_to_read, read_file, require_utf8

LENGTHS = (256, 512, 1024, 2048)
"""Bytes of an input: training uses the first, tests use all."""
VOCABULARY = 256
BLOCKS_AT_LEAST = 2
"""Minimum number of test blocks: one block does not show the variance between blocks."""
BYTES_AT_MOST = 2**30
"""The largest file: training needs nine times its size in memory, in each process."""
SHARES = {"validation": 0.05, "test": 0.08}
_REPEATED = 40
"""A repeated paragraph of at least this many characters is left out."""

FIRST_ON_TEXT = ("none", "learned", "t5", "alibi", "rotary_1d", "kerple_log")
"""The default mechanisms of a comparison on text: one of each kind."""
STANDARD_ON_TEXT = (
    "none", "learned", "sinusoidal_1d", "relative_1d", "t5", "alibi", "kerple_log", "kerple_power", "sandwich",
    "rotary_1d+t5", "rotary_1d", "xpos",
)  # fmt: skip
"""A wider choice of well-known mechanisms."""


@dataclass(frozen=True)
class TextProbe(Probe):
    """A test on text.

    Attributes:
        length: bytes of one input.
    """

    length: int

    @property
    def size(self) -> int:
        return self.length


class Text(Task):
    """A text as bytes: Python's own documentation of its language, or a file of yours.

    Without a file it is `pydoc_data.topics`, part of every Python: about 465 kB of English in 79 topics. Paragraphs
    shared by several topics are kept once, as they would be in both training and test. Each topic goes to one split. A
    file is cut in three: the last 8% for the test, the 5% before it for validation.

    Args:
        text: the file, or None.

    Raises:
        ValueError: no such file, or one too short for the longest input in every split.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "English as bytes: the documentation that comes with Python, or a file of yours."
    kind: ClassVar[TaskKind] = "text"
    measure: ClassVar[Literal["accuracy", "bits_per_byte"]] = "bits_per_byte"
    positions: ClassVar[tuple[str, ...]] = FIRST_ON_TEXT
    standard: ClassVar[tuple[str, ...]] = STANDARD_ON_TEXT

    def __init__(self, text: str | Path | None = None) -> None:
        self.length = LENGTHS[0]
        self._splits = _topics() if text is None else _file(Path(text))
        digest = hashlib.sha256(b"\0".join(self._splits[name] for name in sorted(self._splits))).hexdigest()[:16]
        self.options: dict[str, Any] = {"contents": digest}
        if text is not None:
            self.options = {"text": str(text), **self.options}
        of_what = "Python's documentation of the language (pydoc_data.topics)" if text is None else Path(text).name
        self.title = "Python's documentation" if text is None else Path(text).name
        counts = {name: f"{len(data):,}" for name, data in self._splits.items()}
        self.description = (
            f"{of_what} as bytes: {counts['train']} to train on, {counts['validation']} for validation, "
            f"{counts['test']} to test. Trained on {self.length} bytes at a time."
        )

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        unknown = sorted(set(options) - {"text", "contents"})
        if unknown:
            fail(f"options of the task {cls.name}: text", ", ".join(unknown), "Leave them out.")
        made = cls(options.get("text"))
        if options.get("contents") not in (None, made.options["contents"]):
            fail("the text with which the comparison started", "another", "The file or the Python version changed.")
        return made

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def size(self) -> int:
        return self.length

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(data) for name, data in self._splits.items()}

    @cached_property
    def probes(self) -> tuple[TextProbe, ...]:
        first, *longer = LENGTHS
        test = TextProbe(
            "test",
            "test",
            f"{first:,} bytes",
            None,
            first,
            f"Test text, {first} bytes at a time as in training.",
            first,
        )
        return (
            test,
            *(
                TextProbe(
                    f"length/{length}",
                    "length",
                    f"{length:,} bytes",
                    None,
                    length,
                    f"The same bytes of test text, {length:,} at a time: {length // first} times the trained length.",
                    length,
                )
                for length in longer
            ),
        )

    def stream(self, split: Split) -> Int[Tensor, " n"]:
        """All bytes of a split."""
        return torch.frombuffer(bytearray(self._splits[split]), dtype=torch.uint8).long()

    def batches(
        self, batch_size: int, seed: int, *, start: int = 0
    ) -> Iterator[tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]]:
        """Random pieces of the training text, and for every byte the next one."""
        data = self.stream("train")
        offsets = torch.arange(self.length + 1)
        generator = torch.Generator().manual_seed(seed)
        for number in itertools.count():
            starts = torch.randint(len(data) - self.length, (batch_size, 1), generator=generator)
            if number < start:
                continue
            stretch = data[starts + offsets]
            yield stretch[:, :-1], stretch[:, 1:]

    def blocks(self, split: Split) -> tuple[Int[Tensor, "n N"], Int[Tensor, "n N"]]:
        """The split in blocks of the longest length, and for every byte the next one. The remainder is left out."""
        data, longest = self.stream(split), LENGTHS[-1]
        count = (len(data) - 1) // longest
        return data[: count * longest].view(count, longest), data[1 : count * longest + 1].view(count, longest)

    def once(self, split: Split, batch_size: int) -> Iterator[tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]]:
        read, follows = (x.reshape(-1, self.length).split(batch_size) for x in self.blocks(split))
        yield from zip(read, follows, strict=True)

    def noise(self, grid: tuple[int, ...], batch_size: int) -> tuple[Int[Tensor, "B N"], Int[Tensor, "B N"]]:
        (length,) = grid
        stretch = torch.randint(VOCABULARY, (batch_size, length + 1))
        return stretch[:, :-1], stretch[:, 1:]

    def describe(self) -> results.TaskRecord:
        return replace(super().describe(), length=self.length, blocks=len(self.blocks("test")[0]))


def _topics() -> dict[str, bytes]:
    """Python's topics, each in one split, in a seeded random order."""
    from pydoc_data.topics import topics

    names = sorted(topics)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(0)).tolist()
    seen: set[str] = set()
    texts = {}
    for name in names:
        kept = []
        for paragraph in re.split(r"\n{2,}", topics[name]):
            known = paragraph.strip()
            if len(known) < _REPEATED or known not in seen:
                kept.append(paragraph)
            seen.add(known)
        texts[name] = ("\n\n".join(kept).strip() + "\n\n").encode()
    whole = sum(len(text) for text in texts.values())
    splits = {"train": b"", "validation": b"", "test": b""}
    for index in order:
        size = len(texts[names[index]])  # a long topic would make a split much larger than its share
        open_yet = (name for name, share in SHARES.items() if len(splits[name]) + size / 2 < share * whole)
        splits[next(open_yet, "train")] += texts[names[index]]
    return splits


def _file(path: Path) -> dict[str, bytes]:
    """The three consecutive pieces of a file."""
    expected = "a file of text"
    require_utf8(path, "a file")
    if not path.exists():
        fail(expected, f"{path}, which does not exist", "Pass an existing one.")
    try:
        data = read_file(path, BYTES_AT_MOST)
    except FileError as error:
        fail_to_read(expected, path, error, "Name another, or a part of it.")
    test, validation = (int(len(data) * (1 - SHARES["test"])), int(len(data) * (1 - sum(SHARES.values()))))
    splits = {"train": data[:validation], "validation": data[validation:test], "test": data[test:]}
    enough = {"train": 1, "validation": 1, "test": BLOCKS_AT_LEAST}
    least = max(int((enough[name] * LENGTHS[-1] + 2) / share) + 1 for name, share in SHARES.items())
    if any(len(splits[name]) <= count * LENGTHS[-1] for name, count in enough.items()):
        fail(f"a text of at least {least:,} bytes", f"{path} with {len(data):,}", "Join several files.")
    return splits
