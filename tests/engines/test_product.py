"""Attention under a learned bias in one node of autograd: values, gradients, second derivatives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import relpos
from covering import pairwise
from relpos.core import Grid, Mask, Sequence
from relpos.engines import product

FAST_CASES = 8  # of each of its tests, in the fast part

PLACES = [Sequence(7), Sequence(6, prefix=1), Grid(3, 4), Grid(2, 3, prefix=2), Grid(2, 2, 3)]


def bias_of(where: Sequence | Grid, heads: int = 2) -> relpos.Mechanism:
    if isinstance(where, Sequence):
        return relpos.RelativePositionBias(heads, seq_len=where.length, prefix=where.prefix, init_std=1.0)
    if where.axes == 3:
        return relpos.LogContinuousBias(heads, where.sizes)
    rows, columns = where.sizes
    return relpos.RelativePositionBias(heads, (rows, columns), prefix=where.prefix, init_std=1.0)


def results(backend: str, where: Sequence | Grid, batch: int, dtype: torch.dtype, mask: Mask | None) -> list[Tensor]:
    torch.manual_seed(0)
    position = bias_of(where).to(dtype)
    q, k, v = (torch.randn(batch, 2, where.count, 8, dtype=dtype, requires_grad=True) for _ in range(3))
    out = relpos.attention(q, k, v, position=position, queries=where, mask=mask, backend=backend)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, (q, k, v, *position.parameters()), torch.randn_like(out))]


MASKS = {"all": None, "causal": Mask.causal(), "window": Mask.window(1, 2)}


@pytest.mark.parametrize(
    ("where", "at_once", "mask", "stored", "batch", "dtype"),
    pairwise(PLACES, (product.AT_ONCE, 300, 1), MASKS, (product.STORED, 0), (1, 3), (torch.float32, torch.float64)),
    ids=str,
)
def test_equals_the_reference(
    at_once: int,
    stored: int,
    where: Any,
    batch: int,
    mask: str,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", stored)
    with mock.patch.object(product, "attend", wraps=product.attend) as taken:
        got = results("sdpa", where, batch, dtype, MASKS[mask])
    assert taken.call_count == 1
    for one, wanted in zip(got, results("reference", where, batch, dtype, MASKS[mask]), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("where", [Sequence(4), Grid(2, 2, prefix=1), None], ids=["line", "grid", "dense"])
@pytest.mark.parametrize("stored", [product.STORED, 0], ids=["stored", "again"])
@pytest.mark.parametrize("at_once", [product.AT_ONCE, 1])
def test_gradcheck_also_twice(at_once: int, stored: int, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", stored)
    line = None if where is None else relpos.lines(where)
    count = 4 if where is None else where.count
    shape = (1, 2, count, count) if line is None else (2, line.length)
    q, k, v = (torch.randn(1, 2, count, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    bias = torch.randn(*shape, dtype=torch.float64, requires_grad=True)

    def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return product.attend(q, k, v, bias, line, 0.5)

    assert torch.autograd.gradcheck(attended, (q, k, v, bias))
    assert torch.autograd.gradgradcheck(attended, (q, k, v, bias))


@pytest.mark.parametrize("stored", [product.STORED, 0], ids=["stored", "again"])
@pytest.mark.parametrize("frozen", range(4), ids=["q", "k", "v", "bias"])
def test_what_is_frozen_has_no_gradient_and_changes_none(
    frozen: int, stored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of views, whose memory lies otherwise."""
    monkeypatch.setattr(product, "AT_ONCE", 1)
    monkeypatch.setattr(product, "STORED", stored)
    x = torch.randn(2, 6, 3, 2, 8)
    bias = torch.randn(2, 6, 6)[:, None].transpose(2, 3)
    found = []
    for some in (True, False):
        leaves = [part.transpose(1, 2).detach() for part in x.unbind(2)] + [bias.detach()]
        asked = [place for place in range(4) if not (some and place == frozen)]
        for place in asked:
            leaves[place].requires_grad_()
        out = product.attend(*leaves, None, 0.5)
        found.append(dict(zip(asked, torch.autograd.grad(out.square().sum(), [leaves[p] for p in asked]), strict=True)))
    for place, gradient in found[0].items():
        assert torch.equal(gradient, found[1][place])


@pytest.mark.parametrize("at_once", [product.AT_ONCE, 1], ids=["one part", "many"])
@pytest.mark.parametrize("less", [0, 1])
def test_weights_are_stored_up_to_a_size(less: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is saved for the gradient nothing else has as many numbers."""
    position, where = bias_of(Sequence(20)), Sequence(20)
    scores = 2 * 20 * 20
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", scores - less)
    q, saved = torch.randn(1, 2, 20, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        relpos.attention(q, q, q, position=position, queries=where, backend="sdpa")
    assert (max(saved) >= scores) is (less == 0)


@pytest.mark.parametrize("where", [Sequence(5), None], ids=["line", "dense"])
@pytest.mark.parametrize("stored", [product.STORED, 0], ids=["stored", "again"])
@pytest.mark.parametrize("at_once", [product.AT_ONCE, 1])
def test_many_gradients_at_once(at_once: int, stored: int, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    monkeypatch.setattr(product, "STORED", stored)
    line = None if where is None else relpos.lines(where)
    leaves = [torch.randn(2, 2, 5, 4) for _ in range(3)] + [torch.randn(2, 9) if where else torch.randn(1, 2, 5, 5)]
    out = product.attend(*(x.requires_grad_() for x in leaves), line, 0.5)
    upstream = torch.randn(3, *out.shape)
    together = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in upstream]
    for got, wanted in zip(together, zip(*alone, strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at_once", [product.AT_ONCE, 1])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (1, 3, 0, 5)], ids=str)
def test_nothing(sizes: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No elements, queries, keys or width of values."""
    monkeypatch.setattr(product, "AT_ONCE", at_once)
    batch, n, m, width = sizes
    shapes = (batch, 2, n, 4), (batch, 2, m, 4), (batch, 2, m, width), (1, 2, n, m)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    out = product.attend(*leaves, None, 0.5)
    assert torch.equal(out, torch.zeros(batch, 2, n, width))
    for x, gradient in zip(leaves, torch.autograd.grad(out.sum(), leaves), strict=True):
        assert torch.equal(gradient, torch.zeros_like(x))


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


@pytest.mark.parametrize("where", [Sequence(256), Grid(23, 23)], ids=str)
@pytest.mark.parametrize(
    ("given", "batch", "engine"),
    [
        ({}, 1, "streaming"),
        ({}, 2, "sdpa"),
        ({"mask": Mask.causal()}, 2, "streaming"),
        ({"dtype": torch.bfloat16}, 2, "streaming"),
    ],
    ids=["one", "a batch", "causal", "bfloat16"],
)
def test_who_computes(where: Sequence | Grid, given: dict[str, Any], batch: int, engine: str) -> None:
    """A batch shares the dense bias and its gradient: more tokens of it are dense, where this can compute them."""
    dtype = given.get("dtype", torch.float32)
    q = torch.empty(batch, 16, where.count, 8, dtype=dtype)
    said = relpos.explain(q, q, q, position=bias_of(where, 16).to(dtype), queries=where, mask=given.get("mask"))
    assert said.backend == engine
