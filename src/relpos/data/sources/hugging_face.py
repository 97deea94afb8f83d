"""Datasets of Hugging Face: by name on the hub, in a folder of `save_to_disk`, or handed over in Python.

The library `datasets` (4.0 or newer) runs no code of a dataset. Images stay encoded: relpos's own decoder reads them,
with its limits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from relpos.core.checks import fail, shape_of
from relpos.data.folder import SPLITS
from relpos.data.sources.source import LabelledImage, SampleSource, Unreadable
from relpos.data.task import Split
from relpos.files.reading import FileError, open_file
from relpos_command.visible import visible

ROWS = 1024
"""Rows of a shard, if the dataset can be indexed."""
_AT_ONCE = 64
_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w.-]+)?(:.+)?")
_OTHERS = 5
"""How many classes a message names."""
_SHOWN = 300
"""Characters of the library's own message that are shown."""


def opened(data: Any, streaming: bool) -> dict[Split, Any]:
    """The datasets of each split.

    Args:
        data: `NAME[@CONFIG][:SPLIT]` on the hub, `FOLDER[:SPLIT]` of `save_to_disk`, or a dataset or dict of them.
        streaming: read a dataset of the hub while it is used, instead of storing it first.

    Raises:
        ValueError: no such dataset, no access, no such split, or code that would have to run.
    """
    if not isinstance(data, str | Path):
        return _by_split(data, f"{type(data).__name__} handed over")
    import datasets

    named = str(data)
    folder, split = folder_of(named)
    try:
        if folder is not None:
            found = datasets.load_from_disk(str(folder))
            if split is not None:
                found = _one(found, split, named)
        else:
            if named.startswith((".", "/", "~")):
                fail("a folder that save_to_disk has written", f"{named}, which does not exist", "Check the path.")
            if not _NAME.fullmatch(named):
                fail("hf:NAME, hf:NAME@CONFIG or hf:FOLDER, with :SPLIT or without", f"hf:{named}", "Name one of them.")
            name, _, split = named.partition(":")
            name, _, config = name.partition("@")
            with _silent():
                found = datasets.load_dataset(name, config or None, split=split or None, streaming=streaming)
    except ValueError as error:
        if getattr(error, "fault", None) is not None:  # of relpos
            raise
        _explain(named, error)
    except Exception as error:  # the library raises errors of many kinds, its own, those of the hub, of Arrow
        _explain(named, error)
    return _by_split(found, f"hf:{named}")


@contextmanager
def _silent() -> Iterator[None]:
    """Without the libraries' lines on every attempt to reach the hub; the last error says the same."""
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [one.level for one in loggers]
    for one in loggers:
        one.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for one, level in zip(loggers, levels, strict=True):
            one.setLevel(level)


def folder_of(named: str) -> tuple[Path | None, str | None]:
    """The folder and the split that were named; no folder if there is none."""
    whole = Path(named).expanduser()
    if whole.is_dir():
        return whole, None
    before, _, split = named.rpartition(":")
    if before and Path(before).expanduser().is_dir():
        return Path(before).expanduser(), split
    return None, None


def _one(found: Any, split: str, named: str) -> Any:
    if not isinstance(found, Mapping):
        fail("a folder of several splits with :SPLIT", f"hf:{named}, which has one", "Leave the split out.")
    if split not in found:
        fail(f"a split among {', '.join(found)}", f"{split!r} of hf:{named}", "Name one of them.")
    return found[split]


def _by_split(found: Any, came: str) -> dict[Split, Any]:
    """Train, validation and test of a dict of splits; one dataset alone is all train."""
    if not isinstance(found, Mapping):
        if not hasattr(found, "features") or not hasattr(found, "select_columns"):
            fail("a dataset of the library datasets, or its name", shape_of(found), "Pass one of them.")
        return {"train": found}
    known: dict[Split, Any] = {}
    for name, data in found.items():
        split = SPLITS.get(str(name).lower())
        if split is not None:
            known.setdefault(split, data)
    if "train" not in known:
        if len(found) != 1:
            fail("a split train", f"{', '.join(map(str, found))} of {came}", "Name the one to use: hf:NAME:SPLIT.")
        return {"train": next(iter(found.values()))}
    return known


def _explain(named: str, error: Exception) -> NoReturn:
    """Fail with one line: what the library says, and what to do."""
    said = " ".join(str(error).split()) or type(error).__name__
    said, kind = said[:_SHOWN].rstrip("."), {one.__name__ for one in type(error).__mro__}
    remedy = "Check the name, the split and the network; or save it with save_to_disk and name the folder."
    if "GatedRepoError" in kind or "gated" in said.lower():
        remedy = "Ask for access on its page, then log in with: hf auth login."
    elif kind & {"DatasetNotFoundError", "RepositoryNotFoundError"}:
        remedy = "Check the name; if it is private, log in with: hf auth login."
    elif "scripts are no longer supported" in said or "trust_remote_code" in said:
        remedy = "relpos runs no code of a dataset: use a version of it in Parquet."
    elif "Config name is missing" in said or "BuilderConfig" in said:
        remedy = "Name a configuration: hf:NAME@CONFIG."
    elif "OfflineModeIsEnabled" in kind or isinstance(error, ConnectionError):
        remedy = "Check the network; or save it with save_to_disk on another machine, and name the folder."
    elif folder_of(named)[0] is not None:
        remedy = "Name a folder that save_to_disk has written; for images in folders leave out hf:."
    fail("a dataset that can be read", f"hf:{visible(named)} ({visible(said)})", remedy)


def column_kinds(data: Any) -> dict[str, str]:
    """What each column holds: "image", "class", "label", "bytes", "text" or another word.

    Raises:
        ValueError: the dataset does not say.
    """
    if data.features is None:
        remedy = "Pass features= where the dataset is made, for example to IterableDataset.from_generator."
        fail("a dataset that says what its columns hold (features)", shape_of(data), remedy)
    return {name: _kind(feature) for name, feature in data.features.items()}


def _kind(feature: Any) -> str:
    name, dtype = type(feature).__name__, str(getattr(feature, "dtype", ""))
    if name in ("Image", "ClassLabel"):
        return {"Image": "image", "ClassLabel": "class"}[name]
    if name != "Value":
        return name
    if dtype in ("string", "large_string", "string_view"):
        return "text"
    if dtype in ("binary", "large_binary"):
        return "bytes"
    return "label" if re.fullmatch(r"u?int\d+|bool", dtype) else dtype


def is_text(splits: Mapping[Split, Any]) -> bool:
    """Whether a dataset has a column of text and none of images."""
    kinds = set(column_kinds(splits["train"]).values())
    return "text" in kinds and not kinds & {"image", "bytes"}


def listed(kinds: Mapping[str, str]) -> str:
    """The columns for a message."""
    words = {"class": "classes", "label": "numbers"}
    return ", ".join(f"{name} ({words.get(kind, kind)})" for name, kind in kinds.items()) or "none"


def find_column(
    kinds: Mapping[str, str], named: str | None, what: str, choices: Sequence[Sequence[str]], allowed: Sequence[str]
) -> str:
    """The column for a purpose: the named one, else the only one of the first kinds of which there are some.

    Args:
        what: "image", "label" or "text", as in the option's name. choices: kinds to look for, the best first.
        allowed: the kinds that a named column may have.

    Raises:
        ValueError: no such column, none or several that suit; the line lists the columns.
    """
    if named is not None:
        if kinds.get(named) not in allowed:
            came = f"{named!r}, {'which holds ' + kinds[named] if named in kinds else 'which is none'}"
            fail(f"a column of {what}s as --{what}-column", came, f"The columns are {listed(kinds)}.")
        return named
    for wanted in choices:
        found = [name for name, kind in kinds.items() if kind in wanted]
        if len(found) == 1:
            return found[0]
        if found:
            break
    fail(f"one column of {what}s", f"the columns {listed(kinds)}", f"Name it: --{what}-column NAME.")


def _names(data: Any, column: str) -> tuple[str, ...] | None:
    """The names of the classes of a column; None if it holds no `ClassLabel`."""
    return tuple(data.features[column].names) if column_kinds(data)[column] == "class" else None


def _kept_by_libraries() -> tuple[Path, ...]:
    """The folders to which `datasets` and the hub's library write the files of a dataset."""
    import datasets
    from huggingface_hub import constants

    config = datasets.config
    kept = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, config.EXTRACTED_DATASETS_PATH)
    return tuple(Path(one).resolve() for one in (*kept, constants.HF_HUB_CACHE))


class HuggingFace(SampleSource):
    """Images of a dataset.

    Args:
        data: see `opened`. image_column, label_column: names; found if there is one candidate.
        splits: the datasets of each split, if they are opened.
        streaming: whether a dataset of the hub is read while it is used.
        image_at_most: the most bytes of an image.

    Raises:
        ValueError: see `opened`; or no such columns.
    """

    def __init__(
        self,
        data: Any,
        image_column: str | None = None,
        label_column: str | None = None,
        splits: dict[Split, Any] | None = None,
        *,
        streaming: bool = False,
        image_at_most: int,
    ) -> None:
        self._data, self._streaming, self._image_at_most = data, streaming, image_at_most
        is_named = isinstance(data, str | Path)
        folder, split = folder_of(str(data)) if is_named else (None, None)
        self._embedded, self._of_hub = folder is not None, is_named and folder is None
        if folder is not None:  # for processes elsewhere
            self._data = data = str(folder.resolve()) + (f":{split}" if split else "")
        self.title = Path(str(data).rstrip("/")).name if is_named else type(data).__name__
        self.shown = f"hf:{data}" if is_named else None
        self._open = splits
        first = self._splits["train"]
        kinds = column_kinds(first)
        self._image = find_column(kinds, image_column, "image", [["image"]], ["image", "bytes"])
        rest = {name: kind for name, kind in kinds.items() if name != self._image}
        labels = ("class", "label", "text")
        self._label = find_column(rest, label_column, "label", [["class"], ["label", "text"]], labels)
        self.columns = {"image_column": self._image, "label_column": self._label}
        for split, one in self._splits.items():
            if not {self._image, self._label} <= set(one.column_names or one.features or ()):
                came = f"{', '.join(one.column_names or ())} in {split}"
                fail(f"the columns {self._image} and {self._label} in every split", came, "Name others.")
        self._names = {split: _names(one, self._label) for split, one in self._splits.items()}
        self.classes = self._names["train"]
        for split, names in self._names.items():
            if (names is None) is not (self.classes is None) or not set(names or ()) <= set(self.classes or ()):
                own = sorted(set(names or ()) - set(self.classes or ())) or [f"no names in {self._label}"]
                came = f"{visible(', '.join(own[:_OTHERS]))} in {split}"
                fail("the classes of train in every split", came, "Give all splits the same ClassLabel.")
        self.shards = {split: self._count(one) for split, one in self._splits.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_open": None}

    @property
    def _splits(self) -> dict[Split, Any]:
        if self._open is None:
            self._open = opened(self._data, self._streaming)
        return self._open

    @staticmethod
    def _count(data: Any) -> int:
        return -(-len(data) // ROWS) if hasattr(data, "__len__") else max(1, int(data.num_shards))

    @property
    def identity(self) -> str:
        return repr({split: getattr(one, "_fingerprint", "") for split, one in self._splits.items()})

    @property
    def counts(self) -> Mapping[Split, int] | None:
        if not all(hasattr(one, "__len__") for one in self._splits.values()):
            return None
        return {split: len(one) for split, one in self._splits.items()}

    def read(self, split: Split, shard: int) -> Generator[LabelledImage | Unreadable]:
        for place, row in enumerate(self._rows(split, shard)):
            name = f"{split} {shard * ROWS + place}" if self.counts else f"{split} {shard}/{place}"
            image, label = self._content(row[self._image]), self._name(split, row[self._label])
            if isinstance(image, str) or label is None:
                reason = image if isinstance(image, str) else f"its {self._label} is {row[self._label]!r:.60}"
                yield Unreadable(name, reason)
            else:
                yield LabelledImage(name, place, image, label)

    def _rows(self, split: Split, shard: int) -> Iterator[Mapping[str, Any]]:
        import datasets

        data = self._splits[split]
        if type(data.features[self._image]).__name__ == "Image":
            data = data.cast_column(self._image, datasets.Image(decode=False))
        data = data.select_columns([self._image, self._label])
        if not hasattr(data, "__len__"):
            yield from data if self.shards[split] == 1 else data.shard(self.shards[split], shard, contiguous=True)
            return
        data = data.with_format(None)
        end = min(len(data), (shard + 1) * ROWS)
        for begin in range(shard * ROWS, end, _AT_ONCE):  # as many images as are in memory at once
            columns = data[begin : min(end, begin + _AT_ONCE)]
            for image, label in zip(columns[self._image], columns[self._label], strict=True):
                yield {self._image: image, self._label: label}

    def _content(self, cell: Any) -> bytes | str:
        """The bytes of an image, or the reason why there are none."""
        path = None
        if isinstance(cell, Mapping):
            cell, path = cell.get("bytes"), cell.get("path")
        if cell is None and path and self._may_open(path):
            try:
                with open_file(Path(path), self._image_at_most) as file:
                    return file.read()
            except (FileError, ValueError) as error:
                return f"{Path(path).name}: {error}"
        if not isinstance(cell, bytes):
            return "it has no image" if path is None else "its image is not in the dataset's own files"
        return cell if len(cell) <= self._image_at_most else f"it has {len(cell):,} bytes"

    def _may_open(self, path: str) -> bool:
        """Whether the file of an image that is named by its path is the dataset's: its author may name any."""
        if self._embedded:
            return False
        if not self._of_hub:  # handed over by the user's own code
            return True
        return any(Path(path).resolve().is_relative_to(folder) for folder in _kept_by_libraries())

    def _name(self, split: Split, cell: Any) -> str | None:
        """The name of the class in a cell. Each split numbers the classes in its own order."""
        names = self._names[split]
        if names is not None:
            return names[cell] if isinstance(cell, int) and 0 <= cell < len(names) else None
        if not isinstance(cell, str | int):
            return None
        return " ".join(visible(str(cell)).split())[:200] or None
