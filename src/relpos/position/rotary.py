"""Rotary positions: queries and keys are rotated by an angle proportional to their position, in pairs of dimensions.

    score[h, i, j] = scale * <R(x[i]) q[i], R(x[j]) k[j]>  =  a function of q, k and x[i] - x[j],  x the position

Pair p rotates by position * w[p], w[p] = base ** (-p / P), P pairs per axis. On a grid ("axial") the rotated width is
divided between the axes: the first pairs rotate with the row, the next with the column. Prefix tokens are not rotated.
With `rotary_dim` below the head's width the rest passes through (GPT-NeoX's `rotary_pct`). No parameters.

The layout says which two dimensions are a pair; weights trained with one do not fit the other. "half" (Hugging Face's
Llama, GPT-NeoX) pairs p with p + P, "interleaved" (RoFormer, Meta's Llama, timm) pairs 2p with 2p + 1.

A model that has been trained on contexts of `trained_length` tokens extrapolates to longer ones as it is, or with every
position divided ("linear"), a larger base ("ntk"), or slow pairs slowed and fast ones kept ("yarn", "llama3");
`position.scaling` says how. `scaling=` sets one of these, or another, from the start.

Source: Su et al. 2021 (RoFormer), section 3.2, base 10,000; on grids Heo et al. 2024 (RoPE for ViT), section 3,
"axial", base 100 (their code turns the first pairs with the column; timm and this file with the row). Scores between
tokens depend on offsets alone; scores between a prefix token, which is not rotated, and a token depend on the token's
position. A key that is cached rotated keeps the frequencies of that time. Not to be confused with sinusoidal positions,
which are added to tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import (
    Coordinates,
    Positions,
    Rotation,
    Sequence,
    Terms,
    cached,
    caches_constants,
    constant,
    may_cache,
    require_coordinates,
    uncached_constant,
)
from relpos.core.cache import FEW_BYTES
from relpos.core.checks import fail, require_choice, require_int, require_number
from relpos.core.rotation import require_layout
from relpos.core.terms.rotations import fixed
from relpos.position.base.angles import frequencies, positions
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.saved_settings import Settings, plain
from relpos.position.base.site import Site
from relpos.position.scaling import (
    DynamicNTK,
    LinearScaling,
    Llama3Scaling,
    NTKScaling,
    RotaryScaling,
    Scaled,
    YaRN,
    has_few_lists,
    require_scaling,
)

Beyond = Literal["as is", "linear", "ntk", "yarn", "llama3"]
_CACHED_LENGTHS = (256, 2048, 8192)
"""Lengths of the sequences whose angles are cached; shorter ones are a part of these."""
LONGEST_CACHED = _CACHED_LENGTHS[-1]
"""`kept` takes no longer ones."""
RULES: tuple[Beyond, ...] = ("as is", "linear", "ntk", "yarn", "llama3")
"""What a rotation along one axis can do beyond its trained length."""


def context_length(*coordinates: Coordinates) -> int:
    """The largest position on any axis, plus 1; at least 1. A plain number: of `Positions` it is their `high`."""
    return max(1, *(1 + max(one.high) for one in coordinates))


class RotaryEmbedding(Mechanism):
    """RoPE: rotation of queries and keys by their position.

    `score = scale * <R(i) q[i], R(j) k[j]>`: pair p of P rotates by `position * base ** (-p / P)`. Any length; prefix
    tokens are not rotated, so that a score between one of them and a token depends on the token's absolute position.
    It has no parameters.

    Source: Su et al. 2021 (RoFormer), section 3.2; on grids Heo et al. 2024, section 3, "axial".

    Args:
        head_dim: width of a head, D.
        axes: 1 for a sequence (a grid is then read in raster order), 2 for rows and columns, ...
        base: the slowest pair rotates by nearly 1 / base radians per position. On grids Heo et al. have 100.
        layout: "half", as Llama has it, or "interleaved", as images have it in timm. The name `rotary_2d` is
            `RotaryEmbedding(head_dim, axes=2, base=100.0, layout="interleaved")`.
        rotary_dim: how many dimensions are rotated, the first ones; a multiple of 2 * axes. Default: all.
        scaling: frequencies for longer contexts, such as `YaRN(4.0, trained_length=2048)`; the same for each axis.
        trained_length: tokens of the contexts it is trained on; `grow` stretches from there.
        beyond: its first rule beyond them: "as is", "linear", "ntk", "yarn" or "llama3". Within them all are the same.

    Raises:
        ValueError: rotary_dim is no multiple of 2 * axes or more than `head_dim`; several axes or a scaling beside a
            trained length.

    Examples:
        >>> rotary = relpos.RotaryEmbedding(head_dim=64)
        >>> q = k = v = torch.randn(1, 8, 10, 64)
        >>> relpos.attention(q, k, v, position=rotary, queries=relpos.Sequence(10)).shape
        torch.Size([1, 8, 10, 64])
        >>> last, ten = relpos.Sequence(1, start=9), relpos.Sequence(10)  # one token, and the cache with it
        >>> relpos.attention(q[:, :, 9:], k, v, position=rotary, queries=last, keys=ten).shape
        torch.Size([1, 8, 1, 64])
    """

    saved_settings: ClassVar[tuple[str, ...]] = ("axes", "base", "layout", "rotary_dim", "scaling", "trained_length")

    def __init__(
        self,
        head_dim: int,
        *,
        axes: int = 1,
        base: float = 10000.0,
        layout: Literal["half", "interleaved"] = "half",
        rotary_dim: int | None = None,
        scaling: RotaryScaling | None = None,
        trained_length: int | None = None,
        beyond: Beyond = "as is",
    ) -> None:
        super().__init__()
        require_int(axes, "axes", at_least=1)
        require_int(head_dim, "head_dim", at_least=2 * axes)
        require_number(base, "base", "above 0", "Use the checkpoint's rope_theta; RoFormer's is 10000.")
        require_layout(layout)
        rotary_dim = head_dim - head_dim % (2 * axes) if rotary_dim is None else rotary_dim
        require_int(rotary_dim, "rotary_dim", at_least=2 * axes)
        if rotary_dim % (2 * axes) or rotary_dim > head_dim:
            wanted = f"rotary_dim to be a multiple of {2 * axes} and at most head_dim, {head_dim}"
            fail(wanted, str(rotary_dim), "Every axis rotates pairs of dimensions.")
        self.head_dim, self.axes, self.base, self.rotary_dim = head_dim, axes, base, rotary_dim
        self.layout: Literal["half", "interleaved"] = layout
        require_choice(
            beyond, "beyond", RULES, "For a checkpoint's scaling pass scaling=, such as scaling=LongRoPE(...)."
        )
        if trained_length is not None:
            require_int(trained_length, "trained_length", at_least=1)
            if axes > 1 or scaling is not None:
                came = f"trained_length={trained_length} with {f'{axes} axes' if axes > 1 else repr(scaling)}"
                fail("trained_length for one axis and no scaling", came, "Leave trained_length out.")
        elif beyond != AS_IS:
            fail(f"trained_length with beyond={beyond!r}", "None", "Pass the length at which it was trained.")
        self.trained_length, self.beyond = trained_length, beyond
        require_scaling(scaling)
        self.scaling = scaling
        self.bands(1)  # a scaling for another number of pairs raises here

    @classmethod
    def from_site(cls, site: Site, axes: int = 1, beyond: Beyond = "as is") -> Self:
        if axes == 1:
            return cls(site.head_dim, trained_length=site_length(site), beyond=beyond)
        return cls(site.head_dim, axes=axes, base=100.0, layout="interleaved")

    def _arguments(self) -> dict[str, Any]:
        own = super()._arguments()
        if self.rotary_dim == self.head_dim - self.head_dim % (2 * self.axes):
            own["rotary_dim"] = None
        if self.scaling is not None and self.trained_length is not None:  # it was grown, which no argument tells
            own |= {"trained_length": None, "beyond": AS_IS}
        return own

    def _differing(self, own: Settings, saved: Settings) -> list[str]:
        unknown = None in (own.get("trained_length"), saved.get("trained_length"))  # None changes nothing by itself
        return [one for one in super()._differing(own, saved) if not (one == "trained_length" and unknown)]

    def _remedy(self, saved: Settings, names: list[str]) -> str:
        if names == ["trained_length"]:
            return f"Build the model for {saved[names[0]]} tokens, load, then grow it from there."
        if names != ["scaling"] or self.trained_length is None:
            return super()._remedy(saved, names)
        wanted = saved["scaling"]
        if wanted is None:
            return "Load them into the model as it was built, then grow it."
        numbers = next(iter(wanted.values()))
        factor = numbers.get("factor", 1) if isinstance(numbers, dict) else 1
        length = max(1, round(self.trained_length * factor))
        for rule in RULES[1:]:  # one of these may have made it
            if plain(self.grow(Sequence(length), rule).scaling) == wanted:
                before = "" if self.scaling is None else "Build the model as it was before it was grown. "
                return f"{before}Call model.grow({length}, {rule!r}) before loading."
        return super()._remedy(saved, names)

    @property
    def growth(self) -> tuple[str, ...]:
        """With a trained length, `beyond` and then the other rules; without one, only "as is"."""
        if self.trained_length is None:
            return (AS_IS,)
        return (self.beyond, *(rule for rule in RULES if rule != self.beyond))

    def grow(self, queries: Coordinates, rule: str) -> RotaryEmbedding:
        """A copy that stretches from the trained length to the largest position of `queries`, plus 1, as it then is."""
        if rule == AS_IS or rule not in self.growth or self.trained_length is None:
            super().grow(queries, rule)  # raises unless this one serves as it is
            return self
        require_coordinates(queries, "queries")
        factor = max(1.0, context_length(queries.raster()) / self.trained_length)
        grown = copy.deepcopy(self)
        match rule:
            case "linear":
                grown.scaling = LinearScaling(factor)
            case "ntk":
                grown.scaling = NTKScaling(factor)
            case "yarn":
                grown.scaling = YaRN(factor, self.trained_length)
            case _:
                grown.scaling = Llama3Scaling(factor, self.trained_length)
        return grown

    def bands(self, length: int) -> Scaled:
        """The frequency of each pair of an axis in a context of `length` tokens, and the magnitude."""
        pairs = self.rotary_dim // (2 * self.axes)
        if self.scaling is None:
            return frequencies(pairs, self.base), 1.0
        return self.scaling(self.base, pairs, length)

    def _bands_on_device(self, length: int) -> Float[Tensor, " P"]:
        """The frequencies on its device, float64. Those that depend on the length are neither cached nor copied."""
        if isinstance(self.scaling, DynamicNTK) and caches_constants(self.device):
            pairs = self.rotary_dim // (2 * self.axes)
            exponents = constant(tuple(-p / pairs for p in range(pairs)), torch.float64, self.device)
            return torch.pow(self.scaling.larger_base(self.base, pairs, length), exponents)
        made = constant if has_few_lists(self.scaling) else uncached_constant
        return made(self.bands(length)[0], torch.float64, self.device)

    def angles(self, coordinates: Coordinates, length: int | None = None) -> Float[Tensor, "_ 1 N P"]:
        """The angles of each token in radians, float64; `relpos.rotate` takes them for keys that go into a cache.

        Args:
            coordinates: where the tokens are.
            length: of the context, for scalings that depend on it; by default up to the largest of these positions.
                Keys for a cache also need `magnitude=own.bands(length)[1]` and `width=own.head_dim`.
        """
        own = self._checked(coordinates, "coordinates")
        length = context_length(own) if length is None else length
        return (positions(own, self.device)[..., None] * self._bands_on_device(length)).flatten(2)[:, None]

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        both = [self._checked(queries, "queries")] + ([] if keys is None else [self._checked(keys, "keys")])
        length = context_length(*both)
        if not self._is_cacheable or length > LONGEST_CACHED or any(isinstance(one, Positions) for one in both):
            return Terms(self._rotation(both, length))
        bands = None if self.scaling is None else self.bands(length)
        return Terms(kept(self, both, bands, self.rotary_dim, lambda sides: self._rotation(sides, length)))

    @property
    def _is_cacheable(self) -> bool:
        """Whether its angles depend on coordinates and settings alone (not for some scalings and subclasses)."""
        names = ("angles", "bands", "_bands_on_device")
        own = all(getattr(type(self), name) is getattr(RotaryEmbedding, name) for name in names)
        return has_few_lists(self.scaling) and own and may_cache(self.device)

    def _rotation(self, both: list[Coordinates], length: int) -> Rotation:
        turns = [self.angles(one, length) for one in both]
        magnitude = self.bands(length)[1]
        return Rotation(turns[0], turns[-1], layout=self.layout, magnitude=magnitude, width=self.head_dim)

    def _checked(self, coordinates: Coordinates, name: str) -> Coordinates:
        """The coordinates as it sees them."""
        require_coordinates(coordinates, name)
        own = coordinates.raster() if self.axes == 1 or not coordinates.axes else coordinates  # it raises for a graph
        if own.axes != self.axes:
            fail(f"coordinates with {self.axes} axes", repr(coordinates), f"Build it with axes={coordinates.axes}.")
        return own


def kept(
    owner: Mechanism,
    both: list[Coordinates],
    depends: Hashable,
    width: int,
    make: Callable[[list[Coordinates]], Rotation],
) -> Rotation:
    """The rotation that `make` returns for the coordinates of queries and keys, cached on its mechanism if it may be.

    Sequences that begin at 0 are a part of a longer one, of `_CACHED_LENGTHS`; others are cached if they are small.

    Args:
        owner: the mechanism. both: coordinates of queries, and of keys if they differ; no `Positions`.
        depends: all else that the angles depend on, but the device.
        width: rotated dimensions.
    """
    length = context_length(*both)
    if all(isinstance(one, Sequence) and one.start >= one.prefix == 0 for one in both):
        longest = Sequence(next(count for count in _CACHED_LENGTHS if count >= length))
        whole = cached(owner, (longest, depends, owner.device), owner.device, lambda: fixed(make([longest])))
        return whole.narrow(*(slice(one.low[0], one.high[0] + 1) for one in (both[0], both[-1])))
    few = all(4 * one.count * width <= FEW_BYTES for one in both)
    if not few or any(isinstance(one, Sequence) and one.start for one in both):  # which comes once
        return make(both)
    return cached(owner, (*both, depends, owner.device), owner.device, lambda: fixed(make(both)))


def site_length(site: Site) -> int:
    """The context length of a site in tokens, in raster order, without the prefix."""
    both = (site.queries,) if site.keys is None else (site.queries, site.keys)
    return context_length(*(one.raster() for one in both))


def stretched(name: str, title: str, beyond: Beyond, how: str, source: str) -> Preset:
    """The preset of a rotation whose first rule for longer contexts is `beyond`."""
    return Preset(
        name=name,
        title=f"Rotary (RoPE), 1-D, {title}",
        build=lambda site: RotaryEmbedding.from_site(site, beyond=beyond),
        summary=f"In training it is the plain rotation; on longer inputs {how}. "
        "It is made to extrapolate beyond the trained length, where the plain rotation has untrained angles.",
        source=source,
        token_axes=(1,),
        family="rotation",
    )


PRESETS = [
    Preset(
        name="rotary_1d",
        title="Rotary (RoPE), 1-D",
        build=RotaryEmbedding.from_site,
        summary="Queries and keys rotate with their position, so their product depends on the distance between them; "
        "nothing is learned. On images the position is the raster order, where the row below is as far as a "
        "row is wide.",
        source="Su et al. 2021, section 3.2; base 10,000, half layout",
        token_axes=(1, 2),
        family="rotation",
        aliases=("rope",),
    ),
    Preset(
        name="rotary_2d",
        title="Rotary (RoPE), 2-D axial",
        build=lambda site: RotaryEmbedding.from_site(site, 2),
        summary="Half of each head rotates with the row, half with the column, so scores depend on both offsets. "
        "Nothing is learned about position itself: what an offset means comes from the queries and keys.",
        source="Heo et al. 2024, section 3; base 100, interleaved layout",
        token_axes=(2,),
        family="rotation",
        aliases=("rope",),
    ),
    stretched(
        "rotary_linear",
        "positions divided",
        "linear",
        "every position is divided, so that all fall within the trained range",
        "Chen et al. 2023, section 2",
    ),
    stretched(
        "rotary_ntk",
        "larger base",
        "ntk",
        "the base is larger, so that slow pairs rotate more slowly and fast ones as before",
        "bloc97 2023 (NTK-aware scaling); Peng et al. 2023, section 3.1",
    ),
    stretched(
        "rotary_yarn",
        "YaRN",
        "yarn",
        "slow pairs rotate more slowly, fast ones as before, and scores are larger",
        "Peng et al. 2023, sections 3.2 to 3.4",
    ),
    stretched(
        "rotary_llama3",
        "Llama 3",
        "llama3",
        "pairs with wavelengths beyond a part of the trained context rotate more slowly, the others as before",
        "Llama 3.1 (Dubey et al. 2024), frequencies as in its published code",
    ),
    Preset(
        name="rotary_dynamic_ntk",
        title="Rotary (RoPE), 1-D, dynamic NTK",
        build=lambda site: RotaryEmbedding(site.head_dim, scaling=DynamicNTK(1.0, site_length(site))),
        summary="In training it is the plain rotation; on longer inputs the base grows with each input's own length. "
        "It has no settings, but while a text grows the frequencies of all its tokens change.",
        source="emozilla 2023; Peng et al. 2023, section 3.3",
        token_axes=(1,),
        family="rotation",
    ),
]
