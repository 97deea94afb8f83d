"""Exact attention in O(N) memory: blocks of query rows, every term, gradients recomputed block by block.

The path of a call: the rotation is applied here, rules by row become dense biases of one block of rows at a time, and
everything else goes through the operators of `operators` to the loop of `loop`, which reads a regular line bias as
views of one vector (`strips`) and any other term by its dense meaning on a block (`general`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from relpos.attention import dense
from relpos.attention.call import Call
from relpos.attention.streaming.operators import streaming
from relpos.attention.streaming.plan import Work, pack
from relpos.attention.streaming.rules import slower as slower
from relpos.core import (
    AxisVectors,
    DenseBias,
    LineVectors,
    QueryBias,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Term,
    Terms,
    at_least_float32,
    lookup,
)

NAME = "streaming"
SUMMARY = "blocks of rows in O(N) memory, with an exact gradient; every term, any device; fastest on CPU"

_APPLIED = (Rotation, QueryBias, Scale, RowRule)
_MEETS_PLAIN = (LineVectors, AxisVectors)


def lacks(call: Call) -> str | None:
    """What of the call this engine cannot do: custom operators go through no transform of functions."""
    if torch.compiler.is_compiling():
        return None
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return "torch.func (vmap, grad, ...)"
    return "forward-mode derivatives" if forward_ad._current_level >= 0 else None


def run(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """Output and log-sum-exp."""
    if 0 in (*call.q.shape[:3], call.k.shape[2]):
        return _of_nothing(call)
    work = _work(call)
    rules = call.terms.of(RowRule)
    if not rules:
        return _attend(work)
    return _by_rules(call, work, rules)


def _of_nothing(call: Call) -> tuple[Tensor, Tensor]:
    """No batch, queries or keys: zeros, to which gradients lead all the same."""
    nothing = sum(x[..., :0].sum() for x in (call.q, call.k, call.v))
    out = call.q.new_zeros(*call.q.shape[:3], call.v.shape[3]) + nothing
    lse = at_least_float32(call.q).new_full(call.q.shape[:3], -torch.inf)
    sinks = call.terms.one(Sinks)
    return out, lse if sinks is None else lse.logaddexp(sinks.logits.to(lse.dtype)[:, None])


def _attend(work: Work) -> tuple[Tensor, Tensor]:
    tensors, structure = pack(work)
    out, lse = streaming(tensors, structure)
    return out, lse


def _work(call: Call) -> Work:
    """The call with its rotation and query bias applied."""
    q, k, v = call.q, call.k, call.v
    plain_q = plain_k = None
    rotation = call.terms.one(Rotation)
    if rotation is not None or call.terms.one(QueryBias) is not None:
        if any(isinstance(term, _MEETS_PLAIN) for term in call.terms):
            plain_q, plain_k = q, k
        a_head = rotation is not None and rotation.key is not None and rotation.key.shape[1] != 1
        magnitudes = None if rotation is None else rotation.key_magnitude
        if a_head or (magnitudes is not None and magnitudes.shape[1] != 1):
            k, v = k.repeat_interleave(call.groups, dim=1), v.repeat_interleave(call.groups, dim=1)
        q, k = dense.content(call.terms, q, k)
    terms = Terms(*(_one_row_an_entry(term) for term in call.terms if not isinstance(term, _APPLIED)))
    return Work(q, k, v, plain_q, plain_k, terms, call.mask, call.scale, call.dropout, call.seed, 0)


def _one_row_an_entry(term: Term) -> Term:
    """Vectors on a sequence with as many rows as the line has entries: buckets and clipping are read once, here."""
    if not isinstance(term, LineVectors) or term.lines.layout.kind != "affine":
        return term
    length, count = term.lines.length, term.vectors.shape[1]
    if term.index is None:
        return replace(term, vectors=F.pad(term.vectors[:, :length], (0, 0, 0, max(0, length - count))))
    rows = F.pad(term.vectors, (0, 0, 0, 1)).transpose(0, 1)
    inside = (term.index >= 0) & (term.index < count)
    return replace(term, vectors=lookup(rows, torch.where(inside, term.index, count)).transpose(0, 1), index=None)


def _by_rules(call: Call, work: Work, rules: tuple[RowRule, ...]) -> tuple[Tensor, Tensor]:
    """Rules by row are any function, which no operator can hold: they give each block of rows a dense bias, computed
    again in the backward, so that the blocks' biases never stand side by side."""
    n, m = call.q.shape[2], call.k.shape[2]
    wide_q = at_least_float32(call.q)
    wide_k = at_least_float32(call.k).repeat_interleave(call.groups, dim=1)
    step = max(1, dense.PAIRS_AT_ONCE // max(1, m))
    if call.mask is not None and call.mask.blocks is not None:
        step = -(-step // call.mask.blocks.size) * call.mask.blocks.size
    everything = slice(0, m)

    def attend(start: int, stop: int) -> tuple[Tensor, Tensor]:
        rows = slice(start, stop)
        mask = None if call.mask is None else call.mask.narrow(rows, everything, call.q.device)
        seen = torch.ones(1, 1, stop - start, m, dtype=torch.bool, device=call.q.device)
        if mask is not None:
            seen = mask.dense(stop - start, m, call.q.device)
        bias = sum(rule(wide_q[:, :, rows], wide_k, seen, rows) for rule in rules)
        assert isinstance(bias, Tensor)
        plain_q = None if work.plain_q is None else work.plain_q[:, :, rows]
        terms = work.terms.narrow(rows, everything) + DenseBias(bias)
        return _attend(replace(work, q=work.q[:, :, rows], plain_q=plain_q, terms=terms, mask=mask, first_row=start))

    parts = [checkpoint(attend, start, min(start + step, n), use_reentrant=False) for start in range(0, n, step)]
    outs, lses = zip(*parts, strict=True)
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
