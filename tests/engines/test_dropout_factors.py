"""Dropout under the streaming engine: the pairs that the definition drops, however a tile is cut into pieces."""

from typing import Any

import pytest
import torch
from engine_steps import step
from torch import Tensor

from relpos import Grid, LineBias, LineVectors, Mask, RowRule, Sequence, Softcap, Terms, lines
from relpos.engines.streaming import dropout
from relpos.engines.streaming.plan import planning

FAST_CASES = 9  # of each of its tests, in the fast part

B, H, N, D = 2, 4, 48, 8
LINE, GRID = lines(Sequence(N)), lines(Grid(6, 7, prefix=6))
BIAS, VECTORS = (H, LINE.length), (1, LINE.length, D)


def bias(x: Tensor) -> LineBias:
    return LineBias(x, LINE)


def vectors(x: Tensor, side: Any) -> LineVectors:
    return LineVectors(x, None, LINE, side)


def rule(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, weight: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT) * weight[:, None, None] * allowed


CALLS: dict[str, tuple[Any, list[tuple[int, ...]], Mask | None]] = {
    "no position": (lambda: Terms(), [], None),
    "a bias": (bias, [BIAS], None),
    "a bias under a causal mask": (bias, [BIAS], Mask.causal()),
    "a bias, segments computed apart": (bias, [BIAS], Mask.packed(torch.arange(N) % 3)),
    "a grid behind a prefix": (lambda x: LineBias(x, GRID), [(H, GRID.length)], None),
    "vectors that keys meet, and values": (
        lambda x, y: Terms(vectors(x, "key"), vectors(y, "value")), [VECTORS, VECTORS], None
    ),
    "vectors that queries meet, beside a bias": (
        lambda x, y: Terms(vectors(x, "query"), bias(y)), [VECTORS, BIAS], Mask.window(9, 2)
    ),
    "a soft cap, beside two biases": (lambda x, y: Terms(Softcap(2.0), bias(x), bias(y)), [BIAS, BIAS], None),
    "a row rule": (lambda x: RowRule(rule, (x,)), [(H,)], None),
}  # fmt: skip


@pytest.mark.parametrize("piece", [1, 100, 2**16], ids=lambda piece: f"{piece} pairs at once")
@pytest.mark.parametrize("name", CALLS)
def test_the_pairs_of_the_definition(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout, "_PIECE", piece)
    monkeypatch.setattr(planning, "ROWS", 16)
    monkeypatch.setattr(planning, "WIDTH", 32)
    made, shapes, mask = CALLS[name]
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in ((B, H, N, D), *[(B, 2, N, D)] * 2, *shapes)]
    found, wanted = (step(x, leaves, made, mask=mask, dropout=0.3) for x in ("streaming", "reference"))
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    assert not torch.allclose(wanted[0], step("reference", leaves, made, mask=mask)[0], atol=1e-2)
