"""Attention under vectors on lines, at few tokens on CPU, as one node of autograd.

Every query is multiplied with every row of the vectors, and each pair reads its own product; likewise for keys:

    score[i, j] = scale * <q[i], k[j]> + <x[i], w[rows[i, j]]>        or <x[j], w[rows[i, j]]> where x are keys

These are [N, R] products, where `streaming` computes one for each offset. But all scores are stored and read pair by
pair, which beyond some size costs more than products. As in `learned_bias`, a few heads are computed at a time, so that
their scores stay in the cache, and the weights of a small call are stored for the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from relpos.core import LineVectors, QueryBias, QueryScale, Rotation
from relpos.core.checks import without_autocast
from relpos.core.private import inside_transform, is_batched
from relpos.core.terms.vectors import with_bias, with_zero_row
from relpos.engines.call import Call
from relpos.engines.sdpa.learned_bias import STORED, Part, of_part, parts_of

AT_ONCE = 2**19
"""Scores that are computed at once, 2 MiB in float32: a head of 512 tokens for each of two threads. Four times as many
were no faster."""


class _Buffers:
    """Memory by name, reused by all parts of a call: fresh memory from the system costs more than a product.

    "products" are [N, R] numbers or their gradient; "scores" the scores of a part, later their gradient; "read" the
    products that pairs read, later the weights, if these are not stored.
    """

    def __init__(self, like: Tensor) -> None:
        self.like, self.named = like, dict[str, Tensor]()

    def at(self, name: str, *shape: int) -> Tensor:
        """A tensor of some shape; its contents are undefined."""
        count = math.prod(shape)
        if name not in self.named or self.named[name].numel() < count:
            self.named[name] = self.like.new_empty(count)
        return self.named[name][:count].view(shape)


@dataclass(frozen=True, eq=False)
class _Reads:
    """Which rows of the products of queries, or of keys, the pairs read."""

    rows: Int[Tensor, "*B N M"]
    by_key: bool

    def of(self, part: Part, batch: int, heads: int) -> Int[Tensor, "b h N M"]:
        """The rows of some elements of the batch and heads."""
        rows = self.rows[part[0]] if self.rows.dim() == 3 and self.rows.shape[0] > 1 else self.rows
        return rows.unsqueeze(-3).expand(batch, heads, -1, -1)

    def add(self, scores: Float[Tensor, "b h N M"], x: Tensor, w: Tensor, part: Part, buffers: _Buffers) -> None:
        """Add what every pair reads to the scores."""
        batch, heads, *_ = scores.shape
        left, right = (w.expand(batch, heads, -1, -1), x.mT) if self.by_key else (x, w.mT.expand(batch, heads, -1, -1))
        products = buffers.at("products", batch, heads, left.shape[2], right.shape[3])
        torch.matmul(left, right, out=products)
        read = buffers.at("read", *scores.shape)
        torch.gather(products, self.axis, self.of(part, batch, heads), out=read)
        scores += read

    def sums(self, d: Float[Tensor, "b h N M"], count: int, part: Part, buffers: _Buffers) -> Float[Tensor, "b h _ _"]:
        """The gradient of each product: the sum over the pairs that read it."""
        batch, heads, n, m = d.shape
        shape = (count, m) if self.by_key else (n, count)
        into = buffers.at("products", batch, heads, *shape).zero_()
        into.scatter_add_(self.axis, self.of(part, batch, heads), d)
        return into

    @property
    def axis(self) -> int:
        """The axis of the products that has a number for each row."""
        return -2 if self.by_key else -1


@dataclass(frozen=True, eq=False)
class _CallSettings:
    """What a call holds besides its tensors; the mask is added to the scores."""

    reads: Sequence[_Reads]
    mask: Tensor | None
    scale: float


class _AttendByRows(torch.autograd.Function):
    """Of q, k, v, and for each of `reads` the queries or keys `[B, H, _, D]` and the vectors `[1 or H, R, D]`."""

    @staticmethod
    def forward(
        ctx: Any, reads: Sequence[_Reads], mask: Tensor | None, scale: float, learns: bool, *tensors: Tensor
    ) -> Float[Tensor, "B H N V"]:
        q, k, v, *_ = tensors
        settings = _CallSettings(reads, mask, scale)
        scores = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        keeps = learns and scores <= STORED and any(ctx.needs_input_grad)
        stored = q.new_empty(*q.shape[:3], k.shape[2]) if keeps else None
        out, buffers = q.new_empty(*q.shape[:3], v.shape[3]), _Buffers(q)
        for part in parts_of(q, k, AT_ONCE):
            weights = _weights(settings, tensors, part, buffers, None if stored is None else stored[part])
            torch.matmul(weights, v[part], out=out[part])
        rows = (own.rows for own in reads)
        ctx.save_for_backward(*tensors, *rows, mask, stored)
        ctx.by_key, ctx.scale = [own.by_key for own in reads], scale
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        *saved, mask, stored = ctx.saved_tensors  # read only once: a checkpoint computes them for it
        count, wanted = len(ctx.by_key), ctx.needs_input_grad[4:]
        tensors, rows = saved[: len(saved) - count], saved[len(saved) - count :]
        settings = _CallSettings([_Reads(*own) for own in zip(rows, ctx.by_key, strict=True)], mask, ctx.scale)
        with without_autocast(gradients[0].device):
            if torch.is_grad_enabled() or inside_transform() or is_batched(gradients[0]):
                return None, None, None, None, *_differentiable_gradients(settings, tensors, gradients[0], wanted)
            return None, None, None, None, *_gradients(settings, tensors, stored, gradients[0], wanted)


def _weights(
    settings: _CallSettings, tensors: Sequence[Tensor], part: Part, buffers: _Buffers, out: Tensor | None
) -> Float[Tensor, "b h N M"]:
    """The weights of some heads."""
    (q, k, _), met = (x[part] for x in tensors[:3]), tensors[3:]
    scores = buffers.at("scores", *q.shape[:3], k.shape[2])
    torch.matmul(q * settings.scale, k.mT, out=scores)
    for reads, x, w in zip(settings.reads, met[::2], met[1::2], strict=True):
        reads.add(scores, x[part], _heads(w, part), part, buffers)
    if settings.mask is not None:
        scores += of_part(settings.mask, part)
    return torch.softmax(scores, dim=-1, out=buffers.at("read", *scores.shape) if out is None else out)


def _heads(w: Float[Tensor, "#H R D"], part: Part) -> Float[Tensor, "#h R D"]:
    return w if w.shape[0] == 1 else w[part[1]]


_FAR = 256
"""Rows with a stride that is a multiple of this share few cache lines, and a product along columns takes a quarter
longer: [512, 512] with [512, 64] 0.46 ms, transposed 0.36, and 0.33 with rows of 500."""


def _gradient_of(x: Tensor, across: int) -> Tensor:
    """Memory for the gradient of `x`; transposed if `_turned_product` reads rows of `across` numbers for it."""
    return torch.empty_like(x) if across == 0 or across % _FAR else x.new_empty(x.mT.shape).mT


def _turned_product(
    a: Float[Tensor, "b h n m"], b: Float[Tensor, "*C n D"], out: Float[Tensor, "b h m D"] | None
) -> Float[Tensor, "b h m D"]:
    """`a.mT @ b`, for a large `a`."""
    if a.shape[-1] % _FAR:
        return torch.matmul(a.mT, b, out=out)
    return torch.matmul(b.mT, a, out=None if out is None else out.mT).mT


def _gradients(
    settings: _CallSettings, tensors: Sequence[Tensor], stored: Tensor | None, d_out: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients of all tensors, those that are wanted."""
    keys = tensors[1].shape[2]
    rows = [0, keys, keys]  # of the matrix that each gradient's product transposes
    for reads, w in zip(settings.reads, tensors[4::2], strict=True):
        rows += [keys, 0] if reads.by_key else [0, w.shape[1]]
    found = [
        _gradient_of(x, across) if needed else None for x, across, needed in zip(tensors, rows, wanted, strict=True)
    ]
    for d_w in found[4::2]:
        if d_w is not None:
            d_w.zero_()
    (d_q, d_k, d_v), buffers = found[:3], _Buffers(d_out)
    for part in parts_of(tensors[0], tensors[1], AT_ONCE):
        weights = _weights(settings, tensors, part, buffers, None) if stored is None else stored[part]
        (q, k, v), upstream = (x[part] for x in tensors[:3]), d_out[part]
        if d_v is not None:
            _turned_product(weights, upstream, d_v[part])
        d = torch.matmul(upstream, v.mT, out=buffers.at("scores", *weights.shape)).mul_(weights)
        torch.addcmul(d, weights, d.sum(dim=-1, keepdim=True), value=-1, out=d)
        if d_q is not None:
            torch.matmul(d, k, out=d_q[part]).mul_(settings.scale)
        if d_k is not None:
            _turned_product(d, q * settings.scale, d_k[part])
        for number, reads in enumerate(settings.reads):
            x, w = tensors[2 * number + 3 : 2 * number + 5]
            d_x, d_w = found[2 * number + 3 : 2 * number + 5]
            if d_x is None and d_w is None:
                continue
            sums = reads.sums(d, w.shape[1], part, buffers)
            own = _heads(w, part)
            if d_x is not None and reads.by_key:
                _turned_product(sums, own, d_x[part])
            elif d_x is not None:
                torch.matmul(sums, own, out=d_x[part])
            if d_w is not None:
                into = _heads(d_w, part)
                d_own = sums @ x[part] if reads.by_key else _turned_product(sums, x[part], None)
                into += d_own.sum_to_size(1, *into.shape)[0]
    return found


def _differentiable_gradients(
    settings: _CallSettings, tensors: Sequence[Tensor], d_out: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same by operations that autograd and transforms support: for a second derivative, or batched gradients."""
    with torch.enable_grad():
        tensors = [x.view_as(x) for x in tensors]
        out = _whole_output(settings, tensors)
    needed = [x for x, is_needed in zip(tensors, wanted, strict=True) if is_needed]
    found = iter(torch.autograd.grad(out, needed, d_out, create_graph=torch.is_grad_enabled()))
    return [next(found) if is_needed else None for is_needed in wanted]


def _whole_output(settings: _CallSettings, tensors: Sequence[Tensor]) -> Float[Tensor, "B H N V"]:
    """The output, of all heads at once."""
    q, k, v, *met = tensors
    scores = (q * settings.scale) @ k.mT
    for reads, x, w in zip(settings.reads, met[::2], met[1::2], strict=True):
        products = w @ x.mT if reads.by_key else x @ w.mT
        scores = scores + products.gather(reads.axis, reads.of((slice(None), slice(None)), *q.shape[:2]))
    return torch.softmax(scores if settings.mask is None else scores + settings.mask, dim=-1) @ v


def serves(call: Call) -> bool:
    """Whether only vectors on the query or key side are added to the scores."""
    if call.terms.one(LineVectors) is None:  # asked for by every small call
        return False
    known = all(
        isinstance(term, LineVectors | Rotation | QueryBias) or (isinstance(term, QueryScale) and not term.adds_scores)
        for term in call.terms
    )
    return known and all(term.side != "value" for term in call.terms.of(LineVectors))


def _used(term: LineVectors) -> LineVectors:
    """The term with only the vectors from the first to the last that its index reads: few tokens reach few buckets."""
    count = term.vectors.shape[1]
    if term.index is None or count == 0:
        return term
    index = term.index.long()
    valid = (index >= 0) & (index < count)
    first, last = (int(x) for x in index.clamp(0, count - 1).aminmax())
    index = torch.where(valid, index - first, -1)
    return replace(term, vectors=term.vectors[:, first : last + 1], index=index)


def attend(call: Call, allowed: Bool[Tensor, "#B #H N M"] | None) -> Float[Tensor, "B H N V"]:
    """The output of a call whose rotation is applied, for the allowed pairs, of which each row needs one."""
    q, k = (x if plain is None else plain for x, plain in ((call.q, call.plain_q), (call.k, call.plain_k)))
    reads, met = [], []
    for term in map(_used, call.terms.of(LineVectors)):
        by_key = term.side == "key"
        x = k if by_key else q
        if term.content is not None:
            x = term.content.to(q.dtype).expand(*q.shape[:2], -1, -1)
        vectors = with_zero_row(term.vectors, q.dtype)
        met += [with_bias(x, term.bias), vectors * call.scale if term.scaled else vectors]
        reads.append(_Reads(term.rows(), by_key))
    mask = None if allowed is None else q.new_zeros(allowed.shape).masked_fill_(~allowed, -torch.inf)
    out: Tensor = _AttendByRows.apply(reads, mask, call.scale, torch.is_grad_enabled(), call.q, call.k, call.v, *met)  # type: ignore[no-untyped-call]
    return out
