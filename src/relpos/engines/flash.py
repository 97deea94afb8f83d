"""FlashAttention as in its paper, for reading: tiles, a running softmax, and gradients from recomputed tiles.

Dao et al. 2022, Algorithms 1 and 4, with the order of loops of Dao 2023 (queries outside). Only one tile of scores is
in memory, so memory is O(N). Between tiles each row keeps its maximum and its sum of weights:

    peak'  = max(peak, max of the tile's row)
    total' = total * exp(peak - peak') + sum of exp(tile - peak')
    out'   = out   * exp(peak - peak') + exp(tile - peak') @ values

The backward needs one number per row, `lse = peak + log(total)`: exp(tile - lse) is the softmax.

This is plain PyTorch for any device, for reading and as a second oracle; `relpos.attention` is fast.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from relpos.core import LineBias, Lines, segment_sum
from relpos.core.checks import (
    fail,
    require_flag,
    require_floating,
    require_int,
    require_number,
    shape_of,
    without_autocast,
)
from relpos.engines.arguments import require_alike


def flash_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M V"],
    *,
    bias: LineBias | None = None,
    causal: bool = False,
    scale: float | None = None,
    block_size: int = 64,
) -> Float[Tensor, "B H N V"]:
    """FlashAttention (Dao et al. 2022, Algorithms 1 and 4) in plain PyTorch.

    It is for reading, and a second oracle; `attention` is faster.

    Only the scores of one tile are in memory, forward and backward.

    Args:
        q: queries.
        k: keys, of as many heads.
        v: values, as many as keys.
        bias: a line bias; its values get a gradient.
        causal: whether query i sees keys up to i only; N and M must be equal.
        scale: factor on `q k^T`; default 1/sqrt(D).
        block_size: rows and columns of a tile.

    Returns:
        `[B, H, N, V]`.

    Raises:
        ValueError: shapes or dtypes do not fit together, or the bias is for other tokens.

    Examples:
        >>> q = k = v = torch.randn(1, 2, 10, 8)
        >>> flash = relpos.flash_attention(q, k, v, causal=True, block_size=4)
        >>> torch.allclose(flash, relpos.attention(q, k, v, mask=relpos.Mask.causal()), atol=1e-6)
        True
    """
    for x, name in ((q, "q"), (k, "k"), (v, "v")):
        require_floating(x, name, dims=4)
    require_alike(q, k, v)
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        fail(
            "q [B, H, N, D], k [B, H, M, D] and v [B, H, M, V]",
            f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}",
            "Repeat grouped heads, or call relpos.attention.",
        )
    require_int(block_size, "block_size", at_least=1)
    require_flag(causal, "causal")
    if scale is not None:
        require_number(scale, "scale", "above 0", "Leave it out for 1/sqrt(head width).")
    if causal and q.shape[2] != k.shape[2]:
        fail("as many queries as keys in a causal call", f"{q.shape[2]} and {k.shape[2]}", "Use relpos.attention.")
    if bias is not None:
        if not isinstance(bias, LineBias):
            fail("bias to be a LineBias", shape_of(bias), "An OffsetBias gives one: mechanism.terms(...).")
        bias.check(q, k, v)
        if bias.lines.query.dim() > 1 or bias.lines.key.dim() > 1:
            fail("a bias with lines shared by the batch", "one line per element", "Use relpos.attention.")
    factor = q.shape[3] ** -0.5 if scale is None else float(scale)
    values, lines = (None, None) if bias is None else (bias.values, bias.lines)
    with without_autocast(q.device):  # it would round the scores
        out: Tensor = _Flash.apply(q, k, v, values, lines, causal, factor, block_size)  # type: ignore[no-untyped-call]
    return out


class _Flash(torch.autograd.Function):
    """Sums are in float32, or in float64 for float64 inputs."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        values: Tensor | None,
        lines: Lines | None,
        causal: bool,
        scale: float,
        size: int,
    ) -> Tensor:
        wide = torch.promote_types(q.dtype, torch.float32)
        out, lse = q.new_zeros(*q.shape[:3], v.shape[3]), q.new_zeros(q.shape[:3], dtype=wide)
        for rows in _blocks(q.shape[2], size):
            peak = q.new_full((*q.shape[:2], rows.stop - rows.start), -torch.inf, dtype=wide)
            total = torch.zeros_like(peak)
            summed = q.new_zeros(*peak.shape, v.shape[3], dtype=wide)
            for columns in _blocks(k.shape[2], size, until=rows.stop if causal else None):
                tile = _scores(q, k, values, lines, causal, scale, rows, columns)
                higher = torch.maximum(peak, tile.amax(dim=-1))
                shrink, weights = torch.exp(peak - higher), torch.exp(tile - higher[..., None])
                total = total * shrink + weights.sum(dim=-1)
                summed = summed * shrink[..., None] + weights @ v[:, :, columns].to(wide)
                peak = higher
            out[:, :, rows] = summed / torch.where(total == 0, 1, total)[..., None]  # without keys, 0
            lse[:, :, rows] = peak + torch.log(total)
        ctx.save_for_backward(q, k, v, values, out, lse)
        ctx.rest = lines, causal, scale, size
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, values, out, lse = ctx.saved_tensors
        lines, causal, scale, size = ctx.rest
        wide = lse.dtype
        d_q, d_k, d_v = (torch.zeros_like(x, dtype=wide) for x in (q, k, v))
        d_values = None if values is None else torch.zeros_like(values, dtype=wide)
        delta = (d_out.to(wide) * out.to(wide)).sum(dim=-1)
        for rows in _blocks(q.shape[2], size):
            upstream = d_out[:, :, rows].to(wide)
            for columns in _blocks(k.shape[2], size, until=rows.stop if causal else None):
                tile = _scores(q, k, values, lines, causal, scale, rows, columns)
                weights = torch.exp(tile - lse[:, :, rows, None])
                d_v[:, :, columns] += weights.mT @ upstream
                d_weights = upstream @ v[:, :, columns].to(wide).mT
                d_tile = weights * (d_weights - delta[:, :, rows, None])
                d_q[:, :, rows] += scale * d_tile @ k[:, :, columns].to(wide)
                d_k[:, :, columns] += scale * d_tile.mT @ q[:, :, rows].to(wide)
                if d_values is not None:
                    d_values += _d_values(d_tile, lines, rows, columns).sum_to_size(d_values.shape)
        own = (None if x is None else x.to(q.dtype) for x in (d_q, d_k, d_v))
        learned = None if d_values is None else d_values.to(values.dtype)
        return (*own, learned, None, None, None, None)


def _blocks(count: int, size: int, until: int | None = None) -> list[slice]:
    """Blocks of `size` tokens that begin before `until`."""
    end = count if until is None else min(count, until)
    return [slice(start, min(start + size, count)) for start in range(0, end, size)]


def _scores(
    q: Tensor,
    k: Tensor,
    values: Tensor | None,
    lines: Lines | None,
    causal: bool,
    scale: float,
    rows: slice,
    columns: slice,
) -> Tensor:
    """The scores of one tile, `[B, H, rows, columns]`."""
    wide = torch.promote_types(q.dtype, torch.float32)
    tile = (q[:, :, rows].to(wide) @ k[:, :, columns].to(wide).mT) * scale
    if values is not None and lines is not None:
        tile = tile + values.to(wide)[:, _entries(lines, rows, columns)]
    if causal:
        numbers = torch.arange(rows.start, rows.stop, device=q.device)[:, None]
        later = torch.arange(columns.start, columns.stop, device=q.device) > numbers
        tile = tile.masked_fill(later, -torch.inf)
    return tile


def _entries(lines: Lines, rows: slice, columns: slice) -> Tensor:
    """The index in `values` that each pair of a tile reads."""
    return lines.query[rows, None] - lines.key[columns] + lines.origin


def _d_values(d_tile: Tensor, lines: Lines, rows: slice, columns: slice) -> Tensor:
    """The gradient of `values` from one tile, `[H, L]`, summed in a fixed order."""
    summed = d_tile.sum(dim=0).permute(1, 2, 0)
    return segment_sum(summed, _entries(lines, rows, columns), lines.length).mT
