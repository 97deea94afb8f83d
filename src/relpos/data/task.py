"""Tasks: training data, and probes that test how a trained model handles changed inputs.

Each probe scores the same units of test data (images, blocks of text) under one condition, so that outcomes are paired,
unit by unit, between mechanisms, seeds and probes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from relpos import results
from relpos.core.checks import fail

Split = Literal["train", "validation", "test"]
TaskKind = Literal["images", "text", "other"]
Watch = Callable[[int, int], None]
"""A callback for progress while a task is made: how much is done, of how much."""

FIRST = ("none", "learned", "relative_2d", "t5", "rotary_2d", "learned+relative_2d")
"""The default mechanisms of a comparison on images: one of each kind."""
STANDARD = (
    "none", "learned", "sinusoidal_2d", "relative_1d", "relative_2d", "t5", "alibi", "rotary_1d", "rotary_2d",
    "learned+relative_2d", "rotary_2d+relative_2d",
)  # fmt: skip
"""The mechanisms of the comparison whose results are in the documentation."""


@dataclass(frozen=True)
class Probe(ABC):
    """One test of a trained model.

    Attributes:
        id: "test", "shift/1", "canvas/20/anywhere", "rotation/90", "length/512".
        group: probes of a group make one curve.
        label: a few words for a table.
        variant: distinguishes several curves of a group, or None.
        x: the number on the horizontal axis.
        description: one sentence.
    """

    id: str
    group: str
    label: str
    variant: str | None
    x: float
    description: str

    @property
    @abstractmethod
    def size(self) -> Any:
        """The argument for a model's `grow`: an image size, or a length."""

    def describe(self) -> results.ProbeRecord:
        """The probe for `results.json`."""
        return results.ProbeRecord(**asdict(self))


@dataclass(frozen=True)
class ImageProbe(Probe):
    """A test on images.

    Attributes:
        image_size: (rows, columns).
        trials: placements of each image.
    """

    image_size: tuple[int, int]
    trials: int

    @property
    def size(self) -> tuple[int, int]:
        return self.image_size

    def describe(self) -> results.ProbeRecord:
        return results.ProbeRecord(**{**asdict(self), "image_size": list(self.image_size)})


class Task(ABC):
    """A data set with its probes.

    A task is sent to other processes by `pickle`, with its data.

    Attributes:
        name: its name on the command line. summary: one sentence for a list of tasks.
        kind: "images", "text" or "other". measure: the metric of a probe, a key of `results.json`.
        positions: the default mechanisms of a comparison. standard: a wider choice of well-known ones.
        title, description: its texts on the page.
        options: plain values that, with the name, rebuild the task.
        grid: training tokens along each axis.
        leakage: a line for each split with samples that are also in an earlier one, if that was looked for.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    kind: ClassVar[TaskKind]
    measure: ClassVar[Literal["accuracy", "bits_per_byte"]]
    positions: ClassVar[tuple[str, ...]]
    standard: ClassVar[tuple[str, ...]]
    title: str
    description: str
    options: dict[str, Any]
    leakage: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: dict[str, Any], watch: Watch | None = None) -> Self:
        """The task that `options` describes; a task without options accepts none."""
        if options:
            fail(f"no options for the task {cls.name}", ", ".join(options), "Leave them out.")
        return cls()

    @property
    @abstractmethod
    def grid(self) -> tuple[int, ...]:
        """Tokens along each axis in training."""

    @property
    @abstractmethod
    def size(self) -> int | tuple[int, int]:
        """The size that a model is built for, as an argument of its `grow`."""

    @property
    @abstractmethod
    def sizes(self) -> dict[str, int]:
        """The amount of data for "train", "validation" and "test"."""

    @property
    @abstractmethod
    def probes(self) -> tuple[Probe, ...]:
        """The probes, in the order they are shown; the first is the plain test, at the trained size."""

    @abstractmethod
    def batches(
        self, batch_size: int, seed: int, *, start: int = 0
    ) -> Iterator[tuple[Shaped[Tensor, "B ..."], Int[Tensor, "B ..."]]]:
        """Endless training batches of inputs and the classes to predict, the same for the same seed.

        Args:
            start: how many batches to skip.
        """

    @abstractmethod
    def noise(self, grid: tuple[int, ...], batch_size: int) -> tuple[Shaped[Tensor, "B ..."], Int[Tensor, "B ..."]]:
        """A batch of arbitrary content with a grid of tokens, to time a step."""

    @abstractmethod
    def once(self, split: Split, batch_size: int) -> Iterator[Any]:
        """A whole split, each unit once and in order, in batches as in training."""

    def describe(self) -> results.TaskRecord:
        """The task for `results.json`."""
        return results.TaskRecord(
            name=self.name,
            title=self.title,
            description=self.description,
            sizes=self.sizes,
            probes=[probe.describe() for probe in self.probes],
            kind=self.kind,
        )


class ImageTask(Task):
    """Images of any size, number of channels and classes.

    Attributes:
        classes: names of the labels. channels: channels of an image.
        image_size, patch_size: (rows, columns) in training.
        skipped: broken files that were left out, each `{"path", "reason"}`. left_out: their number, if
            not all are named. ignored: files that are no images.
    """

    kind: ClassVar[TaskKind] = "images"
    measure: ClassVar[Literal["accuracy", "bits_per_byte"]] = "accuracy"
    positions: ClassVar[tuple[str, ...]] = FIRST
    standard: ClassVar[tuple[str, ...]] = STANDARD
    classes: tuple[str, ...]
    channels: int
    image_size: tuple[int, int]
    patch_size: tuple[int, int]
    skipped: tuple[dict[str, str], ...] = ()
    ignored: tuple[str, ...] = ()
    left_out: int = 0

    @property
    def grid(self) -> tuple[int, ...]:
        return tuple(edge // patch for edge, patch in zip(self.image_size, self.patch_size, strict=True))

    @property
    def size(self) -> tuple[int, int]:
        return self.image_size

    @property
    @abstractmethod
    def probes(self) -> tuple[ImageProbe, ...]:
        """The probes, in the order they are shown; the first is the plain test, at the trained image size."""

    @abstractmethod
    def labels(self, split: Split) -> Int[Tensor, " n"]:
        """The class of every image of a split, as its index in `classes`."""

    @abstractmethod
    def batches(
        self, batch_size: int, seed: int, *, start: int = 0
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        """Endless training batches, the same for the same seed."""

    @abstractmethod
    def examples(
        self, probe: ImageProbe, split: Split, chosen: slice = slice(None)
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        """The images of a probe in all their placements, and their labels; the same on every call.

        Args:
            chosen: which images of the split; all large images at once may not fit into memory.
        """

    def once(
        self, split: Split, batch_size: int
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        for start in range(0, len(self.labels(split)), batch_size):
            images, labels = self.examples(self.probes[0], split, slice(start, start + batch_size))
            yield images[:, 0], labels

    def noise(
        self, grid: tuple[int, ...], batch_size: int
    ) -> tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]:
        rows, columns = (count * patch for count, patch in zip(grid, self.patch_size, strict=True))
        labels = torch.arange(batch_size) % len(self.classes)
        return torch.rand(batch_size, self.channels, rows, columns), labels

    def describe(self) -> results.TaskRecord:
        counts = torch.bincount(self.labels("test"), minlength=1)
        return replace(
            super().describe(),
            classes=list(self.classes),
            largest_class=round(counts.max().item() / max(1, counts.sum().item()), 6),
            channels=self.channels,
            image_size=list(self.image_size),
            patch_size=list(self.patch_size),
            skipped=[dict(one) for one in self.skipped],
            ignored=list(self.ignored),
        )
