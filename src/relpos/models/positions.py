"""A model's position: the mechanisms of its layers, built from one choice.

A choice is a preset's name ("relative_2d"), several joined with "+" ("learned+relative_2d"), a function from a `Site`
to a mechanism, or None. Names joined with "~", or a tuple of choices, are a schedule: layer i takes entry i modulo
their number. A mechanism on tokens is applied once, from the first layer. A mechanism in attention is one for all
layers (in a schedule, for all layers of its entry), or one per layer. One that is made from hidden states is always one
per layer, and stands in the layer's attention, which hands it the states and is sharded, checkpointed and compiled with
it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Terms
from relpos.core.checks import fail, require_flag, shape_of
from relpos.position import Mechanism, RotaryEmbedding, Site, Sum, find
from relpos.position.base.device import settle
from relpos.position.base.preset import SCHEDULE
from relpos.position.base.states import needs_states
from relpos.position.base.sum import grow_part, growth_of_all
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, is_mechanism, parts_of
from relpos.position.rotary import site_length
from relpos.position.scaling import RotaryScaling

OneChoice = str | Callable[[Site], Mechanism] | None
PositionChoice = OneChoice | tuple[OneChoice, ...] | list[OneChoice]
"""One choice for all layers, or a schedule over layers: names joined with "~", or a tuple of choices."""


@dataclass(frozen=True)
class RotaryChoice:
    """A rotation along a sequence with its own base or scaling, as a choice that can be saved.

    Attributes:
        base: as in `RotaryEmbedding`.
        scaling: as in `RotaryEmbedding`. The layout is "half".

    Examples:
        >>> choice = relpos.models.RotaryChoice(base=500_000.0, scaling=relpos.Llama3Scaling())
        >>> model = relpos.LanguageModel(256, embed_dim=32, depth=1, num_heads=2, position=choice)
        >>> model.positions[0].parts()[0].base
        500000.0
    """

    base: float = 10000.0
    scaling: RotaryScaling | None = None

    def __call__(self, site: Site) -> RotaryEmbedding:
        trained = None if self.scaling is not None else site_length(site)
        return RotaryEmbedding(site.head_dim, base=self.base, scaling=self.scaling, trained_length=trained)


class ModuleSequence(nn.Module):
    """Modules in order, named by their numbers, as in `nn.ModuleList`.

    It is not a `ModuleList`: PEFT's `modules_to_save` needs modules with a forward. Models read it through `in_use`.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules.values()))  # type: ignore[arg-type]  # none of them is None

    def __getitem__(self, number: int) -> nn.Module:
        return list(self)[number]

    def __setitem__(self, number: int, module: nn.Module) -> None:
        setattr(self, list(self._modules)[number], module)

    def forward(self) -> Self:
        """Itself."""
        return self


def in_use(modules: nn.Module) -> Any:
    """The sequence that a model reads: `modules` itself, or the active adapter's if PEFT wraps it.

    Raises:
        ValueError: several adapters are active in one call.
    """
    if isinstance(modules, ModuleSequence):
        return modules
    try:
        return modules()
    except TypeError:  # the wrapper would split a batch among adapters
        remedy = "Call the model separately for the rows of each adapter."
        fail("one adapter for all rows, which share their position", "adapter_names", remedy)


class LayerPositions(ModuleSequence):
    """The mechanisms of a model: one sum for all layers, one per entry of a schedule, or one per layer.

    The first also acts on tokens. Layer i has sum i modulo their number.

    Args:
        sums: the mechanisms themselves; `and_own` builds them.
        depth: number of layers.
        trainable: False freezes their parameters.
        period: number of entries of a schedule; 1 for none.
    """

    sharing: ClassVar[str] = "shared_position"
    """Name of the caller's argument for one shared mechanism, for messages."""

    def __init__(self, sums: list[Sum], depth: int, trainable: bool, period: int = 1) -> None:
        super().__init__(sums)
        self.depth, self.trainable, self.period = depth, trainable, period
        if not trainable:
            self.requires_grad_(False)

    @classmethod
    def and_own(
        cls, position: PositionChoice, site: Site, depth: int, *, shared: bool, trainable: bool
    ) -> tuple[LayerPositions, list[Sum | None]]:
        """Build a choice's mechanisms for a site; beside them each layer's own, which are made from hidden states."""
        require_flag(shared, cls.sharing)
        require_flag(trainable, "position_trainable")
        builds = [builder(entry, cls.sharing) for entry in entries_of(position, depth)]
        period, built = len(builds), list[list[Mechanism]]()
        for layer in range(depth):
            one_serves = shared and layer >= period and not any(map(needs_states, built[layer % period]))
            of_layer = replace(site, layer=None if shared else layer)
            built.append([] if one_serves else parts_of(builds[layer % period](of_layer)))
        for number, parts in enumerate(built[1:period], start=1):
            if late := [type(part).__name__ for part in parts if acts_on_tokens(part)]:
                remedy = "Add it to the first entry with +: its tokens are those of all layers."
                fail(
                    "a position on tokens in a schedule's first entry",
                    f"{', '.join(late)} in entry {number} (from 0)",
                    remedy,
                )
        own = [[part for part in parts if needs_states(part)] for parts in built]
        rest = [[part for part in parts if not needs_states(part)] for parts in (built[:period] if shared else built)]
        used = [id(part) for parts in (*own, *rest) for part in parts]
        if len(set(used)) != len(used):
            of_states = [id(part) for parts in own for part in parts]
            remedy = f"Pass {cls.sharing}=True to share it."
            if len(set(of_states)) != len(of_states):
                remedy = "Build a new one in each call: no layers share what is made from hidden states."
            fail("a separate mechanism for each layer", "one object twice", remedy)
        later = (Sum(part for part in parts if acts_in_attention(part)) for parts in rest[1:])
        sums = [Sum(parts) if parts else None for parts in own]
        for one in sums:
            if one is not None and not trainable:
                one.requires_grad_(False)
        return cls([Sum(rest[0]), *later], depth, trainable, period), sums

    def sums(self) -> list[Mechanism]:
        """One sum of mechanisms for all layers, or one per layer, with their wrappers if any."""
        for position in self:
            if not is_mechanism(position):
                came, remedy = type(position).__name__, "A wrapper has to pass on the terms of its mechanism."
                fail("the position of each layer to have terms(queries, keys)", came, remedy)
        return list(self)  # type: ignore[arg-type]  # mechanisms, or wrappers of some

    def on_tokens(self) -> Sum:
        """The mechanisms that act on tokens."""
        return Sum(part for part in parts_of(self.sums()[0]) if acts_on_tokens(part))

    def in_attention(self) -> list[Sum]:
        """The mechanisms that act in attention, one sum per layer, per entry of a schedule, or one for all."""
        return [Sum(part for part in parts_of(position) if acts_in_attention(part)) for position in self.sums()]

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        """Tokens with their absolute position added. Call it before `terms`: it settles the device."""
        settle(self, x.device)
        first = self.sums()[0]
        return first.embed(x, coordinates) if acts_on_tokens(first) else x

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> list[Terms]:
        """The terms of each layer's attention; computed once if layers share them."""
        terms = [position.terms(queries, keys) for position in self.sums()]
        return [terms[layer % len(terms)] for layer in range(self.depth)]

    def growth(self) -> tuple[str, ...]:
        """The rules by which the mechanisms extrapolate to other coordinates, as in `Sum`."""
        return growth_of_all(self.entries())

    def entries(self) -> list[Mechanism]:
        """The parts of the sums of a schedule's entries, or of the first layer."""
        return [part for one in self.sums()[: self.period] for part in parts_of(one)]

    def grown(self, coordinates: Coordinates, rule: str) -> LayerPositions:
        """Copies for other coordinates by one of the rules; parts that are defined at any position are the same
        objects."""
        if rule not in self.growth():
            Sum(self.entries()).grow(coordinates, rule)  # raises
        grown = [Sum(grow_part(part, coordinates, rule) for part in parts_of(position)) for position in self.sums()]
        return LayerPositions(grown, self.depth, self.trainable, self.period)


def canonical(position: PositionChoice, *, axes: int) -> PositionChoice:
    """The choice, with an alias replaced by its preset's name for tokens with `axes` axes; names alone are one name."""
    if isinstance(position, tuple | list):
        named = ["none" if one is None else one for one in position]
        if not named or not all(isinstance(one, str) for one in named):
            return tuple(canonical(one, axes=axes) for one in position)  # type: ignore[misc]  # checked by entries_of
        position = SCHEDULE.join(named)  # type: ignore[arg-type]
    return find(position, axes).name if isinstance(position, str) else position


def entries_of(position: PositionChoice, depth: int) -> list[OneChoice]:
    """The entries of a schedule over `depth` layers; a choice for all layers is the only entry.

    Raises:
        ValueError: an empty schedule, one within another, or one with more entries than layers.
    """
    if isinstance(position, str):
        find(position)  # raises if an entry is empty or unknown
        found: list[OneChoice] = [*position.split(SCHEDULE)]
    else:
        found = list(position) if isinstance(position, tuple | list) else [position]
    for one in found:
        if isinstance(one, tuple | list) or (isinstance(one, str) and SCHEDULE in one):
            fail("a position in each entry of a schedule", repr(one), "Write one schedule, of all entries.")
    if not 0 < len(found) <= depth:
        layers = f"{depth} layer{'s' if depth > 1 else ''}"
        came = f"{len(found)}" + (f" in {position!r}" if isinstance(position, str) else "")
        fail(f"1 to {depth} entries in a schedule over {layers}", came, "Shorten it, or build more layers.")
    return found


def builder(position: OneChoice, sharing: str = "shared_position") -> Callable[[Site], Mechanism]:
    """A choice as a function from a site to a mechanism; `sharing` names the caller's argument, for messages."""
    if position is None or isinstance(position, str):
        name = "none" if position is None else position
        find(name)  # raises if the name is unknown
        return lambda site: find(name, site.queries.axes).make(site)
    if isinstance(position, nn.Module) or not callable(position):
        wanted = "position to be a preset's name, a function from a Site to a mechanism, or None"
        remedy = f"Wrap a finished mechanism as lambda site: mechanism (with {sharing}=True)."
        fail(wanted, shape_of(position), remedy)

    def build(site: Site) -> Mechanism:
        one: Mechanism = position(site)
        if not is_mechanism(one):
            fail("position to return a mechanism for a Site", shape_of(one), "Return a relpos.Mechanism.")
        return one

    return build
