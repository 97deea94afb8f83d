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

Keys are cached unrotated, as always in relpos. What is near is a rule for a block of query rows (`core.RowRule`), which
computes the products of near keys under both rotations, on a CPU for these alone, elsewhere for all keys. Memory is
O(N) in `streaming`. `triton` and `flex` do not serve it. A soft cap, a query bias and a factor on the content are
refused beside it.

Sources: Su 2023 (ReRoPE, kexue.fm/archives/9708), Jin et al. 2024 (Self-Extend), An et al. 2024 (dual chunk attention,
ChunkLlama), which Qwen2.5-1M has. Their factors on long texts' queries (log n) are a `QueryScale` on scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from relpos.core import Coordinates, Positions, Rotation, RowRule, Terms, may_cache, require_coordinates, rotate
from relpos.core.checks import fail, require_int, shape_of
from relpos.position.base.angles import positions
from relpos.position.base.device import settle
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.rotary import RotaryEmbedding, context_length, site_length

Places = Float[Tensor, "_ _"]
"""Where tokens are, `[1 or B, N]`, float64."""


@dataclass(frozen=True)
class NearPairs:
    """Keys from `low` to `high`, bounds of each query, and the places of both tokens of such a pair."""

    query: Float[Tensor, "_ N"]
    key: Float[Tensor, "_ M"]
    low: Float[Tensor, "_ N"]
    high: Float[Tensor, "_ N"]


class ByOffset(Mechanism):
    """Base of the rotations chosen by offset. A subclass says at which places near and far pairs are rotated."""

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

    def _far(self, query: Places, key: Places) -> tuple[Places, Places]:
        """The places of queries and keys in a pair that is not near, each `[1 or B, N]`."""
        raise NotImplementedError

    def _near(self, query: Places, key: Places) -> list[NearPairs]:
        """The near pairs, in classes that share no pair."""
        raise NotImplementedError

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        both = [_checked(queries, "queries")] + ([] if keys is None else [_checked(keys, "keys")])
        query, key = (positions(one, self.device)[:, one.prefix :, 0] for one in (both[0], both[-1]))
        length, rotary = context_length(*both), self.rotary
        bands, magnitude = rotary._bands_on_device(length), rotary.bands(length)[1]
        before_queries, before_keys = both[0].prefix, both[-1].prefix

        def turns(places: Places, prefix: int) -> Float[Tensor, "_ 1 _ P"]:
            return (_after(prefix, places, 0.0)[..., None] * bands)[:, None]

        far = self._far(query, key)
        far_query, far_key = turns(far[0], before_queries), turns(far[1], before_keys)
        parameters = [_after(before_keys, key, torch.inf), far_query, far_key]
        for near in self._near(query, key):
            parameters += [turns(near.query, before_queries), turns(near.key, before_keys)]
            bounds = (near.low, torch.inf), (near.high, -torch.inf)
            parameters += [_after(before_queries, bound, beyond) for bound, beyond in bounds]
        rule = _Nearer(rotary.layout, magnitude)
        return Terms(
            Rotation(far_query, far_key, layout=rotary.layout, magnitude=magnitude, width=rotary.head_dim),
            RowRule(rule, tuple(parameters), width=rotary.head_dim, of_content=True),
        )


def _after(prefix: int, x: Places, value: float) -> Places:
    """The numbers of tokens, after those of the prefix."""
    return F.pad(x, (prefix, 0), value=value)


@dataclass(frozen=True)
class _Nearer:
    """The rule: where a pair is near, its product under the near rotation minus that under the far one."""

    layout: Literal["half", "interleaved"]
    magnitude: float

    def __call__(
        self,
        q: Float[Tensor, "B H n D"],
        k: Float[Tensor, "B H M D"],
        allowed: Bool[Tensor, "#B #H n M"],
        rows: slice,
        places: Float[Tensor, "_ M"],
        *turns: Tensor,
    ) -> Float[Tensor, "B H n M"]:
        total = q.new_zeros(*q.shape[:3], k.shape[2])
        for start in range(2, len(turns), 4):
            query, key, low, high = turns[start : start + 4]
            seen = (low[:, rows, None] <= places[:, None]) & (places[:, None] <= high[:, rows, None])
            keys = _span(seen)
            near, far = (
                self._product(q, k[:, :, keys], own[:, :, rows], theirs[:, :, keys])
                for own, theirs in ((query, key), turns[:2])
            )
            change = torch.where(seen[:, None, :, keys], near - far, 0.0)
            total = total + F.pad(change, (keys.start, k.shape[2] - keys.stop))
        return total

    def _product(self, q: Tensor, k: Tensor, query: Tensor, key: Tensor) -> Float[Tensor, "B H n m"]:
        turned = rotate(q, query, layout=self.layout, magnitude=self.magnitude)
        return turned @ rotate(k, key, layout=self.layout, magnitude=self.magnitude).mT


def _span(seen: Bool[Tensor, "_ n M"]) -> slice:
    """The keys from the first to the last that a row sees; all where asking would wait for the device."""
    if not seen.is_cpu or not may_cache(seen.device):
        return slice(0, seen.shape[2])
    columns = seen.flatten(0, 1).any(dim=0).nonzero()
    return slice(int(columns[0]), int(columns[-1]) + 1) if len(columns) else slice(0, 0)


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

    def _far(self, query: Places, key: Places) -> tuple[Places, Places]:
        return torch.full_like(query, self.window), torch.zeros_like(key)

    def _near(self, query: Places, key: Places) -> list[NearPairs]:
        return [NearPairs(query, key, query - (self.window - 1), query + (self.window - 1))]


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

    def _far(self, query: Places, key: Places) -> tuple[Places, Places]:
        shift = self.window - self.window // self.group
        return (query / self.group).floor() + shift, (key / self.group).floor()

    def _near(self, query: Places, key: Places) -> list[NearPairs]:
        return [NearPairs(query, key, query - (self.window - 1), query + (self.window - 1))]


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

    def _far(self, query: Places, key: Places) -> tuple[Places, Places]:
        # as published: of the last token of a chunk, which is C unless chunks are shorter than l
        last = min(2 * self._chunk - 1, self.size)
        return torch.full_like(query, last), key.remainder(self._chunk)

    def _near(self, query: Places, key: Places) -> list[NearPairs]:
        chunk = self._chunk
        inside, own = query.remainder(chunk), key.remainder(chunk)
        first = query - inside
        before = (inside + chunk).clamp(max=self.size)
        return [NearPairs(inside, own, first, first + (chunk - 1)), NearPairs(before, own, first - chunk, first - 1)]

    @property
    def _chunk(self) -> int:
        """Tokens of a chunk, c."""
        return self.size - self.local


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
