"""What a task is: images to train on, and probes that ask how a trained model stands up to change.

A probe scores every test image in one or more placements, so that outcomes can be paired, image by image, between
mechanisms and seeds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.checks import fail

Split = Literal["train", "validation", "test"]
Watch = Callable[[int, int], None]
"""Told how much is done, of how much, while a task is made."""

COMPARED = (
    "none", "learned", "sinusoidal_2d", "relative_1d", "relative_2d", "t5", "alibi", "rotary_1d", "rotary_2d",
    "learned+relative_2d", "rotary_2d+relative_2d",
)  # fmt: skip
"""The mechanisms that a comparison on images begins with, by name."""


@dataclass(frozen=True)
class Probe:
    """One question to a trained model.

    Attributes:
        id: "test", "shift/1", "canvas/20/anywhere", "rotation/90".
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

    A task travels to other processes by `pickle`, with its data.

    Attributes:
        name: what the command line calls it. summary: one sentence for a list of tasks.
        positions: the mechanisms that a comparison takes when none are named.
        title, description: what the page calls it.
        classes: labels in words. channels: of an image.
        image_size, patch_size: (rows, columns) a model is trained at.
        options: plain values that, with the name, make the task again.
        skipped: files left out because they are broken, each `{"path", "reason"}`. ignored: files that are no images.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    positions: ClassVar[tuple[str, ...]] = COMPARED
    title: str
    description: str
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    options: dict[str, Any]
    skipped: tuple[dict[str, str], ...] = ()
    ignored: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        """The task that `options` describes; a task without options takes none."""
        if options:
            fail(f"no options for the task {cls.name}", ", ".join(options), "Leave them out.")
        return cls()

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """Images for "train", "validation" and "test"."""

    @abstractmethod
    def labels(self, split: Split) -> Int[Tensor, " n"]:
        """The class of every image of a split, as its place in `classes`."""

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
        self, probe: Probe, split: Split, chosen: slice = slice(None)
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        """The images of a probe in all their placements, and their labels; the same on every call.

        Args:
            chosen: which images of the split; large ones do not fit into memory all at once.
        """
