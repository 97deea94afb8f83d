"""Attention under a dense bias that is learned, with its gradient written out, for float32 and wider on CPU.

PyTorch's `scaled_dot_product_attention` has no fused backward for a mask that requires a gradient and takes its math
path: some twenty nodes of autograd, which at the sizes of windows and short sequences are much of the time. Here it is
one node with six matrix products. Stored for the gradient: the weights, as there.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import Lines, contract, expand
from relpos.core.densify import written_out
from relpos.core.private import softmax_backward


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, lines: Lines | None, scale: float) -> Tensor:
        dense = bias if lines is None else written_out(bias, lines)
        weights = torch.softmax(((q * scale) @ k.mT).add_(dense), dim=-1)
        ctx.scale, ctx.lines = scale, lines
        ctx.save_for_backward(q, k, v, bias, weights)
        return weights @ v

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, bias, weights = ctx.saved_tensors
        (d_out,), scale, lines = gradients, ctx.scale, ctx.lines
        need_q, need_k, need_v, need_bias = ctx.needs_input_grad[:4]
        again = torch.is_grad_enabled()  # a second derivative is wanted, of the weights too
        if again:
            weights = torch.softmax((q * scale) @ k.mT + (bias if lines is None else expand(bias, lines)), dim=-1)
        d_weights = d_out @ v.mT
        fused = None if again else softmax_backward()
        if fused is None:
            d_scores = weights * (d_weights - (d_weights * weights).sum(dim=-1, keepdim=True))
        else:
            d_scores = fused(d_weights, weights, -1, weights.dtype)
        d_q = (d_scores @ k) * scale if need_q else None
        d_k = d_scores.mT @ (q * scale) if need_k else None
        d_v = weights.mT @ d_out if need_v else None
        d_bias = None
        if need_bias:
            d_bias = d_scores.sum_to_size(bias.shape) if lines is None else _of_values(d_scores, bias, lines)
        return d_q, d_k, d_v, d_bias, None, None


def _of_values(
    d_scores: Float[Tensor, "B H N M"], values: Float[Tensor, "#H L"], lines: Lines
) -> Float[Tensor, "#H L"]:
    whole = d_scores.sum_to_size(1, values.shape[0], *d_scores.shape[2:])[0]
    return contract(whole, lines)


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M V"],
    bias: Tensor,
    lines: Lines | None,
    scale: float,
) -> Float[Tensor, "B H N V"]:
    """Output under a bias that broadcasts to `[B, H, N, M]`, or where there are regular lines, their values `[H, L]`.

    A dense bias may hold -inf, but not in a whole row.
    """
    out: Tensor = _Attend.apply(q, k, v, bias, lines, scale)  # type: ignore[no-untyped-call]
    return out
