"""What watches a training run: the curve of its losses, validation, and whether its numbers are finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from relpos.train.curve import DivergedError, Progress, Quantity
from relpos.train.evaluate import validated
from relpos.train.processes import means_of
from relpos.train.run import TrainingRun
from relpos.train.state import TrainState


class Monitor:
    """Notes every step of a run in the state's curve, and validates the model after some.

    Args:
        watch: called after every step.
        points, validations: number of points on the loss curve, and of validations.
    """

    def __init__(
        self,
        run: TrainingRun,
        state: TrainState,
        watch: Callable[[Progress], None] | None,
        points: int,
        validations: int,
    ) -> None:
        self.run, self.state, self.watch = run, state, watch
        self._steps_a_point = max(1, run.recipe.steps // points)
        self._steps_a_validation = max(1, run.recipe.steps // validations)

    def require_finite(self, what: Quantity, value: float) -> None:
        """Raise `DivergedError` unless a number of this step is finite."""
        if math.isfinite(value):
            return
        recipe, state = self.run.recipe, self.state
        if state.losses:
            state.curve.add(state.step - 1, state.losses, recipe.rate_at(max(0, state.step - 2)))
        raise DivergedError(what, value, step=state.step, recipe=recipe, position=self.run.position, curve=state.curve)

    def note(self, loss: float, rate: float, share: Any) -> None:
        """Note a step that was taken: its loss over all processes, its learning rate, and this process's share."""
        state = self.state
        state.losses.append(loss)
        if self._is_due(self._steps_a_point):
            state.curve.add(state.step, state.losses, rate)
        validation = self._validate(share) if self._is_due(self._steps_a_validation) else None
        if self.watch is not None:
            self.watch(Progress(state.step, self.run.recipe.steps, loss, rate, validation))

    def _is_due(self, interval: int) -> bool:
        return self.state.step % interval == 0 or self.state.step == self.run.recipe.steps

    def _validate(self, share: Any) -> float:
        state = self.state
        state.model.eval()
        with torch.no_grad():
            loss = self.run.procedure.loss(state.model, share).item()  # in float32, without dropout
        # No later step would show that the last step's weights are not finite.
        self.require_finite("loss", means_of([loss], self.run.device)[0])
        validation = self._figure()
        self.require_finite("loss", validation)
        state.curve.validation_step.append(state.step)
        state.curve.validation.append(validation)
        state.model.train()
        return validation

    def _figure(self) -> float:
        run, model, size = self.run, self.state.model, self.run.recipe.batch_size
        with run.parallelism.whole_sequences(model, run.device):
            if not run.procedure.measures:
                return validated(model, run.task, run.device)
            return run.procedure.figures(model, run.task, "validation", run.device, size, at_most=None).mean().item()
