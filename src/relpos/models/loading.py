"""Load weights into a model, all or none, with a report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

from relpos.core.checks import fail, shape_of
from relpos.files.manifest import require_sound
from relpos.files.reading import MIB, FileError, path_of, read_json
from relpos.models.published import OWN, Translation, Weights, translated
from relpos.models.settings import as_json, llama_arguments, unlike
from relpos.position.base.saved_settings import is_settings, require_settings
from relpos_command.visible import visible

_NAMED, _LETTERS = 3, 300
"""Number of faults in a message, and the longest text of each in characters."""
_CONFIG_AT_MOST = 16 * MIB
_FILES = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin")
Header = Mapping[str, tuple[tuple[int, ...], str]]
"""The shape and the dtype of each tensor, "float32" or "F32"."""


@dataclass(frozen=True)
class LoadReport:
    """The result of `relpos.load_weights`. Print it for the text.

    Attributes:
        model: its class. family: the origin of the weights.
        fitted: for each tensor of the model, the names of its source tensors.
        left: tensors that were given but not needed, and why.
        parameters: number of loaded values.
    """

    model: str
    family: str
    fitted: Mapping[str, tuple[str, ...]]
    left: Mapping[str, str]
    parameters: int

    def __str__(self) -> str:
        lines = [
            f"{self.model} from {self.family}: {self.parameters:,} numbers in {len(self.fitted)} tensors, all loaded"
        ]
        renamed = {ours: theirs for ours, theirs in self.fitted.items() if theirs != (ours,)}
        lines += [f"  fitted  {ours} <- {' + '.join(theirs)}" for ours, theirs in renamed.items()]
        if same := len(self.fitted) - len(renamed):
            lines.append(f"  fitted  {same} more under the same names")
        lines += [f"  left    {name}: {why}" for name, why in self.left.items()]
        return visible("\n".join(lines), keep="\n")


def load_weights(model: nn.Module, source: str | Path | Mapping[str, Tensor]) -> LoadReport:
    """Load the weights of a published model, or of a relpos model, into a relpos model: all or none.

        model = relpos.VisionTransformer(embed_dim=192, num_heads=3, norm_eps=1e-6)
        print(relpos.load_weights(model, timm.create_model("vit_tiny_patch16_224").state_dict()))

    `VisionTransformer` takes timm's ViT and DeiT, `SwinTransformer` timm's Swin and Swin V2, `LanguageModel`
    transformers' Llama. Matching shapes are not enough: with another head width, epsilon or rotation base, weights
    would load and compute something else. A configuration of Llama or relpos in the folder, or beside a file with a
    standard name, is compared with the model. For timm's models the caller must give the right settings.

    Args:
        model: with the settings of these weights.
        source: a state dict, a file (`.safetensors`, or any for `torch.load(weights_only=True)`), or a folder with
            `model.safetensors`, its index, or `pytorch_model.bin`.

    Raises:
        ValueError: no weights; a tensor is missing, has no counterpart or another shape; or the configuration differs
            from the model's. The model is unchanged.

    Examples:
        >>> tiny = {"img_size": 16, "patch_size": 8, "embed_dim": 32, "depth": 1, "num_heads": 2}
        >>> trained, model = relpos.VisionTransformer(**tiny), relpos.VisionTransformer(**tiny)
        >>> report = relpos.load_weights(model, trained.state_dict())  # or a file, a folder, timm's state dict
        >>> len(report.fitted), dict(report.left)
        (20, {})
    """
    if not isinstance(model, nn.Module):
        fail("a model to load weights into", shape_of(model), "Build it first.")
    if not isinstance(source, str | Path | Mapping):
        fail("a state dict, a file or a folder of weights", shape_of(source), "Pass for example model.state_dict().")
    theirs = source if isinstance(source, Mapping) else read_weights(path_of(source, "a file or folder of weights"))
    if not theirs or not all(isinstance(name, str) and isinstance(x, Tensor) for name, x in theirs.items()):
        fail("a state dict of names and tensors", shape_of(source), "Pass model.state_dict(), a file or a folder.")
    told = not isinstance(source, Mapping) and _require_same(model, Path(source))
    wanted = {name: x for name, x in model.state_dict().items() if not is_settings(name)}
    if any(x.is_meta for x in wanted.values()):
        fail(f"a {type(model).__name__} that has memory", "one on the device meta", "Build it on a real device.")
    found = fitting(model, theirs)
    if found.family == OWN:
        require_settings(model, theirs, known=told)
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.copy_(found.tensors[name])
    sources = {name: found.sources[name] for name in wanted}
    return LoadReport(type(model).__name__, found.family, sources, found.left, sum(x.numel() for x in wanted.values()))


def fitting(model: nn.Module, theirs: Weights) -> Translation:
    """Weights under a model's names; raises unless all fit. The model may be on the meta device."""
    found = translated(model, theirs)
    if wrong := misfits(header_of(model.state_dict()), header_of(found.tensors), set(theirs) - found.used):
        remedy = "Build the model with their settings; nothing was loaded."
        fail(f"weights that fit this {type(model).__name__}", f"{found.family}, which {wrong}", remedy)
    return found


def _require_same(model: nn.Module, source: Path) -> bool:
    """Raise if the configuration beside the weights differs from the model's.

    Returns:
        Whether there is a configuration of relpos that describes all of its mechanisms.
    """
    folder = source.parent if source.name in _FILES and not source.is_dir() else source
    path, own = folder / "config.json", getattr(model, "arguments", None)
    if own is None or not path.is_file():
        return False
    try:
        config = read_json(path, _CONFIG_AT_MOST)
        if config.get("model_type") == "llama":
            theirs = as_json(llama_arguments(config))
        else:
            theirs = {**config.get("model", {}), **({"position": config["position"]} if "position" in config else {})}
        differ = unlike(own, theirs)
    except (FileError, KeyError, TypeError, AttributeError) as error:
        remedy = "Copy it again: shapes of weights do not show all settings, such as a rotation's base."
        fail("a config.json that can be read", f"{path}: {line_of(error)}", remedy)
    if differ:
        remedy = "Build the model with their settings; nothing was loaded."
        fail(f"the settings of this {type(model).__name__}", f"{path}, which has {'; '.join(differ)}", remedy)
    return "position" in config and config.get("grown", []) == list(getattr(model, "grown", ()))


def header_of(tensors: Weights) -> Header:
    """The `Header` of these tensors."""
    return {name: (tuple(x.shape), str(x.dtype).removeprefix("torch.")) for name, x in tensors.items()}


def misfits(wanted: Header, given: Header, unknown: Iterable[str] = ()) -> str:
    """Why tensors do not fit: the first few reasons, briefly; empty if they fit."""
    wrong = [f"lacks {name}" for name in wanted if name not in given and not is_settings(name)]
    wrong += [f"has {name}" for name in (*(name for name in given if name not in wanted), *sorted(unknown))]
    for name in (name for name in wanted.keys() & given.keys() if not is_settings(name)):  # loading compares settings
        (shape, dtype), (came, other) = wanted[name], given[name]
        if came != shape:
            wrong.append(f"has {name} of shape {list(came)}, not {list(shape)}")
        elif _is_floating(other) != _is_floating(dtype):
            wrong.append(f"has {name} in {other}")
    more = f" and {len(wrong) - _NAMED} more" if len(wrong) > _NAMED else ""
    return ", ".join(shortened(one) for one in wrong[:_NAMED]) + more


def _is_floating(dtype: str) -> bool:
    return dtype.lower().startswith(("f", "bf"))


def line_of(error: Exception) -> str:
    """The text of an error in one line."""
    return shortened(" ".join(str(error).split()) or type(error).__name__)


def shortened(text: str) -> str:
    """A text, cut if it is long."""
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file or of a folder's files, on the CPU. Nothing in them is executed.

    Raises:
        ValueError: there are none, or they cannot be read.
    """
    if path.is_dir():
        named = next((path / name for name in _FILES if (path / name).is_file()), None)
        if named is None:
            fail(f"a folder with {', '.join(_FILES[:-1])} or {_FILES[-1]}", str(path), "Name the file itself.")
        path = named
    if not path.is_file():
        fail("a file or folder of weights", f"{path}, which is not there", "Pass an existing one.")
    if path.suffix == ".json":
        files = sorted(set(_read_index(path).values()))
        return {name: x for file in files for name, x in _read(path.parent / Path(file).name).items()}
    return _read(path)


def _read_index(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text("utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        _unreadable(path, error)


def _read(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    require_sound(path, "Copy it again.")
    if path.suffix == ".safetensors":
        try:
            return dict(load_file(path))
        except (SafetensorError, OSError) as error:
            _unreadable(path, error)
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damage can raise any error
        _unreadable(path, error)
    for wrapper in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(wrapper), dict):
            found = found[wrapper]
    return found if isinstance(found, dict) else {}


def _unreadable(path: Path, error: Exception) -> NoReturn:
    came, remedy = f"{path}: {line_of(error)}", "Save them as safetensors."
    fail("weights that can be read without running code", came, remedy)
