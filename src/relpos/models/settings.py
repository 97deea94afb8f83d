"""A model's arguments to and from plain JSON values, and from other libraries' configurations.

A position that is a function cannot be saved: it becomes {"function": its name}, and saving the model raises.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from relpos.core.checks import fail, require_choice
from relpos.models.llama_rotation import llama_rotation
from relpos.models.positions import RotaryChoice
from relpos.position import (
    ClippedScaling,
    DynamicNTK,
    LinearScaling,
    Llama3Scaling,
    LongRoPE,
    NTKScaling,
    ProportionalScaling,
    ResonanceScaling,
    YaRN,
)
from relpos.position.scaling import RotaryScaling

ModelArguments = dict[str, Any]
"""Arguments of a model by name, as plain values."""
_SCALINGS = {
    one.__name__: one
    for one in (
        ClippedScaling, DynamicNTK, LinearScaling, Llama3Scaling, LongRoPE, NTKScaling, ProportionalScaling,
        ResonanceScaling, YaRN,
    )
}  # fmt: skip
_ROTARY = RotaryChoice.__name__


def as_json(given: Mapping[str, Any]) -> ModelArguments:
    """The arguments of a model, as plain values."""
    return {name: _plain(value) for name, value in given.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    if isinstance(value, RotaryChoice):
        scaling = _plain(value.scaling)
        if isinstance(scaling, dict) and "function" in scaling:
            return scaling
        return {_ROTARY: {"base": value.base, "scaling": scaling}}
    if type(value) in _SCALINGS.values():
        numbers = {one.name: _plain(getattr(value, one.name)) for one in fields(value)}
        own = numbers.get("scaling")
        return own if isinstance(own, dict) and "function" in own else {type(value).__name__: numbers}
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return {"function": getattr(value, "__name__", type(value).__name__)} if callable(value) else value


def as_arguments(plain: Mapping[str, Any]) -> ModelArguments:
    """Plain values as a constructor takes them: lists are tuples."""
    arguments = {name: _tuples(value) for name, value in plain.items()}
    if isinstance(position := arguments.get("position"), dict):
        arguments["position"] = _rotary(position)
    elif isinstance(position, tuple):
        arguments["position"] = tuple(_rotary(one) if isinstance(one, dict) else one for one in position)
    return arguments


def _tuples(value: Any) -> Any:
    return tuple(_tuples(one) for one in value) if isinstance(value, list) else value


def _rotary(plain: Mapping[str, Any]) -> RotaryChoice:
    if set(plain) != {_ROTARY} or not isinstance(plain[_ROTARY], dict):
        fail(f"a position by name or a {_ROTARY}", str(dict(plain))[:100], "Save the model again.")
    settings = dict(plain[_ROTARY])
    scaling = _scaling(settings.pop("scaling", None))
    return RotaryChoice(**settings, scaling=scaling)


def _scaling(plain: Any) -> RotaryScaling | None:
    if plain is None:
        return None
    ((name, numbers),) = plain.items()
    require_choice(name, "scaling", tuple(_SCALINGS))
    own: dict[str, Any] = {
        key: _scaling(value) if key == "scaling" else _tuples(value) for key, value in numbers.items()
    }
    made: RotaryScaling = _SCALINGS[name](**own)
    return made


def llama_arguments(config: Mapping[str, Any]) -> ModelArguments:
    """The arguments of the `LanguageModel` equal to the Llama of a transformers configuration.

    Raises:
        ValueError: it has a setting that the model does not support.
    """
    width, heads = config["hidden_size"], config["num_attention_heads"]
    rotation = llama_rotation(config)
    wanted = {
        "heads as wide as hidden_size / num_attention_heads": (
            config.get("head_dim") or width // heads,
            width // heads,
        ),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "mlp_bias": (config.get("mlp_bias", False), False),
    }
    for name, (came, ours) in wanted.items():
        if came != ours:
            fail(f"a Llama with {name} = {ours!r}", repr(came), "relpos.LanguageModel has no other.")
    return {
        "vocab_size": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "embed_dim": width,
        "depth": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "mlp_hidden": config["intermediate_size"],
        "norm_eps": config.get("rms_norm_eps", 1e-6),
        "qkv_bias": config.get("attention_bias", False),
        "tie_embeddings": config.get("tie_word_embeddings", False),
        "attn_drop_rate": config.get("attention_dropout") or 0.0,
        "embed_scale": 1.0,
        "position": rotation,
    }


_NOT_IN_SHAPES = (
    "num_heads", "num_kv_heads", "norm", "norm_eps", "qk_norm", "mlp", "position", "attention", "version",
    "window_size", "global_pool", "fc_norm", "embed_scale", "window",
)  # fmt: skip
"""Arguments that change the result but not the shapes of weights."""


def unlike(own: ModelArguments, theirs: ModelArguments) -> list[str]:
    """The arguments of `_NOT_IN_SHAPES` in which two models differ, each in a few words."""
    ours, others = _usual(own), _usual(theirs)
    shared = [name for name in _NOT_IN_SHAPES if name in ours and name in others]
    return [f"{name} {others[name]!r}, not {ours[name]!r}" for name in shared if ours[name] != others[name]]


def _usual(arguments: ModelArguments) -> ModelArguments:
    """Arguments with defaults filled in, and equal rotations written equally."""
    found = dict(arguments)
    if found.get("num_kv_heads") is None and "num_kv_heads" in found:
        found["num_kv_heads"] = found.get("num_heads")
    if found.get("norm_eps") is None and "norm_eps" in found:
        found["norm_eps"] = 1e-5 if found.get("norm", "layernorm") == "layernorm" else 1e-6
    found.setdefault("window", None)  # of folders older than windows, and of Llama
    if found.get("position") == "rotary_1d":
        found["position"] = _plain(RotaryChoice())
    return found
