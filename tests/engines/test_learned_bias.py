"""Attention under a learned bias in one node of autograd: values, gradients, second derivatives."""

from typing import Any
from unittest import mock

import pytest
import torch
from engine_steps import assert_as_reference, with_gradients
from torch import Tensor

import relpos
from covering import pairwise
from relpos import LineBias
from relpos.core import Grid, Mask, Sequence
from relpos.engines.sdpa import learned_bias

FAST_CASES = 8  # of each of its tests, in the fast part

PLACES = [Sequence(7), Sequence(6, prefix=1), Grid(3, 4), Grid(2, 3, prefix=2), Grid(2, 2, 3)]
MASKS = {"all": None, "causal": Mask.causal(), "window": Mask.window(1, 2)}


@pytest.fixture(
    params=[(at_once, stored) for at_once in (learned_bias.AT_ONCE, 1) for stored in (learned_bias.STORED, 0)]
)
def limits(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How much is computed at once, and up to which size weights are stored, and not computed again."""
    monkeypatch.setattr(learned_bias, "AT_ONCE", request.param[0])
    monkeypatch.setattr(learned_bias, "STORED", request.param[1])
    return request.param


def bias_of(where: Sequence | Grid | None, heads: int = 2) -> tuple[Tensor, Any]:
    """The numbers of a bias on lines, or of a dense one of five queries and keys, and these lines."""
    line = None if where is None else relpos.lines(where)
    return torch.randn((1, heads, 5, 5) if line is None else (heads, line.length)), line


@pytest.mark.parametrize(
    ("where", "at_once", "mask", "stored", "batch", "dtype"),
    pairwise(
        PLACES, (learned_bias.AT_ONCE, 300, 1), MASKS, (learned_bias.STORED, 0), (1, 3), (torch.float32, torch.float64)
    ),
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
    monkeypatch.setattr(learned_bias, "AT_ONCE", at_once)
    monkeypatch.setattr(learned_bias, "STORED", stored)
    q, k, v = torch.randn(batch, where.count, 3, 2, 8, dtype=dtype).permute(
        2, 0, 3, 1, 4
    )  # as a projection leaves them
    values, line = bias_of(where)
    with mock.patch.object(learned_bias, "attend", wraps=learned_bias.attend) as taken:
        assert_as_reference(
            "sdpa", [q, k, v, values.to(dtype)], lambda x: LineBias(x, line), mask=MASKS[mask],
            rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12,
        )  # fmt: skip
    assert taken.call_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("where", [Sequence(5), Grid(2, 2, prefix=1), None], ids=["line", "grid", "dense"])
def test_gradcheck_also_twice(where: Any, limits: tuple[int, int]) -> None:
    bias, line = bias_of(where)
    leaves = [x.double().requires_grad_() for x in (*torch.randn(3, 1, 2, 5, 3), bias)]

    def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Any:
        return learned_bias.attend(q, k, v, bias, line, 0.5)

    assert torch.autograd.gradcheck(attended, leaves)
    assert torch.autograd.gradgradcheck(attended, leaves, fast_mode=True)


@pytest.mark.parametrize("frozen", range(4), ids=["q", "k", "v", "bias"])
def test_what_is_frozen_has_no_gradient_and_changes_none(frozen: int, limits: tuple[int, int]) -> None:
    """Of views, whose memory lies otherwise."""
    x, bias = torch.randn(2, 6, 3, 2, 8), torch.randn(2, 6, 6)[:, None].transpose(2, 3)

    def gradients(asked: list[int]) -> dict[int, Tensor]:
        leaves = [part.detach() for part in (*x.permute(2, 0, 3, 1, 4), bias)]
        learned = [leaves[place].requires_grad_() for place in asked]
        out = learned_bias.attend(*leaves, None, 0.5)
        return dict(zip(asked, with_gradients(out, learned)[1:], strict=True))

    every = gradients([0, 1, 2, 3])
    for place, gradient in gradients([place for place in range(4) if place != frozen]).items():
        assert torch.equal(gradient, every[place])


@pytest.mark.parametrize("at_once", [learned_bias.AT_ONCE, 1], ids=["one part", "many"])
@pytest.mark.parametrize("less", [0, 1])
def test_weights_are_stored_up_to_a_size(less: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is saved for the gradient nothing else has as many numbers."""
    values, line = bias_of(Sequence(20))
    scores = 2 * 20 * 20
    monkeypatch.setattr(learned_bias, "AT_ONCE", at_once)
    monkeypatch.setattr(learned_bias, "STORED", scores - less)
    q, saved = torch.randn(1, 2, 20, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: (saved.append(x.numel()), x)[1], lambda x: x):
        relpos.attention(q, q, q, position=LineBias(values.requires_grad_(), line), backend="sdpa")
    assert (max(saved) >= scores) is (less == 0)


@pytest.mark.parametrize("where", [Sequence(5), None], ids=["line", "dense"])
def test_many_gradients_at_once(where: Any, limits: tuple[int, int]) -> None:
    bias, line = bias_of(where)
    leaves = [x.requires_grad_() for x in (*torch.randn(3, 2, 2, 5, 4), bias)]
    out = learned_bias.attend(*leaves, line, 0.5)
    upstream = torch.randn(3, *out.shape)
    together = torch.autograd.grad(out, leaves, upstream, is_grads_batched=True, retain_graph=True)
    alone = [torch.autograd.grad(out, leaves, one, retain_graph=True) for one in upstream]
    torch.testing.assert_close(together, tuple(map(torch.stack, zip(*alone, strict=True))), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("at_once", [learned_bias.AT_ONCE, 1])
@pytest.mark.parametrize("sizes", [(0, 3, 4, 5), (2, 0, 4, 5), (2, 3, 0, 5), (2, 3, 4, 0), (1, 3, 0, 5)], ids=str)
def test_nothing(sizes: tuple[int, ...], at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """No elements, queries, keys or width of values."""
    monkeypatch.setattr(learned_bias, "AT_ONCE", at_once)
    batch, n, m, width = sizes
    shapes = (batch, 2, n, 4), (batch, 2, m, 4), (batch, 2, m, width), (1, 2, n, m)
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]
    found = with_gradients(learned_bias.attend(*leaves, None, 0.5), leaves, torch.ones(batch, 2, n, width))
    assert all(not x.any() for x in found)


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_with_a_rotation(layout: Any) -> None:
    turned, line = relpos.RotaryEmbedding(8, layout=layout, rotary_dim=4).terms(Sequence(6)), relpos.lines(Sequence(6))
    leaves = [*torch.randn(3, 2, 2, 6, 8), torch.randn(2, line.length)]
    assert_as_reference("sdpa", leaves, lambda x: turned + LineBias(x, line), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(1, 1), (3, 1), (1, 2), (3, 2)])
def test_a_dense_bias_of_some_elements_and_heads(size: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is read, and its gradient summed, by the parts that a call is cut into."""
    monkeypatch.setattr(learned_bias, "AT_ONCE", 1)
    monkeypatch.setattr(learned_bias, "STORED", 0)
    leaves = [*torch.randn(3, 3, 2, 5, 8), torch.randn(*size, 5, 5)]
    assert_as_reference("sdpa", leaves, relpos.DenseBias, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", [Sequence(256), Grid(23, 23)], ids=str)
@pytest.mark.parametrize(
    ("given", "batch", "dtype", "engine"),
    [
        ({}, 1, torch.float32, "streaming"),
        ({}, 2, torch.float32, "sdpa"),
        ({"mask": Mask.causal()}, 2, torch.float32, "streaming"),
        ({}, 2, torch.bfloat16, "streaming"),
    ],
    ids=["one", "a batch", "causal", "bfloat16"],
)
def test_who_computes(where: Any, given: dict[str, Any], batch: int, dtype: torch.dtype, engine: str) -> None:
    """A batch shares the dense bias and its gradient: more tokens of it are dense, where this can compute them."""
    q, (values, line) = torch.empty(batch, 16, where.count, 8, dtype=dtype), bias_of(where, 16)
    assert relpos.explain(q, q, q, position=LineBias(values.requires_grad_(), line), **given).backend == engine
