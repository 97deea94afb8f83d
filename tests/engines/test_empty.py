"""Calls without keys, without queries, or of no batch: alike in every engine, with gradients of zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import relpos
from relpos import (
    DenseBias,
    LineBias,
    LineVectors,
    Mask,
    Positions,
    RowRule,
    Sinks,
    Softcap,
    attention,
    attention_weights,
    explain,
    lines,
)
from relpos.testing.devices import ON_GPU
from relpos.testing.engines import engines

ENGINES = ["auto", *(name for name in engines() if name not in ON_GPU)]
H, D, V = 4, 6, 3
SIZES = {"no keys": (2, 4, 0), "no queries": (2, 0, 5), "neither": (2, 0, 0), "no batch": (0, 4, 5)}


def qkv(size: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, n, m = size
    shapes = (batch, H, n, D), (batch, 2, m, D), (batch, 2, m, V)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def position(kind: str, batch: int, n: int, m: int) -> Any:
    line = lines(*(Positions(torch.arange(count), low=0, high=9) for count in (n, m)))

    def learned(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    match kind:
        case "a line bias":
            return LineBias(learned(H, line.length), line)
        case "vectors":
            return sum(
                (LineVectors(learned(1, 3, width), None, line, side) for side, width in (("key", D), ("value", V))),
                start=relpos.Terms(),
            )
        case "a dense bias":
            return DenseBias(learned(max(1, batch), 1, n, m))
        case "a rule":
            return RowRule(lambda q, k, allowed, rows, x: x * (q @ k.mT), (learned(),))
        case "a cap":
            return Softcap(2.0)
        case _:
            return None


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["none", "a line bias", "vectors", "a dense bias", "a rule", "a cap"])
def test_nothing(kind: str, size: str, backend: str) -> None:
    """The output is 0, the log-sum-exp -inf, and every gradient is there."""
    batch, n, m = SIZES[size]
    terms = position(kind, batch, n, m)
    mask = Mask.causal(torch.arange(n), torch.arange(m)) & Mask.packed(torch.zeros(n).int(), torch.zeros(m).int())
    for masked in (None, mask):
        for beside in (False, True):
            tensors = qkv((batch, n, m))
            try:
                found: Any = attention(
                    *tensors, position=terms, mask=masked, return_lse=beside, backend=backend, dropout=0.5
                )
            except NotImplementedError:
                assert backend in ("sdpa", "triton"), "which do not serve everything"
                continue
            out, lse = found if beside else (found, None)
            assert torch.equal(out, torch.zeros(batch, H, n, V))
            assert lse is None or torch.equal(lse, torch.full((batch, H, n), -torch.inf))
            gradients = torch.autograd.grad(out.sum() if lse is None else out.sum() + lse.exp().sum(), tensors)
            assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(gradients, tensors, strict=True))


@pytest.mark.parametrize("backend", [name for name in ENGINES if name != "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sinks_alone_are_the_sum(dtype: torch.dtype, backend: str) -> None:
    logits = torch.randn(H, requires_grad=True)
    found: Any = attention(*qkv(SIZES["no keys"], dtype), position=Sinks(logits), return_lse=True, backend=backend)
    out, lse = found
    assert out.dtype == dtype
    assert torch.equal(out, torch.zeros_like(out))
    torch.testing.assert_close(lse, logits.to(lse.dtype)[:, None].expand(2, -1, 4))
    (gradient,) = torch.autograd.grad(lse.sum(), logits)
    torch.testing.assert_close(gradient, torch.full((H,), 8.0))


@pytest.mark.parametrize("backend", ENGINES)
def test_sinks_and_no_keys(backend: str) -> None:
    out = attention(*qkv(SIZES["no keys"]), position=Sinks(torch.randn(H)), backend=backend)
    assert isinstance(out, Tensor)
    assert torch.equal(out, torch.zeros(2, H, 4, V))


def test_weights_and_explanations_of_nothing() -> None:
    for size in SIZES.values():
        q, k, v = qkv(size)
        mask = Mask.padding(torch.ones(k.shape[2]).bool(), queries=torch.ones(q.shape[2]).bool())
        for masked in (None, mask):
            assert attention_weights(q, k, mask=masked).shape == (*q.shape[:3], k.shape[2])
        for kind in ("none", "a line bias", "a cap"):
            assert explain(q, k, v, position=position(kind, *size)).backend in relpos.backends()
