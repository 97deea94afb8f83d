"""Layers of attention that are told of position alike: what a family says of them, and where their mechanisms are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from relpos.adapters.kinds import path_of
from relpos.adapters.replacement.placed import CHILD, Placed, ReplacedPositions
from relpos.adapters.retrofitted import is_swapped, published_class
from relpos.core import Coordinates, Grid, Sequence
from relpos.core.checks import fail
from relpos.position import Site


@dataclass(frozen=True)
class Own:
    """What a model knows of position itself.

    Attributes:
        name: of the module or parameter that says it, in the module that holds the stack.
        what: in words, "absolute embedding of 197 positions".
        parameters: names in that module of what would be trained, and is not while it is off.
    """

    name: str
    what: str
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True)
class Stack:
    """Layers that are told of position alike.

    Attributes:
        name: of the module that holds them, in the model.
        holder: that module.
        site: where a mechanism is to serve.
        layers: the attention modules, in order.
        mixin: what is put in front of each.
        own: what of position is switched off.
        tokens: modules through which tokens pass on their way in, and what is put in front of each; none where a
            mechanism cannot add anything to tokens.
    """

    name: str
    holder: nn.Module
    site: Site
    layers: tuple[nn.Module, ...]
    mixin: type[Placed]
    own: tuple[Own, ...]
    tokens: tuple[tuple[nn.Module, type[Placed]], ...] = ()

    def path(self, name: str) -> str:
        """A name in the holder as one in the model."""
        return ".".join(part for part in (self.name, name) if part)


@dataclass(frozen=True)
class Given:
    """What a caller says of where tokens are: coordinates, and whether a query sees only what comes before it."""

    coordinates: Coordinates | None = None
    causal: bool | None = None

    def grid(self, own: Grid) -> Grid:
        """The grid of a model, which nobody has to give."""
        if self.coordinates is not None and self.coordinates != own:
            fail(f"no coordinates, or the model's own {own}", repr(self.coordinates), "Leave coordinates out.")
        return own

    def sequence(self, longest: int) -> Sequence:
        """The longest text, of which the model has its own idea."""
        given = Sequence(longest) if self.coordinates is None else self.coordinates
        if not isinstance(given, Sequence) or given.prefix or given.start:
            fail("coordinates of a text, Sequence(length)", repr(given), "Leave coordinates out.")
        return given


def require_class(module: Any, path: str) -> Any:
    """The module, if its class is the one of this full name.

    Raises:
        ValueError: it is another.
    """
    if path_of(type(module)) != path:
        came = path_of(published_class(module)) if is_swapped(module) else path_of(type(module))
        fail(f"layers of {path}", came, "Other kinds of attention are not served.")
    return module


def holders(model: nn.Module) -> list[nn.Module]:
    """The modules of a model that hold mechanisms which `replace_position` has put there."""
    return [one for one in model.modules() if _has_positions(one)]


def _has_positions(holder: nn.Module) -> bool:
    """Whether a module's child is what `replace_position` made, or wraps that."""
    child = holder._modules.get(CHILD)
    return child is not None and any(isinstance(one, ReplacedPositions) for one in child.modules())


def require_unwrapped(model: nn.Module) -> None:
    """Raise where something, such as an adapter of PEFT, has been put around the mechanisms."""
    for holder in holders(model):
        child = holder._modules[CHILD]
        if not isinstance(child, ReplacedPositions):
            remedy = "Take the adapter off first: model.merge_and_unload() or model.unload() of PEFT."
            fail("positions that nothing is put around", type(child).__name__, remedy)


def take_out(model: nn.Module) -> None:
    """Remove the mechanisms that `replace_position` has put into a model, and let its own position learn as before."""
    for holder in holders(model):
        positions = holder._modules.pop(CHILD)
        assert isinstance(positions, ReplacedPositions)
        for name in positions.frozen:
            holder.get_parameter(name).requires_grad_(True)
