"""One pass over a source before training: all that a task must know about its samples.

In memory, it reads every sample and keeps the pictures. Of a stream it reads the first samples of every shard, keeps
the held-out pictures, and of the training pictures only their mean, deviation and classes.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Num
from torch import Tensor

from relpos.core.checks import fail
from relpos.data.decode import Pixels, decode_all
from relpos.data.folder import SHARES
from relpos.data.pictures import Moments
from relpos.data.sources.source import LabelledImage, SampleSource, Unreadable, digest_of
from relpos.data.sources.splitting import SPLIT_ORDER, Leakage, split_of
from relpos.data.task import Split, Watch

_TOGETHER, _BYTES_TOGETHER = 256, 2**26
"""Samples decoded together, and the bytes of their files, at most."""
NAMED_AT_MOST = 1000
"""How many samples that were left out are named; the rest are counted."""


@dataclass(frozen=True)
class Decoding:
    """How samples become pictures.

    Attributes:
        size: (rows, columns) of a picture. max_pixels: of an image, at most.
        bad_data: "skip" leaves out and counts what cannot be used, "fail" raises.
    """

    size: tuple[int, int]
    max_pixels: int
    bad_data: str

    def decoded(self, samples: list[LabelledImage]) -> list[Pixels | str]:
        """The picture of every sample, or why there is none."""
        return decode_all([one.image for one in samples], self.size, max_pixels=self.max_pixels)

    def refuse(self, name: str, reason: str) -> None:
        """Raise if bad data are errors."""
        if self.bad_data == "fail":
            fail("samples that can be used", f"{name} ({reason})", "Repair them, or leave them out: --bad-data skip.")


Item = TypeVar("Item", LabelledImage, LabelledImage | Unreadable)


def together(items: Iterator[Item]) -> Iterator[list[Item]]:
    """Items in lists that are decoded at once; their files are in memory, so bytes are limited, too."""
    held: list[Item] = []
    size = 0
    for item in items:
        held.append(item)
        size += len(item.image) if isinstance(item, LabelledImage) else 0
        if len(held) == _TOGETHER or size >= _BYTES_TOGETHER:
            yield held
            held, size = [], 0
    if held:
        yield held


def stacked(pictures: list[Pixels], channels: int) -> Num[Tensor, "n C height width"]:
    """Pictures as one tensor; if they shall be grey, a coloured one gives the mean of its channels."""
    if channels == 1:
        pictures = [
            one[:, :, :1] if is_grey(one) else one.mean(axis=2, keepdims=True, dtype=np.float32) for one in pictures
        ]
    return torch.from_numpy(np.ascontiguousarray(np.stack(pictures).transpose(0, 3, 1, 2)))


def is_grey(picture: Pixels) -> bool:
    """Whether a picture has equal channels."""
    return bool((picture == picture[:, :, :1]).all())


@dataclass
class Survey:
    """What was found.

    Attributes:
        pictures, labels: of each split, in order; of a stream's training samples only the labels.
        moments: of a stream's training pictures.
        taken: the splits that the source lacks.
        complete: whether every sample was read.
        bad: the first that were left out, each `{"path", "reason"}`. left_out: their number.
        unreadable: split, shard and place of samples whose image cannot be decoded.
        closed: split and shard of shards that cannot be opened. each: of a stream, how many samples of a training shard
            were read.
        digest: of everything that was read.
    """

    taken: tuple[Split, ...]
    streamed: bool
    pictures: dict[Split, list[Pixels]] = field(default_factory=lambda: {split: [] for split in SPLIT_ORDER})
    labels: dict[Split, list[str]] = field(default_factory=lambda: {split: [] for split in SPLIT_ORDER})
    moments: Moments = field(default_factory=Moments)
    leakage: Leakage = field(default_factory=Leakage)
    grey: bool = True
    complete: bool = True
    bad: list[dict[str, str]] = field(default_factory=list)
    left_out: int = 0
    unreadable: set[tuple[Split, int, int]] = field(default_factory=set)
    closed: set[tuple[Split, int]] = field(default_factory=set)
    each: int = 0
    digest: str = ""
    _bytes: int = 0

    def __post_init__(self) -> None:
        self._hash = hashlib.sha256()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_hash"}

    @classmethod
    def of(cls, source: SampleSource, reading: Decoding, most: int | None = None, watch: Watch | None = None) -> Survey:
        """Read a source.

        Args:
            most: of a stream, how many training samples; of splits that the source has, their usual shares of it.
            watch: receives how many samples are read, of how many.

        Raises:
            ValueError: no samples, bad data if they are errors, one class, a split without samples, too many to hold.
        """
        found = cls(tuple(split for split in SHARES if split not in source.shards), most is not None)
        total = None if source.counts is None else sum(source.counts.values())
        done = 0
        for split in (one for one in SPLIT_ORDER if one in source.shards):
            limit = None if most is None else most if split == "train" else math.ceil(most * SHARES[split])
            each = None if limit is None else math.ceil(limit / source.shards[split])
            found.each = each or 0 if split == "train" else found.each
            for shard in range(source.shards[split]):
                with closing(source.read(split, shard)) as items:
                    for some in together(itertools.islice(items, each)):
                        found._add(split, shard, some, reading)
                        done += len(some)
                        if watch is not None:
                            watch(done, max(done, total or 0))
                    found.complete &= each is None or next(items, None) is None
        found._require_usable(source)
        found.digest = found._hash.hexdigest()
        return found

    def _add(self, split: Split, shard: int, items: list[LabelledImage | Unreadable], reading: Decoding) -> None:
        samples = [one for one in items if isinstance(one, LabelledImage)]
        decoded = dict(zip(map(id, samples), reading.decoded(samples), strict=True))
        training: list[Pixels] = []
        for item in items:
            picture = item.reason if isinstance(item, Unreadable) else decoded[id(item)]
            if isinstance(item, Unreadable) or isinstance(picture, str):
                assert isinstance(picture, str)
                reading.refuse(item.name, picture)
                self.left_out += 1
                if len(self.bad) < NAMED_AT_MOST:
                    self.bad.append({"path": item.name, "reason": picture})
                if isinstance(item, LabelledImage):
                    self.unreadable.add((split, shard, item.place))
                elif item.is_shard:
                    self.closed.add((split, shard))
                continue
            mark = digest_of(item.image)
            own = split_of(mark, self.taken) if split == "train" else split
            self.leakage.add(own, mark)
            self.labels[own].append(item.label)
            self.grey = self.grey and is_grey(picture)
            self._hash.update(f"{own}\0{item.label}\0".encode() + picture.tobytes())
            if own == "train" and self.streamed:
                training.append(picture)
            else:
                self._keep(own, picture)
        if training:
            self.moments.add(stacked(training, 3))

    def _keep(self, split: Split, picture: Pixels) -> None:
        self.pictures[split].append(picture)
        self._bytes += picture.nbytes
        if self._bytes > _memory() // 2:
            remedy = "Pass --streaming, or a smaller --image-size." if not self.streamed else "Pass a smaller --survey."
            fail("pictures that fit into half of the memory", f"more than {self._bytes / 1e9:.0f} GB of them", remedy)

    def _require_usable(self, source: SampleSource) -> None:
        counts = {split: len(labels) for split, labels in self.labels.items()}
        came = ", ".join(f"{count} for {split}" for split, count in counts.items())
        why = (
            f", and {self.left_out} left out, such as {self.bad[0]['path']} ({self.bad[0]['reason']})"
            if self.bad
            else ""
        )
        if not all(counts.values()):
            fail("samples for training, validation and test", f"{came}{why}", "Add some, or name other columns.")
        if len(self.classes(source)) < 2:
            label = source.columns["label_column"]
            fail("at least two classes", f"one, in the column {label}", "Name another: --label-column.")

    def classes(self, source: SampleSource) -> tuple[str, ...]:
        """The names of all classes: the source's, else those found, sorted, by value if all are numbers."""
        if source.classes is not None:
            return source.classes
        names = set(itertools.chain(*self.labels.values()))
        numbers = all(name.removeprefix("-").isdecimal() for name in names)
        return tuple(sorted(names, key=lambda name: (int(name), name)) if numbers else sorted(names))


def _memory() -> int:
    """The machine's memory in bytes; no limit where it is unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return 2**62
