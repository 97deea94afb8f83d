"""scikit-learn's 1,797 handwritten digits (UCI, Alpaydin and Kaynak 1998), 8 x 8, placed on a larger canvas.

Training puts a digit at an offset uniform over one patch cell around the middle, so that it sees every phase between
digit and patches, and nothing farther out. The probes then go where training did not: 1, 2, 3 pixels beyond that cell
in the eight directions, and canvases of 20 and 24 pixels with the digit in the middle, anywhere, and zoomed with the
canvas.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.checks import fail
from relpos.data.task import Probe, Split, Task

_DIGIT = 8
_CANVAS = 16
_PATCH = 2
_SHIFTS = (1, 2, 3)
_CANVASES = (20, 24)
_ANYWHERE_TRIALS = 2
_SPLIT_SEED = 0

Offsets = list[tuple[int, int]]


def _cell(middle: int) -> Offsets:
    """Every offset inside one patch cell that begins at `middle`."""
    return [(middle + row, middle + column) for row in range(_PATCH) for column in range(_PATCH)]


def _place(
    digits: Float[Tensor, "n side side2"], canvas: int, row: int, column: int
) -> Float[Tensor, "n 1 height width"]:
    """Digits with their upper left corner at (row, column) of empty canvases."""
    side = digits.shape[-1]
    return F.pad(digits, (column, canvas - side - column, row, canvas - side - row))[:, None]


class Digits(Task):
    """Handwritten digits on a 16 x 16 canvas, patches of 2 x 2: 64 tokens."""

    name: ClassVar[str] = "digits"

    def __init__(self) -> None:
        self.title = "Handwritten digits"
        self.description = (
            "1,797 real handwritten digits of 8 x 8 pixels (UCI, from scikit-learn), each placed near the middle of a "
            "16 x 16 canvas: training moves it within one patch, never farther."
        )
        self.classes = tuple(str(digit) for digit in range(10))
        self.channels = 1
        self.image_size = (_CANVAS, _CANVAS)
        self.patch_size = (_PATCH, _PATCH)

    @cached_property
    def _splits(self) -> dict[str, tuple[Float[Tensor, "n 8 8"], Int[Tensor, " n"]]]:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        data = load_digits()
        rest, test, rest_labels, test_labels = train_test_split(
            data.images, data.target, test_size=360, stratify=data.target, random_state=_SPLIT_SEED
        )
        train, validation, train_labels, validation_labels = train_test_split(
            rest, rest_labels, test_size=180, stratify=rest_labels, random_state=_SPLIT_SEED
        )
        return {
            name: (torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels, dtype=torch.int64))
            for name, images, labels in (
                ("train", train, train_labels),
                ("validation", validation, validation_labels),
                ("test", test, test_labels),
            )
        }

    @cached_property
    def _level(self) -> tuple[float, float]:
        """Mean and standard deviation of the training canvases' pixels: what every image is standardised by."""
        digits, _ = self._splits["train"]
        canvases = _place(digits, _CANVAS, 0, 0)
        return canvases.mean().item(), canvases.std().item()

    def _standardise(self, images: Float[Tensor, "*C height width"]) -> Float[Tensor, "*C height width"]:
        mean, deviation = self._level
        return (images - mean) / deviation

    @property
    def sizes(self) -> dict[str, int]:
        return {name: len(labels) for name, (_, labels) in self._splits.items()}

    def batches(
        self, batch_size: int, seed: int
    ) -> Iterator[tuple[Float[Tensor, "B C height width"], Int[Tensor, " B"]]]:
        digits, labels = self._splits["train"]
        if not 1 <= batch_size <= len(labels):  # no whole batch would ever come
            fail(f"a batch size from 1 to {len(labels)}", str(batch_size), "There are no more training images.")
        middle = (_CANVAS - _DIGIT) // 2
        everywhere = self._standardise(torch.stack([_place(digits, _CANVAS, *offset) for offset in _cell(middle)]))
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(labels), generator=generator)
            for chosen in order.split(batch_size):
                if len(chosen) < batch_size:  # a short last batch would weigh its images more
                    continue
                offsets = torch.randint(len(everywhere), (batch_size,), generator=generator)
                yield everywhere[offsets, chosen], labels[chosen]

    @cached_property
    def probes(self) -> tuple[Probe, ...]:
        trained = (_CANVAS, _CANVAS)
        test = Probe("test", "test", "test", None, 0, trained, _PATCH**2, "Test digits placed as in training.")
        shifts = [
            Probe(
                id=f"shift/{shift}",
                group="shift",
                label=f"shift {shift} px",
                variant=None,
                x=shift,
                image_size=trained,
                trials=8,
                description=f"Moved {shift} px beyond every place that training used, in the eight directions.",
            )
            for shift in _SHIFTS
        ]
        variants = (
            ("centred", 1, "in the middle"),
            ("anywhere", _ANYWHERE_TRIALS, "anywhere"),
            ("zoomed", 1, "in the middle and zoomed with the canvas"),
        )
        canvases = [
            Probe(
                id=f"canvas/{canvas}/{variant}",
                group="canvas",
                label=f"{canvas} x {canvas}, {variant}",
                variant=variant,
                x=canvas,
                image_size=(canvas, canvas),
                trials=trials,
                description=f"A canvas of {canvas} x {canvas}, never trained, with the digit {words}.",
            )
            for canvas in _CANVASES
            for variant, trials, words in variants
        ]
        return (test, *shifts, *canvases)

    def examples(
        self, probe: Probe, split: Split
    ) -> tuple[Float[Tensor, "n trials C height width"], Int[Tensor, " n"]]:
        digits, labels = self._splits[split]
        canvas = probe.image_size[0]
        if probe.variant == "anywhere":
            generator = torch.Generator().manual_seed(canvas)
            places = torch.randint(canvas - _DIGIT + 1, (len(labels), probe.trials, 2), generator=generator).tolist()
            images = torch.stack(
                [
                    torch.cat([_place(digit[None], canvas, *offset) for offset in offsets])
                    for digit, offsets in zip(digits, places, strict=True)
                ]
            )
            return self._standardise(images), labels
        if probe.variant == "zoomed":
            side = _DIGIT * canvas // _CANVAS
            digits = F.interpolate(digits[:, None], size=side, mode="bilinear", align_corners=False)[:, 0]
        middle = (canvas - digits.shape[-1]) // 2
        if probe.group == "test":
            offsets = _cell(middle)
        elif probe.group == "shift":
            steps = {-1: middle - int(probe.x), 0: middle, 1: middle + _PATCH - 1 + int(probe.x)}
            offsets = [(steps[row], steps[column]) for row in steps for column in steps if (row, column) != (0, 0)]
        else:
            offsets = [(middle, middle)]
        return self._standardise(torch.stack([_place(digits, canvas, *offset) for offset in offsets], dim=1)), labels
