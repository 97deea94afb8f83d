"""What a training run shows of itself: its progress, its curve, and where it diverged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from relpos.train.recipe import Recipe

Quantity = Literal["loss", "gradient"]
"""What may be nan or inf."""


@dataclass(frozen=True)
class Progress:
    """The argument of `watch`, after every step; `validation` only after some."""

    step: int
    steps: int
    loss: float
    rate: float
    validation: float | None = None


@dataclass
class Curve:
    """The history of a training run: the mean loss since the previous point, and the validation metric."""

    step: list[int] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)
    rate: list[float] = field(default_factory=list)
    validation_step: list[int] = field(default_factory=list)
    validation: list[float] = field(default_factory=list)

    def add(self, step: int, losses: list[float], rate: float) -> None:
        """Add a point after a step: the mean of `losses`, which is then cleared."""
        self.step.append(step)
        self.loss.append(torch.tensor(losses).mean().item())
        self.rate.append(rate)
        losses.clear()


class DivergedError(ValueError):
    """Training stopped because a loss or a gradient was nan or inf.

    Attributes:
        step: counted from 1. Weights exclude this step, unless they caused the NaN.
        rate: the learning rate of the step.
        what: "loss" or "gradient". value: "nan", "inf" or "-inf".
        curve: the history before it.
    """

    def __init__(self, what: Quantity, value: float, *, step: int, recipe: Recipe, position: str, curve: Curve) -> None:
        self.step, self.what, self.value, self.curve = step, what, str(value), curve
        self.rate = recipe.rate_at(step - 1)
        super().__init__(
            f"expected a finite {what}; got {value} at step {step} of {recipe.steps}, at the learning rate "
            f"{self.rate:.1e}, with the position {position}. Lower the recipe's learning rate, or choose another "
            "precision, optimizer or seed."
        )
