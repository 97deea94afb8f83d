"""By heads (DeepSpeed-Ulysses): ranks exchange tokens for heads, and each computes some heads of the whole sequence.

Source: Jacobs et al. 2023. Four exchanges forward (q, k, v and the output), each of 1 / R of the sequence.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from relpos.core import (
    AxisVectors,
    DenseBias,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    Scale,
    Sinks,
    Softcap,
    Term,
    Terms,
)
from relpos.core.tree import changed, fields_of
from relpos.engines import attention
from relpos.parallel.exchange import Shares, heads_for_tokens, tokens_for_heads
from relpos.parallel.ranks import Ranks

HEAD_AXES: dict[type[Term], dict[str, int]] = {
    LineBias: {"values": 0},
    LineVectors: {"vectors": 0, "bias": 0, "content": 1},
    AxisVectors: {"vectors": 0},
    LowRank: {"query": -3, "key": -3},
    DenseBias: {"bias": 1},
    IndexedBias: {"values": 0},
    Rotation: {"query": 1, "key": 1, "query_magnitude": 1, "key_magnitude": 1, "phase": 0},
    PairRotations: {},
    QueryBias: {"u": 0},
    QueryScale: {"factor": 1},
    Sinks: {"logits": -2},
    Scale: {},
    Softcap: {},
}
"""The axis of query heads in the fields of each kind of term; of size 1 it stands for all heads."""


def lacks_heads(terms: Terms, heads: int, key_heads: int, size: int) -> str | None:
    """Why heads cannot be divided among so many ranks, in words; None if they can."""
    if heads % size or key_heads % size:
        return f"heads that {size} ranks share equally (there are {heads}, and {key_heads} of keys)"
    for term in terms:
        if not isinstance(term, tuple(HEAD_AXES)):
            return f"a position without {type(term).__name__}, whose heads cannot be told apart"
    return None


def of_heads(terms: Terms, heads: slice, count: int) -> Terms:
    """The terms of some of `count` query heads."""
    return terms.each(lambda term: _of_heads(term, heads, count))


def _of_heads(term: Term, heads: slice, count: int) -> Term:
    if isinstance(term, PairRotations):
        return changed(term, rotations=tuple(_of_heads(one, heads, count) for one in term.rotations))
    axes = next(axes for kind, axes in HEAD_AXES.items() if isinstance(term, kind))
    cut: dict[str, Any] = {}
    for name, x in fields_of(term).items():
        if name not in axes or x is None:
            continue
        axis = axes[name]
        if isinstance(term, Sinks):
            axis = 1 if term.of_queries else 0
        own = tuple(_cut(one, axis, heads, count) for one in x) if isinstance(x, tuple) else _cut(x, axis, heads, count)
        if own is not x:
            cut[name] = own
    return changed(term, **cut) if cut else term


def _cut(x: Tensor, axis: int, heads: slice, count: int) -> Tensor:
    if x.shape[axis] != count or count == 1:
        return x
    return x.narrow(axis, heads.start, heads.stop - heads.start)


def _mask_of(mask: Mask, heads: slice, count: int) -> Mask:
    """The mask of some heads: block layouts and tensors may differ by head."""
    cut: dict[str, Any] = {}
    if mask.allowed is not None:
        cut["allowed"] = _cut(mask.allowed, 1, heads, count)
    if mask.blocks is not None:
        cut["blocks"] = changed(mask.blocks, layout=_cut(mask.blocks.layout, 0, heads, count))
    return changed(mask, **cut) if cut else mask


def by_heads(
    q: Float[Tensor, "B H n D"],
    k: Float[Tensor, "B G n D"],
    v: Float[Tensor, "B G n V"],
    terms: Terms,
    mask: Mask | None,
    scale: float | None,
    ranks: Ranks,
    shares: Shares,
) -> Float[Tensor, "B H n V"]:
    """Attention of this rank's queries to the keys of all ranks. `terms`: of all tokens."""
    count = q.shape[1]
    width = count // ranks.size
    heads = slice(ranks.rank * width, (ranks.rank + 1) * width)
    whole = [heads_for_tokens(ranks, shares, x) for x in (q, k, v)]
    own = None if mask is None else _mask_of(mask, heads, count)
    out = attention(whole[0], whole[1], whole[2], position=of_heads(terms, heads, count), mask=own, scale=scale)
    return tokens_for_heads(ranks, shares, out)
