"""Rotations chosen by the offset: near keys have the trained angles, far ones angles that training has reached.

    score[h, i, j] = scale * <R(a[i]) q[i], R(b[j]) k[j]>        a, b: places, by where j is, seen from i

                    near keys                     others
    ReRoPE          |i - j| < w: i, j             w, 0                                 one angle for all
    SelfExtend      |i - j| < w: i, j             i // g + w - w // g, j // g          in groups of g tokens
    DualChunk       chunk of i: i % c, j % c      C, j % c                             c = C - l
                    the one before: min(i % c + c, C), j % c

with tokens i and j, frequencies and layout of a `RotaryEmbedding`. No offset is larger than w, than w and a g-th of the
rest, or than C. They read longer inputs than the rotation was trained on without training, if these are within the
trained length. Made for a causal mask: keys after the query are rotated as published code would, and in `DualChunk` as
keys of older chunks. A prefix token has no offset: its pairs are far ones, in which it is not rotated.

Keys are cached unrotated, as always in relpos. The term is a `PairRotations`: the attention of each class of pairs is
computed under its rotation, and the softmax put together from them. Each pair's product is computed once.

Sources: Su 2023 (ReRoPE, kexue.fm/archives/9708), Jin et al. 2024 (Self-Extend), An et al. 2024 (dual chunk attention,
ChunkLlama), which Qwen2.5-1M has. Their factors on long texts' queries (log n) are a `QueryScale` on scores.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import (
    Coordinates,
    Mask,
    PairRotations,
    Positions,
    Rotation,
    Sequence,
    Terms,
    cached,
    require_coordinates,
)
from relpos.core.cache import FEW_BYTES
from relpos.core.checks import fail, require_int, shape_of
from relpos.core.terms.rotations import fixed
from relpos.position.base.angles import positions
from relpos.position.base.device import settle
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.rotary import RotaryEmbedding, context_length, site_length

Places = Int[Tensor, "_ _"]
"""Where tokens are, `[1 or B, N]`."""
_BEYOND = 2**62
"""Beyond the place of any token."""


@dataclass(frozen=True)
class Pairs:
    """A class of pairs, and the places by which their tokens are rotated.

    Attributes:
        query, key: the places; a key of None is not rotated.
        least, most: the offsets, query - key, of such pairs; None for no bound.
        low, high: where keys are besides, for each query; None for anywhere.
    """

    query: Places
    key: Places | None
    least: int | None
    most: int | None
    low: Places | None = None
    high: Places | None = None

    def occur(self, least: int, most: int) -> bool:
        """Whether some such pairs may have offsets from `least` to `most`."""
        return (self.least is None or self.least <= most) and (self.most is None or least <= self.most)


class ByOffset(Mechanism):
    """Base of the rotations chosen by offset. A subclass says which pairs there are, and how each is rotated."""

    growth = (AS_IS,)

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        if not isinstance(rotary, RotaryEmbedding) or rotary.axes != 1:
            fail("a RotaryEmbedding of one axis", shape_of(rotary), "Write RotaryEmbedding(head_dim).")
        self.rotary = rotary

    @property
    def device(self) -> torch.device:
        """The device of the rotation."""
        return self.rotary.device

    def settle(self, device: torch.device) -> None:
        super().settle(device)
        settle(self.rotary, device)

    def _classes(self, query: Places, key: Places, queries: Coordinates, keys: Coordinates) -> list[Pairs]:
        """The classes of pairs of tokens at these places, near ones first, which share no pair and leave none out.

        One has no `most` and no `low`; it has the pairs of prefix tokens, too. Of the coordinates only `low` and `high`
        count, by which classes without pairs are left out.
        """
        raise NotImplementedError

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        both = [_checked(queries, "queries")] + ([] if keys is None else [_checked(keys, "keys")])
        length, rotary = context_length(*both), self.rotary
        few = all(4 * one.count * rotary.rotary_dim <= FEW_BYTES for one in both)
        once = any(isinstance(one, Positions) or one.low[0] for one in both)  # as when a text is decoded
        if once or not few or not rotary._is_cacheable:
            return self._made(both, length)
        settings = [getattr(self, name) for name in self.saved_settings]
        depends = *both, *settings, rotary.bands(length), rotary.layout, rotary.head_dim, self.device
        return cached(self, depends, self.device, lambda: self._made(both, length, mark=fixed))

    def _made(
        self, both: list[Coordinates], length: int, mark: Callable[[Rotation], Rotation] = lambda rotation: rotation
    ) -> Terms:
        """The terms for queries, and keys where they differ. `mark`: applied to each rotation."""
        first, last, rotary = both[0], both[-1], self.rotary
        query = positions(first, self.device)[:, first.prefix :, 0].long()
        key = query if len(both) == 1 else positions(last, self.device)[:, last.prefix :, 0].long()
        bands, magnitude = rotary._bands_on_device(length), rotary.bands(length)[1]
        made: dict[int, Float[Tensor, "_ 1 _ P"]] = {}

        def turns(places: Places, prefix: int) -> Float[Tensor, "_ 1 _ P"]:
            angles = made.get(id(places))
            if angles is None:
                angles = made[id(places)] = (F.pad(places, (prefix, 0)).double()[..., None] * bands)[:, None]
            return angles

        least, most, prefix = first.low[0] - last.high[0], first.high[0] - last.low[0], first.prefix + last.prefix
        every = self._classes(query, key, first, last)
        classes = [one for one in every if one.occur(least, most) or (prefix and one.most is None)]
        rotations, masks = [], []
        for pairs in classes:
            unturned = pairs.key is None and magnitude == 1
            angles = None if unturned else turns(key * 0 if pairs.key is None else pairs.key, last.prefix)
            own = turns(pairs.query, first.prefix)
            turn = Rotation(own, angles, layout=rotary.layout, magnitude=magnitude, width=rotary.head_dim)
            rotations.append(mark(turn))
            masks.append(_mask(pairs, query, key, first, last))
        if len(classes) == 1:
            return Terms(rotations[0])
        return Terms(PairRotations(tuple(rotations), tuple(masks)))


def _mask(pairs: Pairs, query: Places, key: Places, queries: Coordinates, keys: Coordinates) -> Mask:
    """The pairs of a class."""
    low, high = pairs.low, pairs.high
    if isinstance(queries, Sequence) and queries == keys and not queries.prefix:  # differences of indices are offsets
        low, high = (None if x is None else x[0] - queries.start for x in (low, high))
        return Mask(pairs.most, None if pairs.least is None else -pairs.least, low, high)
    if pairs.most is not None:
        low = query - pairs.most if low is None else torch.maximum(low, query - pairs.most)
    if pairs.least is not None:
        high = query - pairs.least if high is None else torch.minimum(high, query - pairs.least)
    order = F.pad(key, (keys.prefix, 0), value=-_BEYOND)
    takes_prefix = pairs.most is None  # its keys have no lowest place
    if low is not None:
        low = F.pad(low, (queries.prefix, 0), value=_BEYOND)
    if high is not None:
        high = F.pad(high, (queries.prefix, 0), value=_BEYOND if takes_prefix else -_BEYOND)
    return Mask(low=low, high=high, key_order=order)


def _checked(coordinates: Coordinates, name: str) -> Coordinates:
    require_coordinates(coordinates, name)
    own = coordinates.raster()
    if isinstance(own, Positions) and own.values.is_floating_point():
        fail(f"{name} at whole numbers", repr(coordinates), "Groups and chunks are of whole tokens: pass integers.")
    return own


class ReRoPE(ByOffset):
    """Rectified rotation: keys from `window` on are all rotated as if they were `window` tokens away.

    Source: Su 2023 (ReRoPE).

    Args:
        rotary: the rotation of near keys, with its base, layout and scaling.
        window: w; keys less than w tokens away are near. Below the trained length; published code has 512 of 4,096.

    Raises:
        ValueError: another mechanism, or no window.

    Examples:
        >>> rectified = relpos.ReRoPE(relpos.RotaryEmbedding(16), window=4)
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=rectified, queries=relpos.Sequence(10), mask="causal").shape
        torch.Size([1, 2, 10, 16])
    """

    saved_settings = ("window",)

    def __init__(self, rotary: RotaryEmbedding, window: int) -> None:
        super().__init__(rotary)
        require_int(window, "window", at_least=1)
        self.window = window

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(RotaryEmbedding(site.head_dim), window=max(1, site_length(site) // 2))

    def _classes(self, query: Places, key: Places, queries: Coordinates, keys: Coordinates) -> list[Pairs]:
        far, window = torch.full_like(query, self.window), self.window
        return [
            Pairs(query, key, 1 - window, window - 1),
            Pairs(far, None, window, None),
            Pairs(far, None, None, -window),
        ]


class SelfExtend(ByOffset):
    """Grouped rotation: keys from `window` on are rotated by the number of their group of `group` tokens.

    Source: Jin et al. 2024 (LLM Maybe LongLM: Self-Extend), section 3.

    Args:
        rotary: the rotation of near keys, with its base, layout and scaling.
        window: w; keys less than w tokens away are near.
        group: g, tokens of a group. A text of N tokens has no offset above w + (N - w) / g.

    Raises:
        ValueError: another mechanism, no window or no group.

    Examples:
        >>> extended = relpos.SelfExtend(relpos.RotaryEmbedding(16), window=4, group=2)
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=extended, queries=relpos.Sequence(10), mask="causal").shape
        torch.Size([1, 2, 10, 16])
    """

    saved_settings = ("window", "group")

    def __init__(self, rotary: RotaryEmbedding, window: int, group: int) -> None:
        super().__init__(rotary)
        require_int(window, "window", at_least=1)
        require_int(group, "group", at_least=1)
        self.window, self.group = window, group

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(RotaryEmbedding(site.head_dim), window=max(1, site_length(site) // 2), group=16)

    def _classes(self, query: Places, key: Places, queries: Coordinates, keys: Coordinates) -> list[Pairs]:
        window = self.window
        shift = window - window // self.group
        far = query // self.group + shift, key // self.group
        return [
            Pairs(query, key, 1 - window, window - 1),
            Pairs(*far, window, None),
            Pairs(*far, None, -window),
        ]


class DualChunk(ByOffset):
    """Dual chunk attention: a rotation within a chunk, one to the chunk before, and one to all older chunks.

    Source: An et al. 2024 (Training-Free Long-Context Scaling of Large Language Models), section 3, as in ChunkLlama's
    code; Qwen2.5-1M.

    Args:
        rotary: the rotation, with its base, layout and scaling.
        size: C, the largest offset that a pair is rotated by; below the trained length. ChunkLlama has 3/4 of it.
        local: l, how many tokens of the chunk before a query keep their true offset. Chunks have C - l tokens.
            ChunkLlama has 1/16 of the trained length.

    Raises:
        ValueError: another mechanism, or `local` that is not below `size`.

    Examples:
        >>> chunked = relpos.DualChunk(relpos.RotaryEmbedding(16), size=6, local=2)
        >>> q = k = v = torch.randn(1, 2, 10, 16)
        >>> relpos.attention(q, k, v, position=chunked, queries=relpos.Sequence(10), mask="causal").shape
        torch.Size([1, 2, 10, 16])
    """

    saved_settings = ("size", "local")

    def __init__(self, rotary: RotaryEmbedding, size: int, local: int) -> None:
        super().__init__(rotary)
        require_int(size, "size", at_least=1)
        require_int(local, "local", at_least=0)
        if local >= size:
            fail("local below size", f"{local} and {size}", "Chunks have size - local tokens.")
        self.size, self.local = size, local

    @classmethod
    def from_site(cls, site: Site) -> Self:
        length = site_length(site)
        size = max(2, 3 * length // 4)
        return cls(RotaryEmbedding(site.head_dim), size=size, local=min(max(1, length // 16), size - 1))

    def _classes(self, query: Places, key: Places, queries: Coordinates, keys: Coordinates) -> list[Pairs]:
        chunk = self.size - self.local  # tokens of a chunk, c
        inside, own = query.remainder(chunk), key.remainder(chunk)
        first = query - inside
        back = queries.high[0] // chunk - keys.low[0] // chunk  # as many chunks as a query may see before its own
        later = keys.high[0] // chunk > queries.low[0] // chunk
        # as published: of the last token of a chunk, which is C unless chunks are shorter than l
        last = torch.full_like(query, min(2 * chunk - 1, self.size))
        return [
            Pairs(inside, own, 1 - chunk, chunk - 1, first, first + (chunk - 1)),
            Pairs(
                (inside + chunk).clamp(max=self.size),
                own,
                1 if back > 0 else _BEYOND,
                2 * chunk - 1,
                first - chunk,
                first - 1,
            ),
            Pairs(last, own, chunk + 1 if back > 1 else _BEYOND, None, high=first - chunk - 1),
            Pairs(last, own, None, -1 if later else -_BEYOND, low=first + chunk),
        ]


def _preset(name: str, title: str, kind: type[ReRoPE | SelfExtend | DualChunk], summary: str, source: str) -> Preset:
    return Preset(
        name=name,
        title=f"Rotary (RoPE), 1-D, {title}",
        build=kind.from_site,
        summary=summary,
        source=source,
        token_axes=(1,),
        family="rotation",
    )


PRESETS = [
    _preset(
        "rerope",
        "rectified (ReRoPE)",
        ReRoPE,
        "Keys near the query rotate as usual, all others as if they were at the border of the window: longer inputs "
        "have no untrained angles. The window is half of the context.",
        "Su 2023 (ReRoPE); base 10,000, half layout",
    ),
    _preset(
        "self_extend",
        "Self-Extend",
        SelfExtend,
        "Keys near the query rotate as usual, all others by the number of their group of 16 tokens: inputs eight times "
        "as long have no untrained angles. The window is half of the context.",
        "Jin et al. 2024 (Self-Extend), section 3; base 10,000, half layout",
    ),
    _preset(
        "dual_chunk",
        "dual chunk attention",
        DualChunk,
        "The input is cut into chunks: keys of the query's chunk and of the one before rotate nearly as usual, all "
        "older ones as if they were at one distance. Longer inputs have no untrained angles.",
        "An et al. 2024 (ChunkLlama), section 3; Qwen2.5-1M; base 10,000, half layout",
    ),
]
