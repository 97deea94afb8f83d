"""A module of another library whose class is swapped: its own forward or relpos's, chosen by the size of the call.

A mixin is put in front of a module's own class, and the module is given the class that results. Nothing else about it
changes: `isinstance`, its class's name, parameters, buffers, hooks and `state_dict` stay, and so do `deepcopy`, pickle
and `save_pretrained`. `restored` gives the class back.

    class T5Attention(Retrofitted):          mixin: overrides what computes the position
        def compute_bias(self, ...):
            if not self.takes(queries, keys):
                return super().compute_bias(...)     the published method
            ...                                      relpos

What is handed on to a layer in relpos's form can be written out as published, so that each module decides for itself,
and a call that runs as published whatever its size needs no more than `runs_as_published`. While a program is recorded
the published methods run in place of the mixin's, which so meet no size that is a symbol.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import cache
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from relpos.adapters import interface
from relpos.adapters.recording import recorded, unless_recorded
from relpos.core import keep
from relpos.core.cache import TOKEN_BYTES, state_of
from relpos.engines import attention

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

_ROUTE = "_relpos_route"

NEVER = 2**20
"""A border beyond all inputs: wherever it was timed, the published method was faster. `border=` saves its memory."""


@dataclass
class Route:
    """Which calls of a module relpos computes: those of at least `border` tokens.

    Attributes:
        border: tokens, the geometric mean of queries and keys; None for the mixin's own, measured border.
        forced: take every call of more than one query, as a verification does.
        taken: calls that relpos computed while forced.
        switched: whether the module's `config` selects the attention function, and ours is in front of it.
        paused: one entry a call that is under way within `paused`; of threads none is lost.
        mechanism: what the mixin's `mechanism` made for the module; it reads the module's own weights by `terms_from`.
    """

    border: int | None = None
    forced: bool = False
    taken: int = 0
    switched: bool = False
    paused: list[None] = field(default_factory=list)
    mechanism: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)


class Retrofitted(nn.Module):
    """What a mixin has in common with others. Its class attributes are measured, see `docs/retrofit.md`."""

    border: ClassVar[int] = 512
    """Tokens from which relpos is no slower in a forward pass without gradients."""

    training_border: ClassVar[int] = 512
    """Tokens from which it is no slower in a training step."""

    also_recorded: ClassVar[bool] = False
    """Whether the mixin's methods run while a program is recorded, too: they ask `takes`, or nothing is published."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what a published module has

    def mechanism(self) -> Any:
        """The position as mechanisms of relpos for the settings of the module; made once, on the meta device."""
        return None

    @property
    def made(self) -> Any:
        """What `mechanism` returned."""
        return self.__dict__[_ROUTE].mechanism

    def takes(self, queries: int, keys: int) -> bool:
        """Whether relpos computes a call of this many tokens. One query is always left to the published method."""
        route: Route = self.__dict__[_ROUTE]
        if runs_as_published() or queries < 2 or keys < 2 or route.paused:
            return False
        if route.forced:
            return True
        own = self.training_border if torch.is_grad_enabled() else self.border
        border = own if route.border is None else route.border
        return queries * keys >= border * border

    def count(self) -> None:
        """Say that relpos computes a call; `attend` says it by itself."""
        route: Route = self.__dict__[_ROUTE]
        if route.forced:
            route.taken += 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        """`relpos.attention`, `[B, H, N, V]`, counted while a verification forces it."""
        self.count()
        out = attention(q, k, v, **more)
        assert isinstance(out, Tensor)
        return out

    def kept(self, key: Hashable, device: torch.device, make: Callable[[], T], tokens: int) -> T:
        """What `make` returns, made once: what follows from shapes and plain settings alone, all in the key.

        Args:
            tokens: of the lines that are made, queries and keys; for very many they are made anew.
        """
        return keep(self.__dict__[_ROUTE], (key, device), device, make, lambda: TOKEN_BYTES * tokens)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)  # by the class's name it would be the published class
        mixin, published = type(self).__bases__
        return _empty, (mixin, published), *reduced[2:]


def runs_as_published() -> bool:
    """Whether the call under way runs as published, whatever its size: a program is recorded from it, or its caller
    waits for attention weights."""
    return recorded() or interface.weights_are_recorded()


class paused:
    """Let the retrofitted modules within a module run as published, where it calls them without the reason."""

    def __init__(self, module: nn.Module) -> None:
        self.routes = [route(one) for one in module.modules() if is_swapped(one)]

    def __enter__(self) -> None:
        for one in self.routes:
            one.paused.append(None)

    def __exit__(self, *error: object) -> None:
        for one in self.routes:
            one.paused.pop()


@cache
def _swapped_class(mixin: Any, published: Any) -> type[nn.Module]:
    names = {name: getattr(published, name) for name in ("__module__", "__qualname__", "__doc__")}
    # what torch.jit.script reads: annotations of a class alone, and properties of all its bases
    names["__annotations__"] = dict(vars(published).get("__annotations__", {}))
    ours = [name for name, _ in inspect.getmembers(mixin, lambda one: isinstance(one, property))]
    names["__jit_unused_properties__"] = [*getattr(published, "__jit_unused_properties__", ()), *ours]
    swapped: Any = type(published.__name__, (mixin, published), names)
    for name in _overridden(mixin, published):
        setattr(swapped, name, unless_recorded(swapped, name, getattr(published, name)))
    made: type[nn.Module] = swapped
    return made


def _overridden(mixin: type[Retrofitted], published: type[nn.Module]) -> set[str]:
    """The methods of a published class that a mixin stands in front of."""
    bases = mixin.__mro__[: mixin.__mro__.index(Retrofitted)]
    own = {name for base in bases for name, one in vars(base).items() if isinstance(one, FunctionType)}
    kept = {name for name in own if name == "forward" or not hasattr(nn.Module, name)}
    return {name for name in kept if isinstance(getattr(published, name, None), FunctionType)}


def _empty(mixin: Any, published: Any) -> nn.Module:
    """A module without its state, for `pickle` and `deepcopy`."""
    if published.__module__.startswith("transformers."):
        interface.register()  # its configuration may name our functions, in a process that has not heard of them
    return object.__new__(_swapped_class(mixin, published))


def swap(module: nn.Module, mixin: type[Retrofitted], border: int | None = None) -> None:
    """Put the mixin in front of a module's class."""
    taken = [name for name in vars(Retrofitted) if name[0] != "_" and name in _names(module)]
    assert not taken, f"{type(module).__name__} has {', '.join(taken)} of its own"
    published: Any = type(module)
    in_front: Any = mixin
    module.__class__ = _swapped_class(in_front, published)
    assert isinstance(module, Retrofitted)
    with torch.device("meta"):  # its own parameters are never read
        module.__dict__[_ROUTE] = Route(border, mechanism=module.mechanism())


def rows_of(embedding: Any) -> Tensor:
    """All rows of an embedding. They are looked up, as the library looks them up, for an adapter (LoRA) may add to them
    and hooks may gather them."""
    weight: Tensor = embedding.weight
    rows: Tensor = embedding(torch.arange(weight.shape[0], device=weight.device))
    return rows


def _names(module: nn.Module) -> set[str]:
    """What a module's own attributes, parameters, buffers and children are called."""
    return {*vars(module), *module._parameters, *module._buffers, *module._modules}


def unswap(module: nn.Module) -> None:
    """Give a swapped module its own class again."""
    module.__class__ = published_class(module)
    module.__dict__.pop(_ROUTE, None)  # none where its mechanism could not be made


def swap_again(module: nn.Module, swapped: type[nn.Module], own: Route) -> None:
    """Undo `unswap`: give a module the class and the route that it had."""
    module.__class__ = swapped
    module.__dict__[_ROUTE] = own


def is_swapped(module: nn.Module) -> bool:
    """Whether the class of a module has been swapped."""
    return isinstance(module, Retrofitted)


def published_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module as its library has it."""
    line = (one for one in type(module).__mro__ if issubclass(one, nn.Module) and not issubclass(one, Retrofitted))
    return next(line) if is_swapped(module) else type(module)


def route(module: nn.Module) -> Route:
    """Which calls of a swapped module relpos computes."""
    found: Route = module.__dict__[_ROUTE]
    return found
