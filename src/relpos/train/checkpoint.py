"""A trained model in a folder: `model.safetensors` and `config.json`, enough to build it again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from safetensors.torch import save as dumped

from relpos.core.checks import fail
from relpos.data import ImageTask, Task
from relpos.files import write_json, write_whole
from relpos.models import LanguageModel, VisionTransformer
from relpos.train.recipe import Model, Recipe

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def check_free(folder: Path) -> None:
    """Raise unless a model can be saved there without overwriting anything."""
    for name in (WEIGHTS, CONFIG):
        if (folder / name).exists():
            fail(f"a folder without a {name}", str(folder), "Choose another --out; nothing is overwritten.")
    if folder.exists() and not folder.is_dir():
        fail("a folder for --out", f"the file {folder}", "Choose another --out.")


def save(folder: Path, model: Model, *, task: Task, position: str, recipe: Recipe, about: dict[str, Any]) -> None:
    """Write the model's weights and what is needed to build it; `about` is kept in the configuration as it is.

    The configuration holds the arguments of the model itself, so that it loads where the task's data are not. Both
    files are there in the end, or neither.

    Raises:
        ValueError: a model is there, or is put there meanwhile.
        WriteError: they cannot be written.
    """
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    weights = dumped({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    config = {
        "task": task.name,
        "task_options": task.options,
        **({"classes": list(task.classes)} if isinstance(task, ImageTask) else {}),
        "kind": task.kind,
        "position": position,
        "model": recipe.arguments(task),
        "recipe": asdict(recipe),
        **about,
    }
    try:
        write_json(folder / CONFIG, config, indent=1, new=True)  # whoever comes first has the folder
    except FileExistsError:
        check_free(folder)
        raise
    try:
        write_whole(folder / WEIGHTS, weights)
    except BaseException:
        (folder / CONFIG).unlink()
        raise


def load(folder: Path) -> tuple[Model, dict[str, Any]]:
    """The model in evaluation mode and its configuration.

    Raises:
        ValueError: the folder holds no model, or one that this relpos did not save.
    """
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            fail(f"a folder with {WEIGHTS} and {CONFIG}", str(folder), "Train one with relpos train --out DIR.")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if "recipe" in config and "model" not in config:
        came = f"one without, saved by relpos {config.get('relpos', 'of an earlier version')}"
        fail(f"a {CONFIG} with the model's arguments", came, "Load it with that version, or train the model again.")
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config["model"].items()
    }
    build = LanguageModel if config.get("kind") == "text" else VisionTransformer
    model = build(**arguments, position=config["position"])
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval(), config
