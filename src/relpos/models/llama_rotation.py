"""The rotation in a configuration of transformers' Llama, as a `RotaryChoice`.

    rope_parameters   transformers 5: "rope_type", "rope_theta" and the settings of that type
    rope_scaling      earlier: the same under "type" or "rope_type", with `rope_theta` beside it; overrides the former

Settings and their defaults are those of transformers 5 (`modeling_rope_utils`). An unknown type is refused: with
another type, weights would load without an error and rotate by angles they were not trained with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from relpos.core.checks import fail, without_remedy
from relpos.models.positions import RotaryChoice
from relpos.position import DynamicNTK, LinearScaling, Llama3Scaling, LongRoPE, ProportionalScaling, YaRN
from relpos.position.scaling import RotaryScaling

_TYPES = ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional")


def llama_rotation(config: Mapping[str, Any]) -> RotaryChoice:
    """The rotation of a Llama.

    Raises:
        ValueError: relpos does not have it.
        KeyError: a setting of its type is missing.
    """
    rope = _settings(config)
    base = float(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    kind = _kind(rope)
    if kind not in _TYPES:
        remedy = "relpos.LanguageModel has no other: with other angles the weights compute nonsense."
        fail(f"a Llama whose rope_type is {', '.join(_TYPES[:-1])} or {_TYPES[-1]}", repr(kind), remedy)
    try:
        return RotaryChoice(base, _scaling(kind, rope, config))
    except ValueError as error:
        came, remedy = f"{kind!r} ({without_remedy(error)})", "relpos.LanguageModel has no other."
        raise ValueError(f"expected a rotation whose settings are known here; got {came}. {remedy}") from None


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The rotation's settings; raises if Llama does not have such a rotation."""
    rope: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if nested := [name for name, value in rope.items() if isinstance(value, Mapping)]:
        remedy = "relpos.LanguageModel has the same rotation in every layer."
        fail("a Llama with one rotation for all layers", ", ".join(nested), remedy)
    part = _part(rope, config)
    if part is not None and part != 1 and _kind(rope) != "proportional":
        remedy = "transformers' own Llama does not compute it: it rotates whole heads anyway, or fails."
        fail("a Llama with partial_rotary_factor = 1.0", repr(part), remedy)
    return rope


def _kind(rope: Mapping[str, Any]) -> Any:
    return rope.get("rope_type", rope.get("type", "default"))


def _part(rope: Mapping[str, Any], config: Mapping[str, Any]) -> Any:
    return rope.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _scaling(kind: str, rope: Mapping[str, Any], config: Mapping[str, Any]) -> RotaryScaling | None:
    longest = config["max_position_embeddings"]
    told = rope.get("original_max_position_embeddings", longest)
    trained = config.get("original_max_position_embeddings", told)
    match kind:
        case "linear":
            return LinearScaling(rope["factor"])
        case "dynamic":  # grows from the longest text; ignores the original length
            return DynamicNTK(rope["factor"], longest)
        case "llama3":
            return Llama3Scaling(rope["factor"], trained, rope["low_freq_factor"], rope["high_freq_factor"])
        case "proportional":  # Gemma 4's, which transformers' Llama computes too
            part = _part(rope, config)
            return ProportionalScaling(1.0 if part is None else part, rope.get("factor", 1.0))
        case "yarn":
            factor = _factor(rope["factor"], longest, trained)
            fast, slow = rope.get("beta_fast") or 32.0, rope.get("beta_slow") or 1.0
            return YaRN(factor, trained, fast, slow, _magnitude(rope, factor), bool(rope.get("truncate", True)))
        case "longrope":
            factor = _factor(rope.get("factor"), longest, trained)
            short, long = tuple(rope["short_factor"]), tuple(rope["long_factor"])
            return LongRoPE(short, long, trained, factor, rope.get("attention_factor"))
    return None


def _factor(own: Any, longest: int, trained: int) -> Any:
    """The given factor, or the longest context divided by the trained one."""
    return longest / trained if own is None else own


def _magnitude(rope: Mapping[str, Any], factor: float) -> Any:
    """YaRN's magnitude, or None for the default: `attention_factor`, or from DeepSeek's two numbers if both are
    given."""
    above, below = rope.get("mscale"), rope.get("mscale_all_dim")
    if rope.get("attention_factor") is not None or not (above and below):
        return rope.get("attention_factor")
    grown = math.log(factor) if factor > 1 else 0.0
    return (0.1 * above * grown + 1.0) / (0.1 * below * grown + 1.0)
