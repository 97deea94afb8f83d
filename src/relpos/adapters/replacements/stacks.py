"""Attention layers that get position in the same way: how a family describes them, and where their mechanisms are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from relpos.adapters.common.kinds import path_of
from relpos.adapters.common.retrofitted import is_swapped, published_class
from relpos.adapters.replacements.repositioned import CHILD, ReplacedPositions, Repositioned
from relpos.core import Coordinates, Grid, Sequence
from relpos.core.checks import fail
from relpos.position import Site


@dataclass(frozen=True)
class Own:
    """A position mechanism of the model itself.

    Attributes:
        name: of its module or parameter, in the module that holds the stack.
        what: in words, such as "absolute embedding of 197 positions".
        parameters: names in that module of its parameters, which are not trained while it is off.
    """

    name: str
    what: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Layers that get position in the same way.

    Attributes:
        name: of the module that holds them, in the model.
        holder: that module.
        site: the `Site` that mechanisms are built for.
        layers: the attention modules, in order.
        mixin: the class put in front of each layer's class.
        own: the model's own position, which is switched off.
        tokens: modules through which tokens enter, and the mixin for each; empty if a mechanism cannot add to tokens.
        others: further modules whose class changes, and the mixin for each.
    """

    name: str
    holder: nn.Module
    site: Site
    layers: tuple[nn.Module, ...]
    mixin: type[Repositioned]
    own: tuple[Own, ...]
    tokens: tuple[tuple[nn.Module, type[Repositioned]], ...] = ()
    others: tuple[tuple[nn.Module, type[Repositioned]], ...] = ()

    def path(self, name: str) -> str:
        """A name in the holder as one in the model."""
        return ".".join(part for part in (self.name, name) if part)


@dataclass(frozen=True)
class Given:
    """The caller's arguments: coordinates, and whether a query attends only to earlier tokens."""

    coordinates: Coordinates | None = None
    causal: bool | None = None

    def grid(self, own: Grid) -> Grid:
        """The model's own grid; raises if the caller gives another."""
        if self.coordinates is not None and self.coordinates != own:
            fail(f"no coordinates, or the model's own {own}", repr(self.coordinates), "Leave coordinates out.")
        return own

    def sequence(self, longest: int) -> Sequence:
        """The longest text: the caller's coordinates, or the model's own length."""
        given = Sequence(longest) if self.coordinates is None else self.coordinates
        if not isinstance(given, Sequence) or given.prefix or given.start:
            fail("coordinates of a text, Sequence(length)", repr(given), "Leave coordinates out.")
        return given


def require_class(module: Any, path: str) -> Any:
    """The module, if its class has this full name.

    Raises:
        ValueError: it has another class.
    """
    if path_of(type(module)) != path:
        came = path_of(published_class(module)) if is_swapped(module) else path_of(type(module))
        fail(f"layers of {path}", came, "Other kinds of attention are not supported.")
    return module


def holders(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold mechanisms from `replace_position`."""
    return [one for one in model.modules() if _has_positions(one)]


def _has_positions(holder: nn.Module) -> bool:
    """Whether a module's child is made by `replace_position`, or wraps such a child."""
    child = holder._modules.get(CHILD)
    return child is not None and any(isinstance(one, ReplacedPositions) for one in child.modules())


def require_unwrapped(model: nn.Module) -> None:
    """Raise if something, such as a PEFT adapter, wraps the mechanisms."""
    for holder in holders(model):
        child = holder._modules[CHILD]
        if not isinstance(child, ReplacedPositions):
            remedy = "Take the adapter off first: model.merge_and_unload() or model.unload() of PEFT."
            fail("positions without a wrapper", type(child).__name__, remedy)


def take_out(model: nn.Module) -> None:
    """Remove the mechanisms of `replace_position` from a model, and make its own position trainable as before."""
    for holder in holders(model):
        positions = holder._modules.pop(CHILD)
        assert isinstance(positions, ReplacedPositions)
        for name in positions.frozen:
            holder.get_parameter(name).requires_grad_(True)
