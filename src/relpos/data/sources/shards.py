"""WebDataset's shards: tars whose files are samples, grouped by name.

    train-0001.tar:  0001.jpg 0001.cls 0002.jpg 0002.cls ...      sample 0001 has the fields jpg and cls

Consecutive files with the same name up to its first dot are a sample; the rest of the name is the field. Only the image
and the label are read: other fields, pickles among them, are never decoded. Names only group; nothing is written to
disk by name.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import string
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from relpos.core.checks import fail
from relpos.data.folder import SPLITS
from relpos.data.sources.cache import DiskCache
from relpos.data.sources.opening import is_remote, open_shard
from relpos.data.sources.source import LabelledImage, SampleSource, Unreadable
from relpos.data.sources.tar import members
from relpos.data.task import Split
from relpos.files.reading import FileError, parse_json
from relpos_command.visible import visible

SHARDS_AT_MOST = 100_000
LABEL_AT_MOST = 2**20
"""Bytes of a field with a label."""
PICKLED = frozenset({"npy", "npz", "pickle", "pkl", "pt", "pth", "pyd"})
"""Fields that are pickles or may hold some: reading one runs the code in it."""
LABELS = ("cls", "label", "class", "txt")
"""Fields that may be the label, if none is named."""
_LONGEST_LABEL = 200
_NUMBERS = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?$")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?(\d+))?$")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase
_DEEPEST = 20
"""Braces within each other."""
_PEEKED = 100
"""Samples whose fields are looked at to find the columns."""
_SCHEME = re.compile(r"\s*([A-Za-z][A-Za-z0-9+.-]+):")
_SPLIT = re.compile(rf"(?<![a-z])({'|'.join(SPLITS)})(?![a-z])")


def expand(pattern: str) -> list[str]:
    """The shards of a brace pattern: `train-{0000..0099}.tar`, `{a,b}.tar`.

    Raises:
        ValueError: a scheme that runs commands or is unknown, unbalanced braces, too many shards.
    """
    from braceexpand import braceexpand  # webdataset's own

    came = f"{pattern!r:.200}"
    if "\0" in pattern:
        fail("the names of shards", came, "Remove the zero byte.")
    try:  # what braceexpand makes of braces within braces is a list: count before
        count = _count(iter(re.findall(r"\\.|[{},]|[^\\{},]+|\\", pattern, re.DOTALL)))
        found = [] if count > SHARDS_AT_MOST else list(itertools.islice(braceexpand(pattern), SHARDS_AT_MOST + 1))
    except ValueError:
        fail("braces in pairs, such as {0000..0099}", came, "Close each.")
    if not 0 < len(found) <= SHARDS_AT_MOST:
        fail(f"at most {SHARDS_AT_MOST:,} shards", came, "Name fewer, or make larger ones.")
    odd = next((match[1].lower() for one in found if (match := _SCHEME.match(one))), None)
    if odd is not None and odd not in ("http", "https"):
        remedy = "pipe: runs a command, which is refused." if odd == "pipe" else "Copy them to this machine."
        fail("shards on this machine, or by http or https", came, remedy)
    return found


def _count(tokens: Iterator[str], depth: int = 0) -> int:
    """How many names a pattern makes, at most: of a pair of braces the sum over its commas, else the product.

    Raises:
        ValueError: unbalanced braces, or more than `_DEEPEST` within each other.
    """
    if depth > _DEEPEST:
        raise ValueError("too many braces within each other")
    total, product, text = 0, 1, ""
    for token in tokens:
        if token == "{":
            product *= _count(tokens, depth + 1)
        elif token == "}":
            if not depth:
                raise ValueError("a brace that ends nothing")
            return _range(text) or total + product
        elif token == "," and depth:
            total, product = total + product, 1
        text += token
    if depth:
        raise ValueError("a brace without its end")
    return product


def _range(text: str) -> int | None:
    """How many names a range makes, such as 00..99, or a..z..2."""
    match = _NUMBERS.match(text) or _LETTERS.match(text)
    if match is None:
        return None
    first, last = (_ALPHABET.index(one) if one.isalpha() else int(one) for one in match.group(1, 2))
    return abs(last - first) // max(1, int(match[3] or 1)) + 1


def _absolute(pattern: str, listed: Sequence[str]) -> str:
    """The pattern of the same shards for processes in other folders."""
    here = [is_remote(one) or one.lstrip().startswith(("/", "~")) for one in listed]
    if all(here):
        return pattern
    if any(here):
        found = [one if is_there else str(Path.cwd() / one) for one, is_there in zip(listed, here, strict=True)]
        return "{" + ",".join(map(_escaped, found)) + "}"
    return f"{_escaped(str(Path.cwd()))}/{pattern}"


def _escaped(path: str) -> str:
    """A path as a pattern of it alone."""
    return re.sub(r"([\\{},])", r"\\\1", path)


def splits_of(shards: Sequence[str]) -> dict[Split, list[str]]:
    """The shards of each split, if the names of all files or their folders have one, and some are train; else all are
    train."""
    found: dict[Split, list[str]] = {}
    for shard in shards:
        path = PurePosixPath(shard.replace("\\", "/").lower())
        named = next((names for one in (path.name, path.parent.name) if (names := _SPLIT.findall(one))), [])
        if len(set(named)) != 1:
            return {"train": list(shards)}
        found.setdefault(SPLITS[named[0]], []).append(shard)
    return found if "train" in found else {"train": list(shards)}


class ShardFiles(SampleSource):
    """The samples in shards.

    Args:
        pattern: see `expand`.
        image_column: the fields of images, alternatives joined by ";". label_column: the field of the label, or
            `json.KEY` for a value in a field of JSON. Found if there is one candidate.
        cache: keeps shards that a server sends.
        image_at_most: the most bytes of an image.

    Raises:
        ValueError: a shard does not exist, no first sample, no such field or several candidates, or a pickled one.
    """

    def __init__(
        self,
        pattern: str,
        image_column: str | None = None,
        label_column: str | None = None,
        cache: DiskCache | None = None,
        *,
        image_at_most: int,
    ) -> None:
        self._cache, self._image_at_most = cache, image_at_most
        if label_column is not None and not _is_json(label_column):
            label_column = label_column.lower()  # as fields are read
        for name, column in (("image", image_column), ("label", label_column)):
            _require_no_pickle(name, column)
        listed = expand(pattern)
        for shard in listed:
            if not is_remote(shard) and not Path(shard).expanduser().exists():
                fail("shards that exist", f"{visible(shard)}, which does not", "Check the path and the braces.")
        pattern = _absolute(pattern, listed)
        listed = [one if is_remote(one) else str(Path(one).expanduser().absolute()) for one in listed]
        self._names = splits_of(listed)
        self.shards = {split: len(names) for split, names in self._names.items()}
        self.title = f"Shards {PurePosixPath(pattern).name}"
        self.shown = f"wds:{pattern}"
        self._image, self._label = self._columns(image_column, label_column)
        self.columns = {"image_column": ";".join(self._image), "label_column": self._label}

    @property
    def identity(self) -> str:
        digest = hashlib.sha256()
        for split, names in self._names.items():
            for name in names:
                size = -1 if is_remote(name) else Path(name).stat().st_size
                digest.update(f"{split}\0{PurePosixPath(name).name}\0{size}\0".encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def _columns(self, image: str | None, label: str | None) -> tuple[tuple[str, ...], str]:
        """The fields of the image and the label, as named or as the first samples have them."""
        if image is not None and label is not None:
            return tuple(image.lower().split(";")), label
        from relpos.data.decode import endings

        known, images, others, twice = endings(), dict[str, None](), dict[str, None](), False
        for fields in self._peek():
            pictures = [field for field in dict.fromkeys(fields) if f".{field.rpartition('.')[2]}" in known]
            twice |= len(pictures) > 1
            images |= dict.fromkeys(pictures)
            others |= dict.fromkeys(field for field in fields if field not in pictures)
        listed = ", ".join((*images, *others)) or "no field"
        if image is None and (twice or not images):
            fail("one field of images", f"the fields {listed}", "Name it: --image-column jpg.")
        labels = [field for field in LABELS if field in others]
        if label is None and len(labels) != 1 and "cls" not in labels:
            fail(
                f"one field of labels among {', '.join(LABELS)}",
                f"the fields {listed}",
                "Name it: --label-column cls, or json.KEY for a value in a field of JSON.",
            )
        return tuple(images if image is None else image.lower().split(";")), labels[0] if label is None else label

    def _peek(self) -> list[list[str]]:
        """The fields of the first samples of the first shard that has some."""
        reason = "no sample"
        for name in self._names["train"]:
            found: dict[str, list[str]] = {}
            try:
                with open_shard(name, self._cache) as file:
                    for path, _ in members(file, _compressed(name), lambda _: None):
                        key, field = _split_name(path)
                        if len(found) == _PEEKED and key not in found:
                            break
                        if field:
                            found.setdefault(key, []).append(field)
            except FileError as error:
                reason = f"{visible(name)} ({error})"
            if found:
                return list(found.values())
        fail("shards with samples", reason, "Name tars whose files are KEY.FIELD, such as 0001.jpg and 0001.cls.")

    def read(self, split: Split, shard: int) -> Generator[LabelledImage | Unreadable]:
        name = self._names[split][shard]
        title = visible(PurePosixPath(name.replace("\\", "/")).name)
        place, seen = 0, set[int]()
        try:
            opened = open_shard(name, self._cache)
        except FileError as error:
            yield Unreadable(title, str(error), is_shard=True)
            return
        try:
            with opened as file:
                for key, fields, repeated in _grouped(members(file, _compressed(name), self._wanted)):
                    own = f"{title}/{visible(key)}"
                    yield from (Unreadable(f"{own}.{visible(field)}", "its name repeats") for field in repeated)
                    if hash(key) in seen:
                        yield Unreadable(own, "its name repeats")
                        continue
                    seen.add(hash(key))
                    yield self._sample(own, place, key, fields)
                    place += 1
        except FileError as error:
            yield Unreadable(title, str(error))

    def _wanted(self, path: str) -> int | None:
        _, field = _split_name(path)
        if field in self._image:
            return self._image_at_most
        return LABEL_AT_MOST if field == self._held else None

    @property
    def _held(self) -> str:
        """The field that holds the label."""
        return "json" if _is_json(self._label) else self._label

    def _sample(self, own: str, place: int, key: str, fields: dict[str, Any]) -> LabelledImage | Unreadable:
        if key.startswith("/") or ".." in key.split("/"):
            return Unreadable(own, "its name leads out of the folder")
        images = [field for field in self._image if field in fields]
        held = self._held
        if len(images) != 1 or held not in fields:
            lacks = "/".join(self._image) if not images else held
            return Unreadable(own, f"it lacks {lacks}" if len(images) < 2 else f"it has {' and '.join(images)}")
        image, label = fields[images[0]], fields[held]
        for field, content in ((images[0], image), (held, label)):
            if not isinstance(content, bytes):
                return Unreadable(own, f"{field}: {content}")
        text = _label_of(label, self._label)
        if text is None:
            return Unreadable(own, f"its {self._label} is no name or number of a class")
        return LabelledImage(own, place, image, text)


def _require_no_pickle(what: str, column: str | None) -> None:
    for field in (column or "").lower().split(";"):
        if field.rpartition(".")[2] in PICKLED and not _is_json(field):
            fail(
                f"a field that is read without running code as --{what}-column",
                f"{field}, which is or may hold a pickle",
                "Write the shards with images and text.",
            )


def _is_json(column: str) -> bool:
    return column.startswith("json.")


def _compressed(name: str) -> bool:
    return name.lower().endswith((".gz", ".tgz"))


def _split_name(path: str) -> tuple[str, str]:
    """The key and the field of a file, as webdataset splits its name; the field is empty if there is none."""
    path = path.removeprefix("./")
    folder, slash, name = path.rpartition("/")
    stem, _, field = name.partition(".")
    return f"{folder}{slash}{stem}", field.lower() if stem else ""


def _grouped(files: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, dict[str, Any], list[str]]]:
    """Key, fields and repeated fields of every sample. The last one of a tar that breaks off is left out."""
    current: tuple[str, dict[str, Any], list[str]] | None = None
    for path, content in files:
        key, field = _split_name(path)
        if not field:
            continue
        if current is None or key != current[0]:
            if current is not None:
                yield current
            current = (key, {}, [])
        if field in current[1]:
            current[2].append(field)
        else:
            current[1][field] = content
    if current is not None:
        yield current


def _label_of(content: bytes, column: str) -> str | None:
    """The name of the class in a field: its text, or a value in its JSON."""
    try:
        if not _is_json(column):
            text = content.decode("utf-8").strip()
        else:
            value = parse_json(content)
            for key in column.split(".")[1:]:
                value = value[key]
            if not isinstance(value, str | int):
                return None
            text = str(value).strip()
    except (ValueError, KeyError, TypeError):
        return None
    return text if text and len(text) <= _LONGEST_LABEL and text.isprintable() else None
