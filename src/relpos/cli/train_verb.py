"""`relpos train`: one model, its weights and configuration in a folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from relpos.cli.task_choice import LIMITS as _OF_TASKS
from relpos.cli.task_choice import add_task_arguments, choose_task, note_on_batch

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace


LIBRARIES = ("accelerate", "sklearn.datasets", "relpos.train")
LIMITS = {"seed": 2**63 - 1, "steps": 10_000_000, "threads": 1024, **_OF_TASKS}


def add_arguments(parser: ArgumentParser) -> None:
    """The verb's arguments."""
    add_task_arguments(parser)
    parser.add_argument("--position", type=str, required=True, help="a mechanism, or a sum a+b (relpos list positions)")
    parser.add_argument("--out", type=str, required=True, help="folder for model.safetensors and config.json")
    parser.add_argument("--seed", type=int, default=0, help="seed of initialisation and batches")
    parser.add_argument("--steps", type=int | None, default=None, help="training steps. Default: the recipe's")
    parser.add_argument(
        "--optimizer", type=str, default="adamw", help="adamw, lion, sophia-g or sophia-h, each at a rate of its own"
    )
    parser.add_argument("--device", type=str, default="auto", help="auto, cpu, cuda, cuda:0")
    parser.add_argument("--precision", type=str, default="float32", help="float32, bf16-mixed or fp16-mixed")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; figures repeat at an equal number")


def run(arguments: Namespace) -> None:
    """Carry the verb out."""
    import torch
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from relpos import __version__
    from relpos.core.checks import require_choice, require_int
    from relpos.files.writing import require_writable
    from relpos.position import find
    from relpos.train import OPTIMIZERS, Recipe, check_free, measured, require_precision, resolve_device, save, train
    from relpos.train import Progress as StepProgress

    console = Console()
    find(arguments.position)
    folder = Path(arguments.out)
    check_free(folder)
    require_writable(folder)
    if arguments.steps is not None:
        require_int(arguments.steps, "steps", at_least=1)
    require_int(arguments.threads, "threads", at_least=1)
    torch.set_num_threads(arguments.threads)
    device = resolve_device(arguments.device)
    require_precision(arguments.precision)
    require_choice(arguments.optimizer, "--optimizer", OPTIMIZERS)
    task = choose_task(arguments, console)
    recipe = Recipe.of(task).by(arguments.optimizer).within(task)
    if arguments.steps is not None:
        recipe = replace(recipe, steps=arguments.steps, warmup_steps=min(recipe.warmup_steps, arguments.steps))
    note_on_batch(recipe.batch_size, task, console)
    weights = recipe.build(task, arguments.position).parameters()
    require_writable(folder, size=sum(x.numel() * x.element_size() for x in weights))

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[note]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task(arguments.position, total=recipe.steps, note="")

        def watch(step: StepProgress) -> None:
            bars.update(bar, completed=step.step, note=f"loss {step.loss:.3f}  rate {step.rate:.1e}")

        model, curve = train(
            task,
            arguments.position,
            recipe,
            seed=arguments.seed,
            device=device,
            precision=arguments.precision,
            watch=watch,
        )
    reached = {"validation": curve.validation[-1], "test": measured(model, task, task.probes[0], device)[task.measure]}
    about = {
        "seed": arguments.seed,
        "device": str(device),
        "precision": arguments.precision,
        "threads": arguments.threads,
        "relpos": __version__,
        "torch": torch.__version__,
        **{f"{split}_{task.measure}": value for split, value in reached.items()},
    }
    save(folder, model, task=task, position=arguments.position, recipe=recipe, about=about)
    figure, unit = ("{:.1%}", "") if task.measure == "accuracy" else ("{:.3f}", " bits per byte")
    figures = {
        split: "not finite" if value is None else figure.format(value) + unit for split, value in reached.items()
    }
    words = ", ".join(f"{split} {value}" for split, value in figures.items())
    by = "" if recipe.optimizer == "adamw" else f" by {recipe.optimizer}"
    console.print(
        f"{arguments.position} on {task.name}{by}: {words}. Saved in {folder}/",
        highlight=False,
    )
