"""Calls without keys, without queries, or of no batch: alike in every engine, with gradients of zero."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import relpos
from relpos import (
    DenseBias,
    LineBias,
    LineVectors,
    Mask,
    Positions,
    RowRule,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    attention,
    attention_weights,
    explain,
    lines,
)
from relpos.testing.devices import ON_GPU
from relpos.testing.engines import engines

FAST_CASES = 40  # of each of its tests, in the fast part

ENGINES = ["auto", *(name for name in engines() if name not in ON_GPU)]
H, D, V = 4, 6, 3
SIZES = {"no keys": (2, 4, 0), "no queries": (2, 0, 5), "neither": (2, 0, 0), "no batch": (0, 4, 5)}


def qkv(size: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    batch, n, m = size
    shapes = (batch, H, n, D), (batch, 2, m, D), (batch, 2, m, V)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def position(kind: str, batch: int, n: int, m: int) -> Terms:
    irregular = n == 0 or m == 0
    line = lines(*(Positions(torch.arange(x), low=0, high=9) if irregular else Sequence(x) for x in (n, m)))

    def learned(*shape: int) -> Tensor:
        return torch.randn(shape, requires_grad=True)

    return {
        "none": lambda: Terms(),
        "a line bias": lambda: Terms(LineBias(learned(H, line.length), line)),
        "vectors": lambda: Terms(
            LineVectors(learned(1, 3, D), None, line, "key"), LineVectors(learned(1, 3, V), None, line, "value")
        ),
        "a dense bias": lambda: Terms(DenseBias(learned(max(1, batch), 1, n, m))),
        "a rule": lambda: Terms(RowRule(lambda q, k, allowed, rows, x: x * (q @ k.mT), (learned(),))),
        "a cap": lambda: Terms(Softcap(2.0)),
    }[kind]()


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["none", "a line bias", "vectors", "a dense bias", "a rule", "a cap"])
def test_nothing(kind: str, size: str, backend: str) -> None:
    """The output is 0, the log-sum-exp -inf, and every gradient is there, that of a table too."""
    batch, n, m = SIZES[size]
    terms = position(kind, batch, n, m)
    mask = Mask.causal(torch.arange(n), torch.arange(m)) & Mask.packed(torch.zeros(n).int(), torch.zeros(m).int())
    for given in ({}, {"return_lse": True}, {"mask": mask}, {"mask": mask, "return_lse": True}):
        leaves = [*qkv((batch, n, m)), *(x for x in pytree.tree_leaves(terms) if x is not None and x.requires_grad)]
        try:
            found: Any = attention(*leaves[:3], position=terms, backend=backend, dropout=0.5, **given)
        except NotImplementedError:
            assert backend in ("sdpa", "triton"), "which do not serve everything"
            continue
        out, *lse = found if "return_lse" in given else (found,)
        assert torch.equal(out, torch.zeros(batch, H, n, V))
        assert all(torch.equal(x, torch.full((batch, H, n), -torch.inf)) for x in lse)
        gradients = torch.autograd.grad(out.sum() + sum(x.exp().sum() for x in lse), leaves)
        assert all(torch.equal(g, torch.zeros_like(x)) for g, x in zip(gradients, leaves, strict=True))


@pytest.mark.parametrize("backend", [name for name in ENGINES if name != "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_sinks_alone_are_the_sum(dtype: torch.dtype, backend: str) -> None:
    logits = torch.randn(H, requires_grad=True)
    out, lse = attention(*qkv(SIZES["no keys"], dtype), position=Sinks(logits), return_lse=True, backend=backend)
    assert torch.equal(out, torch.zeros(2, H, 4, V, dtype=dtype))
    torch.testing.assert_close(lse, logits.to(lse.dtype)[:, None].expand(2, -1, 4))
    (gradient,) = torch.autograd.grad(lse.sum(), logits)
    torch.testing.assert_close(gradient, torch.full((H,), 8.0))


def test_sinks_and_no_keys_where_the_sum_is_not_given() -> None:
    out = attention(*qkv(SIZES["no keys"]), position=Sinks(torch.randn(H)), backend="sdpa")
    assert torch.equal(out, torch.zeros(2, H, 4, V))


@pytest.mark.parametrize("size", SIZES)
def test_weights_and_explanations_of_nothing(size: str) -> None:
    q, k, v = qkv(SIZES[size])
    mask = Mask.padding(torch.ones(k.shape[2]).bool(), queries=torch.ones(q.shape[2]).bool())
    for masked in (None, mask):
        assert attention_weights(q, k, mask=masked).shape == (*q.shape[:3], k.shape[2])
    for kind in ("none", "a line bias", "a cap"):
        assert explain(q, k, v, position=position(kind, *SIZES[size])).backend in relpos.backends()
