"""Settings saved with the weights: those that determine what a mechanism computes, but show in no parameter.

    state_dict()["positions.0._extra_state"]      uint8, the ASCII of {"settings":{"base":10000, ...},"version":1}

A rotation has no weights: without settings, the weights of a grown model would fit one that was not grown. Loading
compares them. Weights saved with other settings raise. Weights without settings, from an older relpos or another
library, load with one warning. No setting is taken from a file: a model stays as it was built.

A mechanism that its parameters and their shapes determine has no such entry.
"""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from relpos.core.checks import fail, shape_of
from relpos.position.base.device import HasDevice

ENTRY = "_extra_state"
"""PyTorch's name for it in a state dict, after the name of the module."""
VERSION = 1
_LETTERS = 160
"""Maximum letters of a setting in a message."""
Settings = dict[str, Any]
"""Plain values, as JSON gives them back."""


class SavesSettings(HasDevice):
    """Base of modules that save settings beside their weights, and compare them where weights are loaded."""

    saved_settings: ClassVar[tuple[str, ...]] = ()
    """Names of attributes that determine what it computes but show in no parameter: numbers, texts, flags, tuples.

    A subclass writes `saved_settings = ("power",)`, and also has those of its bases.
    """

    _expects_entry: ClassVar[bool] = True
    """Whether weights without settings are worth a warning."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers[ENTRY] = None  # accelerate loads a file's entry into it
        self._non_persistent_buffers_set.add(ENTRY)

    def __init_subclass__(cls, **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        each = [vars(one).get("saved_settings", ()) for one in reversed(cls.__mro__)]
        cls.saved_settings = tuple(dict.fromkeys(name for own in each for name in own))
        if cls.saved_settings and cls.get_extra_state is nn.Module.get_extra_state:
            cls.get_extra_state = SavesSettings._encoded  # type: ignore[method-assign, assignment]  # PyTorch asks classes

    def _own_settings(self) -> Settings:
        """The settings that loading compares."""
        return {name: plain(getattr(self, name, None)) for name in self.saved_settings}

    def _has_entry(self) -> bool:
        """Whether settings are saved; not if shapes determine them."""
        return bool(self.saved_settings)

    def _differing(self, own: Settings, saved: Settings) -> list[str]:
        """The names of settings whose difference changes the result."""
        return [name for name in {**own, **saved} if own.get(name) != saved.get(name)]

    def _remedy(self, saved: Settings, names: list[str]) -> str:
        """What to do if settings of these names were saved with other values."""
        return "Build it with the saved settings, then load."

    def _encoded(self) -> torch.Tensor:  # a separate name; `__init_subclass__` assigns it
        """The settings as a state dict holds them, as bytes. PyTorch knows this method as `get_extra_state`."""
        self._check_loaded()
        return encoded(self._own_settings())

    @property
    def _extra_state(self) -> Tensor:
        """The entry of the state dict, for code that looks its names up as attributes."""
        return self._encoded()

    def set_extra_state(self, state: Any) -> None:
        """Compare saved settings with its own; called when weights are loaded.

        Raises:
            ValueError: they differ, or cannot be read.
        """
        self._require_equal(state, "")

    def _require_equal(self, state: Any, name: str) -> None:
        """Raise unless the settings of a state dict equal its own; `name` is the module's in its model."""
        saved, own = decoded(state, name or type(self).__name__), self._own_settings()
        if names := self._differing(own, saved):
            whose = " ".join(filter(None, (type(self).__name__, name)))
            expected, came = (", ".join(f"{one}={_text(all_.get(one))}" for one in names) for all_ in (own, saved))
            fail(f"weights of {whose} saved with {expected}", came, self._remedy(saved, names))

    def _check_loaded(self) -> None:
        """Compare settings that a loader has put into their buffer, one tensor of a file at a time."""
        loaded = self._buffers.get(ENTRY)
        if loaded is not None:
            self._buffers[ENTRY] = None
            if not loaded.is_meta:  # else it is on a disk
                self._require_equal(loaded, "")

    def settle(self, device: torch.device) -> None:
        if self._buffers.get(ENTRY) is not None:
            self._check_loaded()
        if self._buffers["_device_marker"] is None:  # as in `super().settle`, whose call takes time
            super().settle(device)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._check_loaded()
        return super()._apply(fn, recurse)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != ENTRY:  # transformers sets it to anything if a file lacks it
            super().__setattr__(name, value)

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, local_metadata: Any, strict: bool,
        missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str],
    ) -> None:  # fmt: skip
        load = super()._load_from_state_dict
        if type(self).set_extra_state is not SavesSettings.set_extra_state:  # the user's own
            return load(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        key, name = prefix + ENTRY, prefix.removesuffix(".")
        found = state_dict.pop(key, None)
        if isinstance(found, Tensor) and (found.is_meta or is_in_torch_dispatch_mode()):
            pass  # there are no numbers to read
        elif isinstance(found, Tensor):
            if self._own_settings():
                self._require_equal(found, name)
            else:
                unexpected_keys.append(key)
        elif self._expects_entry and self._has_entry() and not self._is_of_others(state_dict, prefix, missing_keys):
            warn_without_settings(self, name, missing_keys)
        load(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if key in missing_keys:
            missing_keys.remove(key)

    def _is_of_others(self, state_dict: Mapping[str, Any], prefix: str, missing_keys: list[str]) -> bool:
        """Whether a state dict is of other modules: it has no weight of this one or, if this one has none, lacks
        some."""
        if next(self.parameters(), None) is None:
            return bool(missing_keys)
        return not any(name.startswith(prefix) for name in state_dict)


_warned_load: object = None
"""The object that identifies the load with the last warning."""


def warn_without_settings(module: SavesSettings, name: str, load: object) -> None:
    """Warn, once per load, that weights come without settings.

    Args:
        module: the one that would compare them. name: its name in the model. load: an object that identifies the load.
    """
    global _warned_load  # modules share nothing else
    if load is _warned_load:
        return
    _warned_load = load
    whose = " ".join(filter(None, (type(module).__name__, name)))
    own = ", ".join(f"{one}={_text(value)}" for one, value in module._own_settings().items())
    warnings.warn(
        f"the weights for {whose} do not record their settings, because another library or an older relpos saved "
        f"them; here the settings are {own}. Check them, here and in other layers, and "
        "save the weights again.",
        stacklevel=2,
    )


def plain(value: Any) -> Any:
    """A setting as JSON gives it back; equal numbers are equal texts."""
    if isinstance(value, tuple | list):
        return [plain(one) for one in value]
    if value is None or isinstance(value, str | bool):
        return value
    if isinstance(value, dict):
        return {str(name): plain(one) for name, one in value.items()}
    if hasattr(value, "tolist"):  # of NumPy or PyTorch
        return plain(value.tolist())
    if isinstance(value, int | float):
        return int(value) if float(value).is_integer() and abs(value) < 2**53 else float(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {type(value).__name__: fields}
    return {"function": getattr(value, "__qualname__", type(value).__name__)}


def encoded(settings: Settings) -> Tensor:
    """Settings as a state dict holds them: bytes, so that every format of tensors takes them."""
    text = json.dumps({"settings": settings, "version": VERSION}, separators=(",", ":"))
    return torch.tensor(list(text.encode("ascii")), dtype=torch.uint8, device="cpu")


def decoded(state: Any, name: str) -> Settings:
    """The settings of an entry of a state dict, whatever dtype it was cast to."""
    if not isinstance(state, Tensor):
        fail(f"the settings of {name} as a tensor of bytes", shape_of(state), "Load a state dict of relpos unchanged.")
    try:
        whole = state.detach()
        whole = whole.round() if whole.is_floating_point() else whole  # a mean of several weights
        found = json.loads(bytes(whole.to("cpu", torch.uint8).tolist()))
        version, settings = found["version"], found["settings"]
        if not isinstance(version, int) or not isinstance(settings, dict):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        fail(f"the settings of {name} that relpos saved", shape_of(state), "The weights are damaged: load others.")
    if version > VERSION:
        wanted = f"the settings of {name} in version {VERSION}, as this relpos writes them"
        fail(wanted, f"version {version}", "Load the weights with the relpos that saved them, or a newer one.")
    return settings


def _text(value: Any) -> str:
    """A plain setting as a person would write it."""
    if isinstance(value, dict) and len(value) == 1:
        ((name, fields),) = value.items()
        if not isinstance(fields, dict):
            return str(fields)
        return f"{name}({', '.join(f'{key}={_text(one)}' for key, one in fields.items() if one is not None)})"
    text = f"({', '.join(map(_text, value))})" if isinstance(value, list) else repr(value)
    return text if len(text) <= _LETTERS else text[: _LETTERS - 3] + "..."


def is_settings(name: str) -> bool:
    """Whether an entry of a state dict holds settings and no weight."""
    return name.rpartition(".")[2] == ENTRY


def with_settings(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights, with the model's own settings for missing ones, which are known from elsewhere to be equal."""
    return {**{name: x for name, x in model.state_dict().items() if is_settings(name)}, **weights}


def require_settings(model: nn.Module, weights: Mapping[str, Tensor], *, known: bool = False) -> None:
    """Compare all settings that come with a model's weights, before any is loaded.

    Args:
        known: whether missing settings are known from elsewhere, so that they need no warning.

    Raises:
        ValueError: they differ.
    """
    load = object()
    for name, module in model.named_modules():
        if not isinstance(module, SavesSettings):
            continue
        found = weights.get(f"{name}.{ENTRY}" if name else ENTRY)
        if found is None and module._has_entry() and module._expects_entry and not known:
            warn_without_settings(module, name, load)
        if found is not None:
            module._require_equal(found, name)
