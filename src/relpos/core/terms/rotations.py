"""Rotations of queries and keys before the content product, and of values, by angles that are theirs alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from relpos.core import polar
from relpos.core.algebra import Single
from relpos.core.cache import cached, may_cache
from relpos.core.checks import fail, require_flag, require_int, require_number, require_tensor, require_wide, shape_of
from relpos.core.rotation import RotationLayout, require_layout, require_width, turn, turn_each
from relpos.core.rotation import rotate as plain_rotate
from relpos.core.terms.fitting import check_device, check_shape, heads_first
from relpos.core.tree import changed, register, static

RotatedSide = Literal["query", "key"]


@register("relpos.core.terms.Rotation")
@dataclass(frozen=True, eq=False)
class Rotation(Single):
    """Turns q and k before the content product: `<rotate(q), rotate(k)>`. At most one.

    With `values`, v is turned as keys are, and the output back by its query's angles: what a value adds to a query is
    then turned by their offset, and keys and values may be one tensor (DeepSeek V4). All of the output is turned back,
    vectors on the value side too.

    Attributes:
        query: angles `[1 or B, 1 or H, N, R/2]` in radians, float32 or wider.
        key: angles of the keys, or None if the keys, and with `values` the values, are already rotated (a cache).
        layout: `"half"` or `"interleaved"`, see `core.rotation`.
        magnitude: multiplies the rotated dimensions of both sides (YaRN's attention factor).
        query_magnitude: one per angle of the queries (xPos), multiplied with `magnitude`.
        key_magnitude: one per angle of the keys.
        width: the head width that the angles were made for, R or more; attention refuses another. None for any.
        start: the first of the R rotated dimensions, of keys and of values; D - R for the trailing ones.
        values: whether values are turned too, and the output back. Not beside magnitudes.

    Raises:
        ValueError: half precision, angles of another shape, or a magnitude beside `values`; in attention, for other
            tokens or another width.

    Examples:
        >>> angles = torch.arange(5.0)[None, None, :, None]  # [1, 1, N, R / 2]: one pair, a radian a token
        >>> turn = relpos.Rotation(angles, angles, layout="half")
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=turn).shape
        torch.Size([1, 2, 5, 8])
    """

    adds_scores = meets_plain = False
    one_of = "rotation"
    _per_angle = 2
    """Dimensions of a head for each angle."""
    query: Float[Tensor, "#B #H N P"]
    key: Float[Tensor, "#B #H M P"] | None
    layout: RotationLayout = static()
    magnitude: float = static(default=1.0)
    query_magnitude: Float[Tensor, "#B #H N P"] | None = None
    key_magnitude: Float[Tensor, "#B #H M P"] | None = None
    width: int | None = static(default=None)
    start: int = static(default=0)
    values: bool = static(default=False)

    def __post_init__(self) -> None:
        require_layout(self.layout)
        require_number(self.magnitude, "Rotation magnitude", "above 0", "Leave it out for 1.")
        for name in ("query", "key", "query_magnitude", "key_magnitude"):
            x = getattr(self, name)
            if x is None and name != "query":
                continue
            require_tensor(x, f"Rotation {name}", dims=4)
            why = "Half precision rounds a position of 1995 to 1992; compute angles in float32."
            require_wide(x, f"Rotation {name}", why)
            if x.shape[3] != self.query.shape[3]:
                wanted = f"Rotation {name} with {self.query.shape[3]} angles per token, as the query has"
                fail(wanted, shape_of(x), "Queries and keys rotate the same dimensions.")
        if self.key is None and self.key_magnitude is not None:
            fail("no key magnitude with keys already rotated", shape_of(self.key_magnitude), "Apply it with rotate().")
        require_int(self.start, "Rotation start", at_least=0)
        require_flag(self.values, "Rotation values")
        if self.values and (self.magnitude != 1 or self.query_magnitude is not None or self.key_magnitude is not None):
            fail("no magnitude in a Rotation of values", "one", "It is defined for q and k alone: leave one out.")
        if self.width is not None:
            require_int(self.width, "Rotation width", at_least=1)
            turned = self.start + self._per_angle * self.query.shape[3]
            if turned > self.width:
                wanted = f"a {type(self).__name__} of at most {self.width} dimensions"
                fail(wanted, str(turned), "There is one angle per pair.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        require_width(q, self.width)
        pairs = self.query.shape[-1]
        for side, x, angles, magnitude in (
            ("query", q, self.query, self.query_magnitude),
            ("key", k, self.key, self.key_magnitude),
        ):
            if angles is None:
                continue
            wanted = ((1, q.shape[0]), (1, q.shape[1]), (x.shape[2],), (pairs,))
            check_device(angles, f"Rotation {side} angles", q)
            check_shape(angles, f"Rotation {side} angles", wanted)
            if magnitude is not None:
                check_device(magnitude, f"Rotation {side} magnitude", q)
                check_shape(magnitude, f"Rotation {side} magnitude", wanted)
        width = min(q.shape[3], v.shape[3]) if self.values else q.shape[3]
        if self.start + self._per_angle * pairs > width:
            most = max(0, width - self.start) // self._per_angle
            where = f" from dimension {self.start}" if self.start else ""
            fail(f"at most {most} angles{where} for a head width of {width}", str(pairs), "Rotate fewer dimensions.")
        if self.values and self.turns_keys_by_head and v.shape[1] != q.shape[1]:
            shared, came = "angles that heads share, in a Rotation of grouped values", f"{q.shape[1]} query heads and "
            fail(shared, f"{came}{v.shape[1]} of values", "Repeat k and v for each query head.")

    @property
    def widens(self) -> int:
        """How many times as wide queries and keys are after it."""
        return 2 // self._per_angle

    def _turned(
        self,
        x: Tensor,
        side: RotatedSide,
        rotate: Callable[..., Tensor] | None = None,
        into: RotationLayout | None = None,
        back: bool = False,
    ) -> Tensor:
        """`x`, rotated as queries or keys are; by `rotate` if an engine has its own. `into`: see `core.rotation.turn`.
        `back`: by the negative angles."""
        part = x[..., self.start :] if self.start else x
        if rotate is None and (known := self._factors(side, torch.promote_types(x.dtype, torch.float32))) is not None:
            turned = turn(part, known.conj() if back else known, self.layout, into)
        else:
            angles, magnitude = self._of(side)
            angles = -angles if back else angles
            turned = (rotate or plain_rotate)(part, angles, layout=self.layout, magnitude=magnitude)
        return torch.cat([x[..., : self.start], turned], dim=-1) if self.start else turned

    def turn_values(self, v: Float[Tensor, "B G M V"]) -> Float[Tensor, "B G M V"]:
        """Values, turned by the angles of their keys."""
        return v if self.key is None else self._turned(v, "key")

    def turn_back(self, output: Float[Tensor, "B H N V"]) -> Float[Tensor, "B H N V"]:
        """The output of turned values, turned back by the angles of its queries."""
        return self._turned(output, "query", back=True)

    def _of(self, side: RotatedSide) -> tuple[Tensor, float | Tensor]:
        angles, own = (self.query, self.query_magnitude) if side == "query" else (self.key, self.key_magnitude)
        assert angles is not None
        return angles, self.magnitude if own is None else own * self.magnitude

    @property
    def _is_fixed(self) -> bool:
        """Whether `fixed` marked it or the term it was cut from, and the cache may be used."""
        return "_whole" in self.__dict__ and may_cache(self.query.device)

    def _factors(self, side: RotatedSide, dtype: torch.dtype) -> Complex[Tensor, "#B #H N P"] | None:
        """The cached factors for `turn`, or None if the angles are not fixed. A part of a fixed term reads that term's
        cache."""
        if not self._is_fixed:
            return None
        whole, *cuts = self.__dict__["_whole"]
        if whole is None:
            side = "query" if self.key is self.query else side
            made: Tensor = cached(self, (side, dtype), self.query.device, lambda: self._made(side, dtype))
            return made
        found: Tensor = whole._factors(side, dtype)
        return found[..., cuts[side == "key"], :]

    def _made(self, side: RotatedSide, dtype: torch.dtype) -> Complex[Tensor, "#B #H N P"]:
        angles, magnitude = self._of(side)
        return torch.complex((angles.cos() * magnitude).to(dtype), (angles.sin() * magnitude).to(dtype))

    @property
    def turns_keys_by_head(self) -> bool:
        """Whether keys are turned differently in each query head, so that grouped keys are no longer shared."""
        return any(x is not None and x.shape[1] != 1 for x in (self.key, self.key_magnitude))

    def turns_keys_as(self, other: Rotation) -> bool:
        """Whether both make the same of keys, judged by the identity of their angles."""
        names = ("magnitude", "layout", "start", "_is_fixed")
        alike = all(getattr(self, name) == getattr(other, name) for name in names)
        return alike and self.key is other.key and self.key_magnitude is other.key_magnitude

    def _whole_factors(self, x: Tensor, side: RotatedSide) -> Complex[Tensor, "#B #H N P"] | None:
        """The cached factors for `turn_each`, or None if they are not cached, or not of all dimensions of `x`."""
        whole = type(self) is Rotation and not self.start and 2 * self.query.shape[3] == x.shape[3]
        return self._factors(side, torch.promote_types(x.dtype, torch.float32)) if whole else None

    def narrow(self, queries: slice, keys: slice) -> Rotation:
        def cut(x: Tensor | None, part: slice) -> Tensor | None:
            return None if x is None else x[..., part, :]

        narrowed = changed(
            self,
            query=self.query[..., queries, :],
            key=cut(self.key, keys),
            query_magnitude=cut(self.query_magnitude, queries),
            key_magnitude=cut(self.key_magnitude, keys),
        )
        if self.__dict__.get("_whole") == (None,):
            narrowed.__dict__["_whole"] = (self, queries, keys)
        return narrowed


@register("relpos.core.terms.Polar")
@dataclass(frozen=True, eq=False)
class Polar(Rotation):
    """Takes each number of q and k as a magnitude with an angle: two numbers, `softplus(x) (cos a, sin a)` (PoPE).

        score = scale * sum over c of softplus(q[c]) softplus(k[c]) cos(query[c] - key[c] - phase[c])

    Content decides magnitudes alone, position angles alone. Queries and keys become twice as wide, while the scale
    stays that of their own width. It is the rotation of the pairs (softplus(x[c]), 0), and counts as the one rotation.
    `magnitude`, `query_magnitude` and `key_magnitude` are as there; the `layout` changes nothing, and `start` and
    `values` are refused.

    Attributes:
        query: angles `[1 or B, 1 or H, N, D]` in radians, float32 or wider.
        key: those of the keys.
        start: of `Rotation`; here 0, since all dimensions are mapped.
        values: of `Rotation`; here False.
        width: the head width, D.
        phase: `[1 or H, D]`, added to the angles of all keys; None for 0.

    Raises:
        ValueError: half precision, or not one angle for each dimension; with a query bias; in a sum, another rotation.

    Examples:
        >>> angles = torch.arange(5.0)[None, None, :, None] * torch.tensor([1.0, 0.1])  # [1, 1, N, D]
        >>> q = k = v = torch.randn(1, 4, 5, 2)
        >>> relpos.attention(q, k, v, position=relpos.Polar(angles, angles)).shape
        torch.Size([1, 4, 5, 2])
    """

    _per_angle = 1
    layout: RotationLayout = static(default="half")
    phase: Float[Tensor, "#H P"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start or self.values:
            fail("Polar without start and values", "one of them", "It maps all dimensions of queries and keys.")
        if self.key is None:
            fail("the angles of the keys for Polar", "None", "Keys are mapped in attention: keep them as they were.")
        if self.phase is not None:
            heads_first(self.phase, "Polar phase", "D")
            require_wide(self.phase, "Polar phase", "Compute it in float32.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        super().check(q, k, v)
        width = q.shape[3]
        if self.query.shape[3] != width:
            fail(f"{width} angles for a head width of {width}", str(self.query.shape[3]), "Each dimension has its own.")
        if self.phase is not None:
            check_device(self.phase, "Polar phase", q)
            check_shape(self.phase, "Polar phase", ((1, q.shape[1]), (width,)))

    @classmethod
    def of(cls, rotation: Rotation, phase: Float[Tensor, "#H P"] | None, width: int) -> Polar:
        """With the angles of a rotation, and what it has cached of them."""
        made = cls(rotation.query, rotation.key, phase=phase, width=width)
        if "_whole" in rotation.__dict__:
            made.__dict__["_whole"] = (rotation, slice(None), slice(None))
        return made

    def _turned(
        self,
        x: Tensor,
        side: RotatedSide,
        rotate: Callable[..., Tensor] | None = None,
        into: RotationLayout | None = None,
        back: bool = False,
    ) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        # subtracted from the query, which has all heads
        phase = None if side == "key" or self.phase is None else self.phase.to(wide)
        if (known := self._factors(side, wide)) is not None:
            return polar.widen_at_once(x, known.real.contiguous(), known.imag.contiguous(), phase)
        angles, magnitude = self._of(side)
        cos, sin = (angles.cos() * magnitude).to(wide), (angles.sin() * magnitude).to(wide)
        return polar.widen(x, cos, sin, phase)


def turned_by_each(
    rotations: Sequence[Rotation], x: Tensor, side: RotatedSide, into: Sequence[RotationLayout | None]
) -> list[Tensor]:
    """`x`, rotated as queries or keys are by each rotation; in one autograd node, if all have cached factors of one
    layout. `into`: see `core.rotation.turn`."""
    factors = [rotation._whole_factors(x, side) for rotation in rotations]
    known = [by for by in factors if by is not None]
    layouts = {rotation.layout for rotation in rotations}
    if len(known) < len(factors) or len(known) < 2 or len(layouts) > 1:
        return [rotation._turned(x, side, into=own) for rotation, own in zip(rotations, into, strict=True)]
    (layout,) = layouts
    return turn_each(x, known, layout, [layout if own is None else own for own in into])


def fixed(rotation: Rotation) -> Rotation:
    """The rotation, marked as having angles that never change: it caches their cosines and sines."""
    rotation.__dict__["_whole"] = (None,)  # parts refer to what they were cut from
    return rotation
