"""Attention under a learned dense bias, with its gradient written out, for float32 and wider on CPU.

PyTorch's `scaled_dot_product_attention` has no fused backward for a mask that requires a gradient and takes its math
path: some twenty autograd nodes, and several tensors of all scores in fresh memory from the system in every step. Here
it is one node, which computes a few heads at a time: their scores stay in the cache, and freed memory is used again.
The weights of a small call are stored for the gradient, those of a large one are computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Lines, contract, expand, may_cache
from relpos.core.checks import without_autocast
from relpos.core.densify import expand_regular
from relpos.core.private import inside_transform, is_batched, softmax_backward
from relpos.engines.call import Call

AT_ONCE = 2**18
"""Scores that are computed at once: 1 MiB in float32."""
STORED = 2**22
"""Maximum scores of a call whose weights are stored, which is faster than computing them again."""


def serves(call: Call) -> bool:
    """Whether this module and `vectors` can compute a call, if they support its terms. They are faster than PyTorch,
    which takes its math path if the added scores are learned. Not measured on GPUs."""
    outside = call.q.device.type == "cpu" and may_cache(call.q.device)
    return outside and call.q.dtype in (torch.float32, torch.float64) and call.groups == 1 and call.dropout == 0


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lines: Lines | None, scale: float) -> Tensor:
        dense = bias if lines is None else expand_regular(bias, lines)[None]
        ctx.scale, ctx.lines = scale, lines
        parts, shape = list(parts_of(q, k, AT_ONCE)), torch.Size((*q.shape[:3], k.shape[2]))
        stores = shape.numel() <= STORED
        out = q.new_empty(*q.shape[:3], v.shape[3])
        stored: Tensor | None
        if len(parts) == 1 and stores:
            stored = _weights(q, k, dense, scale)
            _multiply(stored, v, out)
        else:
            stored = q.new_empty(shape) if stores else None
            for part in parts:
                into = None if stored is None else stored[part]
                weights = _weights(q[part], k[part], of_part(dense, part), scale, into)
                _multiply(weights, v[part], out[part])
        ctx.save_for_backward(q, k, v, bias, stored)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        differentiable = torch.is_grad_enabled() or inside_transform() or is_batched(gradients[0])
        with without_autocast(gradients[0].device):
            return *(_differentiable_gradients if differentiable else _gradients)(ctx, *gradients), None, None


def _gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of q, k, v and the bias, those that are wanted."""
    q, k, v, bias, stored = ctx.saved_tensors
    scale, lines, wanted = ctx.scale, ctx.lines, ctx.needs_input_grad[:4]
    found = [x.new_empty(x.shape) if needed else None for x, needed in zip((q, k, v), wanted, strict=False)]
    parts = list(parts_of(q, k, AT_ONCE))
    if len(parts) == 1:
        weights = stored
        if weights is None:
            weights = _weights(q, k, bias if lines is None else expand_regular(bias, lines)[None], scale)
        d_scores = _write_gradients(found, q, k, v, weights, scale, d_out)
        d_dense = d_scores if lines is not None else d_scores.sum_to_size(bias.shape)
    else:
        dense = bias if lines is None or stored is not None else expand_regular(bias, lines)[None]
        d_dense = bias.new_zeros(bias.shape if lines is None else (1, bias.shape[0], q.shape[2], k.shape[2]))
        for part in parts:
            own = [None if x is None else x[part] for x in found]
            weights = _weights(q[part], k[part], of_part(dense, part), scale) if stored is None else stored[part]
            d_scores = _write_gradients(own, q[part], k[part], v[part], weights, scale, d_out[part])
            if wanted[3]:
                sums = of_part(d_dense, part)
                sums += d_scores.sum_to_size(sums.shape)
    if not wanted[3]:
        return *found, None
    return *found, d_dense if lines is None else _of_values(d_dense, bias, lines)


def _differentiable_gradients(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
    """The same by plain autograd operations, without our own buffers: for a second derivative, and for batched
    gradients."""
    q, k, v, bias, _ = ctx.saved_tensors
    scale, lines, wanted = ctx.scale, ctx.lines, ctx.needs_input_grad[:4]
    dense = bias if lines is None else expand(bias, lines)[None]
    weights = torch.softmax((q * scale) @ k.mT + dense, dim=-1)
    d_weights = d_out @ v.mT
    d_scores = weights * (d_weights - (d_weights * weights).sum(dim=-1, keepdim=True))
    d_q = (d_scores @ k) * scale if wanted[0] else None
    d_k = d_scores.mT @ (q * scale) if wanted[1] else None
    d_v = weights.mT @ d_out if wanted[2] else None
    if not wanted[3]:
        return d_q, d_k, d_v, None
    return d_q, d_k, d_v, d_scores.sum_to_size(bias.shape) if lines is None else _of_values(d_scores, bias, lines)


Part = tuple[slice, slice]
"""Some elements of the batch, and heads."""


def parts_of(q: Tensor, k: Tensor, scores: int) -> Iterator[Part]:
    """Parts with at most `scores` scores, or one head: some heads of one element of the batch, or all of several."""
    batch, heads, n = q.shape[:3]
    most = max(1, scores // max(1, n * k.shape[2]))
    elements, own = max(1, most // heads), min(most, heads)
    for start in range(0, batch, elements):
        for first in range(0, heads, own):
            yield slice(start, start + elements), slice(first, first + own)


def of_part(dense: Tensor, part: Part) -> Tensor:
    """A dense bias of some elements and heads, as a view."""
    elements, heads = (slice(None) if size == 1 else own for size, own in zip(dense.shape, part, strict=False))
    return dense[elements, heads]


def _weights(q: Tensor, k: Tensor, dense: Tensor, scale: float, out: Tensor | None = None) -> Float[Tensor, "B H N M"]:
    if q.shape[0] == 1:
        scores = torch.baddbmm(dense[0], q[0], k[0].mT, alpha=scale)[None]
    else:
        scores = q.new_empty(*q.shape[:3], k.shape[2])
        _multiply(q, k.mT, scores, scale).add_(dense)
    return torch.softmax(scores, dim=-1, out=out)


def _multiply(
    a: Float[Tensor, "B H n c"], b: Float[Tensor, "B H c m"], out: Float[Tensor, "B H n m"], scale: float = 1
) -> Float[Tensor, "B H n m"]:
    """`a @ b * scale` into contiguous memory. Strided factors are copied once, if necessary."""
    out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=scale)
    return out


def _write_gradients(
    found: Sequence[Tensor | None], q: Tensor, k: Tensor, v: Tensor, weights: Tensor, scale: float, d_out: Tensor
) -> Float[Tensor, "B H N M"]:
    """Writes the gradients of q, k and v that `found` has memory for, and returns that of the scores."""
    d_q, d_k, d_v = found
    d_out = d_out.contiguous()  # read twice
    d_weights = _multiply(d_out, v.mT, torch.empty_like(weights))
    fused = softmax_backward()
    if fused is None:
        d_scores = d_weights.mul_(weights)
        d_scores = torch.addcmul(d_scores, weights, d_scores.sum(dim=-1, keepdim=True), value=-1)
    else:
        d_scores = fused(d_weights, weights, -1, weights.dtype)
    if d_q is not None:
        _multiply(d_scores, k, d_q, scale)
    if d_k is not None:
        _multiply(d_scores.mT, q, d_k, scale)
    if d_v is not None:
        _multiply(weights.mT, d_out, d_v)
    return d_scores


def _of_values(d_dense: Float[Tensor, "_ H N M"], values: Float[Tensor, "#H L"], lines: Lines) -> Tensor:
    """The gradient of the values of lines, `[1 or H, L]`."""
    return contract(d_dense.sum_to_size(1, values.shape[0], *d_dense.shape[2:])[0], lines)


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M V"],
    bias: Tensor,
    lines: Lines | None,
    scale: float,
) -> Float[Tensor, "B H N V"]:
    """Output under a bias that broadcasts to `[B, H, N, M]`, or, with regular lines, under their values `[H, L]`.

    A dense bias may hold -inf, but not in a whole row.
    """
    out: Tensor = _Attend.apply(q, k, v, bias, lines, scale)  # type: ignore[no-untyped-call]
    return out
