"""Attention under a learned bias in one node of autograd: values, gradients, second derivatives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import relpos
from relpos.core import Grid, Mask, Sequence
from relpos.engines import product

PLACES = [Sequence(7), Sequence(6, prefix=1), Grid(3, 4), Grid(2, 3, prefix=2), Grid(2, 2, 3)]


def bias_of(where: Sequence | Grid, heads: int = 2) -> relpos.Mechanism:
    if isinstance(where, Sequence):
        return relpos.RelativePositionBias(heads, seq_len=where.length, prefix=where.prefix, init_std=1.0)
    return (
        relpos.LogContinuousBias(heads, where.sizes)
        if where.axes == 3
        else relpos.RelativePositionBias(
            heads,
            where.sizes,
            prefix=where.prefix,
            init_std=1.0,  # type: ignore[arg-type]
        )
    )


def results(backend: str, where: Sequence | Grid, batch: int, dtype: torch.dtype, mask: Mask | None) -> list[Tensor]:
    torch.manual_seed(0)
    position = bias_of(where).to(dtype)
    q, k, v = (torch.randn(batch, 2, where.count, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    out = relpos.attention(q, k, v, position=position, queries=where, mask=mask, backend=backend)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, (q, k, v, *position.parameters()), torch.randn_like(out))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mask", [None, Mask.causal(), Mask.window(1, 2)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("where", PLACES, ids=str)
@pytest.mark.parametrize("at_once", [product.AT_ONCE, 300, 1], ids=["at once", "by elements", "by heads"])
def test_equals_the_reference(
    at_once: int, where: Any, batch: int, mask: Mask | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", 0)
    with mock.patch.object(product, "attend", wraps=product.attend) as taken:
        got = results("sdpa", where, batch, dtype, mask)
    assert taken.call_count == 1
    for one, wanted in zip(got, results("reference", where, batch, dtype, mask), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("where", [Sequence(4), Grid(2, 2, prefix=1)], ids=str)
@pytest.mark.parametrize("at_once", [product.AT_ONCE, 1])
def test_gradcheck_also_twice(at_once: int, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", 0)
    position = bias_of(where).double()
    (table,) = position.parameters()
    q, k, v = (torch.randn(1, 2, where.count, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def attended(q: Tensor, k: Tensor, v: Tensor, own: Tensor) -> Any:
        table.data = own.data
        values = position.terms(where).items[0]
        line = values.lines
        read = own[: line.length] if where.prefix == 0 else None
        if read is None:
            return product.attend(q, k, v, own.sum() * torch.ones(1, 2, where.count, where.count).double(), None, 0.5)
        return product.attend(q, k, v, read.T, line, 0.5)

    own = table.detach().clone().requires_grad_()
    assert torch.autograd.gradcheck(attended, (q, k, v, own))
    assert torch.autograd.gradgradcheck(attended, (q, k, v, own))


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_with_a_rotation(layout: Any) -> None:
    where, found = Sequence(6), {}
    for backend in ("sdpa", "reference"):
        torch.manual_seed(0)
        position = relpos.RotaryEmbedding(8, layout=layout, rotary_dim=4) + relpos.T5Bias(2, init_std=1.0)
        q, k, v = (torch.randn(2, 2, 6, 8, requires_grad=True) for _ in range(3))
        out = relpos.attention(q, k, v, position=position, queries=where, backend=backend)
        assert isinstance(out, Tensor)
        found[backend] = [out, *torch.autograd.grad(out, (q, k, v, *position.parameters()), torch.ones_like(out))]
    for got, wanted in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_strides_do_not_matter() -> None:
    position, where = relpos.T5Bias(4), Sequence(9)
    x = torch.randn(2, 9, 3, 4, 8)
    q, k, v = (part.transpose(1, 2).detach().requires_grad_() for part in x.unbind(2))
    plain = [part.detach().contiguous().requires_grad_() for part in (q, k, v)]
    outs = [relpos.attention(*three, position=position, queries=where, backend="sdpa") for three in ((q, k, v), plain)]
    assert isinstance(outs[0], Tensor)
    torch.testing.assert_close(*outs)
    for out in outs:
        out.square().sum().backward()
    for one, other in zip((q, k, v), plain, strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_a_dense_bias_of_some_elements_and_heads(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read, and its gradient summed, by the parts that a call is cut into."""
    monkeypatch.setattr(product, "AT_ONCE", 1)
    monkeypatch.setattr(product, "STORED", 0)
    bias = torch.randn(*size, 5, 5, requires_grad=True)
    q, k, v = torch.randn(3, 3, 2, 5, 8).unbind()
    found = {}
    for backend in ("sdpa", "reference"):
        out = relpos.attention(q, k, v, position=relpos.DenseBias(bias), backend=backend)
        assert isinstance(out, Tensor)
        found[backend] = [out, *torch.autograd.grad(out.square().sum(), bias)]
    for got, wanted in zip(*found.values(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
