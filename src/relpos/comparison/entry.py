"""`relpos.compare`: the same model with each position mechanism, on your data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from relpos.adapters.library_models import LibraryModel
from relpos.comparison import (
    OWN,
    Comparison,
    ComparisonSettings,
    default_folder,
    listed,
    not_told_apart,
    random_state_kept,
    require_usable,
)
from relpos.comparison.display import Display
from relpos.comparison.elsewhere import machine_of, require_executor
from relpos.comparison.executors import ClusterExecutor, TrialsFailedError
from relpos.comparison.quick import plan_quick
from relpos.comparison.request import checked
from relpos.comparison.result import ComparisonResult
from relpos.comparison.store import steps_of
from relpos.core.checks import fail
from relpos.data import SOURCES, ImageTask, Task, find_data, notes
from relpos.files.writing import require_writable
from relpos.report.page import write_report
from relpos.train import Build, Evaluate, Procedure, TrainingStep, build_swin, note_on_batch
from relpos_command.requests import CompareRequest

PAGE = "report.html"


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
    tokenizer: object = None,
    documents: Literal["cut", "packed"] | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    text_column: str | None = None,
    streaming: bool = False,
    buffer: int | None = None,
    survey: int | None = None,
    bad_data: Literal["skip", "fail"] | None = None,
    cache: str | Path | None = None,
    cache_size: str | None = None,
    devices_per_trial: int | None = None,
    out: str | Path | None = None,
    quick: bool = False,
    device: str = "auto",
    precision: str = "float32",
    display: Display | None = None,
    executor: Executor | None = None,
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
            images; `"timm:NAME"`, `"torchvision:NAME"` or `"hf:FOLDER"`, built at the size of the data, with its
            own position or another in its place; `build(position, task)`, which returns an `nn.Module` with the
            position of that name, or `"FILE.py:build"`. `task` describes the data: `image_size`, `patch_size`,
            `channels` and `classes` of images, `length` of text, `grid` of tokens.
        data: a folder of images (`DIR/class/...`), a file of text, `"digits"`, `"text"`, or (train, validation, test),
            each a dataset with `__len__` and `__getitem__` or a tuple of tensors; `"hf:NAME"`, `"hf:FOLDER"` or
            `"wds:SHARDS"`, or what `relpos.data.from_hf` and `from_wds` make of them.
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
        tokenizer: of a text, `"bytes"`, `"hf:NAME"`, `"tiktoken:NAME"`, or an object of tokenizers, tiktoken or
            transformers, or with `encode(text) -> ids`, `decode(ids) -> text` and `vocab_size`. Bits per byte count
            every byte of text once, so that they compare between tokenizers.
        documents: of a text, `"cut"`: inputs are cut from all documents joined; `"packed"`: attention stays within
            each. Lines of `<|endoftext|>` are between those of a file.
        image_column: of data of `hf:` and `wds:`, as the next eight: the column or field of images, found where one
            may be meant. `relpos.data.from_hf` and `from_wds` say more.
        label_column: that of labels.
        text_column: that of documents, instead of images.
        streaming: whether samples are read while models train, for data that do not fit into memory.
        buffer: samples among which a stream is shuffled.
        survey: samples of a stream that are read first, for its classes and sizes.
        bad_data: `"skip"` counts and leaves out samples that are damaged, `"fail"` stops at the first.
        cache: a folder for shards from http, shared by all workers of a machine.
        cache_size: the most that it holds, such as `"20GB"`.
        devices_per_trial: processes that train each model together, one per GPU, as `relpos train --devices N`.
        out: the folder of the results; by default one under runs/, named after the settings. Work finished there is
            not repeated: name another folder to run it again.
        quick: check that it works, in under a minute; ranks nothing.
        device: `"auto"`, `"cpu"`, `"cuda"`, `"cuda:0"`.
        precision: `"float32"`, `"bf16-mixed"`, `"fp16-mixed"`.
        display: shows progress; by default it prints lines.
        executor: does the work on other machines, or in other processes: any `concurrent.futures.Executor` whose
            workers have the same versions of relpos, torch and the model's library (docs/scale.md). `device` is then
            theirs.

    Returns:
        The finished comparison: `table()`, `best`, `page`, `models`.

    Raises:
        ValueError: one line that says what was expected, what came and what to do.
        TrialsFailedError: an executor could not do some of the work, which a line and the page name.

    Examples:
        >>> result = relpos.compare(None, "photos/", ["none", "relative_2d", "rotary_2d"], seeds=3)  # doctest: +SKIP
        >>> print(result.table())  # doctest: +SKIP
    """
    request = CompareRequest(
        model=model,
        data=data,
        positions=positions,  # type: ignore[arg-type]  # one name, or any iterable of names
        seeds=seeds,
        step=step,
        evaluate=evaluate,
        better=better,
        steps=steps,
        batch_size=batch_size,
        lr=lr,
        recipe=recipe,
        what=what,
        choices=choices,  # type: ignore[arg-type]
        image_size=image_size,
        patch=patch,
        bad_images=bad_images,
        max_pixels=max_pixels,
        rotate=rotate,
        tokenizer=tokenizer,
        documents=documents,
        image_column=image_column,
        label_column=label_column,
        text_column=text_column,
        streaming=streaming,
        buffer=buffer,
        survey=survey,
        bad_data=bad_data,
        cache=cache,
        cache_size=cache_size,
        devices_per_trial=devices_per_trial,
        out=out,
        quick=quick,
        device=device,
        precision=precision,
    )
    return answer(request, Display() if display is None else display, executor)


def answer(request: CompareRequest, display: Display, executor: Executor | None = None) -> ComparisonResult:
    """Run the requested comparison, for `relpos.compare` and the command; an executor does its work elsewhere."""
    result = answer_unless(lambda *_: False, request, display, executor)
    assert result is not None
    return result


@random_state_kept()
def answer_unless(
    handed_over: Callable[[Comparison, Callable[[str], None]], bool],
    request: CompareRequest,
    display: Display,
    executor: Executor | None,
) -> ComparisonResult | None:
    """`answer`, unless the comparison is handed over before its work begins: then None.

    Args:
        handed_over: whether the comparison is left to others; it may say so.
    """
    device = request.device
    if executor is not None:
        require_executor(executor)
        request = replace(request, device="cpu")  # for checks: this process trains nothing
    request, procedure = checked(request)
    if request.out is None:  # before many images are read
        require_writable(Path("runs"))
    else:
        require_usable(Path(request.out))
    if isinstance(executor, ClusterExecutor) and executor.note:
        display.say(executor.note)
    theirs = None if executor is None else machine_of(executor, device, procedure)
    task = _task(request, procedure, display)
    request, lines = _suited(request, task, procedure)
    settings = ComparisonSettings.make(task, request, procedure)
    if request.quick and isinstance(procedure.build, LibraryModel):
        settings, line = _quick(settings, request, task, procedure)
        lines.append(line)
    where = None
    if theirs is not None:
        settings, where = replace(settings, device=theirs[0]), theirs[1]
    folder = default_folder(settings, where) if request.out is None else Path(request.out)
    comparison = Comparison(settings, task, folder, procedure, executor=executor, environment=where)
    for line in lines:  # after all checks have passed
        display.say(line)
    _announce(comparison, request.batch_size, display)
    if handed_over(comparison, display.say):
        return None
    with display.working([one for stage in comparison.tasks() for one in stage]) as take:
        try:
            results = comparison.run(take)
        except TrialsFailedError:  # they are on the page
            write_report(comparison.results(), folder / PAGE)
            raise
    write_report(results, folder / PAGE)
    return ComparisonResult(results, folder / PAGE, comparison)


def _quick(
    settings: ComparisonSettings, request: CompareRequest, task: Task, procedure: Procedure
) -> tuple[ComparisonSettings, str]:
    """The settings of a quick run of a library's model with as many steps as fit, and a line on its time."""
    begun = None if request.out is None else steps_of(Path(request.out))
    if request.steps is None and begun is not None:  # the timing may differ now
        settings = ComparisonSettings.make(task, replace(request, steps=begun), procedure)
    plan = plan_quick(settings, task, procedure)
    usual, minutes = settings.recipe.steps, max(1, round(plan.seconds / 60))
    time = f"A quick run takes about {minutes} minute{'s' if minutes > 1 else ''} here: a step takes {plan.step:.2g} s"
    if request.steps is not None or begun is not None or plan.steps == usual:
        return settings, f"{time}."
    settings = ComparisonSettings.make(task, replace(request, steps=plan.steps), procedure)
    return settings, f"{time}, so each model trains {plan.steps} steps instead of {usual}."


def _task(request: CompareRequest, procedure: Procedure, display: Display) -> Task:
    """The requested data, read at the size of a library's model unless another size is requested."""
    if isinstance(procedure.build, LibraryModel) and request.patch is None:
        least = _QUICK_PATCHES if request.quick else _LEAST_PATCHES
        image_size, patch = _sizes(procedure.build, request.data, request.image_size, least)
        request = replace(request, image_size=image_size, patch=patch)
    with display.reading() as watch:
        task = find_data(request.data, watch=watch, **request.of_images(), **request.of_text())
    if procedure.build is None and task.kind == "other":
        expected = "a model with these datasets (relpos's own needs images [C, height, width] with a class each)"
        fail(expected, "none", "Pass model=build.")
    if task.kind == "other" and not procedure.measures:
        remedy = "Pass evaluate= and better=, or only step=: its loss is then the figure."
        fail("a figure to measure on inputs that are neither images nor text", "no step and no evaluate", remedy)
    return task


def _suited(request: CompareRequest, task: Task, procedure: Procedure) -> tuple[CompareRequest, list[str]]:
    """The request with the positions that suit the model, and notes on the data and the model."""
    lines = notes(task)
    names = listed(request.positions, task)
    if isinstance(procedure.build, LibraryModel):
        lines += [*procedure.build.notes(task), *_few_tokens(task)]
        if names is not None:
            suited, left_out = _served(procedure.build, task, names)
            return replace(request, positions=suited), lines + left_out
    elif procedure.build is build_swin and names is not None:
        lines.append(f"Left out {_OWN_OF_SWIN}: it is Swin's own position within windows.")
        return replace(request, positions=(OWN, *(name for name in names if name != _OWN_OF_SWIN))), lines
    return request, lines


def _sizes(
    model: LibraryModel, data: object, image_size: int | Sequence[int] | None, least: int
) -> tuple[int | Sequence[int] | None, Sequence[int] | None]:
    """The image size and patch that suit a model, if the data do not fix them.

    They are the model's patch, and the size that its weights were trained on; without weights, `least` patches or more.
    """
    patch = model.own_patch
    is_folder = isinstance(data, str | Path) and Path(data).expanduser().is_dir() and str(data) != "digits"
    is_folder |= isinstance(data, str) and data.startswith(SOURCES)  # or text, for which a model has no patch
    if patch is None or not (is_folder or isinstance(data, tuple | list)):
        return image_size, None
    if is_folder and image_size is None:
        image_size = model.trained_size or tuple(max(_LEAST_PIXELS, least * one) for one in patch)
    return image_size, patch


_LEAST_PIXELS, _LEAST_PATCHES, _QUICK_PATCHES = 64, 8, 6
"""Minimum pixels and patches along an axis, if the image size is chosen for a model; the last in a quick run."""
_OWN_OF_SWIN = "relative_2d"
_FEW = 16
"""With fewer tokens per image, position matters little."""


def _few_tokens(task: Task) -> list[str]:
    """A warning if a library's model splits an image into few tokens."""
    if not isinstance(task, ImageTask) or math.prod(task.grid) >= _FEW:
        return []
    images, patch = (" x ".join(map(str, sizes)) for sizes in (task.image_size, task.patch_size))
    count = math.prod(task.grid)
    return [f"Only {count} tokens: images of {images} in patches of {patch}. Pass a smaller patch or larger images."]


def _served(model: LibraryModel, task: Task, names: tuple[str, ...]) -> tuple[tuple[str, ...], list[str]]:
    """Of a list of names "own" and those that the model supports, and a line for each that it does not."""
    refused = {name: model.refusal(name, task) for name in (OWN, *names)}
    if refused[OWN] is not None:
        raise ValueError(refused[OWN])
    left_out = [f"Left out {name}: {reason}" for name, reason in refused.items() if reason is not None]
    return tuple(name for name, reason in refused.items() if reason is None), left_out


def _announce(comparison: Comparison, batch_size: int | None, display: Display) -> None:
    """Show the planned work, its folder, and anything unusual."""
    settings, folder, task = comparison.settings, comparison.store.folder, comparison.task
    note = note_on_batch(settings.recipe, task, batch_size)
    if note:
        display.say(note)
    for name in ("model", "step", "evaluate"):
        unknown = not_told_apart(getattr(settings, name))
        if unknown is not None:
            display.say(f"Every call is a new comparison: {name} holds a {unknown}, whose changes cannot be detected.")
    if not any(comparison.tasks()):
        display.say(f"This comparison is finished. Its results, from {folder}/:")
        return
    done = sum(map(comparison.store.has, [job.id for job in comparison.jobs]))
    begun = f", {done} of {len(comparison.jobs)} training runs already finished" if done else ""
    display.say(f"Comparing {', '.join(settings.names)} on {settings.task}, in {folder}/{begun}")
    if comparison.stays_here is not None:
        reason = f"because the model or the data cannot be sent to another: {comparison.stays_here}"
        display.say(f"All runs use this process, {reason}.")
