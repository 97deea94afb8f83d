"""What a comparison is: its settings, its jobs, and what it runs on."""

from __future__ import annotations

import os
import platform
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch

from relpos import __version__, results
from relpos.comparison.choices import CHOICES, POSITIONS, WHATS, find_choice
from relpos.core.checks import fail, require_choice, require_int
from relpos.data import Probe, Task
from relpos.position import find, presets
from relpos.results import Environment, MechanismRecord, What, plain
from relpos.train import ImageRecipe, Recipe, require_precision, resolve_device

QUICK_STEPS = 60
QUICK_STEPS_ON_TEXT = 10
EVERY = "all"
"""Instead of names: every position that makes sense on the task."""
STANDARD = "standard"
"""Instead of names: the task's wider choice."""


@dataclass(frozen=True)
class Job:
    """One training run: what is compared by name, a seed, and the rate of its position parameters."""

    name: str
    seed: int
    variant: str
    multiplier: float

    @property
    def id(self) -> str:
        """The record's name: `relative_2d--recipe--seed0`."""
        return f"{self.name}--{self.variant}--seed{self.seed}"

    @property
    def label(self) -> str:
        """The run in words."""
        variant = "" if self.variant == "recipe" else ", position at the learning rate of the rest"
        return f"{self.name}, seed {self.seed}{variant}"


@dataclass(frozen=True)
class ComparisonSettings:
    """Everything that decides a comparison's figures; those of a clock also depend on the machine.

    Attributes:
        task: a task's name. task_options: plain values that, with it, rebuild the task; they hold a fingerprint of
            its data where that is a person's own.
        positions: mechanisms by name, `+` for sums.
        seeds: how many; they are 0, 1, ...
        recipe: the training recipe of all runs.
        quick: a short run to see that everything works; no verdict.
        device, precision, threads: how a run computes. timing_threads: of the CPU where steps are timed; by default
            those of this process (all cores, or `OMP_NUM_THREADS`).
        what: is compared. choices: their names where that is not position; `positions` is then the one of all models.
    """

    task: str
    positions: tuple[str, ...]
    seeds: int
    task_options: dict[str, Any] = field(default_factory=dict)
    recipe: Recipe = field(default_factory=ImageRecipe)
    quick: bool = False
    device: str = "cpu"
    precision: str = "float32"
    threads: int = 1
    timing_threads: int = field(default_factory=torch.get_num_threads)
    what: What = "position"
    choices: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """What is compared."""
        return self.positions if self.what == "position" else self.choices

    @property
    def key(self) -> str:
        """What records and costs call it."""
        return "position" if self.what == "position" else "choice"

    def of(self, name: str) -> tuple[Recipe, str]:
        """The recipe and the position of what is compared under a name."""
        if self.what == "position":
            return self.recipe, name
        return find_choice(self.what, name).change(self.recipe), self.positions[0]

    def probes(self, task: Task) -> tuple[Probe, ...]:
        """What trained models are asked: about position everything, else the plain test."""
        return task.probes if self.what == "position" else task.probes[:1]

    @classmethod
    def make(
        cls,
        task: Task,
        positions: tuple[str, ...] | None,
        seeds: int,
        steps: int | None,
        device: str,
        precision: str,
        *,
        quick: bool = False,
        what: str = "position",
        choices: tuple[str, ...] | None = None,
    ) -> ComparisonSettings:
        """Settings from what a person asks, checked.

        Args:
            positions: None takes the task's own choice, `("standard",)` its wider one, `("all",)` every one that makes
                sense on it. Where something else is compared, one, of all models; None for a rotation.
            choices: where something else is compared, None for all that there are.

        The batch is no larger than what the task has to train on.
        """
        require_asked(positions, seeds, steps, device, precision, what=what, choices=choices)
        kind, axes = cast("What", what), len(task.grid)
        usual = task.positions if kind == "position" else (POSITIONS[axes],)
        chosen = usual if positions is None else tuple(dict.fromkeys(positions))
        if chosen == (STANDARD,):
            chosen = task.standard
        if chosen == (EVERY,):
            chosen = tuple(name for name, preset in presets().items() if axes in preset.token_axes)
        for name in chosen:
            if axes not in find(name).token_axes:
                fail(f"positions that make sense on {task.kind} for task {task.name}", repr(name), "Leave it out.")
        recipe = Recipe.of(task).within(task)
        if steps is not None or quick:
            quick_steps = QUICK_STEPS_ON_TEXT if task.kind == "text" else QUICK_STEPS
            count = quick_steps if steps is None else steps
            recipe = replace(recipe, steps=count, warmup_steps=min(recipe.warmup_steps, max(1, count // 5)))
        resolved = str(resolve_device(device))
        named: tuple[str, ...] = ()
        if kind != "position":  # in the order of the list, whose first the others are measured against
            named = tuple(name for name in CHOICES[kind] if choices is None or name in choices)
        if kind == "attention":
            _require_served(named, chosen[0], recipe, task)
        options = task.options
        return cls(task.name, chosen, seeds, options, recipe, quick, resolved, precision, what=kind, choices=named)

    def jobs(self, task: Task) -> list[Job]:
        """The training runs: every mechanism and seed by the recipe, then those with learned positions without
        its position learning rate.

        Seed by seed, so that a comparison cut short has whole seeds. One seed gives a first look in little time: the
        runs without that rate, which ask how much the recipe decides, come from two seeds on.
        """
        usual = self.recipe.position_learning_rate_multiplier
        jobs = [Job(name, seed, "recipe", usual) for seed in range(self.seeds) for name in self.names]
        if usual != 1 and self.seeds > 1 and self.what == "position":
            learned = [name for name in self.positions if self.recipe.build(task, name).position_parameters()]
            jobs += [Job(name, seed, "x1", 1.0) for seed in range(self.seeds) for name in learned]
        return jobs

    def describe(self) -> results.SettingsRecord:
        """The settings as `results.json` has them."""
        lists = {"positions": list(self.positions), "choices": list(self.choices)}
        return results.SettingsRecord(
            **{**asdict(self), **lists, "recipe": results.RecipeRecord(**asdict(self.recipe))}
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values, as `comparison.json` has them: of a comparison of positions without `what`."""
        whole = {**plain(self.describe()), "task_options": plain(self.task_options)}
        return {name: value for name, value in whole.items() if name != "what" or self.what != "position"}


def _require_served(names: tuple[str, ...], position: str, recipe: Recipe, task: Task) -> None:
    """Raise unless every kind of attention takes the position, known from one input."""
    inputs = next(task.batches(1, 0))[0]
    for name in names:
        model = find_choice("attention", name).change(recipe).build(task, position)
        try:
            with torch.no_grad():
                model(inputs)
        except NotImplementedError:
            fail(f"a position that {name} attention takes", repr(position), "Leave out --positions, or that choice.")


def require_asked(
    positions: tuple[str, ...] | None,
    seeds: int,
    steps: int | None,
    device: str,
    precision: str,
    *,
    what: str = "position",
    choices: tuple[str, ...] | None = None,
) -> None:
    """Raise where `Settings.make` would, whatever the task: to be known before many images are read."""
    if positions == ():
        fail("at least one position", "none", "Name some, e.g. --positions none,learned,relative_2d.")
    for name in () if positions in (None, (EVERY,), (STANDARD,)) else positions:
        find(name)
    require_choice(what, "--what", WHATS)
    if what == "position":
        if choices is not None:
            fail("--choices beside --what attention, norm or optimizer", "--what position", "Name --positions.")
    else:
        if positions is not None and (len(positions) != 1 or positions[0] in (EVERY, STANDARD)):
            fail(f"one position for all models of --what {what}", ", ".join(positions), "Name one, or leave it out.")
        if choices == ():
            fail("at least one choice", "none", f"Name some, e.g. --choices {','.join(list(CHOICES[what])[:2])}.")
        for name in () if choices is None else choices:
            find_choice(what, name)
    require_int(seeds, "seeds", at_least=1)
    if steps is not None:
        require_int(steps, "steps", at_least=1)
    require_precision(precision)
    resolve_device(device)


def environment(device: str) -> Environment:
    """Versions and hardware."""
    processor = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                processor = line.split(":", 1)[1].strip()
                break
    name = torch.cuda.get_device_name(torch.device(device)) if device.startswith("cuda") else "cpu"
    return Environment(
        relpos=__version__,
        torch=str(torch.__version__),
        python=platform.python_version(),
        platform=platform.platform(),
        processor=processor,
        cores=os.cpu_count() or 1,
        device=name,
    )


def describe(name: str, settings: ComparisonSettings, task: Task) -> MechanismRecord:
    """What is compared under a name, as `results.json` has it."""
    if settings.what != "position":
        return find_choice(settings.what, name).describe()
    preset = find(name)
    model = settings.recipe.build(task, name)
    return MechanismRecord(name, preset.title, preset.summary, preset.source, list(model.growth()), preset.family)
