"""The options of a verb that say what to train on, and the task made from them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from relpos.cli.saying import say

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from rich.console import Console

    from relpos.data import Task

_SIZES = {"image_size": "--image-size", "patch": "--patch"}
_IMAGE_OPTIONS = ("image_size", "patch", "bad_images", "max_pixels")
_NAMED = 5
SIDE_AT_MOST = 4096
"""Pixels of an image's side that a model is made for."""


def _size(text: str, option: str) -> list[int]:
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    if not found:
        raise ValueError(f"expected N or HxW for {option}; got {text!r}. Write {option} 64, or {option} 64x96.")
    if max(len(side) for side in found.groups("")) > 9 or max(map(int, filter(None, found.groups()))) > SIDE_AT_MOST:
        raise ValueError(
            f"expected at most {SIDE_AT_MOST:,} pixels per side for {option}; got {text!r}. Choose a smaller one."
        )
    return [int(found[1]), int(found[2] or found[1])]


def _options(arguments: Namespace) -> tuple[str, dict[str, Any]]:
    """A task's name and its options, from what was typed."""
    typed = {name: arguments[name] for name in _IMAGE_OPTIONS if arguments[name] is not None}
    if arguments.rotate:
        typed["rotate"] = True
    if arguments.text is not None:
        return "text", _of_text(arguments, typed)
    if arguments.images is None:
        if typed and arguments.task == "text":
            named = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
            raise ValueError(f"expected no options of images with the task text; got {named}. Leave {named} out.")
        if typed:
            named = ", ".join(f"--{name.replace('_', '-')}" for name in typed)
            raise ValueError(f"expected --images DIR with {named}; got none. Name the folder, or leave {named} out.")
        if arguments.task == "images":
            raise ValueError("expected --images DIR for the task images; got none. Name the folder.")
        return arguments.task or "digits", {}
    if arguments.task not in (None, "images"):
        raise ValueError(f"expected --images or --task; got both, --task {arguments.task}. Leave one of them out.")
    sizes = {name: _size(typed[name], option) for name, option in _SIZES.items() if name in typed}
    return "images", {"images": arguments.images, **typed, **sizes}


def _of_text(arguments: Namespace, typed: dict[str, Any]) -> dict[str, Any]:
    if arguments.task not in (None, "text"):
        raise ValueError(f"expected --text or --task; got both, --task {arguments.task}. Leave one of them out.")
    others = ["images"] * (arguments.images is not None) + list(typed)
    if others:
        named = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise ValueError(f"expected --text FILE or images; got --text and {named}. Leave one of them out.")
    return {"text": arguments.text}


def _listed(what: list[str]) -> str:
    more = f", and {len(what) - _NAMED} more" if len(what) > _NAMED else ""
    return ", ".join(what[:_NAMED]) + more


def choose_task(arguments: Namespace, console: Console) -> Task:
    """The task that was asked for; a bar while images are read, and a line for each thing left out."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from relpos.data import ImageTask, find_task

    name, options = _options(arguments)
    columns = (TextColumn("reading {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not (options and console.is_terminal)) as bars:
        bar = bars.add_task("images" if name == "images" else "text", total=None)
        task = find_task(name, options, watch=lambda done, of: bars.update(bar, completed=done, total=of))
    if options:
        say(console, task.description)
    if not isinstance(task, ImageTask):
        return task
    if task.skipped:
        every = sum(task.sizes.values()) + len(task.skipped)
        named = _listed([f"{one['path']} ({one['reason']})" for one in task.skipped])
        say(console, f"Skipped {len(task.skipped)} of {every} images: {named}")
    if task.ignored:
        files, is_no = ("file", "is no image") if len(task.ignored) == 1 else ("files", "are no images")
        named = _listed(list(task.ignored))
        say(console, f"Ignored {len(task.ignored)} {files} that {is_no} in a class's folder: {named}")
    return task


def note_on_batch(batch_size: int, task: Task, console: Console) -> None:
    """Say so where there are fewer training images than a batch of the recipe."""
    from relpos.train import Recipe

    usual = Recipe.of(task).batch_size
    if batch_size < usual:
        count = task.sizes["train"]
        what = "images" if task.kind == "images" else "bytes"
        say(console, f"Batches of {batch_size} instead of {usual}: there are {count} training {what}.")
