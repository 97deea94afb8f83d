"""What is fixed for a training run. `TrainState` has what changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from relpos.data import Task
from relpos.train.precision import PRECISIONS, require_precision
from relpos.train.procedure import OURS, Procedure
from relpos.train.processes import Parallelism, start_accelerator
from relpos.train.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class TrainingRun:
    """One model to train. With as many threads and processes it trains to the same weights, bit for bit.

    Attributes:
        task: the data. position: the mechanism's name. recipe: the hyperparameters.
        seed: of initialisation, batches, dropout and Sophia's draws.
        procedure: builds the model, computes its loss and measures it.
        precision: a name of `PRECISIONS`.
        parallelism: how a step is divided among the launcher's processes and into parts.

    Raises:
        ValueError: there is no such precision.
    """

    task: Task
    position: str
    recipe: Recipe
    seed: int
    device: torch.device
    procedure: Procedure = OURS
    precision: str = "float32"
    parallelism: Parallelism = Parallelism()

    def __post_init__(self) -> None:
        require_precision(self.precision)

    @property
    def is_float16(self) -> bool:
        """Whether losses are scaled, so that float16 holds the gradients, and steps that overflow are skipped."""
        return self.precision == "fp16-mixed"

    def start(self) -> Accelerator:
        """accelerate, which knows the launcher's processes.

        Raises:
            ValueError: the processes cannot share this run.
        """
        accelerator = start_accelerator(self.device, PRECISIONS[self.precision])
        self.parallelism.require_divides(self.recipe.batch_size, accelerator.num_processes)
        self.parallelism.require_shares(self.recipe.optimizer, self.precision, accelerator.num_processes)
        return accelerator

    def model(self) -> nn.Module:
        """A new model on the device."""
        return self.procedure.model(self.recipe, self.task, self.position).to(self.device)

    def batches(self, start: int) -> Iterator[Any]:
        """The batches of all processes together, from a step on."""
        return self.task.batches(self.recipe.batch_size, self.seed, start=start)
