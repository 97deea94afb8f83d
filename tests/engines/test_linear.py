"""Linear attention: against its definition by loops, one form against another, linear time, and as a layer."""

import math
from typing import Any

import pytest
import torch
from engine_steps import Sizes, with_gradients
from torch import Tensor

from covering import pairwise
from relpos import ALiBi, LinearAttention, RotaryEmbedding, Rotation, Sequence, XPos, linear_attention
from relpos.layers.variants import retention_decay
from relpos.testing import oracle

B, H, N, D, V = 2, 4, 11, 6, 5
FORMS = ("quadratic", "recurrent", "chunked")


def phi(x: Tensor, name: str, axis: int) -> Tensor:
    """By loops over numbers."""
    if name == "softmax":
        weights = x.exp()
        return weights / weights.sum(dim=axis, keepdim=True)
    one = {"elu": lambda y: y + 1 if y > 0 else math.exp(y), "relu": lambda y: max(y, 0.0), "identity": lambda y: y}
    return torch.tensor([one[name](y) for y in x.flatten().tolist()], dtype=x.dtype).view_as(x)


def by_loops(
    q: Tensor, k: Tensor, v: Tensor, name: str, causal: bool, decay: list[float] | None, normalize: bool, turn: Any
) -> Tensor:
    q, k = phi(q, name, 3), phi(k, name, 2)
    turned_q, turned_k = turn(q), turn(k)
    out = torch.zeros(*q.shape[:3], v.shape[3], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            for i in range(q.shape[2]):
                total, row = 0.0, torch.zeros(v.shape[3], dtype=q.dtype)
                for j in range(i + 1 if causal else k.shape[2]):
                    fade = 1.0 if decay is None else decay[h] ** (i - j)
                    total += fade * float(q[b, h, i] @ k[b, g, j])
                    row += fade * float(turned_q[b, h, i] @ turned_k[b, g, j]) * v[b, g, j]
                out[b, h, i] = row / total if normalize and total != 0 else row
    return out


def inputs(groups: int = H, n: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in ((B, H, n, D), (B, groups, n, D), (B, groups, n, V))]


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(
    ("name", "causal", "decay", "normalize"),
    [
        ("elu", False, False, True), ("relu", False, False, True), ("softmax", False, False, True),
        ("elu", True, False, True), ("relu", True, True, True), ("identity", True, True, False),
        ("elu", True, True, False), ("elu", False, False, False),
    ],
)  # fmt: skip
def test_the_definition(name: Any, causal: bool, decay: bool, normalize: bool, rotated: bool) -> None:
    q, k, v = inputs(groups=2)
    rates = [0.9, 0.5, 1.0, 0.99] if decay else None
    places = oracle.places(Sequence(N))

    def turn(x: Tensor) -> Tensor:
        return oracle.rotated(x, places, 1, D // 2, 10000.0, "half") if rotated else x

    wanted = by_loops(q, k, v, name, causal, rates, normalize, turn)
    position = RotaryEmbedding(D, axes=1).terms(Sequence(N)) if rotated else None
    for form in FORMS if causal else FORMS[-1:]:
        found = linear_attention(
            q, k, v, feature_map=name, causal=causal, position=position, normalize=normalize, form=form, chunk=4,
            decay=None if rates is None else torch.tensor(rates, dtype=torch.float64),
        )  # fmt: skip
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("chunk", "decays", "position"),
    pairwise([1, 3, 4, 11, 64], [False, True], [None, RotaryEmbedding(D, axes=1), XPos(D)]),
)
def test_all_forms_are_the_same_with_their_gradients(chunk: int, decays: bool, position: Any) -> None:
    terms = None if position is None else position.terms(Sequence(N))
    rate = torch.tensor([0.9, 0.5, 1.0, 0.97], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (*inputs(), *[rate] * decays)]
    quadratic, recurrent, chunked = (
        with_gradients(
            linear_attention(
                *leaves[:3], causal=True, position=terms, decay=rate if decays else None, form=form, chunk=chunk
            ),
            leaves,
        )
        for form in FORMS
    )
    torch.testing.assert_close(recurrent, quadratic, rtol=1e-9, atol=1e-11)
    torch.testing.assert_close(chunked, quadratic, rtol=1e-9, atol=1e-11)


def test_numerical_derivatives() -> None:
    q, k, v = (x[:1, :2, :5].requires_grad_() for x in inputs())
    rate = torch.tensor([0.9, 0.5], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda *x: linear_attention(*x[:3], causal=True, decay=x[3], chunk=2), (q, k, v, rate)
    )
    assert torch.autograd.gradcheck(lambda *x: linear_attention(*x), (q, k, v))


def test_cost_is_linear_in_the_tokens() -> None:
    """Numbers that operations touch, counted: twice the tokens, twice the numbers, forward and backward."""
    counts = []
    for n in (512, 1024, 2048):
        with Sizes() as made:
            linear_attention(*(x.requires_grad_() for x in inputs(n=n)), causal=True).sum().backward()
        counts.append(sum(made.numbers))
    assert counts[1] / counts[0] == pytest.approx(2, rel=0.02)
    assert counts[2] / counts[1] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype: torch.dtype) -> None:
    own = inputs(dtype=dtype)
    wide = linear_attention(*(x.float() for x in own), causal=True)
    torch.testing.assert_close(linear_attention(*own, causal=True), wide.to(dtype), rtol=0, atol=0)


def test_nothing_and_weights_of_nothing() -> None:
    q, k, v = inputs()
    assert linear_attention(q[:, :, :0], k[:, :, :0], v[:, :, :0], causal=True).shape == (B, H, 0, V)
    zero = linear_attention(-q.abs(), k, v, feature_map="relu")
    assert torch.equal(zero, torch.zeros_like(zero)), "no weight at all gives 0, not NaN"


@pytest.mark.parametrize(
    ("queries", "more", "error", "says"),
    [
        (N, {"decay": torch.ones(4)}, ValueError, "decay only in a causal call"),
        (N, {"causal": True, "decay": torch.ones(3)}, ValueError, r"one decay per query head, \[4\]"),
        (N, {"causal": True, "feature_map": "softmax"}, ValueError, "a feature map of single tokens"),
        (N, {"feature_map": "exp"}, ValueError, "feature_map to be one of"),
        (N, {"causal": True, "form": "parallel"}, ValueError, "form to be one of"),
        (N, {"chunk": 0}, ValueError, "chunk to be an integer of at least 1"),
        (5, {"causal": True}, ValueError, "as many queries as keys in a causal call; got 5 and 11"),
        (
            N, {"position": ALiBi(H).terms(Sequence(N))},
            NotImplementedError, "got LineBias, which linear attention lacks",
        ),
        (
            N, {"position": Rotation(torch.zeros(1, 1, N, 2), None, "half", values=True)},
            NotImplementedError, "got a Rotation of values, which linear attention lacks",
        ),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(
    queries: int, more: dict[str, Any], error: type[Exception], says: str, unchecked: None
) -> None:
    q, k, v = inputs()
    with pytest.raises(error, match=says):
        linear_attention(q[:, :, :queries], k, v, **more)


def test_the_layer_by_hand() -> None:
    layer = LinearAttention(12, 3, causal=True, position=RotaryEmbedding(4)).double()
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(2, 7, 3, 3, 4).permute(2, 0, 3, 1, 4)
    wanted = linear_attention(q, k, v, causal=True, position=RotaryEmbedding(4).terms(Sequence(7)), form="quadratic")
    torch.testing.assert_close(layer(x), layer.proj(wanted.transpose(1, 2).reshape(2, 7, 12)))


def test_retention_is_its_equation() -> None:
    """(Q K^T * D) V with D = decay^(n - m), each head normalised."""
    layer = LinearAttention(8, 2, feature_map="identity", causal=True, retention=True).double()
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    q, k, v = layer.qkv(x).view(1, 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
    apart = torch.arange(6)[:, None] - torch.arange(6)
    wanted = []
    for h, decay in enumerate((1 - 1 / 32, 1 - 1 / 64)):
        weights = torch.where(apart >= 0, decay ** apart.double(), 0.0)
        wanted.append((q[:, h] @ k[:, h].mT * weights) @ v[:, h])
    out = torch.stack(wanted, dim=1)
    out = out / (out.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(layer(x), layer.proj(out.transpose(1, 2).flatten(2)))
    assert retention_decay(2).tolist() == [1 - 1 / 32, 1 - 1 / 64]


@pytest.mark.parametrize(
    ("size", "more", "says"),
    [
        (8, {"retention": True}, "retention only in a causal layer"),
        (9, {}, "d_model to be a multiple of num_heads; got 9 and 2"),
        (8, {"position": "rotary_1d"}, "position to be a mechanism"),
    ],
)
def test_a_layer_checks_its_arguments(size: int, more: dict[str, Any], says: str, unchecked: None) -> None:
    with pytest.raises(ValueError, match=says):
        LinearAttention(size, 2, **more)
