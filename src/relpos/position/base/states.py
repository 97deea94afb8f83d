"""Hidden states for mechanisms: which of them ask for states, and how they are asked for terms.

States are what queries are projected from, `[B, N, E]`. A mechanism asks for them by its attribute `needs_states`; all
others are called as ever, `terms(queries, keys)`. What keys contribute (`remembers` numbers a head) a cache keeps, so
that it needs no states of earlier tokens.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Terms

States = Float[Tensor, "B N E"] | tuple[Float[Tensor, "B N E"], Float[Tensor, "B M F"]]
"""Those of the queries, or a pair: those of the queries and those of the keys."""


class MayNeedStates:
    """By default a mechanism needs no hidden states; `FromStates` is the base of those that do."""

    @property
    def needs_states(self) -> bool:
        """Whether its terms are made from hidden states, which `terms` then takes as `states=`."""
        return False

    @property
    def remembers(self) -> int:
        """The numbers that each key's states contribute to each head, which a cache keeps."""
        return 0


def needs_states(part: object) -> bool:
    """Whether a mechanism, wrapped or not, is made from hidden states."""
    return bool(getattr(part, "needs_states", False))


def remembers(part: object) -> int:
    """The numbers that each key contributes to each head of a mechanism, wrapped or not."""
    return int(getattr(part, "remembers", 0))


def terms_of(
    part: Any,
    queries: Coordinates,
    keys: Coordinates | None = None,
    states: States | None = None,
    remembered: Float[Tensor, "B H M r"] | None = None,
) -> Terms:
    """The terms of a mechanism, wrapped or not: states are only handed to those that need them.

    Args:
        part: the mechanism.
        queries, keys: coordinates, as for `Mechanism.terms`.
        states: those of the queries (and keys).
        remembered: what all keys contribute, where a cache has kept it.
    """
    terms: Terms
    if not needs_states(part):
        terms = part.terms(queries, keys)
    elif remembered is None:
        terms = part.terms(queries, keys, states=states)
    else:
        terms = part.terms(queries, keys, states=states, remembered=remembered)
    return terms


def terms_at_rest(part: Any, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
    """The terms of a mechanism, or of a sum, where every token has one and the same hidden state: 0, or its example."""
    if not needs_states(part):
        return terms_of(part, queries, keys)
    state = next(one._example_state() for one in part.parts() if needs_states(one))
    own, others = (state.expand(1, one.count, -1) for one in (queries, keys or queries))
    return terms_of(part, queries, keys, (own, others))
