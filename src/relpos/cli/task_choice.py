"""Pass a verb's data options to `relpos.data.find_data`."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from relpos.cli.progress import say

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from rich.console import Console

    from relpos.data import Task

SIDE_AT_MOST = 4096
"""The largest side of an image or a patch, in pixels."""


def _size(text: str, option: str) -> list[int]:
    found = re.fullmatch(r"(\d+)(?:x(\d+))?", text.strip().lower())
    if not found:
        raise ValueError(f"expected N or HxW for {option}; got {text!r}. Write {option} 64, or {option} 64x96.")
    if max(len(side) for side in found.groups("")) > 9 or max(map(int, filter(None, found.groups()))) > SIDE_AT_MOST:
        raise ValueError(
            f"expected at most {SIDE_AT_MOST:,} pixels per side for {option}; got {text!r}. Choose a smaller one."
        )
    return [int(found[1]), int(found[2] or found[1])]


def image_options(arguments: Namespace) -> dict[str, Any]:
    """The options for a folder of images."""
    found = {name: arguments[name] for name in ("bad_images", "max_pixels", "rotate")}
    for name, option in (("image_size", "--image-size"), ("patch", "--patch")):
        found[name] = None if arguments[name] is None else _size(arguments[name], option)
    return found


def choose_task(arguments: Namespace, console: Console) -> Task:
    """The task for the requested data; shows a bar while images are read, and notes on files left out."""
    from relpos.cli.console import reading
    from relpos.data import find_data, notes

    with reading(console) as watch:
        task = find_data(arguments.data, watch=watch, **image_options(arguments))
    for note in notes(task):
        say(console, note)
    return task
