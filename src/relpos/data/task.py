"""What a task is: images to train on, and probes that ask how a trained model stands up to change.

A probe scores every test image in one or more placements, so that outcomes can be paired, image by image, between
mechanisms and seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float, Int
from torch import Tensor

Split = Literal["validation", "test"]


@dataclass(frozen=True)
class Probe:
    """One question to a trained model.

    Attributes:
        id: "test", "shift/1", "canvas/20/anywhere".
        group: probes of a group make one curve.
        label: a few words for a table.
        variant: what tells the curves of a group apart, or None.
        x: the number on the horizontal axis.
        image_size: (rows, columns).
        trials: placements of each image.
        description: one sentence.
    """

    id: str
    group: str
    label: str
    variant: str | None
    x: float
    image_size: tuple[int, int]
    trials: int
    description: str


class Task(ABC):
    """A data set with its robustness probes. Any image size, number of channels and classes.

    Attributes:
        name, title, description: what the command line and the page call it.
        classes: labels in words. channels: of an image.
        image_size, patch_size: (rows, columns) a model is trained at.
    """

    name: ClassVar[str]
    title: str
    description: str
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    patch_size: tuple[int, int]

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Images for "train", "validation" and "test"."""

    @abstractmethod
    def batches(
        self, batch_size: int, seed: int
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        """Training batches without end, the same for the same seed."""

    @property
    @abstractmethod
    def probes(self) -> tuple[Probe, ...]:
        """The probes, in the order they are shown; the first is the plain test, at the trained image size."""

    @abstractmethod
    def examples(
        self, probe: Probe, split: Split
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        """The images of a probe in all their placements, and their labels; the same on every call."""
