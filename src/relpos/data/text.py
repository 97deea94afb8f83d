"""Text as bytes or other tokens: a language model is trained on one length, then tested on longer inputs.

Every probe predicts the same tokens. A test split is cut into blocks of the longest length. Each block is read in
independent pieces of the probe's length. Its bits per byte are the cross-entropy of all its tokens, divided by the
bytes of text in them, so that they can be compared between tokenizers. A model that extrapolates to longer inputs needs
fewer bits there, because it sees more context.

    documents = "cut"       documents follow each other; inputs are cut from them anywhere
    documents = "packed"    the same, but a token attends only to its own document, and positions begin there. Each
                            document begins with a token of its own, so that all its text is predicted.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Self, get_args

import numpy as np
import torch
from jaxtyping import Int, Shaped
from numpy.typing import NDArray
from torch import Tensor

from relpos import results
from relpos.core.checks import fail, require_choice
from relpos.data.documents import (
    SHARES,
    SPLITS,
    Documents,
    between_lines,
    in_three,
    joined,
    read_text,
    source_of,
    topics,
)
from relpos.data.task import Probe, Split, Task, TaskKind, Watch
from relpos.data.tokenizer import BYTES, Tokenizer, Tokens, find_tokenizer

LENGTHS = (256, 512, 1024, 2048)
"""Tokens of an input: training uses the first, tests use all."""
BLOCKS_AT_LEAST = 2
"""Minimum number of test blocks: one block does not show the variance between blocks."""
Packing = Literal["cut", "packed"]
IGNORED = -100
"""What cross-entropy ignores: a token to predict that is not text."""

FIRST_ON_TEXT = ("none", "learned", "t5", "alibi", "rotary_1d", "kerple_log")
"""The default mechanisms of a comparison on text: one of each kind."""
STANDARD_ON_TEXT = (
    "none", "learned", "sinusoidal_1d", "relative_1d", "t5", "alibi", "kerple_log", "kerple_power", "sandwich",
    "rotary_1d+t5", "rotary_1d", "xpos",
)  # fmt: skip
"""A wider choice of well-known mechanisms."""


class PackedTokens(NamedTuple):
    """Inputs of a model that are packed documents.

    Attributes:
        tokens: `[B, N]`.
        segments: the document of each token, counted within its row.
    """

    tokens: Int[Tensor, "B N"]
    segments: Int[Tensor, "B N"]


@dataclass(frozen=True)
class TextProbe(Probe):
    """A test on text.

    Attributes:
        length: tokens of one input.
    """

    length: int

    @property
    def size(self) -> int:
        return self.length


class Text(Task):
    """A text: Python's own documentation of its language, a file of yours, or documents of another source.

    Without a file it is `pydoc_data.topics`, part of every Python: about 465 kB of English in 79 topics. Paragraphs
    shared by several topics are kept once, as they would be in both training and test. Each topic goes to one split. A
    file is cut in three: the last 8% for the test, the 5% before it for validation.

    Args:
        text: the file, `Documents`, or None.
        tokenizer: "bytes", "hf:NAME", "tiktoken:NAME", or an object (`relpos.data.tokenizer`).
        documents: "cut" or "packed", see this module's docstring. Those of a file are separated by lines of
            `<|endoftext|>`.

    Attributes:
        tokenizer: as found. is_packed: whether documents are packed. sizes_in_bytes: of the text of each split.

    Raises:
        ValueError: no such file or tokenizer, a tokenizer that loses text, or a text too short for the longest input in
            every split.
    """

    name: ClassVar[str] = "text"
    summary: ClassVar[str] = "English as bytes: the documentation that comes with Python, or a file of yours."
    kind: ClassVar[TaskKind] = "text"
    measure: ClassVar[Literal["accuracy", "bits_per_byte"]] = "bits_per_byte"
    positions: ClassVar[tuple[str, ...]] = FIRST_ON_TEXT
    standard: ClassVar[tuple[str, ...]] = STANDARD_ON_TEXT

    def __init__(
        self, text: str | Path | Documents | None = None, *, tokenizer: object = "bytes", documents: str = "cut"
    ) -> None:
        require_choice(documents, "documents", get_args(Packing))
        self.length = LENGTHS[0]
        self.tokenizer: Tokenizer = find_tokenizer(tokenizer)
        self.is_packed = documents == "packed"
        splits = _read(text, packed=self.is_packed, whole_characters=self.tokenizer is not BYTES)
        self.sizes_in_bytes = {split: sum(map(len, splits[split])) for split in SPLITS}
        self._border = self.tokenizer.vocabulary
        encoded = {split: self._encoded(splits[split]) for split in SPLITS}
        self._tokens = {split: tokens for split, (tokens, _) in encoded.items()}
        self._bytes = {split: sizes for split, (_, sizes) in encoded.items()}
        self.options: dict[str, Any] = _identity(text, splits)
        if self.tokenizer is not BYTES:
            self.options |= {"tokenizer": self.tokenizer.name, "tokens": self._fingerprint()}
        if self.is_packed:
            self.options |= {"documents": documents}
        self.title, of_what = _titles(text)
        self._require_enough(of_what, is_file=isinstance(text, str | Path))
        counts = {split: f"{size:,}" for split, size in self.sizes.items()}
        self.description = (
            f"{of_what} as {self.by_what}: {counts['train']} {'' if self.unit == 'bytes' else 'bytes '}to train on, "
            f"{counts['validation']} for validation, {counts['test']} to test. "
            f"Trained on {self.length} {self.unit} at a time."
        )
        if self.is_packed:
            many = sum(map(len, splits.values()))
            self.description += f" {many:,} documents are packed: attention stays within each."

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        read = source_of(options)
        known = {"text", "contents", "tokenizer", "tokens", "documents"}
        if read is None and (unknown := sorted(set(options) - known)):
            fail(f"options of the task {cls.name}: text", ", ".join(unknown), "Leave them out.")
        text = options.get("text") if read is None else read(options)
        how = {name: options[name] for name in ("tokenizer", "documents") if options.get(name) is not None}
        made = cls(text, **how)
        if options.get("contents") not in (None, made.options["contents"]):
            fail("the text with which the comparison started", "another", "The file or the Python version changed.")
        if options.get("tokens") not in (None, made.options.get("tokens")):
            fail("the tokens with which the comparison started", "others", "The tokenizer changed.")
        return made

    @property
    def vocabulary(self) -> int:
        """The number of different tokens, with the one that begins packed documents."""
        return self.tokenizer.vocabulary + self.is_packed

    @property
    def unit(self) -> str:
        """What lengths count: bytes or tokens."""
        return "bytes" if self.tokenizer is BYTES else "tokens"

    @property
    def bytes_per_token(self) -> float:
        """The mean over the text of all splits, without the tokens that begin documents."""
        count = sum(int((ids != self._border).sum()) for ids in self._tokens.values())
        return sum(self.sizes.values()) / count

    @property
    def by_what(self) -> str:
        """What bits are per byte of: "bytes", or the tokenizer with its vocabulary and bytes a token."""
        if self.tokenizer is BYTES:
            return "bytes"
        label, count = self.tokenizer.label, self.tokenizer.vocabulary
        return f"tokens by {label} (vocabulary {count:,}, {self.bytes_per_token:.2f} bytes a token)"

    @property
    def grid(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def size(self) -> int:
        return self.length

    @property
    def sizes(self) -> dict[str, int]:
        return {split: size for split, size in self.sizes_in_bytes.items()}  # noqa: C416

    @cached_property
    def probes(self) -> tuple[TextProbe, ...]:
        first, *longer = LENGTHS
        unit = self.unit
        test = TextProbe(
            "test",
            "test",
            f"{first:,} {unit}",
            None,
            first,
            f"Test text, {first} {unit} at a time as in training.",
            first,
        )
        return (
            test,
            *(
                TextProbe(
                    f"length/{length}",
                    "length",
                    f"{length:,} {unit}",
                    None,
                    length,
                    f"The same {unit} of test text, {length:,} at a time: {length // first} times the trained length.",
                    length,
                )
                for length in longer
            ),
        )

    def stream(self, split: Split) -> Int[Tensor, " n"]:
        """All tokens of a split."""
        return self._tokens[split].long()

    def batches(self, batch_size: int, seed: int, *, start: int = 0) -> Iterator[tuple[Any, Int[Tensor, "B N"]]]:
        """Random pieces of the training text, and for every token the next one; the end of a document is one, too."""
        data = self.stream("train")
        offsets = torch.arange(self.length + 1)
        generator = torch.Generator().manual_seed(seed)
        for number in itertools.count():
            starts = torch.randint(len(data) - self.length, (batch_size, 1), generator=generator)
            if number < start:
                continue
            stretch = data[starts + offsets]
            yield self.inputs(stretch[:, :-1]), stretch[:, 1:]

    def inputs(self, tokens: Int[Tensor, "B N"]) -> Int[Tensor, "B N"] | PackedTokens:
        """What a model reads: tokens, with their documents if these are packed."""
        return PackedTokens(tokens, (tokens == self._border).cumsum(dim=1)) if self.is_packed else tokens

    def blocks(self, split: Split) -> tuple[Int[Tensor, "n N"], Int[Tensor, "n N"]]:
        """The split in blocks of the longest length, and for every token the next one, `IGNORED` where that is no text.

        The remainder is left out.
        """
        data, longest = self.stream(split), LENGTHS[-1]
        count = (len(data) - 1) // longest
        read, follows = data[: count * longest], data[1 : count * longest + 1]
        if self.is_packed:
            follows = torch.where(follows == self._border, IGNORED, follows)
        return read.view(count, longest), follows.view(count, longest)

    def block_bytes(self, split: Split) -> Int[Tensor, "n N"]:
        """The bytes of text in each token that `blocks` predict."""
        count = (len(self._bytes[split]) - 1) // LENGTHS[-1]
        return self._bytes[split][1 : count * LENGTHS[-1] + 1].view(count, -1).long()

    def once(self, split: Split, batch_size: int) -> Iterator[tuple[Any, Int[Tensor, "B N"]]]:
        read, follows = (x.reshape(-1, self.length).split(batch_size) for x in self.blocks(split))
        yield from zip(map(self.inputs, read), follows, strict=True)

    def noise(self, grid: tuple[int, ...], batch_size: int) -> tuple[Any, Int[Tensor, "B N"]]:
        (length,) = grid
        stretch = torch.randint(self.vocabulary, (batch_size, length + 1))
        read, follows = stretch[:, :-1], stretch[:, 1:]
        if not self.is_packed:
            return read, follows
        borders = (self._tokens["train"][:length] == self._border).cumsum(dim=0)  # documents as long as the text's
        segments = torch.nn.functional.pad(borders, (0, length - len(borders)), value=int(borders[-1]))
        return PackedTokens(read, segments.expand(batch_size, -1)), follows

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, a blank line between documents; incomplete characters become U+FFFD."""
        documents: list[list[int]] = [[]]
        for token in tokens:
            documents.append([]) if token == self._border else documents[-1].append(token)
        return "\n\n".join(self.tokenizer.decode(document) for document in documents if document)

    def describe(self) -> results.TaskRecord:
        record = replace(super().describe(), length=self.length, blocks=len(self.blocks("test")[0]))
        if self.is_packed:
            record = replace(record, documents="packed", vocabulary=self.vocabulary)
        if self.tokenizer is BYTES:
            return record
        by = round(self.bytes_per_token, 4)
        return replace(record, tokenizer=self.tokenizer.label, vocabulary=self.vocabulary, bytes_per_token=by)

    def _encoded(self, documents: Sequence[bytes]) -> tuple[Shaped[Tensor, " n"], Shaped[Tensor, " n"]]:
        """The tokens of documents and the bytes in each; if they are packed, each begins with a token of no bytes."""
        count = int(self.is_packed)
        before = Tokens(np.full(count, self._border, dtype=np.int32), np.zeros(count, dtype=np.int32))
        each = [tokens for document in documents for tokens in (before, self.tokenizer.encode(document))] or [before]
        return _small([one.ids for one in each]), _small([one.sizes for one in each])

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(self.tokenizer.identity.encode())
        for split in SPLITS:
            digest.update(self._tokens[split].numpy().tobytes())
        return f"vocabulary {self.tokenizer.vocabulary}, sha256 {digest.hexdigest()[:16]}"

    def _require_enough(self, of_what: str, *, is_file: bool) -> None:
        enough: dict[Split, int] = {"train": 1, "validation": 1, "test": BLOCKS_AT_LEAST}
        short = [split for split, count in enough.items() if len(self._tokens[split]) <= count * LENGTHS[-1]]
        if not short:
            return
        split = short[0]
        if is_file and self.tokenizer is BYTES and not self.is_packed:
            least = max(int((enough[one] * LENGTHS[-1] + 2) / share) + 1 for one, share in SHARES.items())
            came = f"{self.options['text']} with {sum(self.sizes.values()):,}"
            fail(f"a text of at least {least:,} bytes", came, "Join several files.")
        least = enough[split] * LENGTHS[-1] + 1
        came = f"{len(self._tokens[split]):,} in {of_what}"
        fail(f"at least {least:,} {self.unit} of text for {split}", came, "Take a longer text.")


def _read(text: object, *, packed: bool, whole_characters: bool) -> dict[Split, list[bytes]]:
    """The documents of each split; a single one if they are not packed."""
    if isinstance(text, str | Path):
        data = read_text(Path(text))
        return between_lines(data, Path(text)) if packed else in_three(data, whole_characters=whole_characters)
    splits = text.read() if isinstance(text, Documents) else topics()
    return splits if packed else joined(splits)


def _small(arrays: Sequence[NDArray[Any]]) -> Shaped[Tensor, " n"]:
    """Arrays of small numbers as one tensor, in bytes if all fit."""
    highest = max((int(one.max()) for one in arrays if len(one)), default=0)
    kind = np.uint8 if highest < 256 else np.int32
    return torch.from_numpy(np.concatenate([one.astype(kind, copy=False) for one in arrays]))


def _identity(text: object, splits: dict[Split, list[bytes]]) -> dict[str, Any]:
    """The options that name a text, with a fingerprint of its documents."""
    each = [b"\x1e".join(splits[name]) for name in sorted(SPLITS)]  # ASCII's record separator
    named = text.options if isinstance(text, Documents) else {} if text is None else {"text": str(text)}
    return {**named, "contents": hashlib.sha256(b"\0".join(each)).hexdigest()[:16]}


def _titles(text: object) -> tuple[str, str]:
    """The text in a few words, and as the first words of a sentence."""
    if isinstance(text, Documents):
        return text.title, text.what
    if text is None:
        return "Python's documentation", "Python's documentation of the language (pydoc_data.topics)"
    name = Path(str(text)).name
    return name, name
