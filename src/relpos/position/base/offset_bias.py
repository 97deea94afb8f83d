"""A bias that is a function of the offset: the base of most mechanisms, with one function to write."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import (
    Coordinates,
    Kind,
    LineBias,
    Lines,
    Offsets,
    Positions,
    Sequence,
    Term,
    Terms,
    at_least_float32,
    lines,
    may_cache,
    require_queries_and_keys,
)
from relpos.core.checks import fail, shape_of, without_autocast
from relpos.core.tree import unchecked
from relpos.position.base.cached_terms import DecodingTerms
from relpos.position.base.mechanism import AS_IS, Mechanism

_FIRST_LENGTH = 256
"""Tokens of the shortest sequence whose terms a mechanism holds while it decodes."""


class OffsetBias(Mechanism):
    """A bias that depends on query - key alone: subclasses write `bias`, and `prefix_bias` where they have one.

    `offsets.axes` is `Int[L, A]`, query - key, of every offset that can occur; `bias` returns `[H, L]` for them,
    float32 or wider. Lines, engines, masks, caches and gradients need no code.

    Examples:
        >>> class Nearest(relpos.OffsetBias):
        ...     def bias(self, offsets):  # offsets.axes [L, A], query - key
        ...         return -offsets.axes[:, 0].abs().float()[None].expand(4, -1)
        ...
        >>> q = k = v = torch.randn(1, 4, 10, 16)
        >>> relpos.attention(q, k, v, position=Nearest(), queries=relpos.Sequence(10)).shape
        torch.Size([1, 4, 10, 16])
    """

    axes: ClassVar[int | None] = 1
    """The number of axes it supports; others raise. 1 reads a grid in raster order; None takes any coordinates."""

    _covers_prefix: bool = False
    """Whether `bias` already handles prefix pairs."""

    @abstractmethod
    def bias(self, offsets: Offsets) -> Float[Tensor, "H L"]:
        """The bias of each head at each offset, float32 or wider. Pairs with a prefix come as offset 0 and are
        replaced. Inside `relpos.decoding` it may get more offsets than those of the call."""

    def prefix_bias(self) -> Float[Tensor, "H 3"] | None:
        """The bias prefix to token, token to prefix, prefix to prefix; None for 0."""
        return None

    def _accepted(self, queries: Coordinates, keys: Coordinates | None) -> tuple[Coordinates, Coordinates | None]:
        require_queries_and_keys(queries, keys)
        if self.axes == 1:
            return queries.raster(), None if keys is None else keys.raster()
        for name, coordinates in (("queries", queries), ("keys", keys)):
            if coordinates is not None and self.axes is not None and coordinates.axes != self.axes:
                wanted = f"{name} with {self.axes} axes for {type(self).__name__}"
                fail(wanted, repr(coordinates), "Give coordinates with that many axes, or use another mechanism.")
        return queries, keys

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        known = self._decoding_terms
        if known is None or torch.is_grad_enabled() or not known.is_valid():
            return self._terms_on(self._lines(queries, keys))
        queries, keys = self._accepted(queries, keys)
        changing = isinstance(queries, Positions) or isinstance(keys, Positions)  # their tensor may be written to
        device = self.device
        if changing or not may_cache(device):
            return self._terms_on(self._lines(queries, keys))
        key = (queries, keys, device)
        terms = known.get(key)
        if terms is None:
            terms = self._part_of_longer(queries, keys, known)
            for last in [one for one in list(known) if len(one) == len(key)]:  # only the last call's is used again
                known.pop(last, None)
            known[key] = terms
        return terms

    def _part_of_longer(self, queries: Coordinates, keys: Coordinates | None, known: DecodingTerms) -> Terms:
        """A part of the known terms of a longer sequence, if it is equal; else new terms."""
        both = [one for one in (queries, keys) if one is not None]
        anywhere = self.axes == 1 and AS_IS in self.growth
        if not anywhere or not all(isinstance(one, Sequence) and one.prefix == 0 for one in both):
            return self._terms_on(self._lines(queries, keys))
        first = min(one.low[0] for one in both)  # only differences count
        reach = max(one.high[0] for one in both) - first + 1
        long = max(_FIRST_LENGTH, 1 << (reach - 1).bit_length()), self.device
        if long not in known:
            known[long] = self._terms_on(lines(Sequence(long[0]), device=self.device))
        parts = (slice(one.low[0] - first, one.high[0] - first + 1) for one in (both[0], both[-1]))
        return known[long].narrow(*parts)

    def _extra_terms(self) -> tuple[Term, ...]:
        """Terms that come with the bias, for any coordinates."""
        return ()

    def _terms_on(self, line: Lines) -> Terms:
        """Its terms on a line."""
        offsets = line.offsets()
        with without_autocast(line.query.device):  # values are computed in float32, also under autocast
            values = self.bias(offsets)
            if not isinstance(values, Tensor) or values.dim() != 2 or values.shape[1] != line.length:
                fail(
                    f"{type(self).__name__}.bias to return [heads, {line.length}]",
                    shape_of(values),
                    "Return one value per head for each entry of offsets.kind.",
                )
            if line.length != line.layout.tokens and not self._covers_prefix:
                own = self.prefix_bias()
                three = values.new_zeros(values.shape[0], 3) if own is None else own
                by_kind = torch.cat([values.new_zeros(values.shape[0], 1), three], dim=1)
                values = torch.where(offsets.kind == int(Kind.TOKENS), values, spread(by_kind, offsets))
        bias = unchecked(LineBias, values=at_least_float32(values), lines=line)
        return unchecked(Terms, items=(bias, *self._extra_terms()))


def spread(by_kind: Float[Tensor, "H 4"], offsets: Offsets) -> Float[Tensor, "H L"]:
    """The number of each entry's kind. Computed as a product, so that its gradient is a sum in a fixed order."""
    kinds = torch.arange(len(Kind), device=offsets.kind.device)
    return by_kind @ (offsets.kind == kinds[:, None]).to(by_kind.dtype)
