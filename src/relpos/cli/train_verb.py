"""`relpos train`: train one model; write its weights and configuration to a folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from relpos.cli.errors import end
from relpos.cli.progress import WIDTH_FOR_BAR, Description, say
from relpos.cli.task_choice import choose_task
from relpos.cli.train_card import PICTURE, card_of_run

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from rich.console import Console

    from relpos.train import Curve, Model, Progress, TrainingRun
    from relpos.train.checkpointing import Checkpointing
    from relpos_command.requests import TrainRequest


LIBRARIES = ("accelerate", "relpos.train")


def require_names(request: TrainRequest) -> None:
    """Raise if a named mechanism does not exist."""
    from relpos.position import find
    from relpos.position.base.outside import with_files

    find(with_files(request.position))


def run(request: TrainRequest) -> None:
    """Run the verb."""
    from rich.console import Console

    from relpos.files.writing import require_writable
    from relpos.models.pretrained import CARD
    from relpos.train import check_free, fit
    from relpos.train.checkpointing import StoppedError
    from relpos.train.processes import is_main

    device = _begin(request)
    console = Console(quiet=not is_main())
    folder = Path(request.out)
    if is_main():
        check_free(folder, CARD, PICTURE)
        require_writable(folder)
    training = _training(request, device, console)
    weights = training.recipe.build(training.task, training.position).parameters()  # in all processes, or none
    if is_main():
        require_writable(folder, size=sum(x.numel() * x.element_size() for x in weights))
    checkpointing = _checkpointing(request, training, console)
    try:
        with _bar(training, console) as watch:
            model, curve = fit(training, watch=watch, checkpointing=checkpointing, resume=request.resume)
    except StoppedError as stopped:
        end(str(stopped), stopped.code)
    with checkpointing.listening():  # save before an interruption ends the run
        summary = _save(request, training, model, curve)  # type: ignore[arg-type]
        if summary is None:
            return
        say(console, summary)
        if checkpointing.exit_code:
            end(f"interrupted after the last step; the trained model is in {folder}", checkpointing.exit_code)


def _begin(request: TrainRequest) -> torch.device:
    """Start the requested processes, or join those of a launcher; returns this process's device."""
    import torch

    from relpos.core.checks import fail
    from relpos.train import resolve_device
    from relpos.train.processes import device_here, end_with_launcher, require_all_started, world_size

    end_with_launcher()
    require_all_started()
    if request.devices is not None and world_size() not in (1, request.devices):
        fail(f"--devices {world_size()}, the processes of the launcher", str(request.devices), "Leave it out.")
    if request.devices is not None and request.devices > 1 and world_size() == 1:
        _launch(request.devices)
    torch.set_num_threads(request.threads)
    return device_here(resolve_device(request.device))


def _launch(devices: int) -> NoReturn:
    """Become torchrun, which starts this command in several processes."""
    import os
    import sys

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds to write a checkpoint; the default is 30
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "relpos", *sys.argv[1:]])


def _training(request: TrainRequest, device: torch.device, console: Console) -> TrainingRun:
    """The requested task, position and recipe."""
    from relpos.position import find
    from relpos.position.base.outside import with_files
    from relpos.train import Recipe, TrainingRun, note_on_batch
    from relpos.train.processes import Parallelism, world_size

    task = choose_task(request, console)
    position = find(with_files(request.position), len(task.grid)).name
    recipe = Recipe.of(task).by(request.optimizer).within(task)
    if request.batch_size is not None:
        recipe = replace(recipe, batch_size=request.batch_size).within(task)
    if request.steps is not None:
        recipe = replace(recipe, steps=request.steps, warmup_steps=min(recipe.warmup_steps, request.steps))
    if note := note_on_batch(recipe, task):
        say(console, note)
    parallelism = Parallelism(request.strategy, request.accumulate, request.compile, request.context_parallel)
    parallelism.require_divides(recipe.batch_size, world_size())
    return TrainingRun(
        task, position, recipe, request.seed, device, precision=request.precision, parallelism=parallelism
    )


def _checkpointing(request: TrainRequest, training: TrainingRun, console: Console) -> Checkpointing:
    import torch

    from relpos.position.base.outside import sources_of
    from relpos.train.checkpointing import Checkpointing
    from relpos.train.processes import is_main, world_size

    task = training.task
    settings = {
        "task": task.name,
        "task options": json.loads(json.dumps(task.options, default=str)),
        "position": training.position,
        "seed": request.seed,
        "precision": request.precision,
        "accumulate": request.accumulate,
        **training.recipe.to_json(),
        **({"position from": sources} if (sources := sources_of((training.position,))) else {}),
    }
    about = {
        "processes": world_size(),
        "strategy": request.strategy,
        "context": request.context_parallel,
        "compile": request.compile,
        "threads": request.threads,
        "device": str(training.device),
        "torch": torch.__version__,
    }
    return Checkpointing(
        Path(request.out),
        request.checkpoint_every,
        request.keep,
        settings=settings,
        about=about,
        tell=lambda line: say(console, line),
        writes=is_main(),
    )


@contextmanager
def _bar(training: TrainingRun, console: Console) -> Iterator[Callable[[Progress], None]]:
    """A bar of steps; yields its callback."""
    from rich import progress

    from relpos.train.processes import is_main

    columns = [progress.BarColumn()] if console.width >= WIDTH_FOR_BAR else []
    shown = (*columns, Description(), progress.TimeRemainingColumn())
    with progress.Progress(*shown, console=console, transient=True, disable=not is_main()) as bars:
        bar = bars.add_task(training.position, total=training.recipe.steps)

        def watch(step: Progress) -> None:
            line = f"{training.position}: step {step.step} of {step.steps}, loss {step.loss:.3f}"
            bars.update(bar, completed=step.step, description=line)

        yield watch


def _save(request: TrainRequest, training: TrainingRun, model: Model, curve: Curve) -> str | None:
    """Measure the model and write its folder; in the main process, returns a line about it."""
    import torch

    from relpos.position.base.outside import sources_of
    from relpos.train import measured, save
    from relpos.train.processes import is_main, world_size
    from relpos.version import __version__

    task, position, recipe, folder = training.task, training.position, training.recipe, Path(request.out)
    metric = measured(model, task, task.probes[0], training.device)
    reached = {"validation": curve.validation[-1], "test": metric[task.measure]}
    if not is_main():
        return None
    about: dict[str, Any] = {
        "seed": request.seed,
        "device": str(training.device),
        "precision": request.precision,
        "threads": request.threads,
        "processes": world_size(),
        "relpos": __version__,
        "torch": torch.__version__,
        **({"position_from": sources} if (sources := sources_of((position,))) else {}),
        **{f"{split}_{task.measure}": value for split, value in reached.items()},
    }
    card, files = card_of_run(model, folder.resolve().name, task, position, recipe, about, metric)
    save(folder, model, task=task, position=position, recipe=recipe, about=about, card=card, files=files)
    figure, unit = ("{:.1%}", "") if task.measure == "accuracy" else ("{:.3f}", " bits per byte")
    figures = {split: "not finite" if x is None else figure.format(x) + unit for split, x in reached.items()}
    words = ", ".join(f"{split} {value}" for split, value in figures.items())
    by = "" if recipe.optimizer == "adamw" else f" by {recipe.optimizer}"
    return f"{position} on {task.name}{by}: {words}. Saved in {folder}/"
