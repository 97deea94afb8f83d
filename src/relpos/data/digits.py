"""scikit-learn's 1,797 handwritten digits (UCI, Alpaydin and Kaynak 1998), 8 x 8, each on a canvas of 16 x 16."""

from __future__ import annotations

from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from relpos.data.canvas import CanvasTask, Level
from relpos.data.task import Split

_DIGIT = 8
_CANVAS = 16
_PATCH = 2
_SPLIT_SEED = 0


class Digits(CanvasTask):
    """Handwritten digits on a 16 x 16 canvas, patches of 2 x 2: 64 tokens."""

    name: ClassVar[str] = "digits"
    summary: ClassVar[str] = "1,797 real handwritten digits of 8 x 8 pixels (UCI), which come with scikit-learn."
    subject: ClassVar[str] = "digit"

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
        self.picture_size = (_DIGIT, _DIGIT)
        self.first_corner = ((_CANVAS - _DIGIT) // 2, (_CANVAS - _DIGIT) // 2)
        self.options: dict[str, Any] = {}

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

    def pictures(self, split: Split) -> Float[Tensor, "n 1 8 8"]:
        return self._splits[split][0][:, None]

    def labels(self, split: Split) -> Int[Tensor, " n"]:
        return self._splits[split][1]

    @cached_property
    def level(self) -> Level:
        """Mean and deviation of the training canvases."""
        free = _CANVAS - _DIGIT
        canvases = F.pad(self._splits["train"][0], (0, free, 0, free))
        return Level(canvases.mean().view(1, 1, 1), canvases.std().view(1, 1, 1), torch.zeros(1, 1, 1))
