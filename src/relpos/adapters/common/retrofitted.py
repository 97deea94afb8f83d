"""A module of another library with a swapped class: each call runs its own forward or relpos's, depending on its size.

A new class is made from a mixin in front of a module's own class, and set as the module's class. Nothing else changes:
`isinstance`, the class's name, parameters, buffers, hooks and `state_dict` stay, as do `deepcopy`, pickle and
`save_pretrained`. `unswap` sets the own class again.

    class T5Attention(Retrofitted):          mixin: overrides what computes the position
        def compute_bias(self, ...):
            if not self.takes(queries, keys):
                return super().compute_bias(...)     the published method
            ...                                      relpos

A layer can expand what it gets in relpos's form to the published form, so each module decides for itself. Calls that
must run as published at any size only need `runs_as_published`. While a program is recorded, the published methods run
instead of the mixin's, so the mixins never see symbolic sizes.
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

from relpos.adapters.common import interface, sharing
from relpos.adapters.common.borders import UNTIMED_ON_GPU, Borders, kind_of
from relpos.adapters.common.recording import recorded, unless_recorded
from relpos.core import cached
from relpos.core.cache import TOKEN_BYTES, state_of
from relpos.engines import attention
from relpos.layers.context import SharedSequence

M = TypeVar("M", bound=nn.Module)
T = TypeVar("T")

_ROUTE = "_relpos_route"


@dataclass
class Route:
    """Which calls of a module relpos computes: those of at least `border` tokens.

    Attributes:
        border: tokens, the geometric mean of queries and keys; None for the mixin's, of the device.
        kind: a kind of device whose borders count; None for that of the module's weights.
        asked: pairs of each call that `takes` was asked about, while a timing wants to know; else None.
        forced: relpos computes every call of more than one query, for a verification.
        forced_calls: calls that relpos computed while forced.
        switched: whether the module's `config` is switched to our attention function.
        paused: one entry per running `paused` block; a list, because threads could lose updates of a counter.
        mechanism: the result of the mixin's `make_mechanism` for the module; its `terms_from` takes the module's own
            weights.
        shared: the sequence of which the module's tokens are a share; None for whole sequences.
    """

    border: int | None = None
    kind: str | None = None
    asked: list[int] | None = None
    forced: bool = False
    forced_calls: int = 0
    switched: bool = False
    paused: list[None] = field(default_factory=list)
    mechanism: Any = None
    shared: SharedSequence | None = None

    def __getstate__(self) -> dict[str, Any]:
        return state_of(self)


class Retrofitted(nn.Module):
    """Base of all mixins. The borders are measured, see `docs/retrofit.md`; those of a GPU are in `borders.py`."""

    border: ClassVar[int] = 512
    """Number of tokens from which relpos is not slower on a CPU in a forward pass without gradients."""

    training_border: ClassVar[int] = 512
    """Number of tokens from which it is not slower on a CPU in a training step."""

    on_gpu: ClassVar[Borders] = UNTIMED_ON_GPU
    """The borders on a GPU."""

    also_recorded: ClassVar[bool] = False
    """Whether the mixin's methods also run while a program is recorded: they call `takes`, or have no published
    version."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # attributes of the published module

    @classmethod
    def borders_on(cls, kind: str) -> Borders:
        """The borders on a kind of device. One that nobody has timed has a CPU's."""
        return cls.on_gpu if kind == "cuda" else Borders(cls.border, cls.training_border)

    def make_mechanism(self) -> Any:
        """relpos's mechanisms for the module's settings; called once, on the meta device."""
        return None

    @property
    def mechanism(self) -> Any:
        """What `make_mechanism` returned."""
        return self.__dict__[_ROUTE].mechanism

    @property
    def shared_sequence(self) -> SharedSequence | None:
        """The sequence of which the tokens are a share; `relpos.parallel.context_parallel` sets it."""
        found: SharedSequence | None = self.__dict__[_ROUTE].shared
        return found

    @shared_sequence.setter
    def shared_sequence(self, context: SharedSequence | None) -> None:
        self.__dict__[_ROUTE].shared = context

    @staticmethod
    def prepare_sharing(model: nn.Module, context: SharedSequence | None) -> None:
        """Raise unless the tokens of the model can be spread over ranks; let it refuse what a share lacks."""
        if context is not None:
            sharing.require_spreadable(model)
        sharing.guard(model, context)

    def takes(self, queries: int, keys: int) -> bool:
        """Whether relpos computes a call of this many tokens. One query always runs as published, unless ranks share
        the sequence."""
        route: Route = self.__dict__[_ROUTE]
        if route.asked is not None:
            route.asked.append(queries * keys)
        if route.shared is not None:
            sharing.require_plain(recorded(), interface.weights_are_recorded() or bool(route.paused))
            return True
        if runs_as_published() or queries < 2 or keys < 2 or route.paused:
            return False
        if route.forced:
            return True
        border = route.border
        if border is None:
            kind = kind_of(self) if route.kind is None else route.kind
            border = self.borders_on(kind).of(torch.is_grad_enabled())
        return queries * keys >= border * border

    def count(self) -> None:
        """Count a call that relpos computes, if forced; `attend` does so itself."""
        route: Route = self.__dict__[_ROUTE]
        if route.forced:
            route.forced_calls += 1

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> Tensor:
        """`relpos.attention`, `[B, H, N, V]`, with `count`."""
        self.count()
        out = attention(q, k, v, **more)
        assert isinstance(out, Tensor)
        return out

    def cached(self, key: Hashable, device: torch.device, make: Callable[[], T], tokens: int) -> T:
        """The cached result of `make`, which may depend only on shapes and plain settings, all in the key.

        Args:
            tokens: queries and keys of the result; for very many it is not cached.
        """
        return cached(self.__dict__[_ROUTE], (key, device), device, make, lambda: TOKEN_BYTES * tokens)

    def __reduce_ex__(self, protocol: Any) -> Any:
        reduced: Any = super().__reduce_ex__(protocol)  # by name, pickle would find the published class
        mixin, published = type(self).__bases__
        return _empty, (mixin, published), *reduced[2:]


def runs_as_published() -> bool:
    """Whether the current call runs as published at any size: a program is being recorded, or the caller requested
    attention weights."""
    return recorded() or interface.weights_are_recorded()


class paused:
    """Let the retrofitted modules within a module run as published, if it does not pass the reason on to them."""

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
    # for torch.jit.script: it reads annotations of the class only, and properties of all its bases
    names["__annotations__"] = dict(vars(published).get("__annotations__", {}))
    ours = [name for name, _ in inspect.getmembers(mixin, lambda one: isinstance(one, property))]
    names["__jit_unused_properties__"] = [*getattr(published, "__jit_unused_properties__", ()), *ours]
    swapped: Any = type(published.__name__, (mixin, published), names)
    for name in _overridden(mixin, published):
        setattr(swapped, name, unless_recorded(swapped, name, getattr(published, name)))
    result: type[nn.Module] = swapped
    return result


def _overridden(mixin: type[Retrofitted], published: type[nn.Module]) -> set[str]:
    """The methods of a published class that a mixin overrides."""
    bases = mixin.__mro__[: mixin.__mro__.index(Retrofitted)]
    own = {name for base in bases for name, one in vars(base).items() if isinstance(one, FunctionType)}
    methods = {name for name in own if name == "forward" or not hasattr(nn.Module, name)}
    return {name for name in methods if isinstance(getattr(published, name, None), FunctionType)}


def _empty(mixin: Any, published: Any) -> nn.Module:
    """A module without its state, for `pickle` and `deepcopy`."""
    if published.__module__.startswith("transformers."):
        interface.register()  # its configuration may name our functions before this process has registered them
    return object.__new__(_swapped_class(mixin, published))


def swap(module: nn.Module, mixin: type[Retrofitted], border: int | None = None) -> None:
    """Put the mixin in front of a module's class."""
    clashes = [name for name in vars(Retrofitted) if name[0] != "_" and name in _names(module)]
    assert not clashes, f"{type(module).__name__} already has {', '.join(clashes)}"
    published: Any = type(module)
    in_front: Any = mixin
    module.__class__ = _swapped_class(in_front, published)
    module.__dict__[_ROUTE] = Route(border)
    make_mechanism(module)


def make_mechanism(module: nn.Module) -> None:
    """Make the mechanism of a swapped module for its present settings."""
    assert isinstance(module, Retrofitted)
    with torch.device("meta"):  # its own parameters are never read
        route(module).mechanism = module.make_mechanism()


def rows_of(embedding: Any) -> Tensor:
    """All rows of an embedding, by a lookup as in the library: an adapter (LoRA) may add to them, and hooks may gather
    them."""
    weight: Tensor = embedding.weight
    rows: Tensor = embedding(torch.arange(weight.shape[0], device=weight.device))
    return rows


def _names(module: nn.Module) -> set[str]:
    """The names of a module's own attributes, parameters, buffers and children."""
    return {*vars(module), *module._parameters, *module._buffers, *module._modules}


def unswap(module: nn.Module) -> None:
    """Set a swapped module's own class again."""
    module.__class__ = published_class(module)
    module.__dict__.pop(_ROUTE, None)  # absent if its mechanism could not be made


def swap_again(module: nn.Module, swapped: type[nn.Module], own: Route) -> None:
    """Undo `unswap`: set the module's earlier class and route."""
    module.__class__ = swapped
    module.__dict__[_ROUTE] = own


def is_swapped(module: nn.Module) -> bool:
    """Whether the class of a module has been swapped."""
    return isinstance(module, Retrofitted)


def published_class(module: nn.Module) -> type[nn.Module]:
    """The class of a module in its library, whether swapped or not."""
    line = (one for one in type(module).__mro__ if issubclass(one, nn.Module) and not issubclass(one, Retrofitted))
    return next(line) if is_swapped(module) else type(module)


def route(module: nn.Module) -> Route:
    """The `Route` of a swapped module."""
    found: Route = module.__dict__[_ROUTE]
    return found
