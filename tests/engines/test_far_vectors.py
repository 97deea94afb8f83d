"""Vectors of which far offsets share one, in the streaming engine: such stretches of a window are multiplied once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from relpos.core import LineVectors, Mask, Sequence, Terms, lines
from relpos.engines import attention
from relpos.engines.streaming.vector_term import alike

H, D, ROWS = 2, 4, 9
SIZES = [(300, 300), (1, 200), (130, 333), (280, 70), (600, 40)]


def _found(backend: str, n: int, m: int, clip: tuple[int, int], causal: bool, missing: bool) -> list[Tensor]:
    """Output and gradients of vectors on every side, of one row up to clip[0] and from clip[1] on."""
    generator = torch.Generator().manual_seed(n + m)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    q, k, v, upstream = random(1, H, n, D), random(1, H, m, D), random(1, H, m, D), random(1, H, n, D).detach()
    line = lines(Sequence(n, start=max(0, m - n)), Sequence(m))
    index = (torch.arange(line.length) - clip[0]).clamp(0, clip[1] - clip[0]) % ROWS
    if missing:
        index[: clip[0]] = -1
    terms, learned = Terms(), [q, k, v]
    for side in ("query", "key", "value"):
        own, bias = random(H if side == "key" else 1, ROWS, D), random(H, D)
        learned += [own] if side == "value" else [own, bias]
        terms = terms + LineVectors(own, index, line, side=side, bias=None if side == "value" else bias)
    mask = Mask.causal() if causal else None
    out = attention(q, k, v, position=terms, mask=mask, backend=backend)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, learned, upstream)]


@pytest.mark.parametrize(("n", "m"), SIZES)
@pytest.mark.parametrize("clip", [(0.3, 0.6), (0.0, 0.1), (0.9, 1.0), (0.5, 0.5)])
@pytest.mark.parametrize("missing", [False, True])
def test_far_offsets_that_share_a_vector(n: int, m: int, clip: tuple[float, float], missing: bool) -> None:
    low, high = (int(part * (n + m - 2)) for part in clip)
    causal = n == m
    found, exact = (_found(name, n, m, (low, high), causal, missing) for name in ("streaming", "reference"))
    for one, true in zip(found, exact, strict=True):
        assert torch.allclose(one, true, rtol=0, atol=1e-10 * max(1.0, float(true.detach().abs().max())))


def test_where_all_offsets_begin_and_end_to_be_alike() -> None:
    assert alike(torch.tensor([3, 3, 1, 2, 2, 2])) == (2, 3)
    assert alike(torch.tensor([3, 1, 2])) == (1, 2)
    assert alike(torch.tensor([5, 5])) == (2, 2)
