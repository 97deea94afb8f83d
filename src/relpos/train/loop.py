"""The training loop: warm-up and cosine, gradient clipping; reproducible bit for bit at a fixed thread count.

`TrainingRun` is what is fixed, `TrainState` what changes, `TrainStep` takes one step, `Monitor` watches. All randomness
(initialisation, batches, dropout, Sophia's draws) comes from one seed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from relpos.core.checks import fail
from relpos.data import Task
from relpos.train.checkpointing import Checkpointing
from relpos.train.curve import Curve, Progress
from relpos.train.monitor import Monitor
from relpos.train.processes import Parallelism, all_of, means_of
from relpos.train.recipe import Model, Recipe
from relpos.train.run import TrainingRun
from relpos.train.state import TrainState, whole
from relpos.train.step import TrainStep

if TYPE_CHECKING:
    from accelerate import Accelerator


def train(
    task: Task,
    position: str,
    recipe: Recipe,
    *,
    seed: int,
    device: torch.device,
    precision: str = "float32",
    parallelism: Parallelism = Parallelism(),  # noqa: B008 - it is frozen
    **watched: Any,
) -> tuple[Model, Curve]:
    """Train the recipe's model with a position mechanism: `fit`, which takes `watched`, with relpos's own procedure."""
    run = TrainingRun(task, position, recipe, seed, device, precision=precision, parallelism=parallelism)
    model, curve = fit(run, **watched)
    return cast("Model", model), curve


def fit(
    run: TrainingRun,
    *,
    watch: Callable[[Progress], None] | None = None,
    points: int = 40,
    validations: int = 8,
    checkpointing: Checkpointing | None = None,
    resume: str | None = None,
) -> tuple[nn.Module, Curve]:
    """Train a model with a position mechanism.

    Args:
        watch: called after every step.
        points, validations: number of points on the loss curve, and of validations.
        checkpointing: where checkpoints are written; None for none.
        resume: "auto" or the path of a checkpoint to resume from.

    Returns:
        The trained model in evaluation mode, and its curve.

    Raises:
        ValueError: the processes cannot share the run; there is nothing to resume from, or something else.
        DivergedError: a loss or a gradient is nan or inf. With float16, whose gradient is scaled, a step with such a
            gradient is skipped instead, up to forty in a row.
        StoppedError: the process was told to end; `checkpointing` has its last state.
    """
    if resume is not None and checkpointing is None:
        fail("checkpointing= with resume=", "none", "Pass a Checkpointing with the folder of the run.")
    accelerator = run.start()
    steps = run.recipe.steps
    with nullcontext() if checkpointing is None else checkpointing.running(resume) as snapshot:
        state = TrainState(run, accelerator)
        if snapshot is not None:
            state.restore(snapshot)
        step = TrainStep(run, state, accelerator)
        monitor = Monitor(run, state, watch, points, validations)
        checkpoints = _Checkpoints(checkpointing, state)
        batches = run.batches(start=state.step)
        state.model.train()
        while state.step < steps:
            rate = run.recipe.rate_at(state.step)
            state.step += 1
            share = step.share(next(batches))
            loss = step.backward(share, rate)
            loss, told, due = means_of([loss, checkpoints.told(), checkpoints.due()], run.device)
            monitor.require_finite("loss", loss)
            norm = step.clip()
            if not step.is_skipped:
                monitor.require_finite("gradient", norm)
            step.update()
            monitor.note(loss, rate, share)
            if told:
                checkpoints.end()
            if due and state.step < steps:
                checkpoints.write()
        if means_of([checkpoints.told()], run.device)[0]:  # a signal in the last step
            checkpoints.end()
    return _trained(run, state, accelerator).eval(), state.curve


class _Checkpoints:
    """The checkpoints of a run, which may have none. All processes make the same calls.

    `told` and `due` are numbers, whose means over all processes are above 0 if one says so.
    """

    def __init__(self, checkpointing: Checkpointing | None, state: TrainState) -> None:
        self._checkpointing, self._state = checkpointing, state

    def told(self) -> float:
        """Whether this process was told to end."""
        return 0.0 if self._checkpointing is None else float(self._checkpointing.told())

    def due(self) -> float:
        """Whether this process counts a checkpoint as due."""
        return 0.0 if self._checkpointing is None else float(self._checkpointing.due(self._state.step))

    def write(self) -> bool:
        """Write a checkpoint; returns False, in every process, if the writing one failed."""
        assert self._checkpointing is not None
        snapshot = self._state.capture(keep=self._checkpointing.writes)
        written = self._checkpointing.write(self._state.step, snapshot)
        return bool(all_of(written)[0])  # waits for all processes

    def end(self) -> None:
        """Write a checkpoint and raise `StoppedError`."""
        assert self._checkpointing is not None
        self._checkpointing.exit_code = self._checkpointing.exit_code or 143  # set if another process was told to end
        self._checkpointing.end(self._state.step, written=self.write())


def _trained(run: TrainingRun, state: TrainState, accelerator: Accelerator) -> nn.Module:
    """The model as it was built, without what the processes wrap around it; all its weights, if they were sharded."""
    if run.parallelism.strategy == "fsdp" and accelerator.num_processes > 1:
        weights = {name: whole(x) for name, x in state.module.state_dict().items()}
        model = run.model()
        model.load_state_dict(weights)
        return model
    unwrapped: nn.Module = accelerator.unwrap_model(state.model, keep_fp32_wrapper=False)
    if run.parallelism.context > 1:
        from relpos.parallel import context_parallel

        context_parallel(unwrapped, None)
    return unwrapped
