"""A module of another library whose own position is switched off and replaced by a mechanism.

The mechanisms of a stack are one child, `positions`, of the module that holds the stack (the holder): their parameters
are saved, moved and trained with it. Each layer keeps a `LayerPosition`: the coordinates of its tokens and its
mechanism. It asks the holder for that child at every call, because PEFT puts a wrapper there.

    tokens    layer_position.embed(x)             absolute mechanisms, before the first layer
    scores    layer_position.terms(queries, keys) all others, in `Repositioned.attend_repositioned`
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from relpos.adapters.common.above import Above
from relpos.adapters.common.interface import mask_of
from relpos.adapters.common.retrofitted import Retrofitted, is_swapped, route, swap
from relpos.adapters.common.sharing import whole_mask, whole_valid
from relpos.adapters.replacements.frozen import FrozenWarning, WriteCounts, frozen_unintentionally, keep_sizes
from relpos.adapters.replacements.states import LayerStates
from relpos.core import Coordinates, DenseBias, Grid, Mask, Positions, Sequence, Term, Terms
from relpos.core.checks import fail, without_autocast
from relpos.core.private import constant_while_tracing
from relpos.layers.context import SharedSequence
from relpos.models.positions import LayerPositions, PositionChoice, in_use
from relpos.position import Site, Sum
from relpos.position.base.device import settle
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.states import needs_states, remembers, terms_of
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens

CHILD = "positions"
"""Name of the mechanisms in the module that holds a stack."""

_FAR = 2**24
"""The upper limit of positions for mechanisms that are defined at any position."""


class ReplacedPositions(LayerPositions):
    """The mechanisms of a stack, in the module that holds it.

    Attributes:
        frozen: names in that module of the parameters of its own position that were trainable before.
        grids: those of images of other sizes than the one it was built for, one for each number of tokens.
    """

    sharing: ClassVar[str] = "shared"
    frozen: tuple[str, ...] = ()
    grids: tuple[Grid, ...] = ()
    _frozen_by_name = False
    _warning: FrozenWarning | None = None
    _initial_writes: WriteCounts | None = None

    @classmethod
    def of_layers(
        cls, position: PositionChoice, site: Site, depth: int, *, shared: bool, trainable: bool, with_states: bool
    ) -> ReplacedPositions:
        """Build a choice's mechanisms for a site. `with_states`: the layers hand hidden states to them.

        Raises:
            ValueError: a mechanism that needs hidden states in layers that hand none on, or shared by layers.
        """
        positions, own = cls.and_own(position, site, depth, shared=shared, trainable=trainable)
        assert isinstance(positions, cls)
        if names := ", ".join(sorted({type(part).__name__ for one in own if one is not None for part in one.parts()})):
            if not with_states:
                remedy = "GPT-2, Llama, T5, BERT and ViT of transformers hand them on; choose another position here."
                fail("a position that needs no hidden states", names, remedy)
            if shared:
                remedy = f"Each layer has its own, since it has its own hidden states: leave {cls.sharing} out."
                fail(f"{cls.sharing}=False with {names}", "True", remedy)
            both = [(one, *([] if more is None else [more])) for one, more in zip(positions.sums(), own, strict=True)]
            positions = cls([Sum(one) for one in both], depth, trainable, positions.period)
        return positions

    def begin(self, warning: FrozenWarning) -> None:
        """Record the initial parameters and the warning to give."""
        self._warning, self._initial_writes = warning, WriteCounts(self)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        """As in any module. A call on this module, not on the model, counts as explicit."""
        self._frozen_by_name = not requires_grad
        return super().requires_grad_(requires_grad)

    @constant_while_tracing
    def warn_if_frozen(self, trained: bool) -> None:
        """Warn, once per model, if it is trained and these mechanisms are frozen at their initial values
        unintentionally."""
        if (
            self._warning is None
            or self._warning.given
            or self._initial_writes is None
            or not frozen_unintentionally(self)
        ):
            return
        if self._initial_writes.unwritten_since(self):
            self._warning.give(trained=trained)

    def __getstate__(self) -> dict[str, Any]:
        at_start = self._initial_writes is not None and self._initial_writes.unwritten_since(self)
        return {**self.__dict__, "_initial_writes": at_start, "grids": ()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._initial_writes = WriteCounts(self) if state.get("_initial_writes") else None


@dataclass
class LayerPosition:
    """What a layer uses of the mechanisms of its stack, and the coordinates of its tokens.

    Attributes:
        positions: the mechanisms of its stack.
        layer: the number of its layer in the stack.
        coordinates: those the mechanisms were built for. A sequence without prefix also covers shorter ones, and the
            last queries of cached keys.
        holder: the module whose child they are. PEFT wraps them there.
    """

    positions: ReplacedPositions
    layer: int
    coordinates: Coordinates
    holder: Above = Above(None)

    @property
    def child(self) -> nn.Module:
        """The mechanisms, or their current wrapper."""
        holder = self.holder()
        child = None if holder is None else holder._modules.get(CHILD)
        return self.positions if child is None else child

    def off(self) -> list[Tensor | None]:
        """The parameters of the stack's own position."""
        holder = self.holder()
        found: list[Tensor | None] = []
        for path in () if holder is None else self.positions.frozen:
            *where, name = path.split(".")
            module = holder
            for part in where:  # a module that is off may be hidden by a property, as BEiT's shared table is
                module = None if module is None else module._modules[part]
            found.append(None if module is None else module._parameters[name])
        return found

    def sums(self) -> list[Mechanism]:
        """The mechanisms that are in use."""
        found: list[Mechanism] = in_use(self.child).sums()
        return found

    def warn_if_frozen(self, q: Tensor) -> None:
        """In a call in training mode, warn if mechanisms are frozen at their initial values."""
        child = self.child if self.layer == 0 else None
        if isinstance(child, ReplacedPositions):
            child.warn_if_frozen(q.requires_grad)

    @property
    def mechanism(self) -> Mechanism:
        """That of the layer."""
        sums = self.sums()
        return sums[self.layer % len(sums)]

    @property
    def needs_states(self) -> bool:
        """Whether the layer's mechanism is made from hidden states."""
        return needs_states(self.mechanism)

    def remembered(self, states: Tensor) -> Tensor | None:
        """What keys with these hidden states contribute, if the mechanism remembers that."""
        settle(self.child, states.device)
        mechanism: Any = self.mechanism
        with without_autocast(states.device):
            return mechanism.remembered(states) if remembers(mechanism) else None

    def terms(self, queries: int, keys: int, states: LayerStates | None = None) -> Terms:
        """The position terms of the last `queries` of `keys` tokens.

        Raises:
            ValueError: the number of tokens differs from the coordinates'.
        """
        given = (None, None) if states is None else (states.own, states.remembered)
        if not is_growing(self.coordinates):
            self.of_call(keys)
            return terms_of(self.mechanism, self.of_call(queries), None, *given)
        if queries == keys:
            return terms_of(self.mechanism, Sequence(keys), None, *given)
        return terms_of(self.mechanism, Sequence(queries, start=keys - queries), Sequence(keys), *given)

    def embed(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """Tokens `[B, N, E]` with their absolute position added, if a mechanism has one.

        Args:
            ids: the position of each token of a sequence, `[1 or B, N]`; default their order.

        Raises:
            ValueError: the number of tokens differs from the coordinates', or a position is beyond the last.
        """
        settle(self.child, x.device)
        first = self.sums()[0]
        if not acts_on_tokens(first):
            return x
        if not is_growing(self.coordinates):
            return first.embed(x, self.of_call(x.shape[1]))
        if ids is None:
            return first.embed(x, Sequence(x.shape[1]))
        high = _FAR if AS_IS in first.growth else self.coordinates.count - 1
        if ids.device.type == "cpu" and not torch.compiler.is_compiling() and int(ids.max()) > high:
            remedy = "Replace with coordinates=relpos.Sequence(length) of the longest text."
            fail(f"positions 0 to {high}, for which the mechanism was built", f"position {int(ids.max())}", remedy)
        return first.embed(x, Positions(ids, low=0, high=high))

    def of_call(self, tokens: int) -> Coordinates:
        """The coordinates of a call of this many tokens: those it was built for, or of an image of another size."""
        for grid in self.positions.grids:
            if grid.count == tokens:
                return grid
        if tokens != self.coordinates.count:
            remedy = "Positions have the size that the model was built for: call relpos.resize_position(model, size)."
            fail(f"{self.coordinates.count} tokens, for {self.coordinates}", f"{tokens}", remedy)
        return self.coordinates

    def require_grid(self, came: tuple[int, int]) -> None:
        """Raise unless an image has the grid that the mechanisms were built for."""
        assert isinstance(self.coordinates, Grid)
        if self.coordinates.sizes != tuple(came):
            remedy = f"Call relpos.resize_position(model, {tuple(came)})."
            fail(f"images of {self.coordinates.sizes} patches", f"{tuple(came)}", remedy)

    def take_grid(self, came: tuple[int, int], *, checkpoints: bool = False) -> None:
        """Let the layers of this call have the grid of an image, if the mechanisms are defined at any size.

        The layers know their number of tokens alone. A checkpoint runs them again, when it must stand for the same
        grid.

        Raises:
            ValueError: a mechanism was built for one size; another shape of as many patches with checkpoints.
        """
        built, grids = self.coordinates, self.positions.grids
        assert isinstance(built, Grid)
        if not grids and built.sizes == tuple(came):
            return
        if not all(AS_IS in one.growth for one in self.sums()):
            self.require_grid(came)
        grid = Grid(*came, prefix=built.prefix)
        alike = [one for one in (*grids, built) if one.count == grid.count]
        before = alike[0] if alike else grid
        if checkpoints and before != grid:
            came_too = f"{tuple(came)} after {before.sizes}"
            fail("one shape of images for each number of patches with checkpoints", came_too, "Train without them.")
        self.positions.grids = (grid, *(one for one in grids if one.count != grid.count))


def is_growing(coordinates: Coordinates) -> bool:
    """Whether coordinates also cover any shorter number of tokens: a text."""
    return isinstance(coordinates, Sequence) and coordinates.prefix == 0


class Repositioned(Retrofitted):
    """Common base of the mixins."""

    also_recorded = True  # there is no published version of a replaced position
    hands_on_states: ClassVar[bool] = False
    """Whether a layer gives `attend_repositioned` the hidden states that its queries are projected from."""

    def __prepare_scriptable__(self) -> nn.Module:
        wanted = "a model with its own position for torch.jit.script, which reads the source of its class"
        fail(wanted, "one whose position was replaced", "Export it with torch.export.export.")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *arguments: Any) -> None:
        keep_sizes(self, self.layer_position.off(), state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    @property
    def layer_position(self) -> LayerPosition:
        """What the layer uses of its stack's mechanisms."""
        found: LayerPosition = self.mechanism
        return found

    def resized(self, tokens: Coordinates) -> Coordinates:
        """The layer's coordinates where the model has these tokens.

        Raises:
            ValueError: tokens of another number of axes.
        """
        own = self.layer_position.coordinates
        if tokens.axes != own.axes:
            fail(
                f"a size with the axes of {own!r}", repr(tokens), "Give (rows, columns) of patches, or a text's length."
            )
        return Grid(*tokens.sizes, prefix=own.prefix) if isinstance(tokens, Grid) else tokens

    def added_for(self, name: str, tokens: int | None = None) -> Tensor:
        """The vectors added to tokens, `[1, N, E]`, instead of the module's own parameter of this name."""
        own: Tensor | None = self._parameters.get(name)
        if own is not None and own.is_meta and self.layer_position.sums()[0].device == own.device:
            return own  # `load_state_dict(assign=True)` reads it
        like: Tensor = self.cls_token
        tokens = self.layer_position.coordinates.count if tokens is None else tokens
        return self.layer_position.embed(like.new_zeros(1, tokens, like.shape[2]))

    def begin(self, q: Tensor) -> None:
        """Settle the mechanisms' device before a call, and in training warn if they are frozen at their start."""
        if self.training and torch.is_grad_enabled():
            self.layer_position.warn_if_frozen(q)
        settle(self.layer_position.child, q.device)

    def attend_repositioned(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | Mask | None = None,
        *,
        causal: bool = False,
        scale: float | None = None,
        dropout: float = 0.0,
        states: LayerStates | None = None,
    ) -> Tensor:
        """Attention of the last N of M tokens with the layer's mechanism, `[B, H, N, D]`.

        Args:
            mask: `[B, M]`, True or 1 at real keys. Or four dimensions: True where a pair may attend, or numbers added
                to scores. Or a mask of relpos's own.
            scale: the model's own. If it is 1/sqrt(D), the mechanism may set another.
            states: for a mechanism that is made from them.
        """
        self.begin(q)
        scale = None if scale is None or scale == q.shape[-1] ** -0.5 else scale
        if self.shared_sequence is not None:
            return self._attend_shared(self.shared_sequence, (q, k, v), mask, causal, scale, states)
        terms, allowed = self.terms_and_mask(q.shape[2], k.shape[2], mask, causal=causal, states=states)
        return self.attend(q, k, v, position=terms, mask=allowed, scale=scale, dropout=dropout)

    def _attend_shared(
        self,
        shared: SharedSequence,
        heads: tuple[Tensor, Tensor, Tensor],
        mask: Tensor | Mask | None,
        causal: bool,
        scale: float | None,
        states: LayerStates | None,
    ) -> Tensor:
        """Attention where the tokens are a share of a sequence: position and mask are of all."""
        q, k, _ = heads
        valid = whole_valid(shared, k, mask)
        if valid is not None and states is not None:
            fail("no padding beside a position made from hidden states", "padded tokens", "Pack texts without padding.")
        tokens, position = q.shape[2] * shared.size, self.layer_position.mechanism
        return shared.attend(
            heads,
            position=position if acts_in_attention(position) else None,
            terms=None,
            coordinates=Sequence(tokens),
            mask=whole_mask(valid, tokens, causal),
            scale=scale,
            states=q.transpose(1, 2) if states is None else states.own,
        )

    def global_ids(self, tokens: int, device: torch.device) -> Tensor | None:
        """The positions of this rank's tokens, `[1, n]`; None where no ranks share the sequence."""
        shared = self.shared_sequence
        return None if shared is None else shared.share(torch.arange(tokens * shared.size, device=device)[None])

    def terms_and_mask(
        self, queries: int, keys: int, mask: Tensor | Mask | None, *, causal: bool, states: LayerStates | None = None
    ) -> tuple[Terms, Mask | None]:
        """Terms and mask of the last `queries` of `keys` tokens; arguments as in `attend_repositioned`."""
        if isinstance(mask, Mask):
            return self.layer_position.terms(queries, keys, states), mask
        if states is not None and mask is not None and mask.dim() == 2:
            states.without_padding(mask)
        terms = self.layer_position.terms(queries, keys, states)
        if mask is not None and mask.dim() == 4:
            terms, mask = terms + _added(mask), None
        return terms, mask_of(mask, queries, keys, causal=causal)


def is_retrofitted(module: nn.Module) -> bool:
    """Whether `relpos.retrofit` has swapped a module, and not `relpos.replace_position`."""
    return is_swapped(module) and not isinstance(module, Repositioned)


def _added(mask: Tensor) -> Term:
    """A mask of pairs as numbers to add: a quarter of the dtype's minimum, because further terms are added."""
    if mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    return DenseBias(mask.clamp(min=torch.finfo(mask.dtype).min / 4))


def put_in_front(module: Any, mixin: type[Repositioned], layer_position: LayerPosition) -> None:
    """Put the mixin in front of a module's class and store its placement."""
    swap(module, mixin)
    route(module).mechanism = layer_position
