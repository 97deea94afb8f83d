"""What belongs together in a comparison's `results.json` beyond what reading it requires; AssertionError where not."""

import json
import math
from pathlib import Path
from typing import Any

import torch

from relpos.results import Results, plain, read
from relpos.results.schema import Learned, Metric, ProbeRecord, Run, TaskRecord

SETTINGS = {
    "task", "task_options", "positions", "seeds", "quick", "device", "precision", "threads", "timing_threads", "recipe",
    "position", "seed",
}  # fmt: skip
"""Of a run, every one that it was made with."""


def written(folder: Path) -> dict[str, Any]:
    """The tree in a folder's `results.json`."""
    tree: dict[str, Any] = json.loads((folder / "results.json").read_text())
    return tree


def check(tree: dict[str, Any]) -> None:
    """The whole file."""
    json.dumps(tree, allow_nan=False)
    results = read(tree)
    assert plain(results) == tree, "as it was written"
    assert all(one.family != "other" for one in results.mechanisms)
    names = results.settings.positions
    task = results.task
    assert task.probes[0].group == "test"
    assert all(at_own_size(probe, task) == (probe.group not in ("canvas", "length")) for probe in task.probes)
    if task.kind == "text":
        assert task.blocks == (task.sizes["test"] - 1) // max(probe.length or 0 for probe in task.probes)
    for run in results.records:
        check_diverged(run, results.settings.recipe.steps) if run.diverged else check_run(run, results)
    for cost in results.costs:
        assert cost.position in names
        assert (cost.ratio is None) == (cost.reason is not None or "none" not in names)


def at_own_size(probe: ProbeRecord, task: TaskRecord) -> bool:
    """Whether a probe asks at the size that a model is trained at."""
    return (probe.image_size or probe.length) == (task.image_size or task.length)


def check_diverged(run: Run, steps: int) -> None:
    """A run whose loss was no number: where that was, and no figure after it."""
    assert run.diverged is not None
    assert 1 <= run.diverged.step <= steps
    assert run.diverged.value in ("nan", "inf", "-inf")
    assert not run.metrics
    assert (run.validation, run.attention, run.sample, run.learned) == (None, None, None, [])
    assert all(map(math.isfinite, run.curve.loss + run.curve.validation))
    assert all(step <= run.diverged.step for step in run.curve.step + run.curve.validation_step)


def check_run(run: Run, results: Results) -> None:
    recipe, growth = results.settings.recipe, results.mechanism(run.position).growth
    assert 0 <= run.seed < results.settings.seeds
    usual = recipe.position_learning_rate_multiplier
    assert run.position_learning_rate_multiplier == {"recipe": usual, "x1": 1}[run.variant]
    assert run.settings["recipe"]["position_learning_rate_multiplier"] == run.position_learning_rate_multiplier
    assert run.parameters.total == sum(run.parameters.parts.values())
    assert run.parameters.position == run.parameters.parts.get("position", 0)
    assert run.variant == "recipe" or run.parameters.position > 0, "no x 1 runs where position learns nothing"
    assert run.curve.step[-1] == run.curve.validation_step[-1] == recipe.steps
    assert run.validation is not None
    assert run.train_seconds > 0
    assert (run.peak_memory_mib or 0) > 0
    assert {*run.settings} - {"changes"} == SETTINGS
    asked = [
        (probe.id, rule)
        for probe in results.task.probes
        for rule in ([None] if at_own_size(probe, results.task) else growth or [None])
    ]
    assert [(one.probe, one.growth) for one in run.metrics] == asked
    for metric in run.metrics:
        if metric.reason is None:
            check_metric(metric, results)
    for entry in run.learned:
        check_learned(entry, recipe.num_heads)
    if results.task.kind == "text":
        assert run.sample is not None
        assert bool(run.sample.beyond) == bool(growth)
        return
    assert run.attention is not None
    assert {*run.attention.label, *run.attention.predicted} <= {*results.task.classes}
    grey, maps = torch.tensor(run.attention.image), torch.tensor(run.attention.maps)
    assert [*grey.shape[1:]] == results.task.image_size
    assert ((grey >= 0) & (grey <= 1)).all()
    assert maps.shape[1:3] == (recipe.depth, recipe.num_heads)
    torch.testing.assert_close(maps.sum(dim=(-1, -2)), torch.ones(maps.shape[:3]), rtol=0, atol=0.01)


def check_metric(metric: Metric, results: Results) -> None:
    """A figure is the mean of its parts."""
    task = results.task
    if metric.bits_per_byte is not None:
        assert metric.values is not None
        assert metric.by_place is not None
        assert (len(metric.values), len(metric.by_place)) == (task.blocks, 32)
        for parts in (metric.values, metric.by_place):
            assert abs(sum(parts) / len(parts) - metric.bits_per_byte) < 1e-3
        return
    assert metric.correct is not None
    assert metric.trials == next(probe.trials for probe in task.probes if probe.id == metric.probe)
    assert len(metric.correct) == task.sizes["test"]
    share = sum(metric.correct) / (len(metric.correct) * (metric.trials or 0))
    assert abs((metric.accuracy or 0) - share) < 1e-5, "accuracy is what the counts say"


def check_learned(entry: Learned, heads: int) -> None:
    if entry.kind == "embedding":
        assert entry.every == 1 or len(entry.grid or []) == 1
    else:
        assert len(entry.values) == heads
