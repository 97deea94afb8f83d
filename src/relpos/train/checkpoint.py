"""A trained model in a folder, as `save_pretrained` writes it, with what its run was in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
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
    """Write the model's weights and what is needed to build it; `about` is kept in the configuration as it is.

    The configuration holds the arguments of the model itself, so that it loads where the task's data are not. All
    files are there in the end, or none.

    Args:
        card: the text of its model card; what the model itself tells where left out. files: beside it, by name.

    Raises:
        ValueError: a model is there, or is put there meanwhile.
        WriteError: they cannot be written.
    """
    of_run = {
        "task": task.name,
        "task_options": task.options,
        **({"classes": list(task.classes)} if isinstance(task, ImageTask) else {}),
        "kind": task.kind,
        "position": position,
        "recipe": asdict(recipe),
        **about,
    }
    save_folder(model, folder, of_run, card=card, files=files)


def load(folder: Path) -> tuple[Any, dict[str, Any]]:
    """The model in evaluation mode and its configuration; errors as `from_pretrained` has them."""
    return load_folder(folder)
