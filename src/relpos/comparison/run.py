"""One training run and all measurements of the trained model: a record of `results.json`."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import asdict, replace

import torch
from torch import Tensor, nn

from relpos.comparison.learned import attention_over_examples, learned, sample
from relpos.comparison.memory import PeakMemory, keep_freed_memory
from relpos.comparison.settings import ComparisonSettings, Job, environment, grown, growth
from relpos.data import ImageTask, Probe, Task, Text
from relpos.models import LanguageModel, VisionTransformer, count_parameters
from relpos.results import CurveRecord, Divergence, Metric, Parameters, Run
from relpos.train import OURS, DivergedError, Procedure, Progress, Recipe, TrainingRun, fit, measured
from relpos.train.processes import device_here, is_main, world_size


def warm_up(
    task: Task,
    recipe: Recipe,
    device: torch.device,
    precision: str,
    position: str = "none",
    procedure: Procedure = OURS,
) -> None:
    """Train one small step first, so that libraries loaded on first use do not count as the model's memory."""
    small = replace(recipe, steps=1, batch_size=min(2 * world_size(), recipe.batch_size), depth=1)
    with contextlib.suppress(DivergedError):  # this model is not used
        fit(TrainingRun(task, position, small, 0, device, procedure, precision))


def run(
    job: Job,
    settings: ComparisonSettings,
    task: Task,
    watch: Callable[[Progress], None] | None = None,
    *,
    procedure: Procedure = OURS,
    keep: Callable[[nn.Module], None] | None = None,
    probes: tuple[Probe, ...] | None = None,
) -> Run | None:
    """Train one job and measure it; docs/results.md describes the record, also that of a diverged run.

    Of several processes that train together, only the first measures; the others return None.

    Args:
        procedure: builds, trains and measures. keep: receives the trained model.
        probes: tests of the trained model; by default those of the settings.
    """
    torch.set_num_threads(settings.threads)
    keep_freed_memory()
    device = device_here(torch.device(settings.device))
    recipe, position = settings.of(job.name)
    recipe = replace(recipe, position_learning_rate_multiplier=job.multiplier)
    warm_up(task, recipe, device, settings.precision, "none" if procedure.build is None else position, procedure)
    memory = PeakMemory(device)
    started = time.perf_counter()
    model: nn.Module | None = None
    diverged = None
    try:
        training = TrainingRun(task, position, recipe, job.seed, device, procedure, settings.precision)
        model, curve = fit(training, watch=watch)
    except DivergedError as error:
        curve = error.curve
        diverged = Divergence(error.step, error.rate, error.what, error.value)
    seconds = time.perf_counter() - started
    if not is_main():  # of several processes, which have trained together
        return None
    peak = memory.mib()
    built = procedure.model(recipe, task, position) if model is None else model
    parts = {name: count.total for name, count in count_parameters(built).items()}
    points = {name: [round(x, 6) for x in values] for name, values in asdict(curve).items()}
    run = Run(
        id=job.id,
        position=position,
        seed=job.seed,
        variant=job.variant,
        position_learning_rate_multiplier=job.multiplier,
        parameters=Parameters(sum(parts.values()), parts.get("position", 0), parts),
        curve=CurveRecord(**points),
        train_seconds=round(seconds, 2),
        threads=settings.threads,
        metrics=[],
        peak_memory_mib=peak,
        choice=None if settings.what == "position" else job.name,
        diverged=diverged,
        settings={**settings.to_json(), "recipe": recipe.to_json(), "position": position, "seed": job.seed},
        environment=environment(settings.device),
    )
    if model is None:
        return run
    if keep is not None:
        keep(model)
    if procedure.measures:
        found = [
            _figure(procedure.figures(model, task, "test", device, recipe.batch_size, at_most=None), task.probes[0])
        ]
    else:
        found = metrics(model, task, settings.probes(task) if probes is None else probes, device, quick=settings.quick)
    run = replace(run, validation=run.curve.validation[-1], metrics=found)
    return run if settings.what != "position" else _looked_at(run, model, task)


def _figure(figures: Tensor, probe: Probe) -> Metric:
    """The metric of the user's own figures, one per unit."""
    if not figures.isfinite().all():
        return Metric(probe.id, None, reason="the figure is not finite there")
    values = [round(value, 6) for value in figures.tolist()]
    return Metric(probe.id, None, figure=round(figures.mean().item(), 6), values=values)


def _looked_at(run: Run, model: nn.Module, task: Task) -> Run:
    """Add learned positions and examples (attention or text) to the run of a relpos model."""
    if not isinstance(model, VisionTransformer | LanguageModel):
        return run
    run = replace(run, learned=learned(model, task.unit if isinstance(task, Text) else "bytes"))
    match model, task:
        case VisionTransformer(), ImageTask():
            return replace(run, attention=attention_over_examples(model, task))
        case LanguageModel(), Text():
            return replace(run, sample=sample(model, task))
        case _:
            return run


def metrics(
    model: nn.Module, task: Task, probes: tuple[Probe, ...], device: torch.device, *, quick: bool = False
) -> list[Metric]:
    """Measure every probe on the test data, by every growth rule if its size is not the trained one."""
    found: list[Metric] = []
    larger: dict[tuple[object, str], nn.Module] = {}
    for probe in probes:
        same = probe.size == task.size
        rules: tuple[str | None, ...] = (None,) if same else growth(model)
        if not rules:
            reason = "it has no rule by which it extrapolates to another size"
            found.append(Metric(probe.id, None, reason=reason))
        for rule in rules:
            tested = model
            if rule is not None:
                key = (probe.size, rule)
                if key not in larger:
                    larger[key] = grown(model, probe.size, rule)
                tested = larger[key]
            found.append(Metric(probe.id, rule, **measured(tested, task, probe, device, quick=quick)))
    return found
