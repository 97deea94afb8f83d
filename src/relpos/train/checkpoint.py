"""A trained model in a folder: `model.safetensors` and `config.json`, enough to build it again."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from relpos.core.checks import fail
from relpos.data import find_task
from relpos.models import VisionTransformer
from relpos.train.recipe import Recipe

WEIGHTS, CONFIG = "model.safetensors", "config.json"


def check_free(folder: Path) -> None:
    """Raise unless a model can be saved there without overwriting anything."""
    for name in (WEIGHTS, CONFIG):
        if (folder / name).exists():
            fail(f"a folder without a {name}", str(folder), "Choose another --out; nothing is overwritten.")
    if folder.exists() and not folder.is_dir():
        fail("a folder for --out", f"the file {folder}", "Choose another --out.")


def save(
    folder: Path, model: VisionTransformer, *, task: str, position: str, recipe: Recipe, about: dict[str, Any]
) -> None:
    """Write the model's weights and what is needed to build it; `about` is kept in the configuration as it is."""
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(
        {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS
    )
    config = {"task": task, "position": position, "recipe": asdict(recipe), **about}
    (folder / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def load(folder: Path) -> tuple[VisionTransformer, dict[str, Any]]:
    """The model in evaluation mode and its configuration.

    Raises:
        ValueError: the folder holds no model.
    """
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            fail(f"a folder with {WEIGHTS} and {CONFIG}", str(folder), "Train one with relpos train --out DIR.")
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    model = Recipe(**config["recipe"]).build(find_task(config["task"]), config["position"])
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval(), config
