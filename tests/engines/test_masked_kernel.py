"""Attention under a mask by PyTorch's kernel: tiles that hold every pair once, and the definition's numbers."""

import pytest
import torch
from engine_steps import call_of, step

from relpos import Mask
from relpos.engines.operators import Gradients
from relpos.engines.streaming.cpu import masked_kernel

N = 23
CHUNK = torch.arange(N) // 6 * 6
MASKS = {
    "a window": Mask(4, 0),
    "far keys": Mask(right=-5),
    "later keys": Mask(left=-3),
    "both sides": Mask(4, 5),
    "chunks": Mask(right=0, low=CHUNK),
    "the chunk before": Mask(low=CHUNK - 6, high=CHUNK - 1),
    "packed": Mask.causal() & Mask.packed(torch.arange(N) // 5 - 1),
    "two orders": Mask(3, 0, also=Mask(1, 2, query_order=torch.arange(N) // 3, key_order=torch.arange(N) // 2)),
    "batched": Mask(high=torch.stack([CHUNK, CHUNK + 2])),
}


@pytest.mark.parametrize("name", MASKS)
def test_tiles_hold_every_pair_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few rows or keys, or of all."""
    mask = MASKS[name]
    for few in (3, 4, 128):
        monkeypatch.setattr(masked_kernel, "_FEW", few)
        tiles = masked_kernel._KernelTiles(mask, N, N)
        for every in (tiles.by_rows(), tiles.by_keys()):
            count = torch.zeros(mask.dense(N, N).shape)
            for rows, keys, own, _ in every:
                count[:, :, rows, keys] += 1 if own is None else own.exp()
            torch.testing.assert_close(count, mask.dense(N, N).float(), rtol=0, atol=0)


@pytest.mark.parametrize("name", MASKS)
def test_numbers_are_those_of_the_definition(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With grouped keys, other strides, rows that see nothing, and tiles that share rows."""
    monkeypatch.setattr(masked_kernel, "_FEW", 4)
    monkeypatch.setattr("relpos.engines.streaming.plan.masks.GAP", 0)
    q, d = (torch.randn(2, N, 4, 8).transpose(1, 2) for _ in range(2))
    k, v = (torch.randn(2, 2, 8, N).mT for _ in range(2))
    ours, theirs = (step(backend, [q, k, v], upstream=d, mask=MASKS[name]) for backend in ("streaming", "reference"))
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_which_calls_it_computes() -> None:
    q = torch.randn(1, 2, N, 8)
    call = call_of(q, q, q, mask=Mask(4, 0))
    assert masked_kernel.supports(call)
    assert not masked_kernel.supports(call_of(q.double(), q.double(), q.double(), mask=Mask(4, 0)))
    assert not masked_kernel.supports(call_of(q, q, q))


@pytest.mark.parametrize("order", [1, -1])
def test_calls_under_one_softmax(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that some, all or none of them see, and values that they share."""
    monkeypatch.setattr(masked_kernel, "_FEW", 4)
    later = Mask(-17, 20, low=torch.tensor([N, N, *[0] * (N - 2)]))  # the first two see nothing
    masks = (Mask(5, -2), Mask(right=-6), later)[::order]
    *leaves, upstream = torch.randn(8, 2, 4, N, 8)
    queries, keys, v = leaves[:3], leaves[3:6], leaves[6]
    calls = [call_of(*x, v, mask=mask) for *x, mask in zip(queries, keys, masks, strict=True)]
    own = [x.clone().requires_grad_() for x in leaves]
    seen = torch.stack([mask.dense(N, N) for mask in masks])
    scores = (
        (torch.stack(own[:3]) @ torch.stack(own[3:6]).mT / 8**0.5)
        .masked_fill(~seen, -torch.inf)
        .movedim(0, -1)
        .flatten(-2)
    )
    blank = ~seen.any(dim=0).any(dim=-1, keepdim=True)
    assert 0 < blank.sum() < N
    weights = scores.masked_fill(blank, 0).softmax(dim=-1).masked_fill(blank, 0)
    theirs = weights.unflatten(-1, (N, 3)).sum(dim=-1) @ own[6]
    out, lse = masked_kernel.forward(*calls)
    torch.testing.assert_close((out, lse), (theirs, scores.logsumexp(dim=-1)), rtol=1e-5, atol=1e-6)
    gradients = Gradients(leaves)
    masked_kernel.backward(calls, out, lse, upstream, gradients)
    wanted = [*torch.autograd.grad(theirs, own, upstream)]
    torch.testing.assert_close(gradients.finished(), wanted, rtol=1e-4, atol=1e-5)
