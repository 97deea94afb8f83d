"""Every pattern with every kind of position equals dense attention with the dense mask: values and all gradients."""

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_patterns import COLUMNS, PATTERNS, ROWS, N
from torch import Tensor

from relpos import (
    AxisVectors,
    DenseBias,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    RotaryEmbedding,
    Sequence,
    Sinks,
    Terms,
    attention,
    lines,
)
from relpos.core import axis_lines
from relpos.patterns import big_bird, longformer

FAST_SHARE = 10  # of its tests, in the fast part

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
    plan = "relpos.engines.streaming.plan."
    for module, values in {
        "masks": {"GAP": 1, "_FEWEST": 2, "ALIGNED": 4, "_OFTEN": 1},
        "planning": {"ROWS": 5, "WIDTH": 9, "_BACKWARD_WIDTH": 8, "PAIRS": 300},
        "dense_plan": {"MOST_ROWS": 8},
        "regroup": {"_LEAST": 1},
    }.items():
        for name, value in values.items():
            monkeypatch.setattr(importlib.import_module(plan + module), name, value)


Made = Callable[..., Any]


def positions() -> dict[str, tuple[Made, list[tuple[int, ...]]]]:
    """Terms of some learned tensors, and their shapes."""
    line, grid = lines(Sequence(N)), lines(Grid(ROWS, COLUMNS))
    few = torch.arange(grid.length) % 5 - 1

    def vectors(q: Tensor, k: Tensor, v: Tensor) -> Terms:
        return Terms(*(LineVectors(x, None, line, side) for x, side in ((q, "query"), (k, "key"), (v, "value"))))  # type: ignore[arg-type]

    return {
        "nothing": (lambda: None, []),
        "a rotation": (lambda: RotaryEmbedding(D).terms(Sequence(N)), []),
        "a line": (lambda values: LineBias(values, line), [(H, line.length)]),
        "a grid": (lambda values: LineBias(values, grid), [(H, grid.length)]),
        "vectors": (vectors, [(1, line.length, D), (H, line.length, D), (1, line.length, D)]),
        "vectors of few rows": (
            lambda x, bias: Terms(LineVectors(x, few, grid, "query", bias=bias), LineVectors(x, few, grid, "value")),
            [(1, 4, D), (H, D)],
        ),
        "a tensor of two terms": (
            lambda x: Terms(LineVectors(x, None, grid, "query"), LineVectors(x, None, grid, "key")),
            [(H, grid.length - 9, D)],
        ),
        "other terms": (lambda x, y, sinks: Terms(LowRank(x, y), Sinks(sinks)), [(H, N, 2), (B, 1, N, 2), (H,)]),
        "axes": (lambda x, y: AxisVectors((x, y), axis_lines(Grid(ROWS, COLUMNS))), [(1, 7, D), (H, 11, D)]),
        "a dense bias": (lambda x: DenseBias(x), [(1, H, N, N)]),
    }


def drawn(position: str) -> tuple[Made, list[Tensor], list[Tensor]]:
    """A function of learned tensors that makes terms; q, k, v and these; what comes from above."""
    torch.manual_seed(0)
    made, shapes = positions()[position]
    inputs = [torch.randn(shape, dtype=torch.float64) for shape in ((B, H, N, D), *[(B, G, N, D)] * 2, *shapes)]
    return made, inputs, [torch.randn(B, H, N, D).double(), torch.randn(B, H, N).double()]


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


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_is_dense_attention_with_its_dense_mask(name: str, backend: str) -> None:
    """Against the definition without a mask, and -inf wherever the pattern's own definition forbids a pair."""
    mask, allowed = PATTERNS[name]
    made, inputs, upstream = drawn("a line")
    forbidden = [[0.0 if allowed(i, j) else -torch.inf for j in range(N)] for i in range(N)]
    dense = DenseBias(torch.tensor(forbidden, dtype=torch.float64)[None, None])
    q, k, v, values = leaves = [x.requires_grad_() for x in inputs]
    wanted = attention(q, k, v, position=Terms(made(values), dense), backend="reference")
    ours = attention(q, k, v, position=made(values), mask=mask, backend=backend)
    torch.testing.assert_close(ours, wanted)
    for mine, theirs in zip(*(torch.autograd.grad(x, leaves, upstream[0]) for x in (ours, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs)


ALWAYS = (("a line", 0.0), ("other terms", 0.4))
"""Positions, and the probability of dropout, that are quick enough to look at on every run."""
CASES = [(name, 0.0) for name in positions()] + [("a grid", 0.4)]
SHARE = 4
"""Under each mask one in so many of `CASES`, from a different one on."""


def under(number: int) -> list[tuple[str, float]]:
    """The positions and probabilities of dropout that are looked at under a mask."""
    return [*ALWAYS, *(case for case in CASES[number % SHARE :: SHARE] if case not in ALWAYS)]


@pytest.mark.parametrize(
    ("name", "position", "dropout"),
    [
        pytest.param(name, *case, marks=() if case in ALWAYS else pytest.mark.slow)
        for number, name in enumerate(MASKS)
        for case in under(number)
    ],
)
def test_streaming_is_the_definition(name: str, position: str, dropout: float) -> None:
    """Blocks, stretches and segments of every kind, all terms and dropout; the same bits on every run."""
    made, inputs, upstream = drawn(position)
    given = {"mask": MASKS[name], "dropout": dropout}
    mine, theirs = (step(backend, made, inputs, upstream, **given) for backend in ("streaming", "reference"))
    for number, (a, b) in enumerate(zip(mine, theirs, strict=True)):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda text, n=number: f"{n}: {text}")
    if (position, dropout) in ALWAYS:
        again = step("streaming", made, inputs, upstream, **given)
        assert all(torch.equal(a, b) for a, b in zip(mine, again, strict=True))
