"""A model of another library by name, built for the size of the data, with its position replaced by a mechanism.

    timm:NAME           timm's model of that name, random weights
    torchvision:NAME    torchvision's, random weights
    hf:FOLDER           the model of FOLDER/config.json, with the folder's weights if it has any

No network is used. Image data set the size, patch, channels and classes; for a text the vocabulary is its bytes.
Weights that do not fit are initialized anew: the embedding of words and the head, or the class head.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from relpos.adapters.common.libraries import imported, note_on_torchvision, require_importable
from relpos.adapters.replacing import OWN, replace_position
from relpos.adapters.reporting import OwnPosition
from relpos.adapters.torchvision_models import (
    fitted_torchvision_model,
    require_torchvision_name,
    torchvision_patch,
)
from relpos.core.checks import fail
from relpos.data import ImageTask, Task, Text

PREFIXES = ("timm:", "torchvision:", "hf:")
INIT_STD = 0.02
"""Initial standard deviation of learned positions in a model with random weights, as both libraries use."""


@dataclass(frozen=True)
class LibraryModel:
    """`build(position, task)` for a model of timm, torchvision or transformers. Every process builds the same model.

    Args:
        name: `"timm:NAME"`, `"torchvision:NAME"` or `"hf:FOLDER"`.

    Raises:
        ValueError: the library is missing, or there is no such model.
    """

    name: str

    def __post_init__(self) -> None:
        source, _, rest = self.name.partition(":")
        if source == "timm" and rest:
            require_timm_name(rest)
        elif source == "torchvision" and rest:
            require_torchvision_name(rest)
        elif source == "hf" and rest:
            require_folder(rest)
        else:
            fail(
                "timm:NAME, torchvision:NAME or hf:FOLDER",
                repr(self.name),
                "Write for example timm:vit_tiny_patch16_224.",
            )

    def __call__(self, position: str, task: Task) -> nn.Module:
        """The model for a task, with a mechanism by name; `"own"` keeps its position.

        With `"own"`, its attribute `own_position` has the names of its position's parameters, so that they are counted
        and trained as a mechanism's.

        Raises:
            ValueError: it cannot take this data or this position.
        """
        model = self._made(task)
        report = replace_position(model, position, init_std=0.0 if self._is_trained else INIT_STD)
        if position == OWN:
            model.own_position = tuple(name for own in report.own for name in own.parameters)  # type: ignore[assignment]
        if isinstance(task, Text):
            _require_causal(model, self.name)
        return model

    def own(self, task: Task) -> tuple[OwnPosition, ...]:
        """The model's own position mechanisms."""
        return replace_position(self._made(task), OWN).own

    def refusal(self, position: str, task: Task) -> str | None:
        """Why the model cannot take a position, in one line; None if it can."""
        try:
            self(position, task)
        except ValueError as error:
            return str(error)
        return None

    def notes(self, task: Task) -> list[str]:
        """Notes to show before training: how the model is built, which weights are initialized anew, and a torchvision
        that is for another torch."""
        mend = [line for line in (note_on_torchvision(),) if line is not None]
        if not self._is_trained:
            return [f"{self.name} at the size of the data, with random weights.", *mend]
        anew = self._loaded(task)[1]
        note = f"; these start from random values, because they do not fit the data: {', '.join(anew)}" if anew else ""
        return [f"{self.name} starts from its trained weights{note}.", *mend]

    @cached_property
    def own_patch(self) -> tuple[int, int] | None:
        """Height and width of the published model's patch; None without one."""
        if self._source == "torchvision":
            return torchvision_patch(self._name)
        if self._source == "timm":
            with torch.device("meta"):
                patch = getattr(getattr(self._timm(), "patch_embed", None), "patch_size", None)
        else:
            patch = getattr(self._config(), "patch_size", None)
        return (patch, patch) if isinstance(patch, int) else None if patch is None else (patch[0], patch[1])

    @cached_property
    def trained_size(self) -> tuple[int, int] | None:
        """Height and width of the images that a folder's weights were trained on; None without weights or images."""
        size = getattr(self._config(), "image_size", None) if self._is_trained else None
        return (size, size) if isinstance(size, int) else None if size is None else (size[0], size[1])

    def described(self) -> str:
        """The model in words, with the library's version and a fingerprint of a folder's files."""
        if self._source != "hf":
            return f"{self.name}, {self.package} {metadata.version(self.package)}"
        digest = hashlib.sha256((self._folder / "config.json").read_bytes())
        for file in sorted(self._folder.glob("*.safetensors")):
            digest.update(file.read_bytes())
        version = metadata.version("transformers")
        return f"{self.name}, transformers {version}, sha256 {digest.hexdigest()[:12]}"

    @property
    def package(self) -> str:
        """The library that has the model."""
        return "transformers" if self._source == "hf" else self._source

    @property
    def _source(self) -> str:
        return self.name.partition(":")[0]

    @property
    def _name(self) -> str:
        return self.name.partition(":")[2]

    @property
    def _folder(self) -> Path:
        return Path(self._name).expanduser()

    @property
    def _is_trained(self) -> bool:
        return self._source == "hf" and any(self._folder.glob("*.safetensors"))

    def _made(self, task: Task) -> nn.Module:
        """The model as published, for a task."""
        if self._source != "hf":
            if not isinstance(task, ImageTask):
                fail(f"images for {self.name}", f"the data {task.name}", "Name a folder of images, or another model.")
            if self._source == "torchvision":
                return fitted_torchvision_model(self._name, task)
            sizes = {"img_size": task.image_size, "patch_size": task.patch_size}
            return self._timm(num_classes=len(task.classes), in_chans=task.channels, **sizes)
        return self._loaded(task)[0]

    def _timm(self, **arguments: Any) -> nn.Module:
        name, timm = self._name, imported("timm")
        try:
            made: nn.Module = timm.create_model(name, pretrained=False, **arguments)
        except TypeError as error:
            replace_position(timm.create_model(name, pretrained=False), OWN)  # raises if it has no known attention
            fail(f"{self.name} to take {', '.join(arguments)}", str(error), "Pass build(position, task) instead.")
        return made

    def _config(self) -> Any:
        with _quiet():
            return imported("transformers").AutoConfig.from_pretrained(self._folder, local_files_only=True)

    def _loaded(self, task: Task) -> tuple[nn.Module, list[str]]:
        """transformers' model for a task, and the names of weights that the folder lacks or has in another shape."""
        transformers, config = imported("transformers"), self._config()
        if isinstance(task, ImageTask):
            auto, kinds = transformers.AutoModelForImageClassification, "images"
            sizes = {"image_size": task.image_size, "patch_size": task.patch_size, "num_channels": task.channels}
            changes: dict[str, Any] = {**sizes, "num_labels": len(task.classes)}
        elif isinstance(task, Text):
            auto, kinds = transformers.AutoModelForCausalLM, "a text"
            changes = {"vocab_size": task.vocabulary, "is_decoder": True, "use_cache": False}
            changes |= dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
            if not self._is_trained:
                changes["max_position_embeddings"] = task.length
        else:
            came = "datasets of another kind"
            fail(f"images or a text file for {self.name}", came, "Pass build(position, task) instead.")
        if isinstance(task, Text) and task.is_packed:
            came = f"{self.name}, whose attention knows no borders"
            fail("relpos's own model for packed documents", came, "Pass documents=cut, or build(position, task).")
        if isinstance(task, Text) and getattr(config, "is_encoder_decoder", False):
            came = f"{self.name}, a {config.model_type}, which maps one text to another"
            remedy = "Pass datasets with both, build(position, task) and a step: docs/replace.md."
            fail("a model that continues a text", came, remedy)
        if type(config) not in auto._model_mapping:
            remedy = "Name other data, or pass build(position, task) and a step."
            fail(f"a model for {kinds}, as {auto.__name__} makes them", f"{self.name}, a {config.model_type}", remedy)
        for key, value in changes.items():
            if hasattr(config, key):
                setattr(config, key, value)
        longest = getattr(config, "max_position_embeddings", None)
        if isinstance(task, Text) and longest is not None and longest < task.length:
            came = f"{longest} in {self.name}"
            fail(f"at least {task.length} positions, which the data need", came, "Name another model.")
        with _quiet():
            if not self._is_trained:
                return auto.from_config(config), []
            model, loading = auto.from_pretrained(
                self._folder, config=config, local_files_only=True, ignore_mismatched_sizes=True, dtype=torch.float32,
                output_loading_info=True,
            )  # fmt: skip
        anew = {name if isinstance(name, str) else name[0] for key in _NOT_LOADED for name in loading[key]}
        return model, sorted(anew)


_NOT_LOADED = ("missing_keys", "mismatched_keys")


def require_timm_name(name: str) -> None:
    """Raise unless timm has a model of this name."""
    require_importable("timm")
    known = imported("timm").list_models()
    if name not in known:  # about a thousand
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        remedy = f"Did you mean {', '.join(near)}?" if near else "timm.list_models() has their names."
        fail("the name of a model of timm", repr(name), remedy)


def require_folder(folder: str) -> None:
    """Raise unless transformers can make a model from a folder."""
    require_importable("transformers")
    path = Path(folder).expanduser()
    if not (path / "config.json").is_file():
        fail("a folder with config.json after hf:", folder, "Save a model there with model.save_pretrained(FOLDER).")
    if any(path.glob("*.bin")) and not any(path.glob("*.safetensors")):
        fail("weights as safetensors", f"{folder} with others", "Save them with model.save_pretrained(FOLDER).")
    try:
        kind = json.loads((path / "config.json").read_text("utf-8")).get("model_type")
    except (ValueError, AttributeError) as error:
        fail(f"JSON in {path / 'config.json'}", str(error), "Save the model again.")
    if kind not in imported("transformers").CONFIG_MAPPING:
        remedy = "Save a model of transformers there."
        fail(f"a model_type that transformers knows in {path / 'config.json'}", repr(kind), remedy)


@torch.no_grad()
def _require_causal(model: nn.Module, name: str) -> None:
    """Raise if a later byte changes the output at earlier ones: the model would see the bytes it has to predict."""
    training = model.training
    model.eval()
    ids = torch.arange(16)[None].repeat(2, 1)
    ids[1, -1] = 99
    scores = model(ids).logits
    model.train(training)
    if not torch.allclose(scores[0, :-1], scores[1, :-1], atol=1e-4):
        fail("a causal model of text", f"{name}, which sees later bytes", "Pass build and a step instead.")


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn off transformers' progress bars and its messages on weights that do not fit; `notes` reports those."""
    log = imported("transformers").utils.logging
    before, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()
