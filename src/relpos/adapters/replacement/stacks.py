"""Layers of attention that are told of position alike, found in others' models.

A family is a file with a dictionary `STACKS`: the full name of a class, exactly, to a function that says what stacks a
module of this class holds. It imports nothing of the other library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from torch import nn

from relpos.adapters.kinds import path_of
from relpos.adapters.replacement.positioned import Positioned, ReplacedPositions
from relpos.adapters.retrofitted import is_swapped, published_class
from relpos.core import Coordinates, Grid, Sequence
from relpos.core.checks import fail, shape_of
from relpos.position import Site

CHILD = "positions"
"""What the mechanisms are called in the module that holds a stack."""


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
    mixin: type[Positioned]
    own: tuple[Own, ...]
    tokens: tuple[tuple[nn.Module, type[Positioned]], ...] = ()

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


Finder = Callable[[str, Any, Given], Iterator[Stack]]
FAMILIES = ("vit", "beit", "swin", "bert", "gpt2", "llama", "t5", "torch_attention")


@cache
def _finders() -> dict[str, Finder]:
    """The functions of all families, by class."""
    return {
        path: finder
        for family in FAMILIES
        for path, finder in import_module(f"relpos.adapters.replacement.{family}").STACKS.items()
    }


def stacks_of(model: nn.Module, given: Given) -> list[Stack]:
    """The stacks of a model.

    Raises:
        ValueError: there is none, or one that cannot be served.
    """
    found = [
        stack
        for name, module in model.named_modules()
        if (finder := _finders().get(path_of(type(module)))) is not None
        for stack in finder(name, module, given)
    ]
    found = found or _alone(model, given)
    if not found:
        known = ", ".join(sorted({".".join((path.split(".")[0], path.split(".")[-1])) for path in _finders()}))
        fail("a model whose attention can be found", type(model).__name__, f"Known are {known}, nn.MultiheadAttention.")
    for stack in found:
        if given.causal is not None and stack.site.causal != given.causal:
            came = f"causal={given.causal} for {type(stack.holder).__name__}, which has {stack.site.causal}"
            fail("causal as the model has it", came, "Leave causal out.")
        _require_free(stack)
    return found


def _alone(model: nn.Module, given: Given) -> list[Stack]:
    """PyTorch's layers outside any encoder, in a module of the user's own."""
    found: list[Stack] = import_module("relpos.adapters.replacement.torch_attention").layers_alone(model, given)
    return found


def _require_free(stack: Stack) -> None:
    """Raise where something is in the way."""
    if hasattr(stack.holder, CHILD):
        came = f"{shape_of(stack.holder)[:60]}, which has one"
        fail(f"a model without a child named {CHILD!r}", came, "Rename it.")
    for module in (*stack.layers, *(one for one, _ in stack.tokens)):
        if "forward" in vars(module):
            came = f"{type(module).__name__} with one"
            fail("modules without a forward of their own", came, "Replace before accelerate's hooks.")


def require_class(module: Any, path: str) -> Any:
    """The module, if its class is the one of this full name.

    Raises:
        ValueError: it is another.
    """
    if path_of(type(module)) != path:
        came = path_of(published_class(module)) if is_swapped(module) else path_of(type(module))
        fail(f"layers of {path}", came, "Other kinds of attention are not served.")
    return module


def take_out(model: nn.Module) -> None:
    """Remove the mechanisms that `replace_position` has put into a model, and let its own position learn as before."""
    for holder in list(model.modules()):
        positions = holder._modules.get(CHILD)
        if isinstance(positions, ReplacedPositions):
            del holder._modules[CHILD]
            for name in positions.frozen:
                holder.get_parameter(name).requires_grad_(True)
