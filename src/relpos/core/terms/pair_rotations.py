"""One of several rotations for each pair, chosen by where the key is, seen from the query."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from relpos.core.algebra import Single, Terms
from relpos.core.checks import fail, shape_of
from relpos.core.mask import Mask
from relpos.core.terms.fitting import check_device
from relpos.core.terms.of_content import Sinks
from relpos.core.terms.rotations import Rotation
from relpos.core.tree import changed, fields_of, register, unchecked


@register("relpos.core.terms.PairRotations")
@dataclass(frozen=True, eq=False)
class PairRotations(Single):
    """Turns q and k by the rotation of their pair: `<R(q), R(k)>`, R being `rotations[c]` where `pairs[c]` allows it.

    Each pair that may attend is in exactly one of these masks, which is not checked: what other pairs give is not
    defined. All other terms act as beside a `Rotation`. An engine computes one attention for each rotation, over its
    pairs, and puts the softmax together from their log-sum-exps: the products of every pair are computed once.

    Attributes:
        rotations: as they are alone, without `values`; at least one.
        pairs: for each, the pairs that it turns: a `Mask` of intervals (`left`, `right`, `low`, `high`, orders).

    Raises:
        ValueError: no rotation, not one mask for each, a rotation of values, or a mask of more than intervals; in
            attention, for other tokens or another width; in a sum, another rotation.

    Examples:
        >>> angles = torch.arange(6.0)[None, None, :, None]  # [1, 1, N, R / 2]: one pair of dimensions
        >>> near = relpos.Rotation(angles, angles, layout="half")
        >>> far = relpos.Rotation(torch.full_like(angles, 2.0), torch.zeros_like(angles), layout="half")
        >>> rectified = relpos.PairRotations((near, far), (relpos.Mask(left=1), relpos.Mask(right=-2)))
        >>> q = k = v = torch.randn(1, 2, 6, 8)
        >>> relpos.attention(q, k, v, position=rectified, mask="causal").shape
        torch.Size([1, 2, 6, 8])
    """

    meets_plain = False
    one_of = Rotation.one_of
    rotations: tuple[Rotation, ...]
    pairs: tuple[Mask, ...]

    def __post_init__(self) -> None:
        for name, kind in (("rotations", Rotation), ("pairs", Mask)):
            given = getattr(self, name)
            if not isinstance(given, tuple) or not given or not all(isinstance(x, kind) for x in given):
                fail(f"PairRotations {name} as a tuple of {kind.__name__}s", shape_of(given), "Write (one, other).")
        if len(self.rotations) != len(self.pairs):
            fail("a mask of pairs for each rotation", f"{len(self.rotations)} and {len(self.pairs)}", "Give as many.")
        for rotation in self.rotations:
            if rotation.values or rotation.widens > 1:
                came = "one of values" if rotation.values else type(rotation).__name__
                remedy = "Its output has no one rotation back." if rotation.values else "Leave it out."
                fail("PairRotations of queries and keys alone", came, remedy)
        for mask in self.pairs:
            if not mask.is_bounds:
                fail("PairRotations pairs by intervals", "a mask with more", "Pass the rest as mask= of attention.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for rotation in self.rotations:
            rotation.check(q, k, v)
        for mask in self.pairs:
            mask.check(q.shape[2], k.shape[2])
            for name, x in fields_of(mask).items():
                if isinstance(x, Tensor):
                    check_device(x, f"PairRotations {name}", q)
                    if x.dim() == 2 and x.shape[0] not in (1, q.shape[0]):
                        fail(
                            f"PairRotations {name} for a batch of {q.shape[0]}",
                            shape_of(x),
                            "Give one row, or one each.",
                        )

    def narrow(self, queries: slice, keys: slice) -> PairRotations:
        first = self.rotations[0]
        counts = first.query.shape[2], (first.query if first.key is None else first.key).shape[2]
        queries, keys = (slice(*part.indices(count)) for part, count in zip((queries, keys), counts, strict=True))
        return changed(
            self,
            rotations=tuple(rotation.narrow(queries, keys) for rotation in self.rotations),
            pairs=tuple(mask.narrow(queries, keys, self.rotations[0].query.device) for mask in self.pairs),
        )

    def parts(self, terms: Terms, mask: Mask | None) -> list[tuple[Terms, Mask]]:
        """For each rotation, the terms with it in the place of this one, and the pairs of `mask` that it turns.

        Without parts that are known to have no pair. Sinks are in the first alone.
        """
        found: list[tuple[Terms, Mask]] = []
        for rotation, seen in zip(self.rotations, pairs_turned(self, mask), strict=True):
            if seen is not None:
                kept = [x for x in terms if not (found and isinstance(x, Sinks))]
                items = tuple(rotation if x is self else x for x in kept)
                found.append((unchecked(Terms, items=items), seen))
        return found


def pairs_turned(chosen: PairRotations, mask: Mask | None) -> list[Mask | None]:
    """For each rotation, the pairs of `mask` that it turns; None where none are known to be, but not for all."""
    found = [own if mask is None else _within(mask, own) for own in chosen.pairs]
    some: list[Mask | None] = [None if _is_known_empty(one) else one for one in found]
    return some if any(one is not None for one in some) else [*some[:-1], found[-1]]


def _within(mask: Mask, bounds: Mask) -> Mask:
    """The pairs that both allow. `bounds` is intervals alone; `&` joins those of one order only."""
    alike = mask.query_order is bounds.query_order and mask.key_order is bounds.key_order
    unordered = not mask.has_interval and mask.query_order is mask.key_order is None
    if (alike or unordered) and not mask.has_globals:
        return mask & bounds
    if mask.also is None:
        return changed(mask, also=bounds)
    if mask.also.query_order is not bounds.query_order or mask.also.key_order is not bounds.key_order:
        fail("a mask of at most two orders beside PairRotations", "a third", "Pass the rest as a boolean tensor.")
    return changed(mask, also=mask.also & bounds)


def _is_known_empty(mask: Mask) -> bool:
    """Whether a mask allows no pair, judged by `left` and `right` alone."""
    if mask.left is None or mask.right is None or mask.has_globals:
        return False
    return mask.left + mask.right < 0
