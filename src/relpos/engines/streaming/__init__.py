"""Exact attention in O(N) memory: blocks of query rows, every term, gradients recomputed block by block.

The path of a call: `work` applies the rotation, rules by row become dense biases of one block of rows at a time, and
everything else goes through the operators that `operators` makes, scattered segments gathered (`segments`), to the loop
of `loop`, which looks at the keys alone that a block's rows may see (`masks`), reads a regular line
bias as views of one vector (`strips`) and any other term by its dense meaning on a block (`general`).
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from relpos.core import DenseBias, LineVectors, RowRule, Term, at_least_float32, lookup
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.operators import Gradients, lacks_transform, make_operator
from relpos.engines.streaming.backward import Backward
from relpos.engines.streaming.forward import Forward
from relpos.engines.streaming.rules import slower as slower
from relpos.engines.streaming.segments import split
from relpos.engines.work import Work, pack, work_of

NAME = "streaming"
SUMMARY = "blocks of rows in O(N) memory, with an exact gradient; every term, any device; fastest on CPU"


def _forward(work: Work) -> tuple[Tensor, Tensor]:
    parts = split(work)
    if parts is None:
        return Forward(work).run()
    out = work.q.new_empty(*work.q.shape[:3], work.v.shape[3])
    lse = at_least_float32(work.q).new_empty(work.q.shape[:3])
    for part in parts:
        for into, own in zip((out, lse), Forward(part.work).run(), strict=True):
            part.put(into, own)
    return out, lse


def _backward(work: Work, out: Tensor, lse: Tensor, d_out: Tensor, d_lse: Tensor, needed: list[Tensor]) -> Gradients:
    parts = split(work)
    if parts is None:
        return Backward(work, out, lse, d_out, d_lse, needed).run()
    found = {id(x): torch.zeros_like(at_least_float32(x)) for x in needed}
    for part in parts:
        own, sums, d_own, d_sums = (part.take(x) for x in (out, lse, d_out, d_lse))
        wanted = [made for x, made, _ in part.links if id(x) in found]
        gradients = Backward(part.work, own, sums, d_own, d_sums, wanted).run()
        for x, made, add in part.links:
            if id(x) in found and id(made) in gradients:
                add(found[id(x)], gradients[id(made)])
    return found


streaming = make_operator(NAME, _forward, _backward)


def lacks(call: Call) -> str | None:
    """What of the call this engine cannot do: nothing but transforms of functions."""
    return lacks_transform()


def run(call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
    """Output and log-sum-exp."""
    work = _work(call)
    rules = call.terms.of(RowRule)
    if not rules:
        return _attend(work)
    return _by_rules(call, work, rules)


def _work(call: Call) -> Work:
    work = work_of(call)
    return replace(work, terms=work.terms.each(_one_row_an_entry))


def _attend(work: Work) -> tuple[Tensor, Tensor]:
    out, lse = streaming(*pack(work))
    return out, lse


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
