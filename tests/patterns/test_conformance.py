"""Every pattern with every kind of position equals dense attention with the dense mask: values and all gradients."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_patterns import COLUMNS, PATTERNS, ROWS, N
from torch import Tensor

from relpos import (
    DenseBias,
    Grid,
    LineVectors,
    LowRank,
    Mask,
    Sequence,
    Sinks,
    Terms,
    attention,
    lines,
)
from relpos.patterns import big_bird, longformer

B, H, G, D = 2, 4, 2, 4
HEADS_APART = big_bird(N, 4, window=1, global_blocks=1, random_blocks=1, heads=H)
MASKS: dict[str, Mask] = {name: mask for name, (mask, _) in PATTERNS.items()} | {
    "BigBird, a head": HEADS_APART,
    "BigBird": big_bird(N, 4, window=1, global_blocks=1, random_blocks=1),
    "many globals": longformer(N, 3, [1, 2, 3, 8, 15, 16, 23]),
    "dilated and padded": Mask(left=8, right=8)
    & Mask.packed(torch.where(torch.arange(N) % 7 == 3, -1, torch.arange(N) % 4)),
    "segments with globals": Mask(
        low=torch.arange(N) - 3,
        high=torch.arange(N) + torch.arange(N) % 3,
        key_global=torch.arange(N) % 5 == 2,
        query_segments=torch.arange(N) % 3,
        key_segments=torch.arange(N) % 3,
    ),
}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small blocks and gaps, so that a call of a few tokens is cut like a long one."""
    streaming = "relpos.attention.streaming."
    for module, values in {
        "masks": {"GAP": 1, "_FEWEST": 2, "ALIGNED": 4, "_OFTEN": 1},
        "loop": {"ROWS": 5, "WIDTH": 9, "PAIRS": 300},
        "general": {"MOST_ROWS": 8},
        "segments": {"_LEAST": 1},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(importlib.import_module(streaming + module), name, value)


Made = Callable[..., Any]


def positions() -> dict[str, tuple[Made, list[tuple[int, ...]]]]:
    """Terms of some learned tensors, and their shapes."""
    line, grid = lines(Sequence(N)), lines(Grid(ROWS, COLUMNS))
    few = torch.arange(line.length) % 5 - 1

    def biased(on: Any) -> Made:
        return lambda values: importlib.import_module("relpos").LineBias(values, on)

    return {
        "nothing": (lambda: None, []),
        "a line": (biased(line), [(H, line.length)]),
        "a grid": (biased(grid), [(H, grid.length)]),
        "vectors": (
            lambda q, k, v: Terms(
                LineVectors(q, None, line, "query"),
                LineVectors(k, None, line, "key"),
                LineVectors(v, None, line, "value"),
            ),
            [(1, line.length, D), (H, line.length, D), (1, line.length, D)],
        ),
        "vectors of few rows": (
            lambda one, bias: Terms(LineVectors(one, few, grid_line(few, line), "query", bias=bias)),
            [(1, 4, D), (H, D)],
        ),
        "other terms": (
            lambda x, y, sinks: Terms(LowRank(x, y), Sinks(sinks)),
            [(H, N, 2), (B, 1, N, 2), (H,)],
        ),
        "a dense bias": (lambda x: DenseBias(x), [(1, H, N, N)]),
    }


def grid_line(index: Tensor, line: Any) -> Any:
    """A line of no regular layout, from one that has."""
    from dataclasses import replace

    return replace(line, layout=replace(line.layout, query=None, key=None))


def step(backend: str, made: Made, inputs: list[Tensor], upstream: list[Tensor], **given: Any) -> list[Tensor]:
    """Output, log-sum-exp and all gradients."""
    own = [x.clone().requires_grad_() for x in inputs]
    q, k, v, *rest = own
    torch.manual_seed(1)
    out, lse = attention(q, k, v, position=made(*rest), backend=backend, return_lse=True, **given)
    blank = lse.isinf()
    d_lse = torch.where(blank, 0, upstream[1])
    found = torch.autograd.grad([out, torch.where(blank, 0, lse)], own, [upstream[0], d_lse], allow_unused=True)
    return [out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True))]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("position", list(positions()))
@pytest.mark.parametrize("name", MASKS)
def test_streaming_is_the_definition(name: str, position: str, dropout: float) -> None:
    """Blocks, stretches and segments of every kind; the definition is held against loops elsewhere."""
    if dropout and position not in ("a line", "other terms"):
        pytest.skip("dropout with two of them")
    torch.manual_seed(0)
    made, shapes = positions()[position]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((B, H, N, D), *[(B, G, N, D)] * 2, *shapes)]
    upstream = [torch.randn(B, H, N, D).double(), torch.randn(B, H, N).double()]
    given = {"mask": MASKS[name], "dropout": dropout}
    mine, theirs = (step(backend, made, inputs, upstream, **given) for backend in ("streaming", "reference"))
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, n=number: f"{n}: {text}")
    again = step("streaming", made, inputs, upstream, **given)
    assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True)), "the same bits on every run"
