"""FlashAttention from its paper: in every precision against loops in float64, in tiles of every size against the
reference, and what it stores."""

import pytest
import torch
from engine_steps import Sizes, with_gradients
from torch import Tensor

from covering import pairwise
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
from relpos.testing import oracle
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import assert_close


@pytest.mark.parametrize(
    ("block", "causal", "heads"), pairwise([1, 3, 4, 64], [False, True], [0, 1, 3])
)  # heads of the bias
def test_values_and_gradients(block: int, causal: bool, heads: int) -> None:
    line = lines(Grid(2, 5, prefix=1))
    shapes = [*[(2, 3, 11, 4)] * 3, *[(heads, line.length)] * bool(heads)]
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    bias = LineBias(leaves[3], line) if heads else None
    ours = flash_attention(*leaves[:3], bias=bias, causal=causal, block_size=block)
    theirs = attention(*leaves[:3], position=bias, mask=Mask.causal() if causal else None, backend="reference")
    upstream = torch.randn_like(ours)
    torch.testing.assert_close(with_gradients(ours, leaves, upstream), with_gradients(theirs, leaves, upstream))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_in_every_precision(dtype: torch.dtype) -> None:
    """By the rule of `relpos.testing`; the engines are held to it in test_terms_in_engines.py."""
    n, line = 40, lines(Sequence(40))
    leaves = [*(torch.randn(1, 2, n, 8).to(dtype) for _ in range(3)), torch.randn(2, line.length)]  # as tables are
    upstream = torch.randn(1, 2, n, 8).to(dtype)
    allowed = torch.ones(1, 1, n, n, dtype=torch.bool).tril()

    def loops(wide: torch.dtype | None = None) -> list[Tensor]:
        own = [x.to(wide or x.dtype).requires_grad_() for x in leaves]
        bias = own[3][:, line.index()].to(own[0].dtype)[None]
        out, _ = oracle.attention(*own[:3], bias=bias, allowed=allowed)
        return with_gradients(out, own, upstream.to(out.dtype))

    own = [x.clone().requires_grad_() for x in leaves]
    out = flash_attention(*own[:3], bias=LineBias(own[3], line), causal=True, block_size=16)
    found = zip(with_gradients(out, own, upstream), loops(torch.float64), in_orders(loops), strict=True)
    for what, (mine, exact, cost) in zip(("out", "d q", "d k", "d v", "d values"), found, strict=True):
        terms = float(upstream.abs().double().mean()) if what != "out" else 0.0
        assert_close(mine, exact, cost, what=what, terms=terms, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_tiles_scores(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 40, 8).to(dtype)
    plain = flash_attention(q, k, v, causal=True, block_size=16)
    assert plain.dtype == dtype
    with torch.autocast("cpu", dtype):
        assert torch.equal(flash_attention(q, k, v, causal=True, block_size=16), plain)


def test_cross_attention_and_scale() -> None:
    q, k, v = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 3)
    bias = LineBias(torch.randn(2, 13), lines(Sequence(5, start=4), Sequence(9)))
    ours = flash_attention(q, k, v, bias=bias, scale=0.3, block_size=4)
    torch.testing.assert_close(ours, attention(q, k, v, position=bias, scale=0.3, backend="reference"))


def test_no_more_than_a_tile_of_scores_is_there() -> None:
    q = torch.randn(1, 1, 512, 8, requires_grad=True)
    bias = LineBias(torch.randn(1, 1023, requires_grad=True), lines(Sequence(512)))
    with Sizes() as made:
        flash_attention(q, q, q, bias=bias, block_size=32).sum().backward()
    assert max(made.numbers) <= 512 * 8


def test_the_layer() -> None:
    table = RelativePositionBias(2, window_size=(2, 3), init_std=1.0)
    layer = FlashAttention(8, 2, 4, position=table)
    x = torch.randn(2, 6, 8)
    q, k, v = layer.qkv(x).view(2, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    wanted = attention(q, k, v, position=table, queries=Grid(2, 3), backend="reference")
    torch.testing.assert_close(layer(x, coordinates=Grid(2, 3)), layer.proj(wanted.transpose(1, 2).flatten(2)))
    with pytest.raises(NotImplementedError, match="one line bias; got Rotation"):
        FlashAttention(8, 2, position=RotaryEmbedding(4))(x)
