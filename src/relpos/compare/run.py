"""One training run and everything measured on the trained model: a record of `results.json`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch

from relpos.compare.learned import attention_over_examples, learned
from relpos.compare.memory import PeakMemory, keep_freed_memory
from relpos.compare.settings import Job, Settings, environment
from relpos.data import Task
from relpos.models import VisionTransformer, count_parameters
from relpos.train import Progress, Recipe, right, train


def warm_up(task: Task, recipe: Recipe, device: torch.device, precision: str) -> None:
    """One small step, so that what a process loads on first use does not count as a model's memory."""
    small = replace(recipe, steps=1, batch_size=2, depth=1)
    train(task, "none", small, seed=0, device=device, precision=precision)


def run(job: Job, settings: Settings, task: Task, watch: Callable[[Progress], None] | None = None) -> dict[str, Any]:
    """Train one job and measure it; see docs/results.md for the record."""
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    device = torch.device(settings.device)
    recipe = replace(settings.recipe, position_learning_rate_multiplier=job.multiplier)
    warm_up(task, recipe, device, settings.precision)
    memory = PeakMemory(device)
    started = time.perf_counter()
    model, curve = train(
        task, job.position, recipe, seed=job.seed, device=device, precision=settings.precision, watch=watch
    )
    seconds = time.perf_counter() - started
    peak = memory.mib()
    parts = {name: count.total for name, count in count_parameters(model).items()}
    return {
        "id": job.id,
        "position": job.position,
        "seed": job.seed,
        "position_learning_rate_multiplier": job.multiplier,
        "variant": job.variant,
        "parameters": {"total": sum(parts.values()), "position": parts.get("position", 0), "parts": parts},
        "curve": {name: [round(value, 6) for value in values] for name, values in asdict(curve).items()},
        "validation_accuracy": curve.validation_accuracy[-1],
        "train_seconds": round(seconds, 2),
        "threads": settings.threads,
        "peak_memory_mib": peak,
        "settings": {**settings.to_json(), "recipe": asdict(recipe), "position": job.position, "seed": job.seed},
        "environment": environment(settings.device),
        "metrics": metrics(model, task, device),
        "learned": learned(model),
        "attention": attention_over_examples(model, task),
    }


def metrics(model: VisionTransformer, task: Task, device: torch.device) -> list[dict[str, Any]]:
    """Every probe on the test images, by every growth rule where the grid is not the trained one."""
    found: list[dict[str, Any]] = []
    grown: dict[tuple[tuple[int, int], str], VisionTransformer] = {}
    for probe in task.probes:
        same = probe.image_size == task.image_size
        rules: tuple[str | None, ...] = (None,) if same else model.growth()
        if not rules:
            reason = "the mechanism has no rule by which it goes on to another grid"
            found.append({"probe": probe.id, "growth": None, "accuracy": None, "reason": reason})
        for rule in rules:
            tested = model
            if rule is not None:
                key = (probe.image_size, rule)
                tested = grown.setdefault(key, grown.get(key) or model.grow(probe.image_size, rule))
            hits = right(tested, task, probe, "test", device)
            found.append(
                {
                    "probe": probe.id,
                    "growth": rule,
                    "accuracy": round(hits.float().mean().item(), 6),
                    "trials": probe.trials,
                    "correct": hits.sum(dim=1).tolist(),
                }
            )
    return found
