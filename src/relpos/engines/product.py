"""Attention under a dense bias that is learned, with its gradient written out, for float32 and wider on CPU.

PyTorch's `scaled_dot_product_attention` has no fused backward for a mask that requires a gradient and takes its math
path: some twenty nodes of autograd, which at the sizes of windows and short sequences are most of the time. Here it is
one node with five matrix products. Stored for the gradient: the weights, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core.private import softmax_backward


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, scale: float) -> Tensor:
        weights = _weights(q, k, bias, scale)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, bias, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weights = ctx.saved_tensors
        (d_out,) = gradients
        need_q, need_k, need_v, need_bias, _ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # a second derivative is wanted: of the weights too
            weights = _weights(q, k, bias, ctx.scale)
        d_v = weights.mT @ d_out if need_v else None
        d_weights = d_out @ v.mT
        fused = None if torch.is_grad_enabled() else softmax_backward()
        if fused is None:
            d_scores = weights * (d_weights - (d_weights * weights).sum(dim=-1, keepdim=True))
        else:
            d_scores = fused(d_weights, weights, -1, weights.dtype)
        d_q = (d_scores @ k) * ctx.scale if need_q else None
        d_k = d_scores.mT @ (q * ctx.scale) if need_k else None
        return d_q, d_k, d_v, d_scores.sum_to_size(bias.shape) if need_bias else None, None


def _weights(q: Tensor, k: Tensor, bias: Tensor, scale: float) -> Float[Tensor, "B H N M"]:
    return torch.softmax((q * scale) @ k.mT + bias, dim=-1)


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M V"],
    bias: Float[Tensor, "#B #H N M"],
    scale: float,
) -> Float[Tensor, "B H N V"]:
    """Output; the bias may hold -inf, but not for a whole row."""
    out: Tensor = _Attend.apply(q, k, v, bias, scale)  # type: ignore[no-untyped-call]
    return out
