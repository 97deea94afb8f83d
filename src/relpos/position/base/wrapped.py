"""What a mechanism answers, wrapped or not: a wrapper, such as PEFT's, may not hand on all attributes."""

from __future__ import annotations

from torch import nn

from relpos.position.base.mechanism import Mechanism


def is_mechanism(x: object) -> bool:
    """Whether `x` says terms: a mechanism, or a module that PEFT, say, has put around one.

    Such a wrapper may lack all else that a mechanism has; the functions below then return the usual answer.
    """
    return isinstance(x, nn.Module) and callable(getattr(x, "terms", None))


def position_parameters(model: nn.Module) -> set[nn.Parameter]:
    """What describes position in a model: all that mechanisms own, and what its `own_position` names."""
    found = {one for module in model.modules() if is_mechanism(module) for one in module.parameters()}
    return found | {model.get_parameter(name) for name in getattr(model, "own_position", ())}


def parts_of(mechanism: Mechanism) -> list[Mechanism]:
    """The mechanisms that it is a sum of. A wrapper is one: what it holds would answer without it."""
    return mechanism.parts() if isinstance(mechanism, Mechanism) else [mechanism]


def acts_on_tokens(part: Mechanism) -> bool:
    """Whether a mechanism, wrapped or not, embeds tokens."""
    return bool(getattr(part, "acts_on_tokens", False))


def acts_in_attention(part: Mechanism) -> bool:
    """Whether the terms of a mechanism, wrapped or not, say anything."""
    return bool(getattr(part, "acts_in_attention", True))


def growth_of(part: Mechanism) -> tuple[str, ...]:
    """The rules by which a mechanism, wrapped or not, grows."""
    return tuple(getattr(part, "growth", ()))
