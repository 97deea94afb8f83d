"""The terms of a rank's own queries and all keys: made for the whole sequence, in O(N), and cut.

A mechanism that is made from hidden states has those of its own tokens. What keys contribute (`remembered`, a few
numbers a head) is gathered from all ranks; sums over tokens are then taken as one process takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import cast

from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Grid, Sequence, Term, Terms, require_coordinates
from relpos.core.checks import fail, require_tensor, shape_of, without_autocast
from relpos.engines.arguments import Position, require_in_attention
from relpos.parallel.exchange import Shares, gather_tokens
from relpos.parallel.layout import Stretch, local_slices
from relpos.parallel.ranks import Ranks
from relpos.position import Mechanism, RandomizedPositions
from relpos.position.base.states import needs_states, remembers, terms_of
from relpos.position.base.wrapped import is_mechanism, parts_of


@dataclass(frozen=True, eq=False)
class TermsOfQueries:
    """A function from a stretch of this rank's queries to the terms between these and all keys.

    Attributes:
        whole: the terms of all tokens that are not made from hidden states.
        of_states: functions to those that are.
        count: the number of all tokens.
    """

    whole: Terms
    of_states: list[Callable[[Stretch], Terms]]
    count: int

    def __call__(self, span: Stretch) -> Terms:
        own = self.whole
        if span != (0, self.count):
            own = own.narrow(slice(*span), slice(0, self.count))
        for make in self.of_states:
            own = own + make(span)
        return own


def check_position(
    position: Position | None, queries: Coordinates | None, states: object, count: int, q: Float[Tensor, "B H n D"]
) -> None:
    """Raise unless position, coordinates and states belong together, for a sequence of `count` tokens.

    Args:
        q: queries of this rank's tokens, whose states are those of the same.
    """
    if position is None or isinstance(position, Term | Terms):
        if queries is not None or states is not None:
            wanted = "queries= and states= only beside a mechanism"
            fail(wanted, "terms or no position", "Terms have their own, of all tokens: leave both out.")
        return
    if not is_mechanism(position):
        fail("position to be terms or a mechanism", shape_of(position), "Build the mechanism first.")
    require_in_attention(position)
    if queries is None:
        fail("queries= beside a mechanism", "none", "Pass the coordinates of all tokens: relpos.Sequence(length).")
    require_coordinates(queries, "queries")
    if queries.count != count:
        came = f"{queries!r} with {queries.count}"
        fail(f"coordinates of all {count} tokens, those of every rank", came, "They are global, as masks are.")
    for part in parts_of(cast(Mechanism, position)):
        if needs_states(part):
            require_tensor(states, f"states of {type(part).__name__}", dims=3)
    if isinstance(states, Tensor) and states.shape[:2] != (q.shape[0], q.shape[2]):
        wanted = f"states of {q.shape[0]} elements and the {q.shape[2]} tokens that q has"
        fail(wanted, shape_of(states), "Pass those of this rank's tokens, which relpos.parallel.shard cuts.")


def terms_of_queries(
    position: Position | None,
    queries: Coordinates | None,
    states: Float[Tensor, "B n E"] | None,
    count: int,
    ranks: Ranks,
    shares: Shares,
    more: Terms | Term | None = None,
) -> TermsOfQueries:
    """The terms of this rank's queries; what they need of other ranks is here by then.

    Args:
        more: terms of all tokens to add.
    """
    whole = Terms() if more is None else Terms() + more
    of_states: list[Callable[[Stretch], Terms]] = []
    if position is None:
        pass
    elif isinstance(position, Term | Terms):
        whole = whole + position
    else:
        assert queries is not None
        for part in parts_of(cast(Mechanism, position)):
            if not needs_states(part):
                with _sharing_draws(part, ranks):
                    whole = whole + part.terms(queries)
                continue
            assert states is not None
            of_states.append(_of_states(part, queries, states, ranks, shares))
    return TermsOfQueries(whole, of_states, count)


def of_any_queries(
    terms: TermsOfQueries,
    position: Position,
    queries: Coordinates,
    states: Float[Tensor, "B n E"],
    ranks: Ranks,
    shares: Shares,
) -> TermsOfQueries:
    """The same, of a mechanism, for any stretch of the sequence: states of all tokens are gathered."""
    parts = [part for part in parts_of(cast(Mechanism, position)) if needs_states(part)]
    return replace(terms, of_states=[_of_gathered(part, queries, states, ranks, shares) for part in parts])


@contextmanager
def _sharing_draws(part: Mechanism, ranks: Ranks) -> Iterator[None]:
    """A context in which random positions are those that the first rank draws."""
    drawing = [module for module in part.modules() if isinstance(module, RandomizedPositions)]
    before = [module.shared_sequence for module in drawing]
    for module in drawing:
        module.shared_sequence = ranks
    try:
        yield
    finally:
        for module, ranks_before in zip(drawing, before, strict=True):
            module.shared_sequence = ranks_before


def _of_states(
    part: object, queries: Coordinates, states: Float[Tensor, "B n E"], ranks: Ranks, shares: Shares
) -> Callable[[Stretch], Terms]:
    if not isinstance(queries, Sequence | Grid):  # others cannot be cut: sums need the same tokens as keys
        return _of_gathered(part, queries, states, ranks, shares)
    remembered = None
    if remembers(part):
        with without_autocast(states.device):
            remembered = part.remembered(states)  # type: ignore[attr-defined]  # of one that remembers
        (remembered,) = gather_tokens(ranks, shares, 2, remembered)
    line, own = queries.raster(), local_slices(shares[ranks.rank])
    return lambda span: terms_of(part, _cut(line, span), line, states[:, own(span)], remembered)


def _of_gathered(
    part: object, queries: Coordinates, states: Float[Tensor, "B n E"], ranks: Ranks, shares: Shares
) -> Callable[[Stretch], Terms]:
    (every,) = gather_tokens(ranks, shares, 1, states)
    terms = terms_of(part, queries, None, every)
    return lambda span: terms.narrow(slice(*span), slice(0, queries.count))


def _cut(line: Sequence, span: Stretch) -> Sequence:
    """The coordinates of some consecutive tokens of a sequence."""
    start, stop = (max(0, token - line.prefix) for token in span)
    prefix = min(line.prefix, span[1]) - min(line.prefix, span[0])
    return Sequence(stop - start, start=line.start + start, prefix=prefix)
