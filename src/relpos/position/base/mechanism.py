"""What a position mechanism is, and how mechanisms are summed.

    mechanism.terms(queries, keys)                  what happens inside attention
    mechanism.terms_from(tensors, queries, keys)    the same with other numbers for its parameters
    mechanism.terms(queries, keys, states=x)        of one that is made from hidden states (`from_states.py`)
    mechanism.embed(x, coordinates)                 what is added to tokens before it (absolute mechanisms)

An author of a relative bias subclasses `OffsetBias` and writes one function, from offsets to values; see
CONTRIBUTING.md for a whole example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import NoneType
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import (
    Coordinates,
    Grid,
    Lines,
    Sequence,
    Terms,
    keep,
    lines,
    may_keep,
    require_sides,
)
from relpos.core.cache import TOKEN_BYTES, share, state_of
from relpos.core.checks import fail, require_int, shape_of
from relpos.core.private import with_tensors
from relpos.position.base.cached_terms import Held, OnceAForward, drop_once
from relpos.position.base.constructor_repr import WrittenOut
from relpos.position.base.device import META, settle
from relpos.position.base.functional import checked, twin
from relpos.position.base.saved_settings import SavesSettings, is_settings
from relpos.position.base.site import Site
from relpos.position.base.states import MayNeedStates, States, needs_states, remembers, terms_of
from relpos.position.base.trainable import Trainable


def bytes_of_lines(queries: Coordinates, keys: Coordinates | None) -> int:
    """About the memory of lines and all that is cached on them."""
    return TOKEN_BYTES * (queries.count + (queries if keys is None else keys).count)


AS_IS = "as is"
"""The growth rule of mechanisms that are defined at any coordinates and need nothing."""


class Mechanism(SavesSettings, WrittenOut, Trainable, MayNeedStates):
    """Base of all position mechanisms. On its own it says nothing.

    `terms(queries, keys)` is what it says in attention, `embed(x, coordinates)` what it adds to tokens. `a + b` is a
    sum.

    Examples:
        >>> both = relpos.RotaryEmbedding(16) + relpos.T5Bias(num_heads=2, scaled=True)
        >>> [type(term).__name__ for term in both.terms(relpos.Sequence(8))]
        ['Rotation', 'LineBias']
        >>> both.trainable = False  # freezes T5's table
    """

    _repr_html_: ClassVar[Callable[[Mechanism], str | None] | None] = None
    """How notebooks draw it: `relpos` sets what does, so that nothing here knows of drawing."""

    _held: Held | None = None  # within `relpos.decoding`, what was made of its weights

    def _raster_lines(self, queries: Coordinates, keys: Coordinates | None) -> Lines:
        """The lines as a one-axis mechanism sees the tokens, checked."""
        require_sides(queries, keys)
        return self._lines(queries.raster(), None if keys is None else keys.raster())

    def __getstate__(self) -> dict[str, Any]:
        state = state_of(self)
        drop_once(state)
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self.__dict__.pop("_kept", None)  # it may not follow from the new setting
            OnceAForward.changes += "terms" in self.__dict__
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.__dict__.pop("_kept", None)  # it may be on another device from now on
        return super()._apply(fn, recurse)

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        drop_once(replica.__dict__)
        return replica

    def _as_seen(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Coordinates, Coordinates | None]:
        """The coordinates as it sees them; raises where it cannot serve them."""
        return queries, keys

    def _lines(self, queries: Coordinates, keys: Coordinates | None = None) -> Lines:
        """`relpos.lines` as it sees them; of few regular tokens the same object in the next call, nothing checked."""
        device = self.device
        if not (isinstance(queries, (Sequence, Grid)) and isinstance(keys, (Sequence, Grid, NoneType))):
            return lines(*self._as_seen(queries, keys), device=device)
        return keep(
            self, (queries, keys, device), device, lambda: lines(*self._as_seen(queries, keys), device=device),
            lambda: bytes_of_lines(queries, keys),
        )  # fmt: skip

    @property
    def growth(self) -> tuple[str, ...]:
        """Names of the rules by which `grow` takes the mechanism to coordinates it was not built for.

        A subclass writes `growth = ("interpolated",)`.
        """
        return ()

    @classmethod
    def from_site(cls, site: Site) -> Self:
        """The mechanism built for a site with its usual settings."""
        raise NotImplementedError(f"{cls.__name__} has no from_site; build it with its constructor")

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        """What the mechanism says to attention between queries and keys (the queries themselves by default)."""
        return Terms()

    def terms_from(
        self,
        tensors: Mapping[str, Tensor],
        queries: Coordinates,
        keys: Coordinates | None = None,
        *,
        states: States | None = None,
    ) -> Terms:
        """The terms it would have if its parameters were these tensors: `terms` in functional form.

        The mechanism itself stays as it is, all the while, so that threads may share it. Gradients reach the tensors.
        It may be called inside a transform of `torch.func` and under `torch.compile`, and inside `relpos.decoding`,
        where nothing of these tensors is held.

        Args:
            tensors: by their names in `named_parameters()` (or in the state dict, where those are buffers), any of
                them: the rest are its own. Each has the shape and device of what it stands for, and any floating-point
                dtype; half precision is computed in float32, as it is in the mechanism.
            queries: coordinates of N queries, as for `terms`.
            keys: coordinates of M keys.
            states: what the queries are projected from, for a mechanism that needs them.

        Raises:
            ValueError: a name that it does not have, or what is no tensor of that shape.

        Examples:
            >>> bias = relpos.RelativePositionBias(num_heads=8, window_size=(7, 7))
            >>> table = torch.zeros(169, 8, requires_grad=True)
            >>> terms = bias.terms_from({"relative_position_bias_table": table}, relpos.Grid(7, 7))
        """
        if torch.compiler.is_compiling():  # Dynamo of torch 2.10 and 2.11 cannot read the attributes that a twin shares
            swapped = with_tensors(self, checked(self, tensors))
            if swapped is not None:
                with swapped:
                    return terms_of(self, queries, keys, states)
        return terms_of(_twin_of(self, tensors), queries, keys, states)

    def forward(self, queries: Coordinates, keys: Coordinates | None = None, *, states: States | None = None) -> Terms:
        """`terms`, for what calls modules: `torch.func.functional_call(mechanism, tensors, (queries, keys))`.

        That swaps the parameters of the mechanism itself until it returns. `terms_from` does not, and also serves
        mechanisms whose `forward` is another (that of `RelativePositionBias` is its dense bias).
        """
        return terms_of(self, queries, keys, states)

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        """Tokens with the mechanism's absolute position added; unchanged where it has none."""
        return x

    @property
    def acts_on_tokens(self) -> bool:
        """Whether `embed` does anything."""
        return type(self).embed is not Mechanism.embed

    @property
    def acts_in_attention(self) -> bool:
        """Whether `terms` says anything."""
        return type(self).terms is not Mechanism.terms

    def parts(self) -> list[Mechanism]:
        """The mechanisms this one is a sum of; itself alone where it is no sum."""
        return [self]

    def grow(self, queries: Coordinates, rule: str) -> Mechanism:
        """A copy for other coordinates, with weights of its own, by one of the rules in `growth`; this one stays.

        Where the rule is `AS_IS`, the mechanism itself.
        """
        if rule == AS_IS and AS_IS in self.growth:
            return self
        known = ", ".join(self.growth) or "none at all"
        names = " + ".join(type(part).__name__ for part in self.parts()) or type(self).__name__
        raise ValueError(
            f"expected a growth rule of {names} (it has {known}); got {rule!r}. "
            "A mechanism without one stays at the coordinates it was built for."
        )

    def extend(self, length: int) -> Mechanism:
        """A copy for sequences of `length` tokens that says on shorter ones what this mechanism says.

        Itself where it is defined at any length already.

        Raises:
            ValueError: it has no rule for longer sequences.
        """
        require_int(length, "length", at_least=1)
        if AS_IS not in self.growth:
            fail("a mechanism that is defined on longer sequences", type(self).__name__, "Build it for the longest.")
        return self

    def __add__(self, other: Mechanism) -> Sum:
        if not is_mechanism(other):
            fail("a mechanism on both sides of +", shape_of(other), "Build the mechanism first.")
        return Sum([self, other])


def _twin_of(mechanism: Mechanism, tensors: Mapping[str, Tensor]) -> Mechanism:
    """The mechanism with these tensors. It shares what is kept, which follows from shapes, and not what is held."""
    if isinstance(tensors, Mapping):  # a state dict has settings too
        tensors = {name: x for name, x in tensors.items() if not is_settings(str(name))}
    if may_keep(mechanism.device):
        for part in _mechanisms_in(mechanism):
            share(part)
    other = twin(mechanism, tensors)
    structural = tensors.keys() <= dict(mechanism.named_parameters()).keys()
    device = next((x.device for x in tensors.values() if not x.is_meta), META)
    for part in _mechanisms_in(other):
        part.settle(device)
        part.__dict__.pop("_held", None)
        drop_once(part.__dict__)
        if not structural:  # what is kept may follow from a buffer
            part.__dict__.pop("_kept", None)
    return other


def _mechanisms_in(mechanism: Mechanism) -> Iterator[Mechanism]:
    """Itself and the mechanisms inside."""
    return (part for part in mechanism.modules() if isinstance(part, Mechanism))


def is_mechanism(x: object) -> bool:
    """Whether `x` says terms: a mechanism, or a module that PEFT, say, has put around one.

    Such a wrapper may lack all else that a mechanism has; the functions below then say what is usual.
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


class Sum(Mechanism):
    """Several mechanisms together: terms are joined, embeddings applied in order.

    It grows by any rule that one of its parts has, provided that all have one: a part without that rule takes its own
    first. `AS_IS` is left out where some part lacks it.
    """

    def __init__(self, mechanisms: Iterable[Mechanism]) -> None:
        super().__init__()
        self.mechanisms = nn.ModuleList(part for mechanism in mechanisms for part in parts_of(mechanism))

    def __repr__(self) -> str:
        parts = [repr(part) for part in self.mechanisms]
        return " + ".join(parts) if len(parts) > 1 else f"Sum([{', '.join(parts)}])"

    def parts(self) -> list[Mechanism]:
        for part in self.mechanisms:
            if not is_mechanism(part):
                came, remedy = type(part).__name__, "What wraps a mechanism has to hand its terms on."
                fail("each part of a sum to say terms(queries, keys)", came, remedy)
        return list(self.mechanisms)  # type: ignore[arg-type]  # mechanisms, or wrappers of some

    @property
    def device(self) -> torch.device:
        """The device of its parts, the first that is not to be settled yet."""
        found = [part.device for part in self.parts() if hasattr(part, "device")]
        return next((one for one in found if one != META), found[0] if found else super().device)

    def settle(self, device: torch.device) -> None:
        super().settle(device)
        for part in self.mechanisms:
            settle(part, device)

    @property
    def growth(self) -> tuple[str, ...]:
        """The rules of all parts, in their order; none where a part has none."""
        each = [growth_of(part) for part in self.parts()]
        if not all(each):
            return ()
        rules = dict.fromkeys(rule for own in each for rule in own)
        if not all(AS_IS in own for own in each):
            rules.pop(AS_IS, None)
        return tuple(rules) or (AS_IS,)

    def grow(self, queries: Coordinates, rule: str) -> Mechanism:
        if rule not in self.growth:
            return super().grow(queries, rule)
        return Sum(grow_part(part, queries, rule) for part in self.parts())

    def extend(self, length: int) -> Mechanism:
        """The sum of its parts, each for sequences of `length` tokens."""
        return Sum(_extend_part(part, length) for part in self.parts())

    @property
    def acts_on_tokens(self) -> bool:
        return any(acts_on_tokens(part) for part in self.parts())

    @property
    def acts_in_attention(self) -> bool:
        return any(acts_in_attention(part) for part in self.parts())

    @property
    def needs_states(self) -> bool:
        return any(needs_states(part) for part in self.parts())

    @property
    def remembers(self) -> int:
        return sum(remembers(part) for part in self.parts())

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N r"]:
        """What keys with these states contribute to its parts, one after the other."""
        return torch.cat([part.remembered(states) for part in self.parts() if remembers(part)], dim=-1)  # type: ignore[operator]

    def terms(
        self,
        queries: Coordinates,
        keys: Coordinates | None = None,
        *,
        states: States | None = None,
        remembered: Float[Tensor, "B H M r"] | None = None,
    ) -> Terms:
        """The terms of all parts; states go to those that need them, what is remembered to those that did."""
        joined, parts = Terms(), self.parts()
        widths = [remembers(part) for part in parts]
        kept = [None] * len(parts) if remembered is None else remembered.split(widths, dim=-1)
        for part, width, own in zip(parts, widths, kept, strict=True):
            joined = joined + terms_of(part, queries, keys, states, own if width else None)
        return joined

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        for part in self.parts():
            x = part.embed(x, coordinates) if acts_on_tokens(part) else x
        return x


def grow_part(part: Mechanism, queries: Coordinates, rule: str) -> Mechanism:
    """A part of a sum, grown by a rule of the sum: by its own first rule where it does not have that one."""
    rules = growth_of(part)
    rule = rule if rule in rules else rules[0]
    return part.grow(queries, rule) if isinstance(part, Mechanism) else _wrapped_as_is(part, rule == AS_IS)


def _extend_part(part: Mechanism, length: int) -> Mechanism:
    return part.extend(length) if isinstance(part, Mechanism) else _wrapped_as_is(part, AS_IS in growth_of(part))


def _wrapped_as_is(part: nn.Module, suffices: bool) -> Any:
    """A wrapper itself where that suffices. What it holds could grow, but alone, without what the wrapper adds."""
    if not suffices:
        fail("a mechanism to grow", f"{type(part).__name__}, which wraps one", "Merge the adapter into it first.")
    return part
