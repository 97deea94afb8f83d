"""By ring: queries stay, keys and values come to them in blocks, and shards of the output merge by their log-sum-exp.

    out = sum over blocks b of  exp(lse_b - lse) out_b          lse = log sum over blocks of exp(lse_b)

The backward needs the output and the log-sum-exp of all blocks alone, as FlashAttention's does of all tiles: blocks
travel once more, and what a rank finds for a block's keys and values returns to the rank that holds them. Two blocks
are held at a time, of which one is on its way while the other is computed.

Several rotations (`PairRotations`) have a ring each, over the pairs that they turn, so that near keys come from
neighbours alone. Their outputs merge in the same way; so do the sinks of rows, which are keys without a value.

Source: Liu et al. 2023 (Ring Attention); the balanced layout is Brandon et al. 2023 (Striped) as zigzag.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import Mask, PairRotations, Rotation, RowRule, Scale, Sinks, Terms, after_content
from relpos.core.checks import under_autocast, without_autocast
from relpos.core.terms.pair_rotations import pairs_turned
from relpos.core.visibility import hides_nothing, visible_tokens
from relpos.engines.call import Call
from relpos.engines.operators import joined
from relpos.engines.selection import serves_shards
from relpos.engines.unseen import holds_finite, with_zeros
from relpos.parallel.layout import Stretch, local_slices
from relpos.parallel.local_terms import TermsOfQueries
from relpos.parallel.ranks import Ranks
from relpos.parallel.ring_node import Ring, RingWork
from relpos.parallel.ring_schedule import BACKWARD, Schedule


def lacks_blocks(terms: Terms, mask: Mask | None) -> str | None:
    """Why keys cannot come in blocks, in words; None if they can."""
    if terms.of(RowRule):
        return "a position without a rule of rows (CoPE, FIRE), which needs all keys at once,"
    for term in terms:
        if not serves_shards(term):
            return f"a position without {type(term).__name__}, which no engine computes in shards,"
    if mask is not None and mask.allowed is not None:
        return "a mask of structure, and not a tensor,"
    if mask is not None and mask.blocks is not None:
        return "a mask without a block layout"
    return None


def by_rotation(schedule: Schedule, chosen: PairRotations | None) -> list[Schedule]:
    """The schedules of a call's rings: one, or one for each of several rotations, of the pairs that it turns."""
    if chosen is None:
        return [schedule]
    return [replace(schedule, masks=(*schedule.masks, pairs)) for pairs in chosen.pairs]


def by_ring(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B G n D"],
    v: Float[Tensor, "B G n V"],
    terms_of: TermsOfQueries,
    mask: Mask | None,
    scale: float | None,
    ranks: Ranks,
    schedule: Schedule,
) -> Float[Tensor, "B H n V"]:
    """Attention of this rank's queries to the keys of all ranks."""
    dtype, _ = under_autocast(q)
    with without_autocast(q.device):
        return _attend(q.to(dtype), k.to(dtype), v.to(dtype), terms_of, mask, scale, ranks, schedule)


@dataclass(frozen=True, eq=False)
class _Share:
    """This rank's tokens, and by stretch of their queries the terms between these and all keys."""

    q: Tensor
    k: Tensor
    v: Tensor
    terms: list[Terms]
    spans: list[Stretch]
    scale: float

    def calls(self) -> list[Call]:
        """The tokens of each stretch, with its terms, which are of all keys."""
        place, found = local_slices(self.spans), []
        for span, terms in zip(self.spans, self.terms, strict=True):
            q, k, v = (x[:, :, place(span)] for x in (self.q, self.k, self.v))
            found.append(Call(q, k, v, terms, None, self.scale))
        return found

    def without_unseen(self, mask: Mask | None, count: int) -> _Share:
        """The share with 0 in what a mask of `count` tokens hides, if that may matter (`engines.unseen`)."""
        if mask is None or hides_nothing(mask, count, count):
            return self
        calls = self.calls()
        if all(map(holds_finite, calls)):
            return self
        seen = visible_tokens(mask, count, count, self.q.device)
        calls = [
            with_zeros(call, *(x[:, :, slice(*span)] for x in seen))
            for call, span in zip(calls, self.spans, strict=True)
        ]
        q, k, v = (torch.cat([getattr(call, name) for call in calls], dim=2) for name in ("q", "k", "v"))
        return replace(self, q=q, k=k, v=v, terms=[call.terms for call in calls])


def _attend(
    q: Tensor, k: Tensor, v: Tensor, terms_of: TermsOfQueries, mask: Mask | None, scale: float | None, ranks: Ranks,
    schedule: Schedule,
) -> Tensor:  # fmt: skip
    every = [terms_of(span) for span in schedule.own]
    place = local_slices(schedule.own)
    whole_k, whole_v = (x[:, :, :1].expand(-1, -1, terms_of.count, -1) for x in (k, v))
    for span, terms in zip(schedule.own, every, strict=True):
        terms.check(q[:, :, place(span)], whole_k, whole_v)
    if scale is None:
        fixed = every[0].one(Scale)
        scale = q.shape[3] ** -0.5 if fixed is None else fixed.value
    share = _Share(q, k, v, [terms.without(Scale, Sinks) for terms in every], schedule.own, float(scale))
    share = share.without_unseen(mask, q.shape[2] * ranks.size)
    chosen = terms_of.whole.one(PairRotations)
    if chosen is None:
        results = [_ring(share, mask, ranks, schedule)[:2]]
    else:
        results = _ring_of_each(share, mask, chosen, ranks, schedule)
    sinks = [terms.one(Sinks) for terms in every]
    if sinks[0] is not None:
        out, lse = results[0]
        rows = [
            one.rows(lse.dtype).expand(*lse.shape[:2], stop - start)
            for one, (start, stop) in zip(sinks, schedule.own, strict=True)
            if one is not None
        ]
        results.append((torch.zeros_like(out), torch.cat(rows, dim=2)))
    return joined(results)[0]


def _ring_of_each(
    share: _Share, mask: Mask | None, chosen: PairRotations, ranks: Ranks, schedule: Schedule
) -> list[tuple[Tensor, Tensor]]:
    """Output and log-sum-exp of each rotation, over the pairs that it turns. Keys that are turned alike are shared.

    All ranks run the backwards of these rings in the same order: each waits for the gradient of all log-sum-exps.
    """
    results: list[tuple[Tensor, Tensor]] = []
    turned: list[tuple[Rotation, Tensor]] = []
    of_each = zip(chosen.rotations, pairs_turned(chosen, mask), by_rotation(schedule, chosen), strict=True)
    for index, (rotation, seen, own) in enumerate(of_each):
        if seen is None:
            continue
        one = replace(share, terms=[_with_rotation(terms, index) for terms in share.terms])
        known = next((k for other, k in turned if rotation.turns_keys_as(other)), None)
        out, lse, k = _ring(one, seen, ranks, own, known)
        results.append((out, lse))
        turned.append((rotation, k))
    return results


def _with_rotation(terms: Terms, index: int) -> Terms:
    """The terms with one of several rotations in their place."""
    return terms.each(lambda term: term.rotations[index] if isinstance(term, PairRotations) else term)


def _ring(
    share: _Share, mask: Mask | None, ranks: Ranks, schedule: Schedule, turned: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Output and log-sum-exp of this rank's queries, and the keys that it sent. `turned`: these, if they are known."""
    own, place = share.spans, local_slices(share.spans)
    calls, ready = share.calls(), []
    of_values: list[Rotation] = []
    for span, call in zip(own, calls, strict=True):
        alone = replace(call, terms=call.terms.narrow(slice(None), slice(*span)))
        rotation = alone.terms.one(Rotation)
        if rotation is not None and rotation.values:
            of_values.append(rotation)
            alone = replace(alone, v=rotation.turn_values(call.v))
        ready.append(alone.rotated(turned=(None, None if turned is None else turned[:, :, place(span)])))

    def whole(name: str, of: str) -> Tensor | None:
        """One tensor of all stretches: that of the share, where it is not changed."""
        parts = [getattr(call, name) for call in ready]
        if all(part is getattr(call, of) for part, call in zip(parts, calls, strict=True)):
            unchanged: Tensor = getattr(share, of)
            return unchanged
        return parts[0] if len(parts) == 1 or parts[0] is None else torch.cat(parts, dim=2)

    backward = replace(schedule, most=BACKWARD)
    of_queries = {span: after_content(terms) for span, terms in zip(own, share.terms, strict=True)}
    parts = {pair: of_queries[pair[0]].narrow(slice(None), slice(*pair[1])) for pair in backward.all_pairs()}
    seeing = {pair[0] for pair in parts}
    blind = [terms for span, terms in of_queries.items() if span not in seeing]  # others wait for their gradients: 0
    unique = {id(x): x for one in (*parts.values(), *blind) for x in pytree.tree_leaves(one) if isinstance(x, Tensor)}
    learned = [x for x in unique.values() if x.requires_grad]
    work = RingWork(ranks, schedule, backward, of_queries, parts, learned, mask, share.scale, place)
    k = whole("k", "k") if turned is None else turned
    assert k is not None
    out, lse = Ring.apply(
        work, whole("q", "q"), k, whole("v", "v"), whole("plain_q", "q"), whole("plain_k", "k"), *learned
    )  # type: ignore[no-untyped-call]
    if of_values:
        turned_back = [one.turn_back(out[:, :, place(span)]) for one, span in zip(of_values, own, strict=True)]
        out = torch.cat(turned_back, dim=2)
    return out, lse, k
