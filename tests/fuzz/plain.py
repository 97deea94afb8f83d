"""The oracle: what a call of attention means, written out densely in float64. Imports nothing from relpos.

A call comes as plain entries, one for each thing that the documentation says a term adds, whose tensors are named:

    line        bias     values[h, index[i, j]]
    rotation    turns q and k before the content product
    query_bias  added to the turned q
    vectors     <q[i] + bias, vectors[h, rows[i, j]]>, or of k[j], or added to v under the weights; -1 reads zeros
    low_rank    <query[i], key[j]>
    dense       bias[b, h, i, j]
    rule        a function of q, k, the allowed pairs and parameters
    softcap, sinks

**How close is close.** Running error analysis (Higham, Accuracy and Stability of Numerical Algorithms, section 3.3):
whatever the order of a sum, its computed value is within a small multiple of eps of the sum of the magnitudes of what is
summed. So the same functions are evaluated on magnitudes, turned signs added, and their own adjoints carry a bound on
the error of each score to each gradient, entry by entry. With S the magnitudes summed in a score, C those of its content
alone, p the weights and dP, D the magnitudes summed in the gradient of a weight and in delta = <output, its gradient>,

    a weight of row i      errs by r p,    r = k (eps_weights + eps_content max C + eps max S)   relative to itself
    the output             by r sum p |v|
    the gradient of score  by 2 r p (dP + D)
    any other gradient     by that, carried by the magnitudes of what it meets

k grows with the square root of the longest sum, as rounding errors do that are independent of each other (Higham and
Mary 2019). eps is that of the arithmetic; eps_weights and eps_content that of half precision, where weights, and q and k
that were turned, may be rounded to it. Nothing here depends on which rounding some order of sums happens to have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

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
class Precision:
    """eps of the arithmetic, of weights, and of the content product; the smallest normal number; the longest sum."""

    arithmetic: float
    weights: float
    content: float
    tiny: float
    longest: int


@dataclass
class Truth:
    """The exact results and gradients, and by how much each may be missed."""

    out: Tensor
    lse: Tensor
    gradients: dict[str, Tensor] = field(default_factory=dict)
    of_out: Tensor | None = None
    of_lse: Tensor | None = None
    of_gradients: dict[str, Tensor] = field(default_factory=dict)


# where tokens are


@dataclass
class Side:
    """Tokens: coordinates `[n, A]` or `[B, n, A]` behind a prefix, and the least and largest they can be."""

    places: Tensor
    prefix: int
    low: tuple[int, ...]
    high: tuple[int, ...]


def line_index(query: Side, key: Side) -> tuple[Tensor, int]:
    """Which entry of a line bias each pair reads, `[N, M]` or `[B, N, M]`, and how many entries there are.

    The offsets between tokens come first, the lowest first and the last axis fastest; then the pairs of a prefix query
    with tokens, of tokens with a prefix key, and of both.
    """
    spans = [qh - ql + kh - kl + 1 for ql, qh, kl, kh in zip(query.low, query.high, key.low, key.high, strict=True)]
    count, batch = math.prod(spans), torch.broadcast_shapes(query.places.shape[:-2], key.places.shape[:-2])
    n, m = query.places.shape[-2], key.places.shape[-2]
    between = torch.zeros(*batch, n, m, dtype=torch.long)
    own, theirs, origin = torch.zeros(*batch, n, dtype=torch.long), torch.zeros(*batch, m, dtype=torch.long), 0
    for axis, span in enumerate(spans):
        offset = query.places[..., :, None, axis].long() - key.places[..., None, :, axis].long()
        between = between * span + offset - (query.low[axis] - key.high[axis])
        own = own * span + query.places[..., axis].long() - query.low[axis]
        theirs = theirs * span + key.places[..., axis].long() - key.low[axis]
        origin = origin * span + key.high[axis] - key.low[axis]
    index = torch.empty(*batch, query.prefix + n, key.prefix + m, dtype=torch.long)
    index[..., query.prefix :, key.prefix :] = between
    index[..., : query.prefix, key.prefix :] = (count + origin - theirs)[..., None, :]
    index[..., query.prefix :, : key.prefix] = (count + 1 + origin + own)[..., :, None]
    index[..., : query.prefix, : key.prefix] = 2 * count + 1 + origin
    ends = [count]
    if query.prefix:
        ends.append(count + origin + 1)
    if key.prefix:
        ends.append(2 * count + 1)
    if query.prefix and key.prefix:
        ends.append(2 * count + origin + 2)
    return index, max(ends)


# which pairs are allowed


def allowed_by(mask: Mapping[str, Any], n: int, m: int) -> Tensor:
    """The pairs that one mask allows, `[1 or B, 1 or H, N, M]`, from its fields."""

    def rows(name: str) -> Tensor:
        return torch.atleast_2d(mask[name])[:, None, :, None]

    def columns(name: str) -> Tensor:
        return torch.atleast_2d(mask[name])[:, None, None, :]

    own = rows("query_order") if mask.get("query_order") is not None else torch.arange(n).view(1, 1, n, 1)
    theirs = columns("key_order") if mask.get("key_order") is not None else torch.arange(m).view(1, 1, 1, m)
    own, theirs = own.long(), theirs.long()
    seen = torch.ones(1, 1, n, m, dtype=torch.bool)
    if mask.get("left") is not None:
        seen = seen & (own - theirs <= mask["left"])
    if mask.get("right") is not None:
        seen = seen & (theirs - own <= mask["right"])
    if mask.get("low") is not None:
        seen = seen & (theirs >= rows("low").long())
    if mask.get("high") is not None:
        seen = seen & (theirs <= rows("high").long())
    if mask.get("query_global") is not None:
        seen = seen | rows("query_global")
    if mask.get("key_global") is not None:
        seen = seen | columns("key_global")
    if mask.get("limit") is not None:
        seen = seen & (theirs - own <= mask["limit"])
    if mask.get("query_segments") is not None:
        mine, others = rows("query_segments").long(), columns("key_segments").long()
        seen = seen & (mine == others) & (mine >= 0) & (others >= 0)
    if mask.get("layout") is not None:
        size = mask["size"]
        i, j = torch.meshgrid(torch.arange(n) // size, torch.arange(m) // size, indexing="ij")
        seen = seen & mask["layout"][None, :, i, j]
    return seen


def _apart(n: int, m: int) -> Tensor:
    """i - j."""
    return torch.arange(n)[:, None] - torch.arange(m)


def _local(n: int, m: int, window_size: int, causal: bool = False, step: int = 1) -> Tensor:
    apart = _apart(n, m)
    if causal:
        return (apart >= 0) & (apart <= step * (window_size - 1))
    return apart.abs() <= step * (window_size // 2)


def _dilated(n: int, m: int, window_size: int, dilation: int, causal: bool = False) -> Tensor:
    return _local(n, m, window_size, causal, dilation) & (_apart(n, m) % dilation == 0)


def _fixed(n: int, m: int, stride: int, summaries: int = 1, causal: bool = False) -> Tensor:
    i, j = torch.arange(n)[:, None], torch.arange(m)
    seen = (i // stride == j // stride) | (j % stride >= stride - summaries)
    return seen & (j <= i) if causal else seen


def _strided(n: int, m: int, stride: int, causal: bool = False) -> Tensor:
    apart = _apart(n, m)
    return (apart % stride == 0) & ((apart >= 0) | torch.tensor(not causal))


def _longformer(n: int, m: int, window_size: int, global_tokens: list[int]) -> Tensor:
    everywhere = torch.tensor([i in global_tokens for i in range(n)], dtype=torch.bool)
    return _local(n, m, window_size) | everywhere[:, None] | everywhere[None, :]


def _windows(n: int, m: int, grid: tuple[int, ...], size: tuple[int, ...], shift: tuple[int, ...]) -> Tensor:
    seen = torch.ones(n, m, dtype=torch.bool)
    cells = torch.arange(n)
    for cell_count, one, ahead in zip(reversed(grid), reversed(size), reversed(shift), strict=True):
        place = (cells % cell_count - ahead) // one  # which window, counted from the shifted border
        seen &= place[:, None] == place[None, :]
        cells = cells // cell_count
    return seen


PATTERNS: dict[str, Callable[..., Tensor]] = {
    "local": _local,
    "dilated": _dilated,
    "fixed": _fixed,
    "strided": _strided,
    "longformer": _longformer,
    "windows": _windows,
}


# dropout


def _word(x: Tensor) -> Tensor:
    """lowbias32 (Wellons 2018) in Python's whole numbers, which do not overflow, by way of 16-bit halves."""
    mask = 2**32 - 1

    def times(y: Tensor, factor: int) -> Tensor:
        return (((y >> 16) * factor % 2**16 << 16) + (y & 0xFFFF) * factor) & mask

    x = x ^ (x >> 16)
    x = times(x, 0x7FEB352D)
    x = x ^ (x >> 15)
    x = times(x, 0x846CA68B)
    return x ^ (x >> 16)


def kept_pairs(seed: int, shape: tuple[int, int, int, int], dropout: float) -> Tensor:
    """The factor of each weight, `[B, H, N, M]`: 0 or 1 / (1 - dropout)."""
    word = _word(torch.tensor(seed & (2**32 - 1)))
    for axis, size in enumerate(shape):
        word = _word(word ^ torch.arange(size).view(*(1,) * axis, size, *(1,) * (3 - axis)))
    return (word >= math.floor(dropout * 2**32)).double() / (1 - dropout)


# rules by row, dense


def _gate(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    return (q * w[:, None, :]) @ k.mT


def _slope(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    apart = _apart(q.shape[2], k.shape[2]).abs() / 16
    return (w * (1 if absolute else -1))[:, :1, None] * apart


def _before(q: Tensor, k: Tensor, allowed: Tensor, w: Tensor, absolute: bool) -> Tensor:
    return ((q * w[:, None, :]) @ k.mT * allowed).cumsum(-1) / max(1, k.shape[2])


RULES: dict[str, Callable[..., Tensor]] = {"gate": _gate, "slope": _slope, "before": _before}


# the call


def _turn(x: Tensor, angles: Tensor, layout: str, size: Tensor | float, absolute: bool) -> Tensor:
    pairs = angles.shape[-1]
    cos, sin = angles.cos(), angles.sin()
    if absolute:  # nought is added, whose gradient is that of the magnitudes
        nought, cos, sin = angles - angles.detach(), cos.detach().abs(), sin.detach().abs()
        cos, sin = cos + sin * nought, sin + cos * nought
    cos, sin = cos * size, sin * size
    if layout == "half":
        a, b = x[..., :pairs], x[..., pairs : 2 * pairs]
    else:
        a, b = x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    first, second = (a * cos + b * sin if absolute else a * cos - b * sin), a * sin + b * cos
    first, second = torch.broadcast_tensors(first, second)
    turned = torch.cat([first, second], -1) if layout == "half" else torch.stack([first, second], -1).flatten(-2)
    return torch.cat([turned, x[..., 2 * pairs :].expand(*turned.shape[:-1], -1)], -1)


def _with_zeros(vectors: Tensor) -> Tensor:
    return torch.cat([vectors, vectors.new_zeros(vectors.shape[0], 1, vectors.shape[2])], 1)


def _rows(entry: dict[str, Any], vectors: Tensor) -> Tensor:
    """The row that each pair reads, `[1 or B, 1, N, M]`, the zeros standing last."""
    rows, count = entry["rows"], vectors.shape[1]
    rows = torch.where((rows < 0) | (rows >= count), count, rows)
    return rows.view(-1, 1, *rows.shape[-2:])


def _read(products: Tensor, rows: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(products.shape[:2], rows.shape[:2])
    return products.expand(*shape, -1, -1).gather(-1, rows.expand(*shape, -1, -1))


class _Call:
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
        q, k, absolute = self.q, self.k, self.absolute
        for entry in self.kinds("rotation"):
            for side in ("query", "key"):
                angles, size = self.of(entry, side), self.of(entry, f"{side}_magnitude")
                if angles is None:
                    continue
                own = entry["magnitude"] if size is None else size * entry["magnitude"]
                if side == "query":
                    q = _turn(q, angles, entry["layout"], own, absolute)
                else:
                    k = _turn(k, angles, entry["layout"], own, absolute)
        for entry in self.kinds("query_bias"):
            q = q + self.numbers[entry["u"]][:, None, :]
        score = q @ k.mT * self.plain.scale
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
            score = score + self._added(kind, entry)
        return score

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
                    names = entry["parameters"]
                    whole = slice(0, self.q.shape[2])
                    if self.absolute:
                        return 0.0
                    return entry["rule"](self.q, self.k, self.plain.allowed, whole, *(numbers[x] for x in names))
                return RULES[entry["rule"]](
                    self.q, self.k, self.plain.allowed, numbers[entry["parameters"][0]], self.absolute
                )
            case _:
                return 0.0

    def carried(self, weights: Tensor) -> Tensor:
        """The output under some weights, `[B, H, N, V]`."""
        out = weights @ self.v
        for entry in self.kinds("vectors"):
            if entry["side"] == "value":
                vectors = self.numbers[entry["vectors"]]
                rows = _rows(entry, vectors).expand(weights.shape)
                sums = weights.new_zeros(*weights.shape[:3], vectors.shape[1] + 1).scatter_add(-1, rows, weights)
                out = out + sums @ _with_zeros(vectors)
        return out


def exact(
    plain: Plain, wanted: list[str], d_out: Tensor | None, d_lse: Tensor | None, precision: Precision | None
) -> Truth:
    """Results, the gradients of the tensors `wanted`, and where a precision is given by how much each may be missed."""
    numbers = {name: x.detach().requires_grad_(name in wanted) for name, x in plain.numbers.items()}
    call = _Call(plain, numbers)
    shape = (*call.q.shape[:3], call.k.shape[2])
    score = call.scores().expand(shape)
    allowed = plain.allowed.expand(shape)
    score = torch.where(allowed, score, -math.inf)
    sinks = call.kinds("sinks")
    sink = numbers[sinks[0]["logits"]][:, None, None] if sinks else None
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
    if precision is not None:
        p_sink = None if of_sink is None else (of_sink / total).detach()
        capped = None if call.capped is None else call.capped.detach()
        opaque = score.detach() if any(callable(x["rule"]) for x in call.kinds("rule")) else None
        _bound(plain, wanted, truth, weights.detach(), p_sink, allowed, capped, d_out, d_lse, precision, opaque)
    return truth


def _bound(
    plain: Plain,
    wanted: list[str],
    truth: Truth,
    weights: Tensor,
    p_sink: Tensor | None,
    allowed: Tensor,
    capped: Tensor | None,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    precision: Precision,
    opaque: Tensor | None,
) -> None:
    """By how much each result may be missed; see the file's head."""
    angles = {e[s] for k, e in plain.entries if k == "rotation" for s in ("query", "key") if e.get(s) is not None}
    numbers = {
        name: (x.detach() if name in angles else x.detach().abs()).requires_grad_(name in wanted)
        for name, x in plain.numbers.items()
    }
    factor = torch.zeros(()) if capped is None else 1 - capped.square()
    call = _Call(plain, numbers, factor)
    sizes = call.scores().expand(weights.shape)
    assert call.content is not None

    def largest(x: Tensor) -> Tensor:
        x = torch.where(allowed, x.detach().expand(weights.shape), 0.0)
        return x.amax(-1, keepdim=True) if x.shape[3] else x.new_zeros(*x.shape[:3], 1)

    size = largest(sizes)
    if p_sink is not None:
        size = torch.maximum(size, numbers[call.kinds("sinks")[0]["logits"]].detach()[:, None, None])
    if opaque is not None:
        size = size + largest(opaque.abs())
    kappa = 8 + math.sqrt(precision.longest) / 4
    r = precision.weights + 2 * precision.content * largest(call.content) + precision.arithmetic * (1 + 2 * size)
    r = kappa * r
    kept = torch.ones(()) if plain.kept is None else plain.kept
    p = torch.where(allowed, weights + precision.tiny, 0.0)
    p = p.requires_grad_()
    carried = call.carried(p * kept)
    truth.of_out = (r * carried).detach()
    truth.of_lse = (kappa * (precision.content * largest(call.content) + precision.arithmetic * (1 + size)))[..., 0]
    if not truth.gradients:
        return
    names = [name for name in wanted if numbers[name].requires_grad]
    leaves = [numbers[name] for name in names]
    up = torch.zeros_like(truth.out) if d_out is None else d_out.abs()
    d_p, *of_values = torch.autograd.grad(carried, [p, *leaves], r * up, allow_unused=True, retain_graph=True)
    # d_p holds r dP, as r is a number a row
    with torch.no_grad():
        d_p = torch.where(r > 0, d_p / r, 0.0)
        p = p.detach()
        delta = (p * d_p).sum(-1, keepdim=True)
        if d_lse is not None:
            delta = delta + torch.where(d_lse.isfinite(), d_lse, 0.0).abs()[..., None]
        d_scores = 2 * r * p * (d_p + delta)
    of_scores = torch.autograd.grad(sizes, leaves, d_scores, allow_unused=True) if sizes.requires_grad else ()
    for place, name in enumerate(names):
        bound = torch.zeros_like(numbers[name])
        for found in (of_values, of_scores):
            if found and found[place] is not None:
                bound = bound + found[place].abs()
        if p_sink is not None and name == call.kinds("sinks")[0]["logits"]:
            bound = bound + (2 * r * p_sink * delta).sum((0, 2, 3))
        if opaque is not None and bound.numel():
            bound = bound + 2**14 * precision.arithmetic * (1 + truth.gradients[name].abs().amax())
        truth.of_gradients[name] = bound
