"""Find the task for the user's data: `data=` of `relpos.compare`, `--data` of the command.

    "digits", "text"                data that comes with the libraries
    a folder                        images, a folder for each class
    a file                          text, read as bytes or by a tokenizer
    "hf:NAME", "hf:FOLDER"          a dataset of Hugging Face, by name or from `save_to_disk`
    "wds:SHARDS"                    WebDataset's shards, by a pattern with braces
    (train, validation, test)       datasets, in Python
    a `Task`                        the task itself

Write `./digits` for a folder named digits.
"""

from __future__ import annotations

import difflib
from dataclasses import fields
from pathlib import Path
from typing import Any

from relpos.core.checks import fail, shape_of
from relpos.data.datasets import of_datasets
from relpos.data.digits import Digits
from relpos.data.from_sources import from_named
from relpos.data.images import ImageFolder
from relpos.data.sampled_images import pair_of
from relpos.data.task import ImageTask, Task, Watch
from relpos.data.text import Text
from relpos.files.reading import require_utf8
from relpos_command.source_options import SourceOptions

BUILT_IN: dict[str, type[Task]] = {"digits": Digits, "text": Text}
KINDS_OF_DATA = {
    "digits": Digits.summary,
    "text": "English as bytes: the documentation of the Python language, which comes with it.",
    "DIR": ImageFolder.summary,
    "FILE": "Your own text, read as bytes or by a tokenizer.",
    "hf:NAME": "A dataset of Hugging Face, on the hub or in a folder of save_to_disk (hf:FOLDER).",
    "wds:SHARDS": "WebDataset's shards of images, such as wds:data-{0000..0099}.tar.",
}
"""Descriptions of the accepted data, for a list."""
SOURCES = ("hf:", "wds:")
"""Beginnings of data that are no files."""
OF_SOURCES = frozenset(one.name for one in fields(SourceOptions))
_NAMED = 5
"""How many files a line names."""


def find_data(
    data: object, *, watch: Watch | None = None, tokenizer: object = None, documents: str | None = None, **images: Any
) -> Task:
    """The task for the user's data.

    Args:
        data: see the list in this module's docstring.
        watch: receives how many files are read, of how many.
        tokenizer, documents: of `Text`, only for a text.
        images: options of `ImageFolder`, `from_hf` or `from_wds`; None and False count as not given.

    Raises:
        ValueError: the data do not exist or cannot be read, or the options are for other data.
    """
    given = {name: value for name, value in images.items() if value is not None and value is not False}
    of_text: dict[str, Any] = {"tokenizer": tokenizer, "documents": documents}
    of_text = {name: value for name, value in of_text.items() if value is not None}
    if isinstance(data, str) and data.startswith(SOURCES):
        if "bad_images" in given:
            fail("bad_data for samples", "bad_images", "Pass --bad-data skip or fail.")
        return from_named(data, watch=watch, **given, **of_text)
    is_folder = isinstance(data, str | Path) and data not in BUILT_IN and Path(data).expanduser().is_dir()
    if of_text and (is_folder or data == Digits.name or not isinstance(data, str | Path)):
        came = data.name if isinstance(data, Task) else "datasets" if isinstance(data, tuple | list) else str(data)
        named = " and ".join(of_text)
        fail(f"a text as data with {named}", came, f"Name a file of text, or leave {named} out.")
    for name in given.keys() & {"image_size", "patch"}:
        given[name] = pair_of(given[name], name)
    if isinstance(data, tuple | list):
        if len(data) != 3:
            fail("data as three datasets: train, validation, test", f"{len(data)}", "Pass all of them.")
        patch = given.pop("patch", None)
        if not given:
            return of_datasets(data, patch)
    elif not isinstance(data, str | Path | Task):
        fail(
            "data as a folder of images, a file of text, digits, text or datasets", shape_of(data), "Pass one of them."
        )
    odd = given.keys() & OF_SOURCES
    if odd:
        fail(f"data of hf: or wds: with {', '.join(sorted(odd))}", f"{data!r:.100}", "Leave it out.")
    path = Path(data).expanduser() if isinstance(data, str | Path) and data not in BUILT_IN else None
    if path is not None:
        require_utf8(path, "data")
        if path.is_dir():
            return ImageFolder(path, watch=watch, **given)
        if not path.exists():
            near = difflib.get_close_matches(str(data), BUILT_IN, n=1)
            remedy = f"Did you mean {near[0]}?" if near else "Name one of them."
            fail("data as a folder of images, a file of text, digits or text", f"{data}, which does not exist", remedy)
    if given:
        named = ", ".join(given)
        what = data.name if isinstance(data, Task) else "datasets" if isinstance(data, tuple | list) else data
        fail(f"a folder of images as data with {named}", str(what), f"Name the folder, or leave {named} out.")
    if isinstance(data, Task):
        return data
    if path is None and data == Digits.name:
        return Digits()
    return Text(path, **of_text)


def notes(task: Task) -> list[str]:
    """Notes for users on their own data: one line of description, and one for each kind of file left out."""
    own = task.name == "datasets" or {"images", "text", "source", "handed_over"} & set(task.options)
    found = [task.description] if own else []
    if not isinstance(task, ImageTask):
        return found
    if task.skipped:
        count = max(task.left_out, len(task.skipped))
        every = sum(task.sizes.values()) + count
        named = _listed([f"{one['path']} ({one['reason']})" for one in task.skipped], count)
        found.append(f"Skipped {count} of {every} images: {named}")
    if task.ignored:
        files, is_no = ("file", "is no image") if len(task.ignored) == 1 else ("files", "are no images")
        found.append(f"Ignored {len(task.ignored)} {files} that {is_no} in a class's folder: {_listed(task.ignored)}")
    return found


def _listed(what: list[str] | tuple[str, ...], count: int | None = None) -> str:
    """The first names; the others, of `count` in all, are counted."""
    count = len(what) if count is None else count
    more = f", and {count - _NAMED} more" if count > _NAMED else ""
    return ", ".join(what[:_NAMED]) + more
