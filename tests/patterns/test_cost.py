"""The cost of a pattern follows the pairs that it allows: scores that `streaming` computes, forward and backward."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch

from relpos import Grid, LineBias, LowRank, Mask, Terms, attention, explain, lines
from relpos.core import Coordinates, Sequence
from relpos.patterns import big_bird, block_sparse, dilated, fixed, local, longformer, strided, windows

FAST_SHARE = 10  # of its tests, in the fast part

scoring = importlib.import_module("relpos.engines.streaming.scores")
cpu_kernel = importlib.import_module("relpos.engines.streaming.cpu.cpu_kernel")

N, SIDE = 2304, 48
"""Tokens, as a sequence or a square."""
BAND = (torch.arange(N // 64)[:, None] - torch.arange(N // 64)).abs() <= 2
# Scores that are computed for each that is allowed. A block of up to 256 rows takes all keys that one of them may see:
# 256 more than each of a window, and twice as many where the window ends at the row.
PATTERNS: dict[str, tuple[Mask, float]] = {
    "local": (local(257), 2.0),
    "local, causal": (local(256, causal=True), 2.0),
    "dilated": (dilated(N, 65, 8), 4.3),
    "dilated, causal": (dilated(N, 128, 4, causal=True), 2.9),
    "fixed": (fixed(N, 128, summaries=2), 1.01),
    "fixed, causal": (fixed(N, 128, summaries=2, causal=True), 1.8),
    "strided": (strided(N, 64), 1.01),
    "longformer": (longformer(N, 257, [0, 1, 700, 701, 2047]), 1.9),
    "longformer, causal": (longformer(N, 257, [0, 1, 700, 2047]) & Mask.causal(), 2.9),
    "block sparse": (block_sparse(BAND, 64), 1.01),
    "BigBird": (big_bird(N, 64), 1.01),
    "BigBird, a head": (big_bird(N, 64, heads=2), 1.01),
    "windows": (windows(Grid(SIDE, SIDE), 8), 1.01),
    "shifted windows": (windows(Grid(SIDE, SIDE), 8, 4), 1.01),
    "windows that do not divide": (windows(Grid(SIDE, SIDE), 7, 3), 1.01),
}
HEADS = 2


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scores that were computed, a number for each tile."""
    found: list[int] = []
    compute = scoring.Scores.compute

    def counted(self: Any, *arguments: Any) -> torch.Tensor:
        score: torch.Tensor = compute(self, *arguments)
        found.append(score.numel())
        return score

    monkeypatch.setattr(scoring.Scores, "compute", counted)
    monkeypatch.setattr(cpu_kernel, "supports", lambda call: False)
    return found


def share(mask: Mask, computed: list[int], position: Any = None, **given: Any) -> float:
    """Scores that the backward computes, by those that are allowed."""
    q, k, v = (torch.randn(1, HEADS, N, 2, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, mask=mask, position=position, backend="streaming", **given)
    computed.clear()
    out.sum().backward()
    allowed = sum(int(mask.dense(N, N)[:, head % mask_heads(mask)].sum()) for head in range(HEADS))
    return sum(computed) / allowed


def mask_heads(mask: Mask) -> int:
    return 1 if mask.blocks is None else mask.blocks.layout.shape[0]


@pytest.mark.parametrize("name", PATTERNS)
def test_scores_follow_the_allowed_pairs(name: str, computed: list[int]) -> None:
    mask, most = PATTERNS[name]
    coordinates: Coordinates = Grid(SIDE, SIDE) if "windows" in name else Sequence(N)
    line = lines(coordinates)
    bias = LineBias(torch.zeros(HEADS, line.length, requires_grad=True), line)
    assert 0.99 < share(mask, computed, bias) <= most


GENERAL: dict[str, Callable[[], dict[str, Any]]] = {
    "dropout": lambda: {"dropout": 0.1},
    "low rank": lambda: {"position": Terms(LowRank(torch.randn(HEADS, N, 2), torch.randn(1, N, 2)))},
}


@pytest.mark.parametrize("given", GENERAL)
@pytest.mark.parametrize("name", ["dilated", "longformer", "BigBird, a head"])
def test_so_they_do_beside_any_other_term(name: str, given: str, computed: list[int]) -> None:
    mask, most = PATTERNS[name]
    most = 1.3 if name == "BigBird, a head" else most  # a block of rows holds all heads
    assert 0.99 < share(mask, computed, **GENERAL[given]()) <= most


@pytest.mark.parametrize("name", PATTERNS)
def test_auto_takes_the_engine_that_follows(name: str) -> None:
    mask, _ = PATTERNS[name]
    q = torch.zeros(1, HEADS, N, 2, requires_grad=True)
    for position in (None, *(given()["position"] for given in GENERAL.values() if "position" in given())):
        assert explain(q, q, q, mask=mask, position=position).backend == "streaming"
    assert explain(q, q, q, mask=mask, dropout=0.1).backend == "streaming"
    few = q[:, :, :8]
    assert explain(few, few, few, mask=Mask.window(2, 0)).backend == "sdpa"
