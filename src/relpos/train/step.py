"""One step of training: the gradients of a batch, clipped, and the optimizer's update.

accelerate handles precision, except float16, whose losses are scaled here because accelerate refuses it on a CPU.
"""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from relpos.optim import Sophia
from relpos.train.optimizers import estimate_hessian
from relpos.train.procedure import to_device
from relpos.train.processes import number_of
from relpos.train.run import TrainingRun
from relpos.train.state import TrainState

if TYPE_CHECKING:
    from accelerate import Accelerator

_SKIPPED_AT_MOST = 40
"""Consecutive steps that float16 may skip: each halves its scale, which is then below one."""


class TrainStep:
    """The steps of a run, each in the order of these methods; they change the run's state."""

    def __init__(self, run: TrainingRun, state: TrainState, accelerator: Accelerator) -> None:
        self.run, self.state, self.accelerator = run, state, accelerator

    def share(self, batch: Any) -> Any:
        """This process's share of a batch, on its device."""
        return to_device(self.run.parallelism.share(batch, self.accelerator, self.state.module), self.run.device)

    def backward(self, share: Any, rate: float) -> float:
        """The gradients of this process's share, part by part, and its loss. Sets the learning rate.

        Sophia's estimate of the Hessian comes first, and not in float16: squares would overflow.
        """
        run, state, accelerator = self.run, self.state, self.accelerator
        recipe, parallelism = run.recipe, run.parallelism
        for group in state.optimizer.param_groups:
            group["lr"] = rate * group["multiplier"]
        if isinstance(state.optimizer, Sophia) and (state.step - 1) % recipe.hessian_every == 0:
            world = accelerator.num_processes
            estimate_hessian(recipe.optimizer, state.optimizer, state.model, *share, processes=world)
        total = 0.0
        for number, part in enumerate(parallelism.parts(share), 1):
            with parallelism.no_sync(state.model, accelerator, last=number == parallelism.accumulate):
                with self._autocast():
                    loss = run.procedure.loss(state.model, part) / parallelism.accumulate
                total += loss.item()
                accelerator.backward(state.scaler.scale(loss))
        return total

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.run.is_float16:
            return torch.autocast(self.run.device.type, torch.float16)
        autocast: AbstractContextManager[Any] = self.accelerator.autocast()
        return autocast

    def clip(self) -> float:
        """Clip the gradients, and return their norm before."""
        state = self.state
        state.scaler.unscale_(state.optimizer)
        norm = number_of(nn.utils.clip_grad_norm_(state.model.parameters(), self.run.recipe.gradient_clip))
        state.skipped = state.skipped + 1 if self.run.is_float16 and not math.isfinite(norm) else 0
        return norm

    @property
    def is_skipped(self) -> bool:
        """Whether the update will leave the weights as they are: float16 overflowed, and not too often in a row."""
        return 0 < self.state.skipped <= _SKIPPED_AT_MOST

    def update(self) -> None:
        """Change the weights, unless float16 skips the step, and drop the gradients."""
        state = self.state
        state.scaler.step(state.optimizer)
        state.scaler.update()
        state.optimizer.zero_grad()
