"""Pictures on a larger canvas: the same probes for every set of pictures.

Training places a picture at a random offset, uniform over one patch cell around the middle. So it sees every phase
between picture and patches, and nothing farther out. The probes go beyond training. Shifts place the picture half a
patch, a whole one, and one and a half beyond that cell, in eight directions. Canvases are about 1.25 and 1.5 times as
large, with the picture in the middle, anywhere, or zoomed with the canvas. On request, the picture is also rotated by
90, 180 and 270 degrees.
"""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Num
from torch import Tensor

from relpos.core.checks import fail
from relpos.data.task import ImageProbe, ImageTask, Split

GROWTH = (1.25, 1.5)
ANYWHERE_TRIALS = 2
TURNS = (90, 180, 270)
_VARIANTS = (
    ("centred", 1, "in the middle"),
    ("anywhere", ANYWHERE_TRIALS, "anywhere"),
    ("zoomed", 1, "in the middle and zoomed with the canvas"),
)

Corner = tuple[int, int]
"""Row and column of a picture's upper left corner."""


@dataclass(frozen=True)
class Level:
    """Numbers per channel: mean and deviation to standardise images, and the background before that."""

    mean: Float[Tensor, "C 1 1"]
    deviation: Float[Tensor, "C 1 1"]
    background: Float[Tensor, "C 1 1"]


def _middle(canvas: tuple[int, int], picture: tuple[int, int]) -> Corner:
    return (canvas[0] - picture[0]) // 2, (canvas[1] - picture[1]) // 2


class CanvasTask(ImageTask):
    """Pictures of one size, `picture_size`, each on a canvas of `image_size`, the model's input.

    The margin is at least two patches at every edge, so that every shift stays on the canvas.

    Attributes:
        subject: the word for a picture in the probes' descriptions.
        turned: whether there are probes with rotated pictures, which must be square.
        picture_size: (rows, columns) of a picture.
        first_corner: the first of the corners that training uses; together they cover one patch cell.
    """

    subject: ClassVar[str]
    turned: bool = False
    picture_size: tuple[int, int]
    first_corner: Corner

    @property
    @abstractmethod
    def level(self) -> Level:
        """Mean and deviation to standardise images, and the canvas's background."""

    @abstractmethod
    def pictures(self, split: Split) -> Num[Tensor, "n C height width"]:
        """The pictures of a split, before standardisation."""

    @property
    def sizes(self) -> dict[str, int]:
        splits: tuple[Split, ...] = ("train", "validation", "test")
        return {split: len(self.labels(split)) for split in splits}

    def _cell(self) -> list[Corner]:
        """Every corner that training uses."""
        row, column = self.first_corner
        rows, columns = self.patch_size
        return [(row + down, column + right) for down in range(rows) for right in range(columns)]

    def _paste(
        self, pictures: Num[Tensor, "n C height width"], corners: Int[Tensor, "n 2"], canvas: tuple[int, int]
    ) -> Float[Tensor, "n C rows columns"]:
        """Each picture with its corner there on a canvas of its own, standardised."""
        count, _, height, width = pictures.shape
        level = self.level
        images = level.background.repeat(count, 1, *canvas)
        for image, picture, (row, column) in zip(images, pictures, corners.tolist(), strict=True):
            image[:, row : row + height, column : column + width] = picture
        return (images - level.mean) / level.deviation

    def batches(
        self, batch_size: int, seed: int, *, start: int = 0
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        pictures, labels = self.pictures("train"), self.labels("train")
        if not 1 <= batch_size <= len(labels):  # there is no full batch
            fail(f"a batch size from 1 to {len(labels)}", str(batch_size), "There are no more training images.")
        cell = torch.tensor(self._cell())
        generator = torch.Generator().manual_seed(seed)
        an_epoch = len(labels) // batch_size  # a short last batch would give its images more weight
        for epoch in itertools.count():
            order = torch.randperm(len(labels), generator=generator)
            for number, chosen in enumerate(order.split(batch_size)[:an_epoch], epoch * an_epoch):
                corners = cell[torch.randint(len(cell), (batch_size,), generator=generator)]
                if number < start:
                    continue
                yield self._paste(pictures[chosen], corners, self.image_size), labels[chosen]

    def _canvases(self) -> list[tuple[int, int]]:
        """Canvases about 1.25 and 1.5 times as large, in whole patches."""
        (height, width), (rows, columns) = self.image_size, self.patch_size
        return [(math.ceil(height // rows * by) * rows, math.ceil(width // columns * by) * columns) for by in GROWTH]

    @cached_property
    def probes(self) -> tuple[ImageProbe, ...]:
        trained, subject = self.image_size, self.subject
        placements = len(self._trained_corners())
        test = ImageProbe(
            "test", "test", "test", None, 0, f"Test {subject}s placed as in training.", trained, placements
        )
        steps = sorted({max(1, min(self.patch_size) * halves // 2) for halves in (1, 2, 3)})
        shifts = [
            ImageProbe(
                id=f"shift/{shift}",
                group="shift",
                label=f"shift {shift} px",
                variant=None,
                x=shift,
                image_size=trained,
                trials=8,
                description=f"Moved {shift} px beyond every place that training used, in the eight directions.",
            )
            for shift in steps
        ]
        canvases = [
            ImageProbe(
                id=f"canvas/{rows if rows == columns else f'{rows}x{columns}'}/{variant}",
                group="canvas",
                label=f"{rows} x {columns}, {variant}",
                variant=variant,
                x=rows,
                image_size=(rows, columns),
                trials=trials,
                description=f"A canvas of {rows} x {columns}, never trained, with the {subject} {words}.",
            )
            for rows, columns in self._canvases()
            for variant, trials, words in _VARIANTS
        ]
        turns = [
            ImageProbe(
                id=f"rotation/{degrees}",
                group="rotation",
                label=f"rotated {degrees} degrees",
                variant=None,
                x=degrees,
                image_size=trained,
                trials=placements,
                description=f"Placed as in training, each {subject} turned {degrees} degrees counter-clockwise.",
            )
            for degrees in TURNS
            if self.turned
        ]
        return (test, *shifts, *canvases, *turns)

    def _trained_corners(self) -> list[Corner]:
        """Up to four evenly spaced corners of the training cell: every phase in steps of half a patch."""
        row, column = self.first_corner
        downs, rights = (sorted({0, edge // 2}) for edge in self.patch_size)
        return [(row + down, column + right) for down in downs for right in rights]

    def _corners(self, probe: ImageProbe, count: int, picture: tuple[int, int]) -> Int[Tensor, "n trials 2"]:
        """All corners of each of `count` pictures; the same on every call."""
        canvas = probe.image_size
        middle = _middle(canvas, picture)
        if probe.variant == "anywhere":
            ends = torch.tensor([canvas[0] - picture[0] + 1, canvas[1] - picture[1] + 1])
            generator = torch.Generator().manual_seed(canvas[0])
            drawn = torch.randint(int(ends.max()), (count, probe.trials, 2), generator=generator)
            return drawn * ends // ends.max()  # scale the draws down for the shorter edge
        corners = [middle]
        if probe.group in ("test", "rotation"):
            corners = self._trained_corners()
        elif probe.group == "shift":
            (row, column), (rows, columns), shift = self.first_corner, self.patch_size, int(probe.x)
            downs = (row - shift, middle[0], row + rows - 1 + shift)
            rights = (column - shift, middle[1], column + columns - 1 + shift)
            corners = [(down, right) for down in downs for right in rights if (down, right) != middle]
        return torch.tensor(corners).expand(count, -1, -1)

    def examples(
        self, probe: ImageProbe, split: Split, chosen: slice = slice(None)
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        pictures, labels = self.pictures(split), self.labels(split)
        count, pictures, labels = len(labels), pictures[chosen], labels[chosen]
        if probe.variant == "zoomed":
            edges = zip(self.picture_size, probe.image_size, self.image_size, strict=True)
            zoomed = [picture * now // before for picture, now, before in edges]
            pictures = F.interpolate(pictures.float(), size=zoomed, mode="bilinear", align_corners=False)
        if probe.group == "rotation":
            pictures = torch.rot90(pictures, int(probe.x) // 90, dims=(2, 3))
        height, width = pictures.shape[2:]
        corners = self._corners(probe, count, (height, width))[chosen]
        repeated = pictures.repeat_interleave(probe.trials, dim=0)
        images = self._paste(repeated, corners.flatten(0, 1), probe.image_size)
        return images.unflatten(0, (-1, probe.trials)), labels
