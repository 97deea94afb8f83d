"""A model in a folder: `model.safetensors`, `config.json` and a model card, enough to build it again.

    config.json    "class", "relpos" (the version), "model" (the arguments it was built with), "position", "grown"
                   (its calls of `grow`), and what a training run adds

Older folders of `relpos train` without a "class" load too. No memory is allocated before the files agree: a
configuration could ask for any number of parameters.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from safetensors.torch import save as dumped
from torch import nn

from relpos.core.checks import fail, require_flag, shape_of, without_remedy
from relpos.files.manifest import require_sound
from relpos.files.reading import MIB, FileError, fail_to_read, path_of, read_json
from relpos.files.writing import make_folder, write_json, write_whole
from relpos.models.card import model_card
from relpos.models.config import LanguageConfig, SwinConfig, VisionConfig
from relpos.models.loading import Header, fitting, header_of, line_of, load_weights, misfits, read_weights
from relpos.models.settings import ModelArguments, as_arguments, as_json, llama_arguments
from relpos.position.base.saved_settings import is_settings, with_settings
from relpos.version import __version__

WEIGHTS, CONFIG, CARD = "model.safetensors", "config.json", "README.md"
_CONFIG_AT_MOST = 16 * MIB
_REMEDY = "Save it again, or train one with relpos train --out DIR."
_DTYPES = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_FIELDS: dict[str, type] = {
    "class": str, "model": dict, "grown": list, "kind": str, "recipe": dict, "task": str, "seed": int,
}  # fmt: skip
_WORDS: dict[type, str] = {dict: "an object", list: "a list", str: "text", int: "a whole number"}


class PretrainedModel(nn.Module):
    """Base of the models: keeps its arguments, and can be saved to a folder and loaded.

    Args:
        config: its arguments, a data class of `models/config.py`.
    """

    def __init__(self, config: VisionConfig | LanguageConfig | SwinConfig) -> None:
        super().__init__()
        self.arguments: ModelArguments = as_json({one.name: getattr(config, one.name) for one in fields(config)})
        self.grown: tuple[dict[str, Any], ...] = ()

    def save_pretrained(self, folder: str | Path, *, card: str | None = None) -> None:
        """Write the model's weights, its configuration and a model card into a folder, all or none.

        Args:
            folder: created if it does not exist.
            card: the text of the model card, Markdown; by default a card from the model.

        Raises:
            ValueError: the folder has a model or a card, which is not overwritten; the position has no name; or the
                model has changed since it was built.
            WriteError: a file cannot be written.
        """
        save_folder(self, path_of(folder, "a folder to save in"), {}, card=card)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Load a model, in evaluation mode, from a folder of `save_pretrained`, `relpos train` or transformers.

        It has the dtype of its weights if they share one. From transformers, Llama with its rotation's scaling loads as
        a `LanguageModel` in the default dtype.

        Raises:
            ValueError: the folder has no model, a model of another class, or damaged files.
        """
        model, _ = load_folder(path_of(folder, "the folder of a model"))
        if not isinstance(model, cls):
            came = f"a {type(model).__name__} in {folder}"
            fail(f"a {cls.__name__}", came, f"Use relpos.{type(model).__name__}.from_pretrained.")
        return model

    def push_to_hub(
        self, name: str, *, card: str | None = None, private: bool = True, message: str = "Upload a model of relpos"
    ) -> str:
        """Upload the files of `save_pretrained` as a commit with huggingface_hub, and return its address.

        Only huggingface_hub handles the login (`hf auth login`).

        Args:
            name: of the repository, "user/model"; created if it does not exist.
            card: as in `save_pretrained`.
            private: whether a created repository is private.
            message: of the commit.

        Raises:
            ValueError: huggingface_hub is not installed, or the position has no name.
        """
        from tempfile import TemporaryDirectory

        require_flag(private, "private")
        try:
            import huggingface_hub
        except ImportError as error:
            fail("huggingface_hub, importable", str(error), "Run pip install huggingface_hub.")
        with TemporaryDirectory() as made:
            save_folder(self, Path(made) / "model", {}, card=card, shown_as=name)
            huggingface_hub.create_repo(name, private=private, exist_ok=True)
            done = huggingface_hub.upload_folder(
                repo_id=name, folder_path=str(Path(made) / "model"), commit_message=message
            )
        return str(done)


def check_free(folder: Path, *more: str) -> None:
    """Raise if saving a model there, with the files named in `more`, would overwrite anything."""
    for name in (WEIGHTS, CONFIG, *more):
        if os.path.exists(folder / name):  # False without permission: creating the folder then raises
            fail(f"a folder without a {name}", str(folder), "Choose another folder; nothing is overwritten.")
    if os.path.exists(folder) and not os.path.isdir(folder):
        fail("a folder to save in", f"the file {folder}", "Choose another; nothing is overwritten.")


def save_folder(
    model: PretrainedModel,
    folder: Path,
    about: Mapping[str, Any],
    *,
    card: str | None = None,
    files: Mapping[str, bytes] | None = None,
    shown_as: str | None = None,
) -> None:
    """Write a model as `save_pretrained` does, with `about` in its configuration and `files` beside it.

    Args:
        shown_as: the folder's name in the default card.
    """
    arguments = dict(model.arguments)
    position = arguments.pop("position")
    for one in position if isinstance(position, list) else [position]:
        if not isinstance(one, dict) or "function" not in one:
            continue
        came = f"the function {one['function']}"
        remedy = "Save model.state_dict(), for a model built with that function; a preset or a RotaryChoice has a name."
        fail("a position by name to save", came, remedy)
    if card is None:
        numbers = sum(parameter.numel() for parameter in model.parameters())
        name = shown_as or folder.resolve().name
        card = model_card(type(model).__name__, numbers, model.arguments, model.grown, name)
    beside = {**(files or {}), CARD: card.encode()}
    check_free(folder, *beside)
    config = {
        "class": type(model).__name__,
        "relpos": __version__,
        "position": position,
        "model": arguments,
        **({"grown": list(model.grown)} if model.grown else {}),
        **about,
    }
    _require_loadable(model, config)
    make_folder(folder)
    weights = dumped({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})
    try:
        write_json(folder / CONFIG, config, indent=1, new=True)  # the first process gets the folder
    except FileExistsError:
        check_free(folder)
        raise
    written = [folder / CONFIG]
    try:
        for name, content in {WEIGHTS: weights, **beside}.items():
            write_whole(folder / name, content)
            written.append(folder / name)
    except BaseException:
        for path in written:
            with contextlib.suppress(OSError):
                path.unlink()
        raise


def _require_loadable(model: PretrainedModel, config: dict[str, Any]) -> None:
    """Raise if a model differs from what its configuration builds."""
    state = model.state_dict()
    built = _built(config, len(state), Path(CONFIG), "meta").state_dict()
    changed = (
        f"has {model.get_submodule(name.rpartition('.')[0])} for {name.rpartition('.')[0]}"
        for name, x in state.items()
        if is_settings(name) and not torch.equal(x, built.get(name, x[:0]))
    )
    if wrong := misfits(header_of(built), header_of(state)) or next(changed, ""):
        remedy = "Build it with such arguments, or save model.state_dict()."
        fail(f"an unchanged {type(model).__name__} to save", f"one that {wrong}", remedy)


def load_folder(folder: Path) -> tuple[PretrainedModel, dict[str, Any]]:
    """The model in evaluation mode and its configuration.

    Raises:
        ValueError: the folder has no model, one that this relpos did not save, or damaged files.
    """
    path = folder / CONFIG
    config = _configuration(path) if path.is_file() else {}
    if config.get("model_type") == "llama":
        return _llama(config, folder), config
    if not config or not (folder / WEIGHTS).is_file():
        fail(f"a folder with {WEIGHTS} and {CONFIG}", str(folder), "Train one with relpos train --out DIR.")
    header = _header(folder / WEIGHTS)
    if wrong := misfits(header_of(_built(config, len(header), path, "meta").state_dict()), header):
        fail_to_read(f"the weights of the model in {CONFIG}", folder / WEIGHTS, f"it {wrong}", _REMEDY)
    model = _built(config, len(header), path, "cpu")
    weights = load_file(folder / WEIGHTS)
    kinds = {x.dtype for x in weights.values() if x.is_floating_point()}
    if len(kinds) == 1 and kinds < _DTYPES:
        model.to(kinds.pop())
    try:
        model.load_state_dict(with_settings(model, weights))  # settings are also in the configuration
    except ValueError as error:
        fail_to_read(f"the weights of the model in {CONFIG}", folder / WEIGHTS, line_of(error), _REMEDY)
    return model.eval(), config


def _llama(config: dict[str, Any], folder: Path) -> PretrainedModel:
    path, remedy = folder / CONFIG, "Save it with transformers."
    try:
        arguments = as_json(llama_arguments(config))
    except (KeyError, TypeError, ZeroDivisionError) as error:
        fail_to_read("a configuration of transformers' Llama", path, line_of(error), remedy)
    ours = {"class": "LanguageModel", "model": arguments, "position": arguments["position"]}
    weights = read_weights(folder)
    fitting(_built(ours, len(weights), path, "meta", remedy), weights)  # before memory is allocated
    model = _built(ours, len(weights), path, "cpu", remedy)
    load_weights(model, weights)
    return model.eval()


def _configuration(path: Path) -> dict[str, Any]:
    expected = f"a {CONFIG} that relpos wrote"
    try:
        config = read_json(path, _CONFIG_AT_MOST)
    except FileError as error:
        fail_to_read(expected, path, error, _REMEDY)
    if not isinstance(config, dict):
        fail_to_read(expected, path, f"it is {shape_of(config)}, not an object", _REMEDY)
    if config.get("model_type") == "llama":
        return config
    if "recipe" in config and "model" not in config:
        came = f"one without, saved by relpos {config.get('relpos', 'of an earlier version')}: {path}"
        fail(f"a {CONFIG} with the model's arguments", came, "Load it with that version, or train a new model.")
    for name, kind in _FIELDS.items():
        value = config.get(name, kind())
        if not isinstance(value, kind):
            fail_to_read(expected, path, f"its {name} is {shape_of(value)}, not {_WORDS[kind]}", _REMEDY)
    for name in ("model", "position"):
        if name not in config:
            fail_to_read(expected, path, f"it has no {name}", _REMEDY)
    if (steps := config.get("recipe", {}).get("steps", 1)) is not None and not isinstance(steps, int):
        fail_to_read(expected, path, f"its recipe.steps is {shape_of(steps)}, not a whole number", _REMEDY)
    return config


def _header(path: Path) -> Header:
    """Shape and dtype of every tensor in a file."""
    require_sound(path, _REMEDY)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: (tuple(one.get_shape()), one.get_dtype()) for name, one in slices.items()}
    except (SafetensorError, OSError) as error:
        fail_to_read("weights that relpos wrote", path, line_of(error), _REMEDY)


def _class(name: str, path: Path) -> Callable[..., PretrainedModel]:
    """A model's class by its name."""
    known = {one.__name__: one for one in _subclasses(PretrainedModel)}
    if name not in known:
        fail_to_read(f"a {CONFIG} of a model of relpos", path, f"its class is {name!r}", _REMEDY)
    return known[name]


def _subclasses(cls: type[PretrainedModel]) -> list[type[PretrainedModel]]:
    return [found for one in cls.__subclasses__() for found in (one, *_subclasses(one))]


def _built(config: dict[str, Any], weights: int, path: Path, device: str, remedy: str = _REMEDY) -> PretrainedModel:
    """Build a configuration's model. `weights` bounds its depth; on the "meta" device it takes no parameter memory."""
    expected = f"a {CONFIG} whose model can be built"
    # relpos 0.1.0 stored the kind of the task instead of a class
    before = "LanguageModel" if config.get("kind") == "text" else "VisionTransformer"
    build = _class(config.get("class") or before, path)
    try:
        arguments = as_arguments({**config["model"], "position": config["position"]})
        depths = arguments.get("depths", arguments.get("depth", 0))
        depth = sum(depths) if isinstance(depths, tuple) else depths
    except Exception as error:  # damage may be anywhere
        fail_to_read(expected, path, line_of(without_remedy(error)), remedy)
    if isinstance(depth, int) and depth > weights:  # a block has several weights; else building never ends
        fail_to_read(expected, path, f"its model has depth {depth}, but only {weights} weights", remedy)
    try:
        with torch.device(device):
            model: Any = build(**arguments)
            for step in config.get("grown", []):
                model = model.grow(**as_arguments(step))
    except MemoryError:
        raise
    except Exception as error:  # a damaged argument can raise any error
        fail_to_read(expected, path, line_of(without_remedy(error)), remedy)
    assert isinstance(model, PretrainedModel)
    return model
