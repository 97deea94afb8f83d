"""Gradients where one key has nearly all of a row's weight, beside PyTorch's attention in the same dtype.

There `d score = weight * (<d out, v> - delta)` is a small number between large ones: how a score and the log-sum-exp
round against each other, and whether delta fits the weights, is most of the error. The yardstick is what PyTorch loses
with the same inputs. Twice that is the limit: the two sums may round in another order each, once a side.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from relpos.core import LineBias, Mask, Sequence, Terms, lines
from relpos.engines import attention

H, N, D, SPREAD = 2, 512, 64, 9.0
NAMES = ("out", "d q", "d k", "d v")


def _errors(dtype: torch.dtype, *, bias: bool, causal: bool = False) -> dict[str, tuple[float, float]]:
    """RMS distance from float64, of streaming and of PyTorch, whose path for a learned mask has no half precision."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, upstream = (torch.randn(1, H, N, D, generator=generator) for _ in range(4))
    q, k, v, upstream = (x.to(dtype) for x in (q * SPREAD, k, v, upstream))
    line = lines(Sequence(N))
    values = torch.randn(H, line.length, generator=generator).to(dtype).float()

    def torchs(dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        own_q, own_k, own_v = leaves
        mask = values[:, line.index()].to(dtype)[None].requires_grad_() if bias else None
        out = F.scaled_dot_product_attention(own_q, own_k, own_v, attn_mask=mask, is_causal=causal)
        return [out, *torch.autograd.grad(out, leaves, upstream.to(dtype))]

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    position = Terms(LineBias(values.clone().requires_grad_(), line)) if bias else Terms()
    out = attention(*leaves, position=position, mask=Mask.causal() if causal else None, backend="streaming")
    assert isinstance(out, Tensor)
    found = [out, *torch.autograd.grad(out, leaves, upstream)]

    def far(x: Tensor, exact: Tensor) -> float:
        return float((x - exact).detach().square().mean().sqrt())

    rows = zip(NAMES, found, torchs(dtype), torchs(torch.float64), strict=True)
    return {name: (far(ours, exact), far(theirs, exact)) for name, ours, theirs, exact in rows}


@pytest.mark.parametrize(("bias", "causal"), [(False, False), (True, False), (False, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_peaked_rows_lose_no_more_than_twice_what_pytorch_loses(dtype: torch.dtype, bias: bool, causal: bool) -> None:
    for name, (ours, theirs) in _errors(dtype, bias=bias, causal=causal).items():
        assert ours <= 2 * theirs, f"{name}: {ours:.2e} from float64, PyTorch {theirs:.2e}"
