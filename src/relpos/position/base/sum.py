"""The sum of several mechanisms, which `a + b` makes; it grows and extends part by part."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from relpos.core import Coordinates, Terms
from relpos.core.checks import fail, shape_of
from relpos.position.base.device import META, settle
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.states import States, needs_states, remembers, terms_of
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, growth_of, is_mechanism, parts_of


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
                came, remedy = type(part).__name__, "A wrapper has to pass on the terms of its mechanism."
                fail("each part of a sum to have terms(queries, keys)", came, remedy)
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
        return growth_of_all(self.parts())

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
        """What keys with these states contribute to its parts, one after the other; H is 1 if it is for all."""
        kept = [part.remembered(states) for part in self.parts() if remembers(part)]  # type: ignore[operator]
        heads = max(x.shape[1] for x in kept)
        return torch.cat([x.expand(-1, heads, -1, -1) for x in kept], dim=-1)

    def terms(
        self,
        queries: Coordinates,
        keys: Coordinates | None = None,
        *,
        states: States | None = None,
        remembered: Float[Tensor, "B H M r"] | None = None,
    ) -> Terms:
        """The terms of all parts; states and what is remembered go to those that need them."""
        joined, parts = Terms(), self.parts()
        widths = [remembers(part) for part in parts]
        shares = [None] * len(parts) if remembered is None else remembered.split(widths, dim=-1)
        for part, width, share in zip(parts, widths, shares, strict=True):
            joined = joined + terms_of(part, queries, keys, states, share if width else None)
        return joined

    def embed(self, x: Float[Tensor, "B N E"], coordinates: Coordinates) -> Float[Tensor, "B N E"]:
        for part in self.parts():
            x = part.embed(x, coordinates) if acts_on_tokens(part) else x
        return x


def growth_of_all(parts: Iterable[Mechanism]) -> tuple[str, ...]:
    """The rules by which mechanisms grow together, as `Sum.growth`."""
    each = [growth_of(part) for part in parts]
    if not all(each):
        return ()
    rules = dict.fromkeys(rule for own in each for rule in own)
    if not all(AS_IS in own for own in each):
        rules.pop(AS_IS, None)
    return tuple(rules) or (AS_IS,)


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


def _sum_of_two(first: Mechanism, second: Mechanism) -> Sum:
    if not is_mechanism(second):
        fail("a mechanism on both sides of +", shape_of(second), "Build the mechanism first.")
    return Sum([first, second])


Mechanism._sum_of_two = staticmethod(_sum_of_two)
