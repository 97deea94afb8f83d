"""PyTorch's FlexAttention, compiled, on CUDA: terms become its `score_mod`, a mask its `BlockMask`.

Vectors with few rows are multiplied with queries or keys beforehand, so that `score_mod` looks up one of N x R numbers.
FlexAttention sums the gradient of a table with atomics, in no fixed order; `auto` therefore does not use this engine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils import _pytree as pytree

from relpos.core import (
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    PairRotations,
    QueryBias,
    QueryScale,
    Rotation,
    Sinks,
    Softcap,
    at_least_float32,
)
from relpos.core.pairs import Compared
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.operators import joined, lacks_transform

NARROWEST = 16
"""Minimum head width that FlexAttention supports."""
MOST_ROWS = 512
"""Maximum rows of vectors; one number per row is stored for each query or key."""

MOST_RANK = 8
"""Maximum rank of a low-rank bias, whose numbers `score_mod` reads one by one."""

_ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A `score_mod`: the new score, from a score and the indices of batch, head, query and key."""


class Flex(Engine):
    name = "flex"
    summary = (
        "PyTorch's FlexAttention, compiled, for biases on lines or of low rank, and vectors on few rows; CUDA, "
        "gradients not deterministic"
    )
    served = (LineBias, LineVectors, LowRank, PairRotations, Rotation, QueryBias, QueryScale, Softcap, Sinks)
    checked_on = ("cuda",)

    def unsupported(self, call: Call) -> str | None:
        if call.q.device.type != "cuda":
            return f"a CUDA device (q is on {call.q.device.type})"
        if call.q.dtype == torch.float64:
            return "float64"
        if min(call.q.shape[3], call.v.shape[3]) < NARROWEST:
            return f"head widths below {NARROWEST}"
        if call.dropout > 0:
            return "dropout"
        if call.mask is not None and call.mask.allowed is not None:
            return "a mask as a tensor"
        if (unknown := self.unknown(call)) is not None:
            return unknown
        if any(term.query.shape[-1] > MOST_RANK for term in call.terms.of(LowRank)):
            return f"a LowRank of a rank above {MOST_RANK}"
        for term in call.terms.of(LineVectors):
            if term.side == "value":
                return "LineVectors on the value side"
            if term.vectors.shape[1] > MOST_ROWS:
                return f"LineVectors of more than {MOST_ROWS} rows"
        return lacks_transform()

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and log-sum-exp."""
        return attend(call.rotated(), *_compiled())


FLEX = Flex()


@cache
def _compiled() -> tuple[Any, Any]:
    """`flex_attention` and `create_block_mask`; the latter would make the mask of all pairs if it were not compiled."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def attend(call: Call, flex: Any, create_block_mask: Any) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The call by `flex_attention` and `create_block_mask`, compiled or not."""
    return joined([_attend_alone(one, flex, create_block_mask) for one in call.each()])


def _attend_alone(call: Call, flex: Any, create_block_mask: Any) -> tuple[Tensor, Tensor]:
    from torch.nn.attention.flex_attention import AuxRequest

    block_mask = None
    if call.mask is not None:
        tensors = [x for x in pytree.tree_leaves(call.mask) if isinstance(x, Tensor)]
        batch = call.q.shape[0] if any(x.dim() == 2 for x in tensors) else None
        heads = None if call.mask.blocks is None else call.q.shape[1]
        allows, device = _mask_mod(call, call.mask), call.q.device
        block_mask = create_block_mask(allows, batch, heads, call.q.shape[2], call.k.shape[2], device=device)
    out, aux = flex(
        call.q, call.k, call.v, score_mod=_score_mod(call), block_mask=block_mask, scale=call.scale,
        enable_gqa=call.is_grouped, return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    lse = aux.lse
    sinks = call.terms.one(Sinks)
    if sinks is not None:
        with_sinks = lse.logaddexp(sinks.rows(lse.dtype))
        shift = torch.where(with_sinks == -torch.inf, 0, with_sinks)  # a row that sees nothing, and no sink
        out = out * torch.exp(lse - shift)[..., None].to(out.dtype)
        lse = with_sinks
    return out, lse


def _score_mod(call: Call) -> _ScoreMod:
    """All terms as one `score_mod`, in the order of the definition."""
    softcap, temperature = call.terms.one(Softcap), call.terms.one(QueryScale)
    cap = None if softcap is None else softcap.cap
    factor = None if temperature is None else temperature.factor.float().expand(call.q.shape[:3])
    steps = [_bias(term, call) for term in call.terms.of(LineBias)]
    steps += [_vectors(term, call) for term in call.terms.of(LineVectors)]
    steps += [_low_rank(term, call) for term in call.terms.of(LowRank)]

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if cap is not None:
            score = cap * torch.tanh(score / cap)
        added = score if factor is None else torch.zeros_like(score)
        for step in steps:
            added = step(added, b, h, i, j)
        return added if factor is None else score + factor[b, h, i] * added

    return score_mod


def _bias(term: LineBias, call: Call) -> _ScoreMod:
    batch, heads = call.q.shape[:2]
    values, origin = term.values.float().expand(heads, -1), term.lines.origin
    query, key = term.lines.query.expand(batch, -1), term.lines.key.expand(batch, -1)
    return lambda score, b, h, i, j: score + values[h, query[b, i] - key[b, j] + origin]


def _low_rank(term: LowRank, call: Call) -> _ScoreMod:
    """The products of each rank, which are summed before they are added: large ones of a forget gate cancel."""
    batch, heads = call.q.shape[:2]
    query, key = (x.float().expand(batch, heads, -1, -1).unbind(dim=-1) for x in (term.query, term.key))
    pairs = list(zip(query, key, strict=True))
    return lambda score, b, h, i, j: score + sum(x[b, h, i] * y[b, h, j] for x, y in pairs)


def _vectors(term: LineVectors, call: Call) -> _ScoreMod:
    """Products of every query or key with every row, looked up by the row that a pair reads; an added row gives 0."""
    batch, heads = call.q.shape[:2]
    lines, count = term.lines, term.vectors.shape[1]
    query, key = lines.query.expand(batch, -1), lines.key.expand(batch, -1)
    rows = torch.arange(lines.length, device=call.q.device) if term.index is None else term.index
    rows = torch.where((rows < 0) | (rows >= count), count, rows)
    on_queries = term.side == "query"
    plain = call.plain_q if on_queries else call.plain_k
    x = at_least_float32((call.q if on_queries else call.k) if plain is None else plain)
    if term.content is not None:
        x = at_least_float32(term.content).expand(batch, heads, -1, -1)
    x = x.repeat_interleave(heads // x.shape[1], dim=1)
    if term.bias is not None:
        x = x + term.bias[:, None].to(x.dtype)
    products = F.pad(x @ term.vectors.to(x.dtype).mT, (0, 1)) * (call.scale if term.scaled else 1.0)
    origin = lines.origin
    if on_queries:
        return lambda score, b, h, i, j: score + products[b, h, i, rows[query[b, i] - key[b, j] + origin]]
    return lambda score, b, h, i, j: score + products[b, h, j, rows[query[b, i] - key[b, j] + origin]]


def _mask_mod(call: Call, mask: Mask) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """A mask as a `mask_mod`, a function of the indices of batch, head, query and key."""
    batch, device = call.q.shape[0], call.q.device
    also = None if mask.also is None else _mask_mod(call, mask.also)
    rows, columns = (torch.arange(x.shape[2], device=device) for x in (call.q, call.k))
    found = mask.compared(rows, columns, slice(0, call.k.shape[2]))
    wide = (getattr(found, field.name) for field in fields(found))
    compared = Compared(*(None if x is None else x.expand(batch, -1) for x in wide))
    blocks = mask.blocks
    layout = None if blocks is None else blocks.layout.expand(call.q.shape[1], -1, -1)

    def mask_mod(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = compared.allowed(i >= 0, lambda x: x[b, i], lambda x: x[b, j])
        if blocks is not None and layout is not None:
            allowed = allowed & layout[h, i // blocks.size, j // blocks.size]
        return allowed if also is None else allowed & also(b, h, i, j)

    return mask_mod
