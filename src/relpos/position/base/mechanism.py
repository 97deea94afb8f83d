"""What a position mechanism is: the base class of all.

    mechanism.terms(queries, keys)                  what happens inside attention
    mechanism.terms(queries, keys, states=x)        of one that is made from hidden states (`from_states.py`)
    mechanism.terms_from(tensors, queries, keys)    the same with other numbers for its parameters
    mechanism.embed(x, coordinates)                 what is added to tokens before it (absolute mechanisms)

An author of a relative bias subclasses `OffsetBias` and writes one function, from offsets to values; see
CONTRIBUTING.md for a whole example.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import NoneType
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import (
    Coordinates,
    Grid,
    Lines,
    Sequence,
    Terms,
    cached,
    lines,
    may_cache,
    require_queries_and_keys,
)
from relpos.core.cache import TOKEN_BYTES, cache_of, state_of
from relpos.core.checks import fail, require_int
from relpos.core.private import with_tensors
from relpos.position.base.cached_terms import DecodingTerms, TermsOfForward, drop_terms_of_forward
from relpos.position.base.constructor_repr import ConstructorRepr
from relpos.position.base.device import META
from relpos.position.base.functional import checked, twin
from relpos.position.base.saved_settings import SavesSettings, is_settings
from relpos.position.base.site import Site
from relpos.position.base.states import MayNeedStates, States, terms_of
from relpos.position.base.trainable import Trainable


def bytes_of_lines(queries: Coordinates, keys: Coordinates | None) -> int:
    """About the memory of lines and all that is cached on them."""
    return TOKEN_BYTES * (queries.count + (queries if keys is None else keys).count)


AS_IS = "as is"
"""The growth rule of mechanisms that are defined at any coordinates and need nothing."""


class Mechanism(SavesSettings, ConstructorRepr, Trainable, MayNeedStates):
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

    _sum_of_two: ClassVar[Callable[[Mechanism, Mechanism], Mechanism]]
    """What `+` does: `sum.py` sets it, for a sum is a mechanism itself."""

    _decoding_terms: DecodingTerms | None = None  # within `relpos.decoding`, the terms made so far

    def _raster_lines(self, queries: Coordinates, keys: Coordinates | None) -> Lines:
        """The lines as a one-axis mechanism sees the tokens, checked."""
        require_queries_and_keys(queries, keys)
        return self._lines(queries.raster(), None if keys is None else keys.raster())

    def __getstate__(self) -> dict[str, Any]:
        state = state_of(self)
        drop_terms_of_forward(state)
        return state

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "training":
            self.__dict__.pop("_shape_cache", None)  # it may not follow from the new setting
            TermsOfForward.changes += "terms" in self.__dict__
        super().__setattr__(name, value)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self.__dict__.pop("_shape_cache", None)  # it may be on another device from now on
        return super()._apply(fn, recurse)

    def _replicate_for_data_parallel(self) -> Self:
        replica: Self = super()._replicate_for_data_parallel()  # type: ignore[no-untyped-call]
        drop_terms_of_forward(replica.__dict__)
        return replica

    def _accepted(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Coordinates, Coordinates | None]:
        """The coordinates as it sees them; raises where it cannot serve them."""
        return queries, keys

    def _lines(self, queries: Coordinates, keys: Coordinates | None = None) -> Lines:
        """`relpos.lines` as it sees them; of few regular tokens the same object in the next call, nothing checked."""
        device = self.device
        if not (isinstance(queries, (Sequence, Grid)) and isinstance(keys, (Sequence, Grid, NoneType))):
            return lines(*self._accepted(queries, keys), device=device)
        return cached(
            self, (queries, keys, device), device, lambda: lines(*self._accepted(queries, keys), device=device),
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
        where no terms of these tensors are cached.

        Args:
            tensors: by their names in `named_parameters()` (or in the state dict, where those are buffers), any of
                them: the rest are its own. Each has the shape and device of what it stands for, and any floating-point
                dtype; half precision is computed in float32, as it is in the mechanism.
            queries: coordinates of N queries, as for `terms`.
            keys: coordinates of M keys.
            states: the tensor that the queries are projected from, for a mechanism that needs it.

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
            "A mechanism without rules works only at the coordinates it was built for."
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

    def __add__(self, other: Mechanism) -> Mechanism:
        return Mechanism._sum_of_two(self, other)


def _twin_of(mechanism: Mechanism, tensors: Mapping[str, Tensor]) -> Mechanism:
    """The mechanism with these tensors. It shares the cache of what follows from shapes, and no terms."""
    if isinstance(tensors, Mapping):  # a state dict has settings too
        tensors = {name: x for name, x in tensors.items() if not is_settings(str(name))}
    if may_cache(mechanism.device):
        for part in _mechanisms_in(mechanism):
            cache_of(part)
    other = twin(mechanism, tensors)
    structural = tensors.keys() <= dict(mechanism.named_parameters()).keys()
    device = next((x.device for x in tensors.values() if not x.is_meta), META)
    for part in _mechanisms_in(other):
        part.settle(device)
        part.__dict__.pop("_decoding_terms", None)
        drop_terms_of_forward(part.__dict__)
        if not structural:  # what is cached may follow from a buffer
            part.__dict__.pop("_shape_cache", None)
    return other


def _mechanisms_in(mechanism: Mechanism) -> Iterator[Mechanism]:
    """Itself and the mechanisms inside."""
    return (part for part in mechanism.modules() if isinstance(part, Mechanism))
