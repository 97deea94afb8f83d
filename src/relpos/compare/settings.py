"""What a comparison is: its settings, its jobs, and what it runs on."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from relpos import __version__
from relpos.core.checks import fail, require_int
from relpos.data import Task, find_task
from relpos.position import find, presets
from relpos.train import Recipe, require_precision, resolve_device

QUICK_STEPS = 60


@dataclass(frozen=True)
class Job:
    """One training run: a mechanism, a seed, and the rate of its position parameters."""

    position: str
    seed: int
    variant: str
    multiplier: float

    @property
    def id(self) -> str:
        """The record's name: `relative_2d--recipe--seed0`."""
        return f"{self.position}--{self.variant}--seed{self.seed}"


@dataclass(frozen=True)
class Settings:
    """Everything that decides a comparison's figures, timings aside.

    Attributes:
        task: a task's name. positions: mechanisms by name, `+` for sums.
        seeds: how many; they are 0, 1, ...
        recipe: the training recipe of all runs.
        quick: a short run to see that everything works; no verdict.
        device, precision, threads: how a run computes.
    """

    task: str
    positions: tuple[str, ...]
    seeds: int
    recipe: Recipe = field(default_factory=Recipe)
    quick: bool = False
    device: str = "cpu"
    precision: str = "float32"
    threads: int = 1

    @classmethod
    def make(
        cls,
        task: str,
        positions: tuple[str, ...] | None,
        seeds: int,
        steps: int | None,
        quick: bool,
        device: str,
        precision: str,
    ) -> Settings:
        """Settings from what a person asks, checked; `positions=None` takes every mechanism that suits the task."""
        axes = len(find_task(task).image_size)
        if positions is None:
            chosen = tuple(name for name, preset in presets().items() if axes in preset.token_axes)
        else:
            chosen = tuple(dict.fromkeys(positions))
        if not chosen:
            fail("at least one position", "none", "Name some, e.g. --positions none,learned,relative_2d.")
        for name in chosen:
            if axes not in find(name).token_axes:
                fail(f"positions that make sense on images for task {task}", repr(name), "Leave it out.")
        require_int(seeds, "seeds", at_least=1)
        if steps is not None:
            require_int(steps, "steps", at_least=1)
        require_precision(precision)
        recipe = Recipe()
        if steps is not None or quick:
            count = QUICK_STEPS if steps is None else steps
            recipe = replace(recipe, steps=count, warmup_steps=min(recipe.warmup_steps, max(1, count // 5)))
        resolved = str(resolve_device(device))
        return cls(task, chosen, seeds, recipe, quick, resolved, precision)

    def jobs(self) -> list[Job]:
        """The training runs: every mechanism and seed by the recipe, then those with learned positions at rate x 1.

        Seed by seed, so that a comparison cut short has whole seeds. One seed gives a first look in little time: the
        runs at rate x 1, which ask how much the recipe decides, come from two seeds on.
        """
        usual = self.recipe.position_learning_rate_multiplier
        learned = [name for name in self.positions if _learns(self, name)]
        jobs = [Job(name, seed, "recipe", usual) for seed in range(self.seeds) for name in self.positions]
        if usual != 1 and self.seeds > 1:
            jobs += [Job(name, seed, "x1", 1.0) for seed in range(self.seeds) for name in learned]
        return jobs

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `results.json` has them."""
        return {**asdict(self), "positions": list(self.positions), "recipe": asdict(self.recipe)}


def _learns(settings: Settings, name: str) -> bool:
    task = find_task(settings.task)
    return bool(settings.recipe.build(task, name).position_parameters())


def environment(device: str) -> dict[str, Any]:
    """Versions and hardware."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "cpu"
    return {
        "relpos": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": processor,
        "cores": os.cpu_count(),
        "device": name,
    }


def describe_task(task: Task) -> dict[str, Any]:
    """The task as `results.json` has it."""
    return {
        "name": task.name,
        "title": task.title,
        "description": task.description,
        "classes": list(task.classes),
        "channels": task.channels,
        "image_size": list(task.image_size),
        "patch_size": list(task.patch_size),
        "sizes": task.sizes,
        "probes": [{**asdict(probe), "image_size": list(probe.image_size)} for probe in task.probes],
    }


def describe_mechanism(name: str, settings: Settings) -> dict[str, Any]:
    """A mechanism as `results.json` has it."""
    preset = find(name)
    model = settings.recipe.build(find_task(settings.task), name)
    return {
        "name": name,
        "title": preset.title,
        "summary": preset.summary,
        "source": preset.source,
        "growth": list(model.growth()),
    }
