"""Documents of a column of text, in three splits.

A split that the dataset lacks is taken from the training documents by a hash of each (`splitting`). All are in memory;
of a stream the first are, up to `STREAMED` bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relpos.core.checks import fail
from relpos.data.documents import SHARES, Documents
from relpos.data.sources.hugging_face import column_kinds, find_column, folder_of, opened
from relpos.data.sources.source import digest_of
from relpos.data.sources.splitting import SPLIT_ORDER, Leakage, split_of
from relpos.data.task import Split

STREAMED = 2**28
"""Bytes of a streamed dataset's training documents that are read; of its other splits their usual shares."""
_AT_ONCE = 1000


@dataclass(frozen=True)
class FoundDocuments:
    """Documents, and what is to be said of them.

    Attributes:
        leakage: a line for each split with documents that are also in an earlier one.
    """

    documents: Documents
    leakage: tuple[str, ...]


def documents_of(
    data: Any,
    text_column: str | None = None,
    splits: dict[Split, Any] | None = None,
    *,
    streaming: bool = False,
    bad_data: str = "skip",
) -> FoundDocuments:
    """The documents of a dataset of Hugging Face.

    Args:
        data, streaming: see `hugging_face.opened`. text_column: its name; found if there is one candidate.
        splits: the datasets of each split, if they are opened.
        bad_data: "skip" leaves out rows without a text, "fail" raises.

    Raises:
        ValueError: no such dataset or column; a row without a text, if that is an error.
    """
    splits = opened(data, streaming) if splits is None else splits
    column = find_column(column_kinds(splits["train"]), text_column, "text", [["text"]], ["text"])
    missing: list[Split] = [split for split in SPLIT_ORDER if split not in splits]
    found: dict[Split, list[str]] = {split: [] for split in SPLIT_ORDER}
    leakage, left_out, is_part = Leakage(), 0, False
    for split, one in splits.items():
        left = STREAMED * SHARES.get(split, 1.0)
        for number, text in enumerate(_column(one, column)):
            if not isinstance(text, str) or not text:
                if bad_data == "fail":
                    fail("a text in every row", f"none in row {number} of {split}", "Leave them out: --bad-data skip.")
                left_out += 1
                continue
            content = text.encode("utf-8", "surrogatepass")
            mark = digest_of(content)
            own = split_of(mark, missing, SHARES) if split == "train" else split
            leakage.add(own, mark)
            found[own].append(text)
            left -= len(content)
            if streaming and left < 0:
                is_part = True
                break
    named = isinstance(data, str | Path)
    folder = folder_of(str(data))[0] if named else None
    title = Path(str(data).rstrip("/")).name if named else type(data).__name__
    shown = None if not named else f"hf:{data}" if folder is None else f"hf:{_absolute(str(data))}"
    several = sum(map(len, found.values()))
    what = f"{several:,} documents of {title} (column {column}"
    what += f"; the first {STREAMED:,} bytes" if is_part else ""
    what += f"; {left_out:,} rows without a text left out)" if left_out else ")"
    among = f", among the first {several:,}" if is_part else ""
    options: dict[str, Any] = {"text": shown or title, "text_column": column}
    options |= {} if named else {"handed_over": True}
    options |= {"streaming": True} if streaming else {}
    return FoundDocuments(Documents(found, title, what, options), tuple(leakage.lines("documents", among)))


def again(options: dict[str, Any]) -> Documents:
    """The documents of a task's options."""
    named = str(options["text"]).removeprefix("hf:")
    return documents_of(named, options.get("text_column"), streaming=bool(options.get("streaming"))).documents


def _absolute(named: str) -> str:
    folder, split = folder_of(named)
    assert folder is not None
    return str(folder.resolve()) + (f":{split}" if split else "")


def _column(data: Any, column: str) -> Iterator[Any]:
    data = data.select_columns([column])
    if not hasattr(data, "__len__"):
        yield from (row[column] for row in data)
        return
    data = data.with_format(None)
    for begin in range(0, len(data), _AT_ONCE):
        yield from data[begin : begin + _AT_ONCE][column]
