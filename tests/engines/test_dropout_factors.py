"""Dropout under the streaming engine: the pairs that the definition drops, however a tile is cut into pieces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from relpos import Grid, LineBias, LineVectors, Mask, Sequence, Softcap, Terms, attention, lines
from relpos.engines.streaming import dropout, planning

B, H, N, D = 2, 4, 48, 8


def _bias(heads: int = H) -> LineBias:
    return LineBias(torch.randn(heads, lines(Sequence(N)).length, requires_grad=True), lines(Sequence(N)))


def _vectors(side: Any) -> LineVectors:
    vectors = torch.randn(1, 2 * N - 1, D, requires_grad=True)
    return LineVectors(vectors, None, lines(Sequence(N)), side)


def _grid() -> LineBias:
    grid = lines(Grid(6, 7, prefix=6))
    return LineBias(torch.randn(H, grid.length, requires_grad=True), grid)


CALLS: dict[str, tuple[Any, Mask | None]] = {
    "no position": (lambda: Terms(), None),
    "a bias": (_bias, None),
    "a bias under a causal mask": (_bias, Mask.causal()),
    "a bias, segments computed apart": (_bias, Mask.packed(torch.arange(N) % 3)),
    "a grid behind a prefix": (_grid, None),
    "vectors that keys meet, and values": (lambda: Terms(_vectors("key"), _vectors("value")), None),
    "vectors that queries meet, beside a bias": (lambda: Terms(_vectors("query"), _bias()), Mask.window(9, 2)),
    "a soft cap, beside two biases": (lambda: Terms(Softcap(2.0), _bias(), _bias()), None),
}


@pytest.mark.parametrize("piece", [1, 100, 2**16], ids=lambda piece: f"{piece} pairs at once")
@pytest.mark.parametrize("name", CALLS)
def test_the_pairs_of_the_definition(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_PIECE", piece)
    monkeypatch.setattr(planning, "ROWS", 16)
    monkeypatch.setattr(planning, "WIDTH", 32)
    made, mask = CALLS[name]
    terms = made()
    q, k, v = (torch.randn(B, heads, N, D, requires_grad=True) for heads in (H, 2, 2))
    leaves = [q, k, v, *(x for x in torch.utils._pytree.tree_leaves(terms) if x is not None and x.requires_grad)]
    found = {}
    for backend in ("reference", "streaming"):
        torch.manual_seed(3)
        out = attention(q, k, v, position=terms, mask=mask, dropout=0.3, backend=backend)
        assert isinstance(out, torch.Tensor)
        found[backend] = [out, *torch.autograd.grad(out.square().sum(), leaves)]
    for own, wanted in zip(found["streaming"], found["reference"], strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found["reference"][0], attention(q, k, v, position=terms, mask=mask), atol=1e-2)
