"""Base of mechanisms that are made from hidden states: a subclass writes `remembered` and `from_states`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from relpos.core import Coordinates, Terms, at_least_float32, require_queries_and_keys
from relpos.core.checks import fail, require_device, require_tensor, shape_of, without_autocast
from relpos.position.base.mechanism import Mechanism
from relpos.position.base.states import States


class FromStates(Mechanism):
    """Base of mechanisms that are made from the hidden states that q, k and v are projected from.

    Models build one per layer, whatever else they share, since each layer has other states. No terms are cached
    (`relpos.decoding`, `relpos.reading_once`) or planned. Terms are made in float32 or wider.

    Attributes:
        embed_dim: width of a state, E. A subclass sets it.
        remembers: the numbers that each key contributes to each head; a cache keeps these and no states.

    Raises:
        ValueError: in `terms`, no states, or some of another shape or device.

    Examples:
        >>> class Salience(relpos.FromStates):  # each key adds to the score what its own hidden state says
        ...     embed_dim, remembers = 8, 1
        ...
        ...     def remembered(self, states):  # [B, H or 1, M, r]
        ...         return states.mean(dim=-1)[:, None, :, None]
        ...
        ...     def from_states(self, queries, keys, states, remembered):
        ...         return relpos.Terms(relpos.DenseBias(remembered.transpose(2, 3)))
        ...
        >>> q, x = torch.randn(1, 2, 5, 4), torch.randn(1, 5, 8)
        >>> relpos.attention(q, q, q, position=Salience(), queries=relpos.Sequence(5), states=x).shape
        torch.Size([1, 2, 5, 4])
    """

    needs_states = True
    _silent_at_zero = False
    """Whether states of 0 say nothing, so that drawings need others."""
    embed_dim: int

    def remembered(self, states: Float[Tensor, "B N E"]) -> Float[Tensor, "B H N r"]:
        """What keys with these states contribute, each by itself: r is `remembers`."""
        raise NotImplementedError(f"{type(self).__name__} remembers {self.remembers} numbers and defines none")

    def _example_state(self) -> Float[Tensor, " E"]:
        """The hidden state of every token in drawings: 0, or numbers of about the size of a normed state's."""
        if not self._silent_at_zero:
            return torch.zeros(self.embed_dim, device=self.device)
        return 2**0.5 * torch.arange(1, self.embed_dim + 1, device=self.device).sin()

    def from_states(
        self,
        queries: Coordinates,
        keys: Coordinates,
        states: Float[Tensor, "B N E"],
        remembered: Float[Tensor, "B H M r"] | None,
    ) -> Terms:
        """The terms of checked arguments, with autocast off; `remembered` is None where it remembers nothing."""
        raise NotImplementedError

    def terms(
        self,
        queries: Coordinates,
        keys: Coordinates | None = None,
        *,
        states: States | None = None,
        remembered: Float[Tensor, "B H M r"] | None = None,
    ) -> Terms:
        """What it says to attention between queries and keys with these states.

        Args:
            queries: coordinates of N queries.
            keys: coordinates of M keys; default the queries.
            states: `[B, N, E]`, what the queries are projected from; a pair with that of the keys, `[B, M, E]`, where
                keys are other tokens or have states of their own.
            remembered: `remembered(states)` of all M keys, `[B, H, M, r]`, in place of their states: a cache's.

        Raises:
            ValueError: no states, or states of another shape or device.
        """
        require_queries_and_keys(queries, keys)
        name, keys = type(self).__name__, queries if keys is None else keys
        if states is None:
            fail(f"states= with {name}", "none", "Pass what the queries are projected from, [batch, tokens, width].")
        if isinstance(states, list) or (isinstance(states, tuple) and len(states) != 2):
            wanted = f"states of {name} as a tensor or a tuple of two"
            fail(wanted, f"{type(states).__name__} of {len(states)}", "Of two, pass (those of queries, those of keys).")
        own, others = states if isinstance(states, tuple) else (states, states)
        self._require_states(own, f"states of {name}'s queries", queries)
        with without_autocast(own.device):
            if not self.remembers:
                return self.from_states(queries, keys, own, None)
            if remembered is None:
                self._require_states(others, f"states of {name}'s keys", keys)
                remembered = self.remembered(others)
            elif remembered.shape[-2] != keys.count:
                fail(f"remembered= of {keys.count} keys", shape_of(remembered), "Pass what all keys contribute.")
            return self.from_states(queries, keys, own, remembered)

    def _require_states(self, x: object, name: str, coordinates: Coordinates) -> None:
        require_tensor(x, name, dims=3)
        assert isinstance(x, Tensor)
        if tuple(x.shape[1:]) != (coordinates.count, self.embed_dim) or not x.is_floating_point():
            wanted = f"{name} as floating-point [batch, {coordinates.count}, {self.embed_dim}]"
            fail(wanted, shape_of(x), "Pass what they are projected from; where keys differ, a pair of both.")
        if self.device != torch.device("meta"):
            require_device(x, name, self.device, "Move the mechanism with .to(device).")


def projected(
    states: Float[Tensor, "B N E"], weight: Float[Tensor, "O E"], bias: Float[Tensor, " O"] | None = None
) -> Float[Tensor, "B N O"]:
    """`states @ weight.mT + bias`, in float32 or wider."""
    dtype = torch.promote_types(states.dtype, at_least_float32(weight).dtype)
    return F.linear(states.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
