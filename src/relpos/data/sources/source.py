"""A source of samples: encoded images with the name of a class each, in shards that are read in a fixed order.

    source.read("train", 3)  ->  LabelledImage, LabelledImage, Unreadable, ...      shard 3 of the training split

A second pass gives the same. Nothing is decoded here: an image stays the bytes of its file.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass

from relpos.data.task import Split


@dataclass(frozen=True)
class LabelledImage:
    """An image as the bytes of its file, and its class.

    Attributes:
        name: names it to the user. place: its number within its shard.
    """

    name: str
    place: int
    image: bytes
    label: str


@dataclass(frozen=True)
class Unreadable:
    """A sample that cannot be used, or a shard from here on; the reason follows its name.

    Attributes:
        is_shard: whether the shard cannot be opened at all.
    """

    name: str
    reason: str
    is_shard: bool = False


def digest_of(content: bytes) -> bytes:
    """What identifies a sample by its bytes: the first half of their SHA-256."""
    return hashlib.sha256(content).digest()[:16]


class SampleSource(ABC):
    """Samples of one or more splits. It is sent to other processes by `pickle`, and opens its files there.

    Attributes:
        title: its name on the page. shown: how it was named, as `--data` takes it; None if Python handed it over.
        columns: the options that name its columns, as they were found.
        shards: the number of shards of each split that it has.
        classes: the names of the classes, if the data have them.
    """

    title: str
    shown: str | None
    columns: dict[str, str]
    shards: dict[Split, int]
    classes: tuple[str, ...] | None = None

    @property
    @abstractmethod
    def identity(self) -> str:
        """What is known of its contents without reading them: names and sizes of its shards."""

    @property
    def counts(self) -> Mapping[Split, int] | None:
        """The samples of each split, if they are known without reading."""
        return None

    @abstractmethod
    def read(self, split: Split, shard: int) -> Generator[LabelledImage | Unreadable]:
        """The samples of a shard."""
