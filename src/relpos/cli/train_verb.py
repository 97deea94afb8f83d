"""`relpos train`: train one model; write its weights and configuration to a folder."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from relpos.cli.errors import end
from relpos.cli.progress import WITH_A_BAR, say
from relpos.cli.task_choice import choose_task
from relpos.cli.train_card import PICTURE, card_of_run

if TYPE_CHECKING:
    from jsonargparse import Namespace


LIBRARIES = ("accelerate", "relpos.train")


def require_names(arguments: Namespace) -> None:
    """Raise if a named mechanism does not exist."""
    from relpos.position import find

    find(arguments.position)


def run(arguments: Namespace) -> None:
    """Run the verb."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TimeRemainingColumn

    from relpos.cli.bars import Description
    from relpos.core.checks import fail, require_choice, require_int
    from relpos.files.writing import require_writable
    from relpos.models.pretrained import CARD
    from relpos.position import find
    from relpos.train import (
        OPTIMIZERS,
        Recipe,
        check_free,
        measured,
        note_on_batch,
        require_precision,
        resolve_device,
        save,
        train,
    )
    from relpos.train import Progress as StepProgress
    from relpos.train.checkpointing import Checkpointing, StoppedError
    from relpos.train.processes import (
        Parallelism,
        device_here,
        end_with_launcher,
        is_main,
        require_all_started,
        world_size,
    )
    from relpos.version import __version__

    end_with_launcher()
    require_all_started()
    if arguments.devices is not None and world_size() not in (1, arguments.devices):
        fail(f"--devices {world_size()}, as many as the launcher started", str(arguments.devices), "Leave it out.")
    if arguments.devices is not None and arguments.devices > 1 and world_size() == 1:
        _launch(arguments.devices)
    console = Console(quiet=not is_main())
    folder = Path(arguments.out)
    if is_main():
        check_free(folder, CARD, PICTURE)
        require_writable(folder)
    if arguments.steps is not None:
        require_int(arguments.steps, "steps", at_least=1)
    require_int(arguments.threads, "threads", at_least=1)
    torch.set_num_threads(arguments.threads)
    device = device_here(resolve_device(arguments.device))
    require_precision(arguments.precision)
    require_choice(arguments.optimizer, "--optimizer", OPTIMIZERS)
    task = choose_task(arguments, console)
    position = find(arguments.position, len(task.grid)).name
    recipe = Recipe.of(task).by(arguments.optimizer).within(task)
    if arguments.batch_size is not None:
        recipe = replace(recipe, batch_size=arguments.batch_size).within(task)
    if arguments.steps is not None:
        recipe = replace(recipe, steps=arguments.steps, warmup_steps=min(recipe.warmup_steps, arguments.steps))
    if note := note_on_batch(recipe, task):
        say(console, note)
    parallelism = Parallelism(arguments.strategy, arguments.accumulate, arguments.compile)
    parallelism.require_divides(recipe.batch_size, world_size())
    weights = recipe.build(task, position).parameters()
    if is_main():
        require_writable(folder, size=sum(x.numel() * x.element_size() for x in weights))
    checkpointing = Checkpointing(
        folder,
        arguments.checkpoint_every,
        arguments.keep,
        settings={
            "task": task.name,
            "task options": json.loads(json.dumps(task.options, default=str)),
            "position": position,
            "seed": arguments.seed,
            "precision": arguments.precision,
            "accumulate": arguments.accumulate,
            **asdict(recipe),
        },
        about={
            "processes": world_size(),
            "strategy": arguments.strategy,
            "compile": arguments.compile,
            "threads": arguments.threads,
            "device": str(device),
            "torch": torch.__version__,
        },
        tell=lambda line: say(console, line),
        writes=is_main(),
    )

    bar = [BarColumn()] if console.width >= WITH_A_BAR else []
    columns = (*bar, Description(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_main()) as bars:
        shown = bars.add_task(position, total=recipe.steps)

        def watch(step: StepProgress) -> None:
            said = f"{position}: step {step.step} of {step.steps}, loss {step.loss:.3f}"
            bars.update(shown, completed=step.step, description=said)

        try:
            model, curve = train(
                task,
                position,
                recipe,
                seed=arguments.seed,
                device=device,
                precision=arguments.precision,
                watch=watch,
                parallelism=parallelism,
                checkpointing=checkpointing,
                resume=arguments.resume,
            )
        except StoppedError as stopped:
            bars.stop()
            end(str(stopped), stopped.code)
    with checkpointing.listening():  # save before an interruption ends the run
        metric = measured(model, task, task.probes[0], device)
        reached = {"validation": curve.validation[-1], "test": metric[task.measure]}
        if not is_main():
            return
        about = {
            "seed": arguments.seed,
            "device": str(device),
            "precision": arguments.precision,
            "threads": arguments.threads,
            "processes": world_size(),
            "relpos": __version__,
            "torch": torch.__version__,
            **{f"{split}_{task.measure}": value for split, value in reached.items()},
        }
        card, files = card_of_run(model, folder.resolve().name, task, position, recipe, about, metric)
        save(folder, model, task=task, position=position, recipe=recipe, about=about, card=card, files=files)
        figure, unit = ("{:.1%}", "") if task.measure == "accuracy" else ("{:.3f}", " bits per byte")
        figures = {
            split: "not finite" if value is None else figure.format(value) + unit for split, value in reached.items()
        }
        words = ", ".join(f"{split} {value}" for split, value in figures.items())
        by = "" if recipe.optimizer == "adamw" else f" by {recipe.optimizer}"
        say(console, f"{position} on {task.name}{by}: {words}. Saved in {folder}/")
        if checkpointing.exit_code:
            end(f"interrupted after the last step; the trained model is in {folder}", checkpointing.exit_code)


def _launch(devices: int) -> NoReturn:
    """Become torchrun, which starts this command in several processes."""
    import os
    import sys

    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "120")  # seconds to write a checkpoint; the default is 30
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    os.execv(sys.executable, [sys.executable, *torchrun, "-m", "relpos", *sys.argv[1:]])
