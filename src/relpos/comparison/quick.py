"""How long a quick run of a library's model takes, from one timed step; its steps are cut to stay near two minutes."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from relpos.comparison.settings import ComparisonSettings
from relpos.comparison.workers import MOST_AT_ONCE
from relpos.data import ImageProbe, Task
from relpos.train import OURS, Procedure
from relpos.train.procedure import to_device

NEAR = 120.0
"""Seconds that a quick run may take."""
_STEPS = (60, 30, 15, 8, 4, 2)
"""The steps it may have: few choices, so that the same command on the same machine mostly makes the same run."""
_VALIDATIONS = 8
_BESIDE = 5
"""Steps of each mechanism for its time and memory."""
_FORWARD = 1 / 3
"""The share of a step that the forward pass takes."""


@dataclass(frozen=True)
class QuickPlan:
    """A quick run's steps and seconds. `step` is the seconds of a step."""

    steps: int
    seconds: float
    step: float


def plan_quick(
    settings: ComparisonSettings, task: Task, procedure: Procedure = OURS, *, step: float | None = None
) -> QuickPlan:
    """The most steps with which a quick run stays near two minutes, at most those of the settings.

    Args:
        step: seconds of a training step; by default one is timed, on the first mechanism.
    """
    step = seconds_of_step(settings, task, procedure) if step is None else step
    at_most = settings.recipe.steps
    choices = [at_most, *(steps for steps in _STEPS if steps < at_most)]
    plans = [QuickPlan(steps, _seconds(settings, task, step, steps), step) for steps in choices]
    return next((plan for plan in plans if plan.seconds <= NEAR), plans[-1])


def seconds_of_step(settings: ComparisonSettings, task: Task, procedure: Procedure) -> float:
    """The seconds of a forward and backward pass of the first mechanism's model, by the threads of a run."""
    device, threads = torch.device(settings.device), torch.get_num_threads()
    recipe, position = settings.of(settings.names[0])
    model = procedure.model(recipe, task, position).to(device).train()
    batch = to_device(next(task.batches(recipe.batch_size, 0)), device)
    torch.set_num_threads(settings.threads)
    try:
        for _ in range(2):  # the first is slower
            started = time.perf_counter()
            procedure.loss(model, batch).backward()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            seconds = time.perf_counter() - started
    finally:
        torch.set_num_threads(threads)
    return seconds


def _seconds(settings: ComparisonSettings, task: Task, step: float, steps: int) -> float:
    """The seconds of all runs, tests, times and memory."""
    probes = [probe for probe in settings.probes(task) if probe.size == task.size]  # such a model takes no other size
    trials = sum(probe.trials if isinstance(probe, ImageProbe) else 1 for probe in probes)
    tested = task.sizes["test"] * trials + task.sizes["validation"] * min(_VALIDATIONS, steps)
    if task.kind == "text":
        tested = 0  # a quick run reads two blocks
    each = step * (steps + _FORWARD * tested / settings.recipe.batch_size)
    runs = len(settings.names) * settings.seeds
    at_once = 1 if settings.device != "cpu" else min(MOST_AT_ONCE, os.cpu_count() or 1, runs)
    return each * runs / at_once + _BESIDE * step * len(settings.names)
