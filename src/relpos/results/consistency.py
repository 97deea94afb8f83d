"""The conditions, besides types, that the values of a `results.json` must meet before a page is made from it.

Every check yields a line, "where: expected this, got that". Each check may rely on those before it, and the first fault
is raised.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from relpos.results.schema import Attention, Cost, Learned, Metric, ProbeRecord, RecipeRecord, Results, Run, TaskRecord
from relpos.results.typed import LARGEST, ResultsError, typed

Faults = Iterator[str]


def require_consistent(results: Results, name: str) -> None:
    """Raise a `ResultsError` that starts with `name` if values are inconsistent."""
    fault = next(_faults(results), None)
    if fault is not None:
        raise ResultsError(f"{name}.{fault}")


def _faults(results: Results) -> Faults:
    yield from _of_settings(results)
    yield from _of_task(results.task)
    yield from _repeated("records", "id", [run.id for run in results.records])
    runs = [f"{run.name}, {run.variant}, seed {run.seed}" for run in results.records]
    yield from _repeated("records", "run", runs)
    for index, run in enumerate(results.records):
        yield from _of_run(run, results, f"records[{index}]")
    yield from _of_units(results.records)
    yield from _repeated("costs", "entry", [f"{one.name} at {one.tokens} tokens" for one in results.costs])
    for index, cost in enumerate(results.costs):
        yield from _of_cost(cost, results.names, f"costs[{index}]")
    yield from _repeated("failed", "id", [one.id for one in results.failed])
    for index, failed in enumerate(results.failed):
        if failed.name is not None and failed.name not in results.names:
            yield f"failed[{index}]: expected work on {_listed(results.names)}, got {failed.name!r:.60}"


def _of_settings(results: Results) -> Faults:
    settings = results.settings
    asked, key = (settings.positions, "positions") if settings.what == "position" else (settings.choices, "choices")
    if not asked:
        yield f"settings.{key}: expected at least one name, got none"
    for name in asked:
        if not name.strip() or not name.isprintable():
            yield f"settings.{key}: expected names that can be printed, got {name!r:.60}"
    yield from _repeated(f"settings.{key}", "name", asked)
    if results.names != asked:
        yield f"mechanisms: expected one for each of settings.{key}, {_listed(asked)}, got {_listed(results.names)}"
    yield from _least("settings.seeds", settings.seeds, 1)
    yield from _of_recipe(settings.recipe, results.task, "settings.recipe")


def _of_recipe(recipe: RecipeRecord, task: TaskRecord, where: str) -> Faults:
    yield from _least(f"{where}.steps", recipe.steps, 1)
    wanted = {"images": ("global_pool", "class_token"), "text": ("mlp",), "other": ()}
    for name in wanted[task.kind]:
        if getattr(recipe, name) is None:
            yield f"{where}: missing {name}"


def _of_task(task: TaskRecord) -> Faults:
    for split in ("train", "validation", "test"):
        if split not in task.sizes:
            yield f"task.sizes: missing {split}"
    if not task.probes:
        yield "task.probes: expected at least one, got none"
    yield from _repeated("task.probes", "id", [probe.id for probe in task.probes])
    if task.kind == "images":
        yield from _least("task.channels", task.channels, 1)
        if not task.classes:
            yield "task.classes: expected at least one, got none"
        if task.largest_class is not None and not 0 <= task.largest_class <= 1:
            yield f"task.largest_class: expected a share from 0 to 1, got {task.largest_class:g}"
        yield from _size("task.image_size", task.image_size)
        yield from _size("task.patch_size", task.patch_size)
        for index, file in enumerate(task.skipped):
            if not {"path", "reason"} <= set(file):
                yield f"task.skipped[{index}]: expected path and reason, got {_listed(file)}"
    elif task.kind == "text":
        yield from _least("task.length", task.length, 1)
        yield from _least("task.blocks", task.blocks, 1)
    for index, probe in enumerate(task.probes):
        yield from _of_probe(probe, task, f"task.probes[{index}]")


def _of_probe(probe: ProbeRecord, task: TaskRecord, where: str) -> Faults:
    yield from _least(f"{where}.x", probe.x, 1 if probe.group == "length" else 0)
    if task.kind == "text":
        yield from _least(f"{where}.length", probe.length, 1)
    elif task.kind == "images":
        yield from _size(f"{where}.image_size", probe.image_size)
        if probe.group == "length":
            yield f"{where}.group: expected one of images, got 'length'"


def _of_run(run: Run, results: Results, where: str) -> Faults:
    if run.name not in results.names:
        yield f"{where}: expected a run of {_listed(results.names)}, got {run.name!r:.60}"
    yield from _least(f"{where}.seed", run.seed, 0)
    if "recipe" not in run.settings:
        yield f"{where}.settings: missing recipe"
    try:
        recipe = typed(RecipeRecord, run.settings["recipe"], f"{where}.settings.recipe")
    except ResultsError as fault:
        yield str(fault)
        return
    yield from _of_recipe(recipe, results.task, f"{where}.settings.recipe")
    curve, most = run.curve, LARGEST if results.task.kind == "text" else 1.0
    own = results.settings.better is not None
    yield from _alike(f"{where}.curve", step=curve.step, loss=curve.loss, rate=curve.rate)
    yield from _alike(f"{where}.curve", validation_step=curve.validation_step, validation=curve.validation)
    yield from () if own else _within(f"{where}.curve.validation", curve.validation, most)
    yield from _repeated(f"{where}.metrics", "one", [f"{one.probe}, {one.growth}" for one in run.metrics])
    for index, metric in enumerate(run.metrics):
        yield from _of_metric(metric, results.task, f"{where}.metrics[{index}]", own=own)
    for index, entry in enumerate(run.learned):
        yield from _of_learned(entry, f"{where}.learned[{index}]")
    if run.attention is not None:
        yield from _of_attention(run.attention, f"{where}.attention")


def _of_metric(metric: Metric, task: TaskRecord, where: str, *, own: bool) -> Faults:
    if metric.probe not in [probe.id for probe in task.probes]:
        yield f"{where}.probe: expected the id of a probe, got {metric.probe!r:.60}"
    if metric.reason is not None:
        return
    kinds = (("figure", "values"), ("bits_per_byte", "values"), ("accuracy", "trials", "correct"))
    wanted = kinds[0] if own else kinds[1] if task.kind == "text" else kinds[2]
    missing = [name for name in wanted if getattr(metric, name) in (None, [])]
    if missing:
        yield f"{where}: expected {_listed(wanted)}, or a reason; got no {_listed(missing)}"
    every = dict.fromkeys(name for kind in kinds for name in kind)
    odd = [name for name in every if name not in wanted and getattr(metric, name) is not None]
    if odd:
        yield f"{where}: expected what {'figures' if own else task.kind} have, got {_listed(odd)}"
    if metric.correct is not None:
        yield from _least(f"{where}.trials", metric.trials, 1)
        yield from _within(f"{where}.correct", metric.correct, metric.trials or 0)
        yield from _within(f"{where}.accuracy", [metric.accuracy or 0.0], 1)
    yield from () if own else _within(f"{where}.values", metric.values or [], LARGEST)


def _of_units(runs: Sequence[Run]) -> Faults:
    """Every run must have the same number of units for a probe, as runs are compared unit by unit."""
    first: dict[tuple[str, str], tuple[int, str]] = {}
    for run in runs:
        for metric in run.metrics:
            for key in ("correct", "values", "by_place"):
                units = getattr(metric, key)
                if units is None:
                    continue
                count, name = first.setdefault((metric.probe, key), (len(units), run.id))
                if len(units) != count:
                    where = f"records.{run.id}.metrics.{metric.probe}.{key}"
                    yield f"{where}: expected {count} as in {name}, got {len(units)}"


def _of_learned(entry: Learned, where: str) -> Faults:
    if entry.kind == "embedding":
        if not entry.grid or len(entry.grid) > 2 or min(entry.grid) < 1:
            yield f"{where}.grid: expected one or two sizes of at least 1, got {entry.grid!r:.60}"
        yield from _least(f"{where}.every", 1 if entry.every is None else entry.every, 1)
        count = math.prod(entry.grid or [])
        yield from _array(f"{where}.similarity", entry.similarity, (count, count))
        return
    pairs = entry.offsets or []
    if entry.layer is None:
        yield f"{where}: missing layer"
    if entry.axes not in (1, 2) or len(pairs) != entry.axes:
        yield f"{where}.offsets: expected one for each of 1 or 2 axes, got {len(pairs)} for {entry.axes}"
    for pair in pairs:
        if len(pair) != 2 or pair[0] > pair[1]:
            yield f"{where}.offsets: expected [lowest, highest], got {pair!r:.60}"
    spans = [high - low + 1 for low, high in pairs]
    yield from _array(f"{where}.values", entry.values, (None, *spans))
    if entry.prefix is not None:
        yield from _array(f"{where}.prefix", entry.prefix, (len(entry.values), 3))


def _of_attention(found: Attention, where: str) -> Faults:
    images = len(found.label)
    yield from _least(f"{where}.label", images, 1)
    yield from _alike(where, label=found.label, predicted=found.predicted)
    yield from _size(f"{where}.grid", found.grid)
    inside = len(found.query) == 2 and all(0 <= at < of for at, of in zip(found.query, found.grid, strict=True))
    if not inside:
        yield f"{where}.query: expected a patch of the grid {found.grid}, got {found.query!r:.60}"
    yield from _array(f"{where}.image", found.image, (images, None, None))
    pixels = np.shape(found.image)[1:]
    if any(size % of for size, of in zip(pixels, found.grid, strict=True)):
        yield f"{where}.image: expected pixels that a grid of {found.grid} divides, got {list(pixels)}"
    yield from _array(f"{where}.maps", found.maps, (images, None, None, *found.grid))


def _of_cost(cost: Cost, names: Sequence[str], where: str) -> Faults:
    if cost.name not in names:
        yield f"{where}: expected the cost of {_listed(names)}, got {cost.name!r:.60}"
    for key in ("tokens", "batch_size"):
        yield from _least(f"{where}.{key}", getattr(cost, key), 1)
    yield from _least(f"{where}.depth", 1 if cost.depth is None else cost.depth, 1)
    if cost.step_ms is None and cost.reason is None:
        yield f"{where}: expected step_ms, or a reason; got neither"
    times = [] if cost.step_ms is None else [cost.step_ms.low, cost.step_ms.median, cost.step_ms.high]
    if any(time <= 0 for time in times) or times != sorted(times):
        yield f"{where}.step_ms: expected times above 0, low to high, got {times}"
    if cost.ratio is not None and cost.ratio <= 0:
        yield f"{where}.ratio: expected a number above 0, got {cost.ratio}"
    yield from _least(f"{where}.peak_memory_mib", cost.peak_memory_mib or 0, 0)


def _repeated(where: str, what: str, names: Sequence[str]) -> Faults:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            yield f"{where}: expected each {what} once, got {name!r:.60} twice"
        seen.add(name)


def _least(where: str, value: float | None, least: float) -> Faults:
    if value is None or value < least:
        yield f"{where}: expected at least {least}, got {value}"


def _within(where: str, values: Iterable[float], most: float) -> Faults:
    odd = next((value for value in values if not 0 <= value <= most), None)
    if odd is not None:
        yield f"{where}: expected numbers from 0 to {most:g}, got {odd}"


def _size(where: str, size: Sequence[int] | None) -> Faults:
    if size is None or len(size) != 2 or min(size) < 1:
        yield f"{where}: expected [rows, columns] of at least 1, got {size!r:.60}"


def _alike(where: str, **lists: Sequence[Any]) -> Faults:
    if len({len(one) for one in lists.values()}) > 1:
        yield f"{where}: expected equally many {_listed(lists)}, got {_listed([str(len(x)) for x in lists.values()])}"


def _array(where: str, value: Any, shape: Sequence[int | None]) -> Faults:
    """Nested lists of numbers of a shape; None is any size of at least 1."""
    wanted = " x ".join("any" if size is None else str(size) for size in shape)
    try:
        array = np.asarray(value)
    except (ValueError, RecursionError):  # lists of differing lengths
        array = np.asarray("ragged")
    fits = len(array.shape) == len(shape) and all(b in (None, a) for a, b in zip(array.shape, shape, strict=True))
    if not fits or array.dtype.kind not in "iuf" or array.size == 0 or not (np.abs(array) <= LARGEST).all():
        yield f"{where}: expected nested lists of numbers, {wanted}, got {value!r:.60}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(names) or "none"
