"""One training run and everything measured on the trained model: a record of `results.json`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from relpos.compare.learned import attention_over_examples, learned, sample
from relpos.compare.memory import PeakMemory, keep_freed_memory
from relpos.compare.settings import Job, Settings, environment
from relpos.data import ImageTask, Probe, Task, Text
from relpos.models import LanguageModel, VisionTransformer, count_parameters
from relpos.train import DivergedError, Model, Progress, Recipe, measured, train


def warm_up(task: Task, recipe: Recipe, device: torch.device, precision: str) -> None:
    """One small step, so that what a process loads on first use does not count as a model's memory."""
    small = replace(recipe, steps=1, batch_size=2, depth=1)
    with contextlib.suppress(DivergedError):  # nothing is wanted of this model
        train(task, "none", small, seed=0, device=device, precision=precision)


def run(job: Job, settings: Settings, task: Task, watch: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Train one job and measure it; see docs/results.md for the record, also of a run that diverges."""
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    device = torch.device(settings.device)
    recipe, position = settings.of(job.name)
    recipe = replace(recipe, position_learning_rate_multiplier=job.multiplier)
    warm_up(task, recipe, device, settings.precision)
    memory = PeakMemory(device)
    started = time.perf_counter()
    model: Model | None = None
    diverged: dict[str, Any] = {}
    try:
        model, curve = train(
            task, position, recipe, seed=job.seed, device=device, precision=settings.precision, watch=watch
        )
    except DivergedError as error:
        curve = error.curve
        found = {"step": error.step, "rate": error.rate, "what": error.what, "value": error.value}
        diverged = {"diverged": found}
    seconds = time.perf_counter() - started
    peak = memory.mib()
    names = {"validation": f"validation_{task.measure}"}
    built = recipe.build(task, position) if model is None else model
    parts = {name: count.total for name, count in count_parameters(built).items()}
    return {
        "id": job.id,
        **({} if settings.what == "position" else {"choice": job.name}),
        "position": position,
        "seed": job.seed,
        "position_learning_rate_multiplier": job.multiplier,
        "variant": job.variant,
        **diverged,
        "parameters": {"total": sum(parts.values()), "position": parts.get("position", 0), "parts": parts},
        "curve": {names.get(name, name): [round(x, 6) for x in values] for name, values in asdict(curve).items()},
        names["validation"]: None if model is None else curve.validation[-1],
        "train_seconds": round(seconds, 2),
        "threads": settings.threads,
        "peak_memory_mib": peak,
        "settings": {**settings.to_json(), "recipe": asdict(recipe), "position": position, "seed": job.seed},
        "environment": environment(settings.device),
        **_measured(model, settings, task, device),
    }


def _measured(model: Model | None, settings: Settings, task: Task, device: torch.device) -> dict[str, Any]:
    """What is known of a trained model; nothing where there is none."""
    found: dict[str, Any] = {"metrics": []}
    if model is not None:
        found["metrics"] = metrics(model, task, settings.probes(task), device, quick=settings.quick)
    if settings.what == "position":
        found |= {"learned": []} if model is None else {"learned": learned(model), **_shown(model, task)}
    return found


def _shown(model: Model, task: Task) -> dict[str, Any]:
    """What a reader may look at: attention over images, or text that the model wrote."""
    match model, task:
        case VisionTransformer(), ImageTask():
            return {"attention": attention_over_examples(model, task)}
        case LanguageModel(), Text():
            return {"sample": sample(model, task)}
        case _:
            return {}


def metrics(
    model: Model, task: Task, probes: tuple[Probe, ...], device: torch.device, *, quick: bool = False
) -> list[dict[str, Any]]:
    """Every one of these probes on the test data, by every growth rule where the size is not the trained one."""
    found: list[dict[str, Any]] = []
    grown: dict[tuple[Any, str], Model] = {}
    for probe in probes:
        same = probe.size == task.size
        rules: tuple[str | None, ...] = (None,) if same else model.growth()
        if not rules:
            reason = "the mechanism has no rule by which it extrapolates to another size"
            found.append({"probe": probe.id, "growth": None, task.measure: None, "reason": reason})
        for rule in rules:
            tested = model
            if rule is not None:
                key = (probe.size, rule)
                tested = grown.setdefault(key, grown.get(key) or model.grow(probe.size, rule))
            found.append({"probe": probe.id, "growth": rule, **measured(tested, task, probe, device, quick=quick)})
    return found
