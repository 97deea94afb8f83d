"""FlashAttention from its paper against the reference, tile sizes of every kind, and what it stores."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relpos import (
    FlashAttention,
    Grid,
    LineBias,
    Mask,
    RelativePositionBias,
    RotaryEmbedding,
    Sequence,
    attention,
    flash_attention,
    lines,
)


@pytest.mark.parametrize("block", [1, 3, 4, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [None, 1, 3], ids=["no bias", "one row", "a row a head"])
def test_values_and_gradients(block: int, causal: bool, heads: int | None) -> None:
    torch.manual_seed(0)
    line = lines(Grid(2, 5, prefix=1))
    q, k, v = (torch.randn(2, 3, 11, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    values = torch.randn(heads or 1, line.length, dtype=torch.float64, requires_grad=True)
    bias = None if heads is None else LineBias(values, line)
    leaves = [q, k, v, *([] if heads is None else [values])]
    ours = flash_attention(q, k, v, bias=bias, causal=causal, block_size=block)
    mask = Mask.causal() if causal else None
    theirs = attention(q, k, v, position=bias, mask=mask, backend="reference")
    assert isinstance(theirs, torch.Tensor)
    torch.testing.assert_close(ours, theirs)
    upstream = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (ours, theirs)), strict=True):
        torch.testing.assert_close(a, b)


def test_cross_attention_and_scale() -> None:
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    bias = LineBias(torch.randn(2, 13), lines(Sequence(5, start=4), Sequence(9)))
    ours = flash_attention(q, k, v, bias=bias, scale=0.3, block_size=4)
    torch.testing.assert_close(ours, attention(q, k, v, position=bias, scale=0.3, backend="reference"))


def test_no_more_than_a_tile_of_scores_is_there() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        numbers = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for x in torch.utils._pytree.tree_leaves(out):
                self.numbers = max(self.numbers, x.numel() if isinstance(x, torch.Tensor) else 0)
            return out

    q = torch.randn(1, 1, 512, 8, requires_grad=True)
    bias = LineBias(torch.randn(1, 1023, requires_grad=True), lines(Sequence(512)))
    with Largest() as largest:
        flash_attention(q, q, q, bias=bias, block_size=32).sum().backward()
    assert largest.numbers <= 512 * 8


def test_half_precision_is_summed_in_float32() -> None:
    q, k, v = (torch.randn(1, 2, 70, 8).bfloat16() for _ in range(3))
    ours = flash_attention(q, k, v, block_size=16)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, flash_attention(q.float(), k.float(), v.float()).bfloat16(), atol=1e-2, rtol=1e-2)


def test_the_layer() -> None:
    table = RelativePositionBias(2, window_size=(2, 3), init_std=1.0)
    layer = FlashAttention(8, 2, 4, position=table)
    x = torch.randn(2, 6, 8)
    q, k, v = layer.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    wanted = attention(q, k, v, position=table, queries=Grid(2, 3), backend="reference")
    assert isinstance(wanted, torch.Tensor)
    torch.testing.assert_close(layer(x, coordinates=Grid(2, 3)), layer.proj(wanted.transpose(1, 2).flatten(2)))
    with pytest.raises(NotImplementedError, match="one line bias; got Rotation"):
        FlashAttention(8, 2, position=RotaryEmbedding(4))(x)
