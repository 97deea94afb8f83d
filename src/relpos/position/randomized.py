"""Randomized positions: in training, tokens stand at random places of a range that is longer than any text.

    training      places = n of 0 ... longest - 1 at random, in order; anew in each call           n tokens
    evaluation    places = positions: the mechanism alone

A mechanism that was trained so knows all distances up to `longest` from texts that are far shorter, and reads longer
ones by their order rather than by exact distances. A draw is one for the whole batch; layers that share the mechanism
in one forward share the draw (`shared_position=True`), others draw their own, as published. Prefix tokens have no
place.

Published code draws in evaluation, too, as many places for any length: `position.train()` within a model in evaluation
does that. Evaluation without draws repeats its results, and decodes and packs documents as the mechanism does.

Source: Ruoss et al. 2023 ("Randomized Positional Encodings Boost Length Generalization of Transformers"), section 3.
"""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Graph, Positions, Terms, require_coordinates
from relpos.core.checks import fail, require_int, shape_of
from relpos.position.base.device import settle
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.states import needs_states
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, growth_of, is_mechanism
from relpos.position.rotary import RotaryEmbedding, context_length, site_length


class SharedDraws(Protocol):
    """Ranks that share a sequence, and so a draw."""

    def of_first(self, x: Tensor) -> Tensor:
        """What the first rank has in the place of a tensor."""
        ...


class RandomizedPositions(Mechanism):
    """A mechanism whose tokens stand at random places in training; in evaluation it is that mechanism.

    In training it has one axis; a grid is read in raster order. It grows as its mechanism does.

    Source: Ruoss et al. 2023, section 3.

    Args:
        mechanism: what sees these places; it must be defined at all of them.
        longest: how many places there are, more than tokens in a text; in one with more, nothing is random.

    Raises:
        ValueError: no mechanism, one that is made from hidden states, or no places; in training, positions between
            whole numbers.

    Examples:
        >>> randomized = relpos.RandomizedPositions(relpos.RotaryEmbedding(16), longest=2048)
        >>> places = randomized.places(relpos.Sequence(4)).values[:, 0]  # of this call
        >>> bool((places.diff() > 0).all()), len(places)
        (True, 4)
    """

    saved_settings: ClassVar[tuple[str, ...]] = ("longest",)
    shared_sequence: SharedDraws | None = None
    """The ranks that share a sequence; `relpos.parallel` sets it."""

    def __init__(self, mechanism: Mechanism, longest: int) -> None:
        super().__init__()
        if not is_mechanism(mechanism):
            fail("a mechanism to randomize", shape_of(mechanism), "Build it first, such as RotaryEmbedding(64).")
        if needs_states(mechanism):
            came = f"{type(mechanism).__name__}, which is made from hidden states"
            fail("a mechanism of positions", came, "Its positions are the sums of what tokens say.")
        require_int(longest, "longest", at_least=1)
        self.mechanism, self.longest = mechanism, longest

    @property
    def device(self) -> torch.device:
        """The device of the mechanism."""
        return self.mechanism.device

    def settle(self, device: torch.device) -> None:
        super().settle(device)
        settle(self.mechanism, device)

    @property
    def growth(self) -> tuple[str, ...]:
        """The rules of the mechanism."""
        return growth_of(self.mechanism)

    def grow(self, queries: Coordinates, rule: str) -> Mechanism:
        """The same of a grown mechanism."""
        return self._around(self.mechanism.grow(queries, rule))

    def extend(self, length: int) -> Mechanism:
        """The same of an extended mechanism."""
        return self._around(self.mechanism.extend(length))

    def _around(self, grown: Mechanism) -> Mechanism:
        if grown is self.mechanism:
            return self
        made = RandomizedPositions(grown, self.longest).train(self.training)
        made.shared_sequence = self.shared_sequence
        return made

    @property
    def acts_on_tokens(self) -> bool:
        return acts_on_tokens(self.mechanism)

    @property
    def acts_in_attention(self) -> bool:
        return acts_in_attention(self.mechanism)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        if not self.training:
            return self.mechanism.terms(queries, keys)
        own = [_checked(queries, "queries")] + ([] if keys is None else [_checked(keys, "keys")])
        return self.mechanism.terms(*self._drawn(own))

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        if not self.acts_on_tokens:
            return x
        return self.mechanism.embed(x, self.places(coordinates) if self.training else coordinates)

    def places(self, coordinates: Coordinates) -> Positions:
        """A draw: where tokens stand in one call in training."""
        (found,) = self._drawn([_checked(coordinates, "coordinates")])
        return found

    def _drawn(self, both: list[Coordinates]) -> list[Positions]:
        """Queries and keys at places of one draw: as many as there are positions up to the last of both."""
        lowest = min(0, *(one.low[0] for one in both))
        count = context_length(*both) - lowest
        size = max(self.longest, count)
        places = torch.randperm(size, device=self.device)[:count].sort().values
        if self.shared_sequence is not None:
            places = self.shared_sequence.of_first(places)
        found = []
        for one in both:
            own = places[one.tokens(self.device)[..., 0] - lowest]
            found.append(Positions(own, low=0, high=size - 1, prefix=one.prefix))
        return found


def _checked(coordinates: Coordinates, name: str) -> Coordinates:
    require_coordinates(coordinates, name)
    if isinstance(coordinates, Graph):
        wanted = f"{name} in an order (Sequence, Grid or Positions) in training"
        fail(wanted, repr(coordinates), "Nodes of a graph have no places: leave out RandomizedPositions.")
    if isinstance(coordinates, Positions) and coordinates.values.is_floating_point():
        fail(f"{name} at whole numbers", repr(coordinates), "They number the tokens: pass integers.")
    return coordinates.raster()


PRESETS = [
    Preset(
        name="rotary_randomized",
        title="Rotary (RoPE), 1-D, randomized positions",
        build=lambda site: RandomizedPositions(RotaryEmbedding(site.head_dim), longest=8 * site_length(site)),
        summary="In training, tokens stand at random places of a range eight times as long as the context, in order. "
        "It learns order rather than exact distances, and knows the distances of longer inputs.",
        source="Ruoss et al. 2023, section 3, on RoPE with base 10,000",
        token_axes=(1,),
        family="rotation",
    )
]
