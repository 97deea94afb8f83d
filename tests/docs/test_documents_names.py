"""The classes of the documents that relpos started from: names, constructor arguments, defaults, and meaning."""

import inspect
import math
from typing import Any

import pytest
import torch

import relpos

REQUIRED = inspect.Parameter.empty
SIGNATURES: dict[str, dict[str, Any]] = {
    "RelativePositionBias": {"num_heads": REQUIRED},
    "LinearAttention": {"d_model": REQUIRED, "num_heads": REQUIRED},
    "SparseAttention": {"d_model": REQUIRED, "num_heads": REQUIRED, "sparsity_factor": 4},
    "LocalAttention": {"d_model": REQUIRED, "num_heads": REQUIRED, "window_size": 7},
    "MultiQueryAttention": {"d_model": REQUIRED, "num_heads": REQUIRED},
    "FlashAttention": {"d_model": REQUIRED, "num_heads": REQUIRED, "block_size": 64},
    "RotaryPositionalEmbedding": {"d_model": REQUIRED, "max_seq_len": 2048},
    "ALiBiPositionalEmbedding": {"num_heads": REQUIRED, "max_seq_len": 2048},
    "RMSNorm": {"d_model": REQUIRED, "eps": 1e-6},
    "GroupNorm": {"d_model": REQUIRED, "num_groups": 32, "eps": 1e-6},
    "AdamW": {"params": REQUIRED, "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2},
    "Lion": {"params": REQUIRED, "lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0},
    "Sophia": {"params": REQUIRED, "lr": 1e-4, "betas": (0.965, 0.99), "rho": 0.01, "weight_decay": 1e-1},
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_constructor_arguments_and_defaults(name: str) -> None:
    found = inspect.signature(getattr(relpos, name)).parameters
    wanted = SIGNATURES[name]
    positional = [one for one in found.values() if one.kind != inspect.Parameter.KEYWORD_ONLY]
    assert [one.name for one in positional][: len(wanted)] == list(wanted)
    assert {one.name: one.default for one in positional if one.name in wanted} == wanted


def turned(vector: list[float], place: int) -> list[float]:
    """By loops: the first half of a vector pairs with the second."""
    pairs = len(vector) // 2
    out = [0.0] * len(vector)
    for p in range(pairs):
        angle = place * 10000 ** (-p / pairs)
        a, b = vector[p], vector[p + pairs]
        out[p], out[p + pairs] = a * math.cos(angle) - b * math.sin(angle), a * math.sin(angle) + b * math.cos(angle)
    return out


def test_rotary_by_loops() -> None:
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    layer = relpos.RotaryPositionalEmbedding(6)
    wanted = torch.tensor([[[turned(x[b, h, n].tolist(), n) for n in range(5)] for h in range(3)] for b in range(2)])
    torch.testing.assert_close(layer(x, 5), wanted.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer(x[:, 1]), layer(x)[:, 1])


@pytest.mark.parametrize("heads", [4, 6])
def test_alibi_by_loops(heads: int) -> None:
    scores = torch.randn(2, heads, 7, 7, dtype=torch.bfloat16)
    slopes = {4: [2**-2, 2**-4, 2**-6, 2**-8], 6: [2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3]}[heads]
    found = relpos.ALiBiPositionalEmbedding(heads)(scores)
    assert found.dtype == torch.bfloat16
    for h in range(heads):
        for i in range(7):
            for j in range(7):
                wanted = float(scores[1, h, i, j]) - slopes[h] * abs(i - j)
                assert abs(float(found[1, h, i, j]) - wanted) <= 2**-8 * abs(wanted)


def test_adamw_is_pytorchs() -> None:
    assert relpos.AdamW is torch.optim.AdamW
