"""A model of one's own for comparisons, and what goes with it; the tests name it as a file too."""

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import relpos


class Pooled(nn.Module):
    """Tokens of 16 numbers through one block, their mean to a number for each class."""

    def __init__(self, inputs: int, outputs: int, position: str, tokens: int) -> None:
        super().__init__()
        self.embed = nn.Linear(inputs, 16)
        self.position = relpos.LearnedPositionEmbedding(16, seq_len=tokens) if position == "learned" else None
        self.block = relpos.TransformerBlock(16, 2)
        self.head = nn.Linear(16, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if self.position is not None:
            x = self.position.embed(x, relpos.Sequence(x.shape[1]))
        out: Tensor = self.head(self.block(x).mean(dim=1))
        return out


class Rows(Pooled):
    """The same on images: a token for each row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:, 0])


def build(position: str, task: Any) -> nn.Module:
    rows, columns = task.image_size
    return Rows(columns, len(task.classes), position, rows)


def build_for_regression(position: str, task: Any) -> nn.Module:
    return Pooled(4, 1, position, 12)


def build_by_chance(position: str, task: Any) -> nn.Module:
    """One that draws from Python and NumPy, too."""
    model = Pooled(4, 1, position, 12)
    with torch.no_grad():
        model.head.weight *= random.random() + np.random.rand()  # noqa: NPY002
    return model


def step(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return (model(inputs)[:, 0] - targets).square().mean()


def evaluate(model: nn.Module, split: Any) -> Tensor:
    """Minus the absolute error of each input, so that figures are below 0 and more is better."""
    return torch.cat([-(model(inputs)[:, 0] - targets).abs() for inputs, targets in split])


def fails(position: str, task: Any) -> nn.Module:
    raise KeyError(position)


def gives_none(position: str, task: Any) -> None:
    return None


def of_another_shape(position: str, task: Any) -> nn.Module:
    return Rows(task.image_size[1], 3, position, task.image_size[0])
