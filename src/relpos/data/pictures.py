"""Pictures of one size on a canvas, from the user's own images: sizes, level and pixels of every split.

Each picture is scaled and cropped to the canvas minus a margin of two patches at every edge. The margin has the mean
colour of the training pictures, so that it is 0 after standardisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor

from relpos.core.checks import fail, require_flag, require_int
from relpos.data.canvas import CanvasTask, Level
from relpos.data.task import Split

IMAGE_SIZE = (64, 64)
PATCH = (8, 8)
MARGIN = 2
_AT_ONCE = 256


class Pictures(CanvasTask):
    """The common part of tasks on the user's own images.

    Args:
        image_size: (rows, columns) of the model's input, including the margin.
        patch: (rows, columns) of a patch.
        rotate: adds probes with pictures rotated by 90, 180 and 270 degrees.

    Raises:
        ValueError: sizes that do not fit.
    """

    subject: ClassVar[str] = "picture"

    def __init__(self, image_size: tuple[int, int], patch: tuple[int, int], rotate: bool) -> None:
        _require_sizes(image_size, patch)
        require_flag(rotate, "rotate")
        if rotate and image_size[0] - 2 * MARGIN * patch[0] != image_size[1] - 2 * MARGIN * patch[1]:
            fail("square pictures to rotate", f"an image size of {by(image_size)}", "Choose a square one.")
        self.image_size, self.patch_size, self.turned = image_size, patch, rotate
        rows, columns = (edge - 2 * MARGIN * of for edge, of in zip(image_size, patch, strict=True))
        self.picture_size = (rows, columns)
        self.first_corner = (MARGIN * patch[0] - patch[0] // 2, MARGIN * patch[1] - patch[1] // 2)
        self._pixels: dict[Split, Num[Tensor, "n C height width"]] = {}
        self._labels: dict[Split, Int[Tensor, " n"]] = {}
        self._level: Level

    def _how_shown(self) -> str:
        """How pictures are made and shown, for the description."""
        return (
            f"Images of other sizes are scaled until the shorter side fits {by(self.picture_size)} pixels, and the "
            f"longer is cropped evenly. Each stands near the middle of a {by(self.image_size)} canvas of the training "
            "images' mean colour; training moves it within one patch."
        )

    @property
    def level(self) -> Level:
        return self._level

    def pictures(self, split: Split) -> Num[Tensor, "n C height width"]:
        return self._pixels[split]

    def labels(self, split: Split) -> Int[Tensor, " n"]:
        return self._labels[split]


class Moments:
    """Sums of the training pictures' values per channel, for their mean and deviation."""

    def __init__(self) -> None:
        self._count = 0
        self._sums: list[Float[Tensor, " C"]] = []
        self._squares: list[Float[Tensor, " C"]] = []

    def add(self, pixels: Num[Tensor, "n C height width"]) -> None:
        """Note some pictures."""
        for part in pixels.split(_AT_ONCE):
            exact = part.double()
            self._count += part[:, 0].numel()
            self._sums.append(exact.sum(dim=(0, 2, 3)))
            self._squares.append(exact.square().sum(dim=(0, 2, 3)))

    def level(self, channels: int) -> Level:
        """Mean and deviation of the first channels; the background is the mean."""
        mean, square = (torch.stack(sums).sum(dim=0)[:channels] / self._count for sums in (self._sums, self._squares))
        deviation = (square - mean.square()).clamp(min=0).sqrt()
        deviation = torch.where(deviation < 1e-3, 1.0, deviation)  # pictures of one colour are not scaled
        mean, deviation = mean.float().view(-1, 1, 1), deviation.float().view(-1, 1, 1)
        return Level(mean, deviation, background=mean)


def by(size: Sequence[int]) -> str:
    """A size as text."""
    return f"{size[0]} x {size[1]}"


def _require_sizes(image_size: tuple[int, int], patch: tuple[int, int]) -> None:
    least = 2 * MARGIN + 1
    for edge, of in zip(image_size, patch, strict=True):
        require_int(of, "patch", at_least=1)
        require_int(edge, "image_size", at_least=1)
        if edge % of:
            below = edge - edge % of
            near = max(below + of, least * of) if below < least * of else f"{below} or {below + of}"
            fail(f"an image size divisible by the patch size {by(patch)}", by(image_size), f"Take {near} for {edge}.")
        if edge // of < least:
            wanted = f"an image size of at least {least} patches per side, of which {2 * MARGIN} are margin"
            fail(wanted, f"{by(image_size)} with patches of {by(patch)}", f"Take {least * of} or more for {edge}.")
