"""The oracle: what a call of attention means, written out densely in float64. Imports nothing from relpos.

A call comes as plain entries, one for each thing that the documentation says a term adds, whose tensors are named:

    line        bias     values[h, index[i, j]]
    rotation    turns q and k before the content product
    by_pair     of several rotations turns by that which its number says, for each pair
    polar       makes numbers of q and k the magnitudes softplus(x) of plane vectors, before the content product
    query_bias  added to the turned q
    query_scale factor[b, h, i] on that q; on scores also on all that is added but sinks
    vectors     <q[i] + bias, vectors[h, rows[i, j]]>, or of k[j], or of a content[b, h, i] in place of q[i], or added
                to v under the weights; -1 reads zeros
    low_rank    <query[i], key[j]>
    dense       bias[b, h, i, j]
    rule        a function of q, k, the allowed pairs and parameters
    softcap, sinks

The bounds that results are held to are `plain_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz.plain_pairs import apart

Entry = tuple[str, dict[str, Any]]


@dataclass
class Plain:
    """A call: what it adds, the pairs it allows and its numbers by name, in float64."""

    entries: list[Entry]
    allowed: Tensor  # [1 or B, 1 or H, N, M]
    scale: float
    numbers: dict[str, Tensor]
    kept: Tensor | None = None  # dropout's factors
    q: str = "q"
    k: str = "k"
    v: str = "v"


@dataclass
class Truth:
    """The exact results and gradients."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)


@dataclass
class Inside:
    """What lies between: the weights, the sink's, the pairs allowed, what a cap's tanh gave, and scores of which a part
    came from a function that nothing is known of."""

    weights: Tensor
    of_sink: Tensor | None
    allowed: Tensor
    capped: Tensor | None
    opaque: Tensor | None


# rules by row, dense


def _gate(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    return (q * w[:, None, :]) @ k.mT


def _slope(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    away = apart(q.shape[2], k.shape[2]).abs() / 16
    return (w * (1 if absolute else -1))[:, :1, None] * away


def _before(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    return ((q * w[:, None, :]) @ k.mT * allowed).cumsum(-1) / max(1, k.shape[2])


RULES: dict[str, Callable[..., Tensor]] = {"gate": _gate, "slope": _slope, "before": _before}


# the call


def _factors(angles: Tensor, size: Tensor | float, absolute: bool) -> tuple[Tensor, Tensor]:
    cos, sin = angles.cos(), angles.sin()
    if absolute:  # nought is added, whose gradient is that of the magnitudes
        nought, cos, sin = angles - angles.detach(), cos.detach().abs(), sin.detach().abs()
        cos, sin = cos + sin * nought, sin + cos * nought
    return cos * size, sin * size


def _widened(x: Tensor, angles: Tensor, entry: dict[str, Any], size: Tensor | float, absolute: bool) -> Tensor:
    """Each number as a vector of the plane, `[..., 2 D]`. Of magnitudes softplus is a bound, and so is its slope."""
    cos, sin = _factors(angles, size, absolute)
    large = torch.nn.functional.softplus(x)
    return torch.cat([large * cos, large * sin], -1)


def _turn(x: Tensor, angles: Tensor, layout: str, size: Tensor | float, absolute: bool) -> Tensor:
    pairs, (cos, sin) = angles.shape[-1], _factors(angles, size, absolute)
    if layout == "half":
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    else:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    first, second = (a * cos + b * sin if absolute else a * cos - b * sin), a * sin + b * cos
    first, second = torch.broadcast_tensors(first, second)
    turned = torch.cat([first, second], -1) if layout == "half" else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([turned, x[..., 2 * pairs :].expand(*turned.shape[:-1], -1)], -1)


def _turn_part(x: Tensor, angles: Tensor, entry: dict[str, Any], size: Tensor | float, absolute: bool) -> Tensor:
    """`_turn` from the rotation's first dimension on."""
    turned = _turn(x[..., entry["start"] :], angles, entry["layout"], size, absolute)
    return torch.cat([x[..., : entry["start"]].expand(*turned.shape[:-1], -1), turned], -1)


def _with_zeros(vectors: Tensor) -> Tensor:
    return torch.cat([vectors, vectors.new_zeros(vectors.shape[0], 1, vectors.shape[2])], 1)


def _rows(entry: dict[str, Any], vectors: Tensor) -> Tensor:
    """The row that each pair reads, `[1 or B, 1, N, M]`, the zeros standing last."""
    rows, count = entry["rows"], vectors.shape[1]
    rows = torch.where((rows < 0) | (rows >= count), count, rows)
    return rows[None, None] if rows.dim() == 2 else rows[:, None]


def _read(products: Tensor, rows: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(products.shape[:2], rows.shape[:2])
    return products.expand(*shape, -1, -1).gather(-1, rows.expand(*shape, -1, -1))


class Evaluation:
    """One evaluation: on the numbers themselves, or on their magnitudes."""

    def __init__(self, plain: Plain, numbers: dict[str, Tensor], factor: Tensor | None = None) -> None:
        self.plain, self.absolute, self.numbers = plain, factor is not None, numbers
        self.factor = factor
        self.capped: Tensor | None = None
        self.content: Tensor | None = None
        self.q = numbers[plain.q]
        groups = self.q.shape[1] // numbers[plain.k].shape[1]
        self.k = numbers[plain.k].repeat_interleave(groups, dim=1)
        self.v = numbers[plain.v].repeat_interleave(groups, dim=1)

    def of(self, entry: dict[str, Any], name: str) -> Tensor | None:
        return None if entry.get(name) is None else self.numbers[entry[name]]

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [entry for known, entry in self.plain.entries if known == kind]

    def scores(self) -> Tensor:
        """Of every pair, forbidden or not, `[B, H, N, M]`."""
        factors = [(self.numbers[entry["factor"]][..., None], entry["on"]) for entry in self.kinds("query_scale")]
        score = self._products(self.kinds("rotation"), factors)
        for by_pair in self.kinds("by_pair"):
            every = [self._products([entry], factors) for entry in by_pair["turns"]]
            for place, products in enumerate(every):
                score = torch.where(by_pair["which"] == place, products, score)
        size = score.detach()
        for entry in self.kinds("softcap"):
            cap = entry["cap"]
            if self.factor is None:
                self.capped = torch.tanh(score / cap)
                score = cap * self.capped
            else:
                score = (self.factor * (1 + score.detach() / cap) + 1) * score  # what its gradient is carried by
                score = score - score.detach() + self.factor * size + cap
        self.content = score
        for kind, entry in self.plain.entries:
            added = self._added(kind, entry)
            for factor, on in factors:
                added = added * factor if on == "scores" else added
            score = score + added
        return score

    def _products(self, rotations: list[dict[str, Any]], factors: list[tuple[Tensor, str]]) -> Tensor:
        """Of the content, where all pairs are turned alike."""
        q, k = self.q, self.k
        for entry in rotations:
            q, k = (self._turned(x, entry, side, _turn_part) for x, side in ((q, "query"), (k, "key")))
        for entry in self.kinds("polar"):
            q, k = (self._turned(x, entry, side, _widened) for x, side in ((q, "query"), (k, "key")))
        for entry in self.kinds("query_bias"):
            q = q + self.numbers[entry["u"]][:, None, :]
        for factor, _ in factors:
            q = q * factor
        return q @ k.mT * self.plain.scale

    def _turned(self, x: Tensor, entry: dict[str, Any], side: str, by: Callable[..., Tensor]) -> Tensor:
        angles, size = self.of(entry, side), self.of(entry, f"{side}_magnitude")
        if angles is None:
            return x
        if side == "key" and (phase := self.of(entry, "phase")) is not None:
            angles = angles + phase[:, None, :]
        return by(x, angles, entry, entry["magnitude"] if size is None else size * entry["magnitude"], self.absolute)

    def _added(self, kind: str, entry: dict[str, Any]) -> Tensor | float:
        numbers = self.numbers
        match kind:
            case "line":
                bias = numbers[entry["values"]][:, entry["index"]]
                return bias if entry["index"].dim() == 2 else bias.transpose(0, 1)
            case "vectors" if entry["side"] != "value":
                vectors, bias = _with_zeros(numbers[entry["vectors"]]), self.of(entry, "bias")
                rows, factor = _rows(entry, numbers[entry["vectors"]]), self.plain.scale if entry["scaled"] else 1.0
                x = self.q if entry["side"] == "query" else self.k
                if (content := self.of(entry, "content")) is not None:
                    x = content[:, :, entry["queries"] or slice(None)]
                x = x if bias is None else x + bias[:, None, :]
                if entry["side"] == "query":
                    return _read(x @ vectors.mT, rows) * factor
                return _read(x @ vectors.mT, rows.mT).mT * factor
            case "low_rank":
                return numbers[entry["query"]] @ numbers[entry["key"]].mT
            case "dense":
                return numbers[entry["bias"]]
            case "rule":
                if callable(entry["rule"]):  # an opaque one: of its magnitudes nothing is known but its own
                    if self.absolute:
                        return 0.0
                    own = (numbers[x] if isinstance(x, str) else x for x in entry["parameters"])
                    return entry["rule"](self.q, self.k, self.plain.allowed, slice(0, self.q.shape[2]), *own)
                return RULES[entry["rule"]](
                    self.q, self.k, self.plain.allowed, numbers[entry["parameters"][0]], self.absolute
                )
            case _:
                return 0.0

    def carried(self, weights: Tensor) -> Tensor:
        """The output under some weights, `[B, H, N, V]`."""
        v, turns = self.v, [entry for entry in self.kinds("rotation") if entry["values"]]
        for entry in turns:
            if (angles := self.of(entry, "key")) is not None:
                v = _turn_part(v, angles, entry, 1.0, self.absolute)
        out = weights @ v
        for entry in self.kinds("vectors"):
            if entry["side"] == "value":
                vectors = self.numbers[entry["vectors"]]
                rows = _rows(entry, vectors).expand(weights.shape)
                sums = weights.new_zeros(*weights.shape[:3], vectors.shape[1] + 1).scatter_add(-1, rows, weights)
                out = out + sums @ _with_zeros(vectors)
        for entry in turns:
            out = _turn_part(out, -self.numbers[entry["query"]], entry, 1.0, self.absolute)
        return out


def sink_of_rows(call: Evaluation) -> Tensor | None:
    """The sink's logit of each row, `[1 or B, H, 1 or N, 1]`."""
    for entry in call.kinds("sinks"):
        logits = call.numbers[entry["logits"]]
        return logits[..., None] if logits.dim() == 3 else logits[None, :, None, None]
    return None


def exact(plain: Plain, wanted: list[str], d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Truth, Inside]:
    """Results and the gradients of the tensors `wanted`."""
    numbers = {name: x.detach().requires_grad_(name in wanted) for name, x in plain.numbers.items()}
    call = Evaluation(plain, numbers)
    shape = (*call.q.shape[:3], call.k.shape[2])
    score = call.scores().expand(shape)
    allowed = plain.allowed.expand(shape)
    score = torch.where(allowed, score, -math.inf)
    sink = sink_of_rows(call)
    peak = score.detach().amax(-1, keepdim=True) if shape[3] else score.new_full((*shape[:3], 1), -math.inf)
    peak = peak if sink is None else torch.maximum(peak, sink.detach())
    peak = torch.where(peak == -math.inf, 0.0, peak)
    raised = (score - peak).exp()
    of_sink = None if sink is None else (sink - peak).exp()
    total = raised.sum(-1, keepdim=True) if of_sink is None else raised.sum(-1, keepdim=True) + of_sink
    blank = total.detach() == 0
    total = torch.where(blank, 1.0, total)
    weights = raised / total
    lse = torch.where(blank, -math.inf, peak + total.log())[..., 0]
    out = call.carried(weights if plain.kept is None else weights * plain.kept)
    leaves = [numbers[name] for name in wanted]
    results = [(x, dx) for x, dx in ((out, d_out), (lse, d_lse)) if dx is not None and x.requires_grad]
    truth = Truth(out.detach(), lse.detach())
    if results and leaves:
        ends, cotangents = zip(*results, strict=True)
        found = torch.autograd.grad(ends, leaves, cotangents, allow_unused=True)
        truth.gradients = {
            name: torch.zeros_like(x) if gradient is None else gradient
            for name, x, gradient in zip(wanted, leaves, found, strict=True)
        }
    return truth, Inside(
        weights.detach(),
        None if of_sink is None else (of_sink / total).detach(),
        allowed,
        None if call.capped is None else call.capped.detach(),
        score.detach() if any(callable(x["rule"]) for x in call.kinds("rule")) else None,
    )
