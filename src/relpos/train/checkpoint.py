"""A trained model in a folder: `model.safetensors` and `config.json`, enough to rebuild it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as dumped

from relpos.core.checks import fail, shape_of
from relpos.data import ImageTask, Task
from relpos.files.reading import MIB, FileError, fail_to_read, read_json
from relpos.files.writing import write_json, write_whole
from relpos.models import LanguageModel, VisionTransformer
from relpos.train.recipe import Model, Recipe

WEIGHTS, CONFIG = "model.safetensors", "config.json"
Header = dict[str, tuple[tuple[int, ...], str]]
_CONFIG_AT_MOST = 16 * MIB
_REMEDY = "Train a new one with relpos train --out DIR."
_FIELDS: dict[str, type] = {"model": dict, "position": str, "kind": str, "recipe": dict, "task": str, "seed": int}
_WORDS: dict[type, str] = {dict: "object", str: "text", int: "whole number"}
_NAMED, _LETTERS = 3, 300
"""Faults that a message names, and the letters of each."""


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

    Nothing is made from what the files say before they agree: a configuration may ask for any number of parameters.

    Raises:
        ValueError: the folder holds no model, or one that this relpos did not save, or one whose files are damaged.
    """
    for name in (WEIGHTS, CONFIG):
        if not (folder / name).is_file():
            fail(f"a folder with {WEIGHTS} and {CONFIG}", str(folder), "Train one with relpos train --out DIR.")
    config, header = _configuration(folder / CONFIG), _header(folder / WEIGHTS)
    _require_fit(_built(config, header, folder / CONFIG, "meta"), header, folder / WEIGHTS)
    model = _built(config, header, folder / CONFIG, "cpu")
    model.load_state_dict(load_file(folder / WEIGHTS))
    return model.eval(), config


def _configuration(path: Path) -> dict[str, Any]:
    expected = f"a {CONFIG} that relpos train wrote"
    try:
        config = read_json(path, _CONFIG_AT_MOST)
    except FileError as error:
        fail_to_read(expected, path, error, _REMEDY)
    if not isinstance(config, dict):
        fail_to_read(expected, path, f"it is {shape_of(config)}, no object", _REMEDY)
    if "recipe" in config and "model" not in config:
        came = f"one without, saved by relpos {config.get('relpos', 'of an earlier version')}: {path}"
        fail(f"a {CONFIG} with the model's arguments", came, "Load it with that version, or train a new model.")
    for name, kind in _FIELDS.items():
        value = config.get(name, kind())
        if not isinstance(value, kind):
            fail_to_read(expected, path, f"its {name} is {shape_of(value)}, no {_WORDS[kind]}", _REMEDY)
    for name in ("model", "position"):
        if name not in config:
            fail_to_read(expected, path, f"it has no {name}", _REMEDY)
    if (steps := config.get("recipe", {}).get("steps", 1)) is not None and not isinstance(steps, int):
        fail_to_read(expected, path, f"its recipe.steps is {shape_of(steps)}, no whole number", _REMEDY)
    return config


def _header(path: Path) -> Header:
    """Shape and dtype of every tensor in a file."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        fail_to_read("weights that relpos train wrote", path, _line(error), _REMEDY)


def _built(config: dict[str, Any], header: Header, path: Path, device: str) -> Model:
    """The model of a configuration; on the device "meta" without a byte for its parameters."""
    arguments: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in config["model"].items()
    }
    build = LanguageModel if config.get("kind") == "text" else VisionTransformer
    expected = f"a {CONFIG} whose model can be built"
    depth = arguments.get("depth", 0)
    if isinstance(depth, int) and depth > len(header):  # a block has several; without a look it is built for ever
        fail_to_read(expected, path, f"its model is {depth} deep, and has {len(header)} weights", _REMEDY)
    try:
        with torch.device(device):
            return build(**arguments, position=config["position"])
    except MemoryError:
        raise
    except Exception as error:  # damage may stand in any argument, and end anywhere
        fail_to_read(expected, path, _line(error), _REMEDY)


def _require_fit(model: Model, header: Header, path: Path) -> None:
    """Raise unless a file has what the model has, in the same shapes."""
    wanted = model.state_dict()
    wrong = [f"lacks {name}" for name in wanted if name not in header]
    wrong += [f"has {name}" for name in header if name not in wanted]
    for name in wanted.keys() & header.keys():
        shape, dtype = header[name]
        if shape != tuple(wanted[name].shape):
            wrong.append(f"has {name} of shape {list(shape)}, not {list(wanted[name].shape)}")
        elif wanted[name].is_floating_point() != dtype.startswith(("F", "BF")):
            wrong.append(f"has {name} in {dtype}")
    if wrong:
        more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
        listed = ", ".join(_short(one) for one in wrong[:_NAMED])
        fail_to_read(f"the weights of the model in {CONFIG}", path, f"it {listed}{more}", _REMEDY)


def _line(error: Exception) -> str:
    return _short(" ".join(str(error).split()) or type(error).__name__)


def _short(text: str) -> str:
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."
