"""`relpos.compare`: the same model with each position mechanism, on your data."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from relpos.adapters.library_models import LibraryModel
from relpos.comparison import (
    OWN,
    Comparison,
    ComparisonSettings,
    default_folder,
    find_build,
    find_function,
    listed,
    not_told_apart,
    random_state_kept,
    require_asked,
    require_usable,
)
from relpos.comparison.display import Display
from relpos.comparison.result import ComparisonResult
from relpos.core.checks import fail, require_choice, require_flag, shape_of
from relpos.data import ImageTask, Task, find_data, notes
from relpos.files.writing import require_writable
from relpos.report.page import write_report
from relpos.train import Build, Evaluate, Procedure, TrainingStep, build_swin, note_on_batch

PAGE = "report.html"


@random_state_kept()
def compare(
    model: str | Build | None = None,
    data: object = "digits",
    positions: str | Sequence[str] | None = None,
    *,
    seeds: int = 1,
    step: str | TrainingStep | None = None,
    evaluate: str | Evaluate | None = None,
    better: Literal["higher", "lower"] | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    lr: float | None = None,
    recipe: Mapping[str, Any] | None = None,
    what: str = "position",
    choices: Sequence[str] | None = None,
    image_size: int | Sequence[int] | None = None,
    patch: int | Sequence[int] | None = None,
    bad_images: Literal["error", "skip"] | None = None,
    max_pixels: int | None = None,
    rotate: bool = False,
    out: str | Path | None = None,
    quick: bool = False,
    device: str = "auto",
    precision: str = "float32",
    display: Display | None = None,
) -> ComparisonResult:
    """Train the same model with each position mechanism and see which suits it: the command `relpos compare`.

        result = relpos.compare("timm:vit_tiny_patch16_224", "photos/", ["own", "relative_2d", "rotary_2d"], seeds=3)
        result.table(); result.best       # None while undecided
        result.page; result.models["rotary_2d", 0]

    Figures repeat bit for bit on the same machine, and an interrupted call continues where it stopped. Each run has its
    own process. If a function or a dataset cannot be sent to another process (a closure, or one defined in a notebook),
    all runs stay in this process, and a line says so.

    Args:
        model: None for relpos's own, a vision transformer or a language model; `"swin"` for its Swin Transformer on
            images; `"timm:NAME"` or `"hf:FOLDER"`, built at the size of the data, with its own position or another in
            its place; `build(position, task)`, which returns an `nn.Module` with the position of that name, or
            `"FILE.py:build"`. `task` describes the data: `image_size`, `patch_size`, `channels` and `classes` of
            images, `length` of text, `grid` of tokens.
        data: a folder of images (`DIR/class/...`), a file of text, `"digits"`, `"text"`, or (train, validation, test),
            each a dataset with `__len__` and `__getitem__` or a tuple of tensors.
        positions: names of mechanisms, `a+b` for a sum; `"standard"` for about a dozen well-known ones, `"all"` for
            every one that suits the data. By default six. `"own"` is the built-in position of a model that is not
            relpos's; it comes first for Swin, timm and transformers.
        seeds: training runs of each; one seed is not enough to decide.
        step: `step(model, batch)`, which returns the loss, instead of the cross-entropy of `model(inputs)` and classes.
        evaluate: `evaluate(model, split)`, which returns a figure, or one per unit, instead of accuracy or bits per
            byte; `split` gives the batches of the validation or the test data. With only a step, the figure is its
            loss; data that are neither images nor text need one of the two. Each of the three may be `"FILE.py:NAME"`.
        better: with `evaluate`, whether `"higher"` or `"lower"` figures are better.
        steps: training steps, instead of the recipe's.
        batch_size: instead of the recipe's.
        lr: the highest learning rate, instead of the recipe's.
        recipe: other fields of the recipe by name, such as `{"weight_decay": 0.1}`.
        what: compare `"attention"`, `"norm"` or `"optimizer"` instead.
        choices: the names to compare then.
        image_size: the size to which a folder's images are scaled, one number or (rows, columns).
        patch: pixels of a patch, one number or (rows, columns).
        bad_images: `"error"` or `"skip"`, for image files that cannot be read.
        max_pixels: the most pixels of an image; larger ones cannot be read.
        rotate: whether to test rotated images, too.
        out: the folder of the results; by default one under runs/, named after the settings. Work finished there is
            not repeated: name another folder to run it again.
        quick: check that it works, in under a minute; ranks nothing.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:0"`.
        precision: `"float32"`, `"bf16-mixed"`, `"fp16-mixed"`.
        display: shows progress; by default it prints lines.

    Returns:
        The finished comparison: `table()`, `best`, `page`, `models`.

    Raises:
        ValueError: one line that says what was expected, what was given and what to do.

    Examples:
        >>> result = relpos.compare(None, "photos/", ["none", "relative_2d", "rotary_2d"], seeds=3)  # doctest: +SKIP
        >>> print(result.table())  # doctest: +SKIP
    """
    display = Display() if display is None else display
    require_flag(quick, "quick")
    require_flag(rotate, "rotate")
    procedure = _procedure(model, step, evaluate, better)
    asked = (_names(positions, "positions"), seeds, steps, device, precision)
    chosen = _names(choices, "choices")
    require_asked(*asked, what=what, choices=chosen, procedure=procedure)
    if recipe is not None and not isinstance(recipe, Mapping):
        fail("recipe to be a dict of fields", shape_of(recipe), 'Pass for example recipe={"weight_decay": 0.1}.')
    if out is not None and not isinstance(out, str | os.PathLike):
        fail("out to be the path of a folder", shape_of(out), "Leave it out for one under runs/.")
    folder = None if out is None else Path(out)
    if folder is None:  # before many images are read
        require_writable(Path("runs"))
    else:
        require_usable(folder)
    if isinstance(procedure.build, LibraryModel) and patch is None:
        image_size, patch = _sizes(procedure.build, data, image_size)
    with display.reading() as watch:
        images = {"image_size": image_size, "patch": patch, "bad_images": bad_images, "max_pixels": max_pixels}
        task = find_data(data, watch=watch, **images, rotate=rotate)
    if procedure.build is None and task.kind == "other":
        came = "none, and relpos's own take images [C, height, width] with a class each"
        fail("a model beside these datasets", came, "Pass model=build.")
    if task.kind == "other" and not procedure.measures:
        remedy = "Pass evaluate= and better=, or step= alone, whose loss is then the figure."
        fail("a figure to measure on inputs that are neither images nor text", "no step and no evaluate", remedy)
    said = notes(task)
    if isinstance(procedure.build, LibraryModel):
        suited, left_out = _suited(procedure.build, task, asked[0])
        asked = (suited, *asked[1:])
        said += [*procedure.build.notes(task), *_few_tokens(task), *left_out]
    elif procedure.build is build_swin and (names := listed(asked[0], task)) is not None:
        asked = ((OWN, *(name for name in names if name != _OWN_OF_SWIN)), *asked[1:])
        said += [f"Left out {_OWN_OF_SWIN}: within windows it is Swin's own."]
    functions = {"model": model, "step": step, "evaluate": evaluate}
    changes = {**({} if recipe is None else recipe), "batch_size": batch_size, "learning_rate": lr}
    settings = ComparisonSettings.make(
        task,
        *asked,
        quick=quick,
        what=what,
        choices=chosen,
        recipe={name: value for name, value in changes.items() if value is not None},
        procedure=procedure,
        given={name: given for name, given in functions.items() if isinstance(given, str)},
    )
    folder = default_folder(settings) if folder is None else folder
    comparison = Comparison(settings, task, folder, procedure)
    for line in said:  # after all checks have passed
        display.say(line)
    _say_what_begins(comparison, batch_size, display)
    with display.working([one for stage in comparison.tasks() for one in stage]) as take:
        results = comparison.run(take)
    write_report(results, folder / PAGE)
    return ComparisonResult(results, folder / PAGE, comparison)


def _procedure(model: object, step: object, evaluate: object, better: Literal["higher", "lower"] | None) -> Procedure:
    if evaluate is None:
        if better is not None:
            fail("better beside evaluate", f"better={better!r} alone", "Leave it out: of a loss less is better.")
    elif better is None:
        fail("better='higher' or 'lower' beside evaluate", "none", "Say which of its figures are better.")
    else:
        require_choice(better, "better", ("higher", "lower"))
    own = (
        find_build(model),
        find_function(step, "step(model, batch)"),
        find_function(evaluate, "evaluate(model, split)"),
    )
    return Procedure(*own, "lower" if better is None else better)


def _names(asked: object, what: str) -> tuple[str, ...] | None:
    """One name or several; None if left out."""
    if asked is None or isinstance(asked, str):
        return None if asked is None else (asked,)
    if not isinstance(asked, Iterable):
        fail(f"{what} to be names", shape_of(asked), f'Pass {what}=["NAME", ...], or leave it out.')
    return tuple(asked)


def _sizes(
    model: LibraryModel, data: object, image_size: int | Sequence[int] | None
) -> tuple[int | Sequence[int] | None, Sequence[int] | None]:
    """The image size and patch that suit a model, if the data do not fix them.

    They are the model's patch, and the size that its weights were trained on; without weights, eight patches or more.
    """
    patch = model.own_patch
    is_folder = isinstance(data, str | Path) and Path(data).expanduser().is_dir() and str(data) != "digits"
    if patch is None or not (is_folder or isinstance(data, tuple | list)):
        return image_size, None
    if is_folder and image_size is None:
        image_size = model.trained_size or tuple(max(_SIDE, _PATCHES * one) for one in patch)
    return image_size, patch


_SIDE, _PATCHES = 64, 8
"""Minimum pixels and patches along a side, if the image size is chosen for a model."""
_OWN_OF_SWIN = "relative_2d"
_FEW = 16
"""With fewer tokens per image, position matters little."""


def _few_tokens(task: Task) -> list[str]:
    """A warning if a library's model splits an image into few tokens."""
    if not isinstance(task, ImageTask) or math.prod(task.grid) >= _FEW:
        return []
    images, patch = (" x ".join(map(str, sides)) for sides in (task.image_size, task.patch_size))
    count = math.prod(task.grid)
    return [f"Only {count} tokens: images of {images} in patches of {patch}. Pass a smaller patch or larger images."]


def _suited(
    model: LibraryModel, task: Task, positions: tuple[str, ...] | None
) -> tuple[tuple[str, ...] | None, list[str]]:
    """The requested names; for a list of relpos, "own" and those that the model supports.

    Also a line for each name that it does not support.
    """
    names = listed(positions, task)
    if names is None:
        return positions, []
    refused = {name: model.refusal(name, task) for name in (OWN, *names)}
    if refused[OWN] is not None:
        raise ValueError(refused[OWN])
    left_out = [f"Left out {name}: {reason}" for name, reason in refused.items() if reason is not None]
    return tuple(name for name, reason in refused.items() if reason is None), left_out


def _say_what_begins(comparison: Comparison, batch_size: int | None, display: Display) -> None:
    """Show what is about to run, where, and what is unusual."""
    settings, folder, task = comparison.settings, comparison.store.folder, comparison.task
    note = note_on_batch(settings.recipe, task, batch_size)
    if note:
        display.say(note)
    for name in ("model", "step", "evaluate"):
        unknown = not_told_apart(getattr(settings, name))
        if unknown is not None:
            display.say(f"A new comparison each time: {name} holds a {unknown}, in which a change would not be seen.")
    if not any(comparison.tasks()):
        display.say(f"This comparison is finished. Its results, from {folder}/:")
        return
    done = sum(map(comparison.store.has, [job.id for job in comparison.jobs]))
    begun = f", {done} of {len(comparison.jobs)} training runs finished before" if done else ""
    display.say(f"Comparing {', '.join(settings.names)} on {settings.task}, in {folder}/{begun}")
    if comparison.kept_here is not None:
        display.say(f"All runs are in this process, since another could not be sent them: {comparison.kept_here}.")
