"""PyTorch's FlexAttention, compiled, on CUDA: what is a lookup becomes its `score_mod`, a mask its `BlockMask`.

Vectors on few rows are multiplied with queries or keys beforehand, which leaves numbers to look up: N x R of them. Its
gradient of a table is accumulated by atomics, in no fixed order, so `auto` does not take this engine.
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

from relpos.core import LineBias, LineVectors, Mask, QueryBias, Rotation, Scale, Sinks, Softcap, at_least_float32
from relpos.core.pairs import Compared
from relpos.engines.call import Call
from relpos.engines.engine import Engine
from relpos.engines.operators import lacks_transform

NARROWEST = 16
"""Head width that its compiler takes."""
MOST_ROWS = 512
"""Rows of vectors: as many numbers a query or key are stored."""

_Lookup = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of a score and the numbers of batch, head, query and key: the score with something done to it."""


class Flex(Engine):
    name = "flex"
    summary = (
        "PyTorch's FlexAttention, compiled, for line biases and vectors on few rows; CUDA, gradients in no fixed order"
    )
    served = (LineBias, LineVectors, Rotation, QueryBias, Scale, Softcap, Sinks)
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
        if (unknown := self.unknown(call)) is not None:
            return unknown
        for term in call.terms.of(LineVectors):
            if term.side == "value":
                return "LineVectors on the value side"
            if term.vectors.shape[1] > MOST_ROWS:
                return f"LineVectors of more than {MOST_ROWS} rows"
        return lacks_transform()

    def not_preferred(self, call: Call) -> str:
        return "its gradients come in no fixed order"

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and log-sum-exp."""
        return attend(call.rotated(), *_compiled())


FLEX = Flex()


@cache
def _compiled() -> tuple[Any, Any]:
    """What attends, and what makes a `BlockMask`: as it is, that would form the mask of all pairs first."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), torch.compile(create_block_mask)


def attend(call: Call, flex: Any, create_block_mask: Any) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """The call by `flex_attention` and `create_block_mask`, compiled or as they are."""
    from torch.nn.attention.flex_attention import AuxRequest

    seen = None
    if call.mask is not None:
        tensors = (x for x in vars(call.mask).values() if isinstance(x, Tensor))
        batch = call.q.shape[0] if any(x.dim() == 2 for x in tensors) else None
        heads = None if call.mask.blocks is None else call.q.shape[1]
        device: Any = call.q.device
        seen = create_block_mask(_allowed(call), batch, heads, call.q.shape[2], call.k.shape[2], device=device)
    out, beside = flex(
        call.q, call.k, call.v, score_mod=_modified(call), block_mask=seen, scale=call.scale,
        enable_gqa=call.q.shape[1] != call.k.shape[1], return_aux=AuxRequest(lse=True),
    )  # fmt: skip
    sums = beside.lse
    sinks = call.terms.one(Sinks)
    if sinks is not None:
        whole = sums.logaddexp(sinks.logits.to(sums.dtype)[:, None])
        shift = torch.where(whole == -torch.inf, 0, whole)  # a row that sees nothing, and no sink
        out = out * torch.exp(sums - shift)[..., None].to(out.dtype)
        sums = whole
    return out, sums


def _a_batch(x: Tensor, batch: int) -> Tensor:
    return x.expand(batch, -1) if x.dim() == 2 else x[None].expand(batch, -1)


def _modified(call: Call) -> _Lookup:
    """All that is done to a score, in the order of the definition."""
    steps: list[_Lookup] = []
    softcap = call.terms.one(Softcap)
    if softcap is not None:
        cap = softcap.cap
        steps.append(lambda score, b, h, i, j: cap * torch.tanh(score / cap))
    steps += [_bias(term, call) for term in call.terms.of(LineBias)]
    steps += [_vectors(term, call) for term in call.terms.of(LineVectors)]

    def modified(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for step in steps:
            score = step(score, b, h, i, j)
        return score

    return modified


def _bias(term: LineBias, call: Call) -> _Lookup:
    batch, heads = call.q.shape[:2]
    values, origin = term.values.float().expand(heads, -1), term.lines.origin
    query, key = _a_batch(term.lines.query, batch), _a_batch(term.lines.key, batch)
    return lambda score, b, h, i, j: score + values[h, query[b, i] - key[b, j] + origin]


def _vectors(term: LineVectors, call: Call) -> _Lookup:
    """What every query, or key, gives with every row, looked up by the row a pair reads; one more row gives 0."""
    batch, heads = call.q.shape[:2]
    lines, count = term.lines, term.vectors.shape[1]
    query, key = _a_batch(lines.query, batch), _a_batch(lines.key, batch)
    rows = torch.arange(lines.length, device=call.q.device) if term.index is None else term.index
    rows = torch.where((rows < 0) | (rows >= count), count, rows)
    on_queries = term.side == "query"
    plain = call.plain_q if on_queries else call.plain_k
    x = at_least_float32((call.q if on_queries else call.k) if plain is None else plain)
    x = x.repeat_interleave(heads // x.shape[1], dim=1)
    if term.bias is not None:
        x = x + term.bias[:, None].to(x.dtype)
    met = F.pad(x @ term.vectors.to(x.dtype).mT, (0, 1)) * (call.scale if term.scaled else 1.0)
    origin = lines.origin
    if on_queries:
        return lambda score, b, h, i, j: score + met[b, h, i, rows[query[b, i] - key[b, j] + origin]]
    return lambda score, b, h, i, j: score + met[b, h, j, rows[query[b, i] - key[b, j] + origin]]


def _allowed(call: Call) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """The mask's pairs as a function of the numbers of batch, head, query and key."""
    mask, batch, device = call.mask, call.q.shape[0], call.q.device
    assert isinstance(mask, Mask)
    rows, columns = (torch.arange(x.shape[2], device=device) for x in (call.q, call.k))
    found = mask.compared(rows, columns, slice(0, call.k.shape[2]))
    wide = (getattr(found, field.name) for field in fields(found))
    compared = Compared(*(None if x is None else x.expand(batch, -1) for x in wide))
    blocks = mask.blocks
    layout = None if blocks is None else blocks.layout.expand(call.q.shape[1], -1, -1)

    def allowed(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = compared.allowed(i >= 0, lambda x: x[b, i], lambda x: x[b, j])
        if blocks is not None and layout is not None:
            seen = seen & layout[h, i // blocks.size, j // blocks.size]
        return seen

    return allowed
