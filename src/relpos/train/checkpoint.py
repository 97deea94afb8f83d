"""A trained model in a folder, as written by `save_pretrained`, with a description of its run in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relpos.data import ImageTask, Task
from relpos.models.pretrained import CONFIG, WEIGHTS, check_free, load_folder, save_folder
from relpos.train.recipe import Model, Recipe

__all__ = ["CONFIG", "WEIGHTS", "check_free", "load", "save"]


def save(
    folder: Path,
    model: Model,
    *,
    task: Task,
    position: str,
    recipe: Recipe,
    about: dict[str, Any],
    card: str | None = None,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write the model's weights and what is needed to build it; `about` is stored in the configuration unchanged.

    The configuration holds the model's own arguments, so it loads without the task's data. Either all files are written
    or none.

    Args:
        card: the text of its model card; by default a card from the model. files: further files, by name.

    Raises:
        ValueError: the folder contains a model, or another process writes one meanwhile.
        WriteError: the files cannot be written.
    """
    of_run = {
        "task": task.name,
        "task_options": task.options,
        **({"classes": list(task.classes)} if isinstance(task, ImageTask) else {}),
        "kind": task.kind,
        "position": position,
        "recipe": recipe.to_json(),
        **about,
    }
    save_folder(model, folder, of_run, card=card, files=files)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode and its configuration. Errors as in `from_pretrained`."""
    return load_folder(folder)
