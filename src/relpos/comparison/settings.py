"""The settings of a comparison, its jobs and its environment."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import nn

from relpos import results
from relpos.adapters.library_models import LibraryModel
from relpos.adapters.resizing import for_images, rules_for_images
from relpos.comparison.callables import described
from relpos.comparison.changes import changed
from relpos.comparison.choices import CHOICES, POSITIONS, find_choice
from relpos.comparison.request import EVERY, OWN, STANDARD, as_typed, changes_of, require_asked
from relpos.core.checks import fail
from relpos.data import Probe, Task
from relpos.models import LanguageModel, SwinTransformer, VisionTransformer
from relpos.optim import parameter_groups
from relpos.position import find, presets
from relpos.position.base.outside import sources_of
from relpos.results import Environment, MechanismRecord, What, plain
from relpos.train import (
    OF_THE_MODEL,
    OURS,
    ImageRecipe,
    Procedure,
    Recipe,
    build_swin,
    resolve_device,
    scores_of,
)
from relpos.train.processes import Parallelism
from relpos.version import __version__
from relpos_command.requests import CompareRequest

QUICK_STEPS = 60
QUICK_STEPS_ON_TEXT = 10


@dataclass(frozen=True)
class Job:
    """One training run: the name of a mechanism or choice, a seed, and the rate of the position parameters."""

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
        """The run's description."""
        variant = "" if self.variant == "recipe" else ", position at the learning rate of the rest"
        return f"{self.name}, seed {self.seed}{variant}"


@dataclass(frozen=True)
class ComparisonSettings:
    """Everything that determines a comparison's figures; times also depend on the machine.

    Attributes:
        task: a task's name. task_options: plain values that, with the name, rebuild the task; for the user's own data
            they include a fingerprint.
        positions: mechanisms by name, `+` for sums.
        seeds: their number; the seeds are 0, 1, ...
        recipe: the training recipe of all runs.
        quick: a short run to check that everything works; no verdict.
        device, precision, threads: how a run computes. timing_threads: CPU threads while steps are timed; by default
            those of this process (all cores, or `OMP_NUM_THREADS`).
        what: the subject: position, attention, norm or optimizer. choices: the names compared if it is not position;
            `positions` is then the one position of all models.
        model, step, evaluate: the user's functions as text with a fingerprint; None means relpos's own.
        changes: requested changes of the recipe, except steps.
        better: whether higher or lower figures of the user's metric are better; None if relpos measures.
        given: model, step, evaluate and mechanisms of files as the user typed them, to repeat the command. They do not
            distinguish comparisons: a moved file is the same code.
        sources: the files and packages of mechanisms that are not relpos's, with a fingerprint.
        devices_per_trial: processes of a training run, if several. They train as one does, up to rounding.
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
    model: str | None = None
    step: str | None = None
    evaluate: str | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    better: Literal["higher", "lower"] | None = None
    given: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    devices_per_trial: int | None = None

    @property
    def processes(self) -> int:
        """Of each training run."""
        return self.devices_per_trial or 1

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mechanisms or choices compared."""
        return self.positions if self.what == "position" else self.choices

    @property
    def key(self) -> str:
        """The field of records and costs that holds the name."""
        return "position" if self.what == "position" else "choice"

    def of(self, name: str) -> tuple[Recipe, str]:
        """The recipe and the position for a name."""
        if self.what == "position":
            return self.recipe, name
        return find_choice(self.what, name).change(self.recipe), self.positions[0]

    def probes(self, task: Task) -> tuple[Probe, ...]:
        """The tests of trained models: all for position; the plain test for other choices or the user's metric."""
        return task.probes if self.what == "position" and self.better is None else task.probes[:1]

    @classmethod
    def make(cls, task: Task, request: CompareRequest, procedure: Procedure = OURS) -> ComparisonSettings:
        """Check a request and make settings of it.

        As positions, None takes the task's own choice, `("standard",)` its wider one, `("all",)` all that suit the
        task. If something else is compared, it is the one position of all models, None for a rotation. The batch is at
        most as large as the task's training data.
        """
        require_asked(request, procedure)
        kind, axes = cast("What", request.what), len(task.grid)
        usual = task.positions if kind == "position" else (POSITIONS[axes],)
        chosen = usual if request.positions is None else request.positions
        chosen = listed(chosen, task) or canonical(chosen, axes, procedure)
        for name in chosen if procedure.build is None else ():
            if axes not in find(name).token_axes:
                fail(f"positions that suit {task.kind} for task {task.name}", repr(name), "Leave it out.")
        changes, steps = changes_of(request), request.steps
        if steps is None and request.quick:
            steps = changes.get("steps", QUICK_STEPS_ON_TEXT if task.kind == "text" else QUICK_STEPS)
        for name in changes.keys() & OF_THE_MODEL if procedure.build is not None else ():
            fail("training settings with your own model", f"{name}, a setting of relpos's models", f"Leave {name} out.")
        used = changed(Recipe.of(task), changes if steps is None else {**changes, "steps": steps}).within(task)
        world = request.devices_per_trial or 1
        Parallelism().require_divides(used.batch_size, world)
        Parallelism().require_shares(used.optimizer, request.precision, world)
        if procedure.measures and used.optimizer.startswith("sophia"):
            fail("adamw or lion, with your own step or evaluate", used.optimizer, "Choose one of them.")
        named: tuple[str, ...] = ()
        if kind != "position":  # in the order of the list, whose first the others are measured against
            named = tuple(name for name in CHOICES[kind] if request.choices is None or name in request.choices)
        if kind == "attention":
            _require_served(named, chosen[0], used, task)
        return cls(
            task.name,
            chosen,
            request.seeds,
            task.options,
            used,
            request.quick,
            str(resolve_device(request.device)),
            request.precision,
            what=kind,
            choices=named,
            model=described(procedure.build),
            changes={name: value for name, value in changes.items() if name != "steps"},
            better=procedure.better if procedure.measures else None,
            step=described(procedure.step),
            evaluate=described(procedure.evaluate),
            given=as_typed(request),
            sources=sources_of(chosen),
            devices_per_trial=None if request.devices_per_trial == 1 else request.devices_per_trial,
        )

    def jobs(self, task: Task, procedure: Procedure = OURS) -> list[Job]:
        """The training runs: every mechanism and seed by the recipe; then mechanisms with position parameters, without
        the recipe's own learning rate for them.

        The order is seed by seed, so that an interrupted comparison has whole seeds. One seed gives a quick first look:
        the runs without that rate, which show how much the recipe matters, need two seeds.
        """
        usual = self.recipe.position_learning_rate_multiplier
        jobs = [Job(name, seed, "recipe", usual) for seed in range(self.seeds) for name in self.names]
        if usual != 1 and self.seeds > 1 and self.what == "position":
            learned = [name for name in self.positions if _learns(procedure.model(self.recipe, task, name))]
            jobs += [Job(name, seed, "x1", 1.0) for seed in range(self.seeds) for name in learned]
        return jobs

    def describe(self) -> results.SettingsRecord:
        """The settings for `results.json`."""
        lists = {"positions": list(self.positions), "choices": list(self.choices)}
        return results.SettingsRecord(
            **{**asdict(self), **lists, "recipe": results.RecipeRecord(**self.recipe.to_json())}
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values for `comparison.json` that distinguish comparisons; `what` only if it is not position, and
        `sources` only if there are some."""
        whole = {**plain(self.describe()), "task_options": plain(self.task_options)}
        left_out = ["given", *(["what"] if self.what == "position" else []), *([] if self.sources else ["sources"])]
        return {name: value for name, value in whole.items() if name not in left_out}


def canonical(positions: tuple[str, ...], axes: int, procedure: Procedure = OURS) -> tuple[str, ...]:
    """Replace aliases by preset names, on tokens with `axes` axes; each name once."""
    users_own = OWN if procedure.build is not None else None
    return tuple(dict.fromkeys(name if name == users_own else find(name, axes).name for name in positions))


def listed(positions: tuple[str, ...] | None, task: Task) -> tuple[str, ...] | None:
    """The names in a list of relpos: for None its first choice, for `("standard",)` or `("all",)` those; else None."""
    if positions is None:
        return task.positions
    if positions == (STANDARD,):
        return task.standard
    if positions == (EVERY,):
        return tuple(name for name, preset in presets().items() if len(task.grid) in preset.token_axes)
    return None


def _require_served(names: tuple[str, ...], position: str, recipe: Recipe, task: Task) -> None:
    """Raise unless every kind of attention supports the position; one input tests it."""
    inputs = next(task.batches(1, 0))[0]
    for name in names:
        model = find_choice("attention", name).change(recipe).build(task, position)
        try:
            with torch.no_grad():
                scores_of(model, inputs)
        except NotImplementedError:
            fail(f"a position that {name} attention supports", repr(position), f"Leave out --positions, or {name}.")


def _learns(model: nn.Module) -> bool:
    """Whether a model has parameters that describe position."""
    groups = parameter_groups(model, learning_rate=1.0, weight_decay=0.0, position_learning_rate_multiplier=2.0)
    return any(group["multiplier"] == 2.0 for group in groups)


def default_folder(settings: ComparisonSettings, where: Environment | None = None) -> Path:
    """A folder named by settings and environment (by default this machine's), so that the same call on the same
    machine finds its results."""
    whole = [settings.to_json(), plain(environment(settings.device) if where is None else where)]
    digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()[:8]
    name = settings.task
    for key in ("images", "text", "source"):
        if key in settings.task_options:
            name = re.sub(r"[^\w.-]+", "-", Path(settings.task_options[key]).name) or name
    if settings.what != "position":
        name += f"-{settings.what}"
    return Path("runs") / f"{name}{'-quick' if settings.quick else ''}-{digest}"


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


def describe(name: str, settings: ComparisonSettings, task: Task, procedure: Procedure = OURS) -> MechanismRecord:
    """The entry of a name in `results.json`; its model is tried first."""
    if settings.what != "position":
        return find_choice(settings.what, name).describe()
    rules = list(growth(procedure.tried(settings.recipe, task, name)))
    if name == OWN:
        known = "the model's own position"
        if procedure.build is build_swin:
            known = "a table of offsets within each window (relative_2d)"
        elif isinstance(procedure.build, LibraryModel):
            known = "; ".join(f"{own.what} ({own.name})" for own in procedure.build.own(task)) or "nothing"
        return MechanismRecord(OWN, "The model's own", f"{known[0].upper()}{known[1:]}.", "the model", rules)
    preset = find(name)
    return MechanismRecord(name, preset.title, preset.summary, preset.source, rules, preset.family)


def growth(model: nn.Module) -> tuple[str, ...]:
    """The rules by which a model extrapolates to another size; relpos's models, timm's and torchvision's have some.

    Swin's windows keep their size on a larger image, so its rules are those of the position added to tokens.
    """
    if isinstance(model, SwinTransformer):
        return model.token_position.growth()
    return model.growth() if isinstance(model, VisionTransformer | LanguageModel) else rules_for_images(model)


def grown(model: nn.Module, size: Any, rule: str) -> nn.Module:
    """A model for another size, by a rule of `growth`; Swin stays unchanged if only its windows have a position."""
    if isinstance(model, SwinTransformer) and rule not in model.growth():
        return model
    if not isinstance(model, VisionTransformer | LanguageModel | SwinTransformer):
        return for_images(model, size, rule)
    return model.grow(size, rule)
