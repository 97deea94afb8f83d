"""The definition: attention written out, every term, N x M tensors stored, any dtype up to float64.

    score   = softcap(factor * scale * <rotate(q) + u, rotate(k)>) + biases    factor of the query, or 1
    score   = -inf where the mask forbids
    weights = exp(score) / (sum over keys of exp(score) + exp(sink))        0 in a row that may see nothing
    output  = dropout(weights) @ v + value vectors under the same weights

Where a `Rotation` turns values, the plan of a call turns v before and the output back after (`plan.py`).
Half precision is computed in float32 and rounded once. This readable file is the oracle of every other engine.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineVectors, Sinks, Softcap, at_least_float32
from relpos.core.random import kept_pairs
from relpos.engines import dense
from relpos.engines.call import Call
from relpos.engines.engine import Engine


class Reference(Engine):
    name = "reference"
    summary = "the definition, dense and readable; any device, any dtype up to float64, every term"

    def unsupported(self, call: Call) -> None:
        """Nothing."""

    def run(self, call: Call) -> tuple[Float[Tensor, "B H N V"], Float[Tensor, "B H N"]]:
        """Output and log-sum-exp."""
        probabilities, lse = weights(call)
        if call.seed is not None:
            batch, heads, n, m = probabilities.shape
            rows, columns = torch.arange(n, device=lse.device), torch.arange(m, device=lse.device)
            kept = kept_pairs(call.seed, batch, heads, rows, columns, call.dropout)
            probabilities = probabilities * kept / (1 - call.dropout)
        v = at_least_float32(call.v).repeat_interleave(call.groups, dim=1)
        output = probabilities @ v
        for term in call.terms.of(LineVectors):
            if term.side == "value":
                output = output + term.outputs(probabilities)
        return output.to(call.q.dtype), lse


REFERENCE = Reference()


def weights(call: Call) -> tuple[Float[Tensor, "B H N M"], Float[Tensor, "B H N"]]:
    """The softmax's weights before dropout, and the log-sum-exp of the scores (-inf in a row that sees nothing)."""
    q, k = at_least_float32(call.q), at_least_float32(call.k).repeat_interleave(call.groups, dim=1)
    n, m = q.shape[2], k.shape[2]
    allowed = None if call.mask is None else call.mask.dense(n, m, q.device)

    score = dense.product(call.terms, q, k) * call.scale
    softcap = call.terms.one(Softcap)
    if softcap is not None:
        score = softcap.cap * torch.tanh(score / softcap.cap)
    added = dense.scores(call.terms, q, k, call.scale, allowed)
    if added is not None:
        score = score + added
    if allowed is not None:
        score = score.masked_fill(~allowed, -torch.inf)

    sinks = call.terms.one(Sinks)
    sink = None if sinks is None else sinks.rows(score.dtype)[..., None]
    peak = score.detach().amax(dim=-1, keepdim=True) if m else score.new_full((*score.shape[:3], 1), -torch.inf)
    if sink is not None:
        peak = torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -torch.inf, 0, peak)
    numerator = torch.exp(score - peak)
    total = numerator.sum(dim=-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - peak)
    blank = total == 0
    total = torch.where(blank, 1, total)
    lse = torch.where(blank, -torch.inf, peak + torch.log(total))
    return numerator / total, lse.squeeze(-1)
