"""How close is close.

Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3): whatever the order of a
sum, its computed value is within a small multiple of eps of the sum of the magnitudes of what is summed. So the
oracle's functions are evaluated on magnitudes, every sign a plus, and their own adjoints carry a bound on the error of
each score to each gradient, entry by entry. With S the magnitudes summed in a score, C those of its content alone, p
the weights, and dP, D those summed in the gradient of a weight and in delta = <output, its gradient> less that of the
log-sum-exp,

    a weight of row i      errs by r p,    r = k (2 eps_weights + 2 eps_content max C + eps (1 + 2 max S))
    the output             by r sum p |v|
    the gradient of score  by 2 r p (dP + D)
    any other gradient     by that, carried by the magnitudes of what it meets

and each result by eps of its own dtype for being rounded to it. eps is that of the arithmetic; eps_weights and
eps_content are that of half precision where weights, and q and k that were turned, may be rounded to it. k is
4 + sqrt(n) / 8, n the longest sum: rounding errors that are independent grow with its square root (Higham and Mary
2019), and with n itself where the numbers summed are all equal, as along a dimension that is expanded. Nothing depends
on which rounding some order of sums happens to have.

Of 4,000 calls the worst result of a correct engine came to 0.5 of its bound. An error of 0.8% of the largest number,
put anywhere into a result, was above it in all of 938 results in float64 and in 930 of them in float32; the other 8 are
sums over thousands of pairs that nearly cancel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fuzz.plain import Evaluation, Inside, Plain, Truth, sink_of_rows

OPAQUE = 2**14
"""In eps of the largest: what a rule may miss of which only the results are known."""


@dataclass
class Precision:
    """What a call is computed with.

    Attributes:
        arithmetic, weights, content: eps of the arithmetic, of the weights and of the content product.
        tiny: weights below it may lose digits, or be 0. longest: of the sums.
    """

    arithmetic: float
    weights: float
    content: float
    tiny: float
    longest: int


@dataclass
class Bounds:
    """By how much each result may be missed."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


def bounds(
    plain: Plain,
    truth: Truth,
    inside: Inside,
    wanted: list[str],
    d_out: Tensor | None,
    d_lse: Tensor | None,
    precision: Precision,
) -> Bounds:
    """The bounds of what `exact` gave; see the file's head."""
    turning = [e for kind, e in plain.entries if kind in ("rotation", "polar")]
    turning += [turn for kind, e in plain.entries if kind == "by_pair" for turn in e["turns"]]
    angles = {e[s] for e in turning for s in ("query", "key", "phase") if e.get(s) is not None}
    numbers = {
        name: (x.detach() if name in angles else x.detach().abs()).requires_grad_(name in wanted)
        for name, x in plain.numbers.items()
    }
    weights, p_sink, allowed = inside.weights, inside.of_sink, inside.allowed
    factor = torch.zeros(()) if inside.capped is None else 1 - inside.capped.square()
    call = Evaluation(plain, numbers, factor)
    sizes = call.scores().expand(weights.shape)
    assert call.content is not None

    def largest(x: Tensor) -> Tensor:
        x = torch.where(allowed, x.detach().expand(weights.shape), 0.0)
        return x.amax(-1, keepdim=True) if x.shape[3] else x.new_zeros(*x.shape[:3], 1)

    content, size = largest(call.content), largest(sizes)
    sink = sink_of_rows(call)
    size = size if sink is None else torch.maximum(size, sink.detach())
    if inside.opaque is not None:
        size = size + largest(inside.opaque.abs())
    kappa = 4 + math.sqrt(precision.longest) / 8
    r = kappa * (2 * precision.weights + 2 * precision.content * content + precision.arithmetic * (1 + 2 * size))
    kept = torch.ones(()) if plain.kept is None else plain.kept
    p = torch.where(allowed, weights + precision.tiny, 0.0).requires_grad_()
    carried = call.carried(p * kept)
    of_lse = kappa * (precision.content * content + precision.arithmetic * (1 + 2 * size))
    found = Bounds((r * carried).detach(), of_lse[..., 0])
    if not truth.gradients:
        return found
    leaves = [numbers[name] for name in wanted]
    up = torch.zeros_like(truth.out) if d_out is None else d_out.abs()
    d_p, *of_values = torch.autograd.grad(carried, [p, *leaves], r * up, allow_unused=True, retain_graph=True)
    with torch.no_grad():  # r is one number a row, and goes through
        d_p, p = d_p / r, p.detach()
        delta = (p * d_p).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta + d_lse.abs()[..., None]
        d_scores = 2 * r * p * (d_p + delta)
    of_scores = torch.autograd.grad(sizes, leaves, d_scores, allow_unused=True) if sizes.requires_grad else ()
    for place, name in enumerate(wanted):
        bound = torch.zeros_like(numbers[name])
        for of in (of_values, of_scores):
            if of and of[place] is not None:
                bound = bound + of[place].abs()
        if p_sink is not None and name == call.kinds("sinks")[0]["logits"]:
            own = bound.shape if bound.dim() == 3 else (1, *bound.shape, 1)
            bound = bound + (2 * r * p_sink * delta)[..., 0].sum_to_size(own).view(bound.shape)
        if inside.opaque is not None and bound.numel():
            bound = bound + OPAQUE * precision.arithmetic * (1 + truth.gradients[name].abs().amax())
        found.gradients[name] = bound
    return found
