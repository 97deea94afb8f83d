"""Every fused path in float32, bfloat16 and float16 against loops in float64, by the rule of `relpos.testing`.

Streaming, sdpa and the terms they take are also held to it in test_terms_in_engines.py, Triton's kernels, in all
dtypes, in test_triton.py, and linear attention, whose sums in half precision are those of float32, in test_linear.py.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from relpos.core import LineBias, Mask, Sequence, lines
from relpos.engines import attention, flash_attention
from relpos.testing import oracle
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import assert_close

B, H, N, D = 1, 2, 40, 8
Path = Callable[[Tensor, Tensor, Tensor, LineBias], Tensor]


def engine(name: str) -> Path:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: LineBias) -> Tensor:
        out = attention(q, k, v, position=bias, mask=Mask.causal(), backend=name)
        assert isinstance(out, Tensor)
        return out

    return call


PATHS: dict[str, Path] = {
    **{name: engine(name) for name in ("reference", "sdpa", "streaming")},
    "flash": lambda q, k, v, bias: flash_attention(q, k, v, bias=bias, causal=True, block_size=16),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_and_gradients_in_every_precision(path: str, dtype: torch.dtype) -> None:
    line = lines(Sequence(N))
    torch.manual_seed(0)
    q, k, v, upstream = (torch.randn(B, H, N, D).to(dtype) for _ in range(4))
    values = torch.randn(H, line.length)  # float32, as learned tables reach an engine
    entries = line.query[:, None] - line.key + line.origin
    allowed = torch.ones(N, N, dtype=torch.bool).tril()

    def found(by: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], *inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs]
        out = by(*leaves)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(out.dtype))]

    def loops(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> Tensor:
        return oracle.attention(q, k, v, bias=values[:, entries].to(q.dtype)[None], allowed=allowed[None, None])[0]

    exact = found(loops, *(x.double() for x in (q, k, v, values)))
    yardstick = in_orders(lambda: found(loops, q, k, v, values))
    actual = found(lambda q, k, v, values: PATHS[path](q, k, v, LineBias(values, line)), q, k, v, values)
    for what, one, true, plain in zip(("out", "d q", "d k", "d v", "d values"), actual, exact, yardstick, strict=True):
        terms = float(upstream.abs().double().mean()) if what != "out" else 0.0
        assert_close(one, true, plain, what=f"{path}: {what}", terms=terms, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_does_not_round_the_tiles_scores(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(B, H, N, D).to(dtype) for _ in range(3))
    plain = flash_attention(q, k, v, causal=True, block_size=16)
    with torch.autocast("cpu", dtype):
        assert torch.equal(flash_attention(q, k, v, causal=True, block_size=16), plain)


def test_one_long_key_bounds_the_scores() -> None:
    """In bfloat16 the shift of a row is a bound by the longest key: by a shorter one exp2 would overflow."""
    q, k, v = (torch.randn(1, 1, 64, 32).mul(scale).bfloat16() for scale in (8.0, 0.01, 1.0))
    k[0, 0, 5] = q[0, 0, 9] * 4
    found = attention(q, k, v, backend="streaming")
    exact = attention(q.double(), k.double(), v.double(), backend="reference")
    assert isinstance(found, torch.Tensor)
    assert isinstance(exact, torch.Tensor)
    assert (found - exact).abs().max() < 0.05
