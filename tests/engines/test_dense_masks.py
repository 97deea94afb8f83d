"""`mask="causal"` and masks that come as boolean tensors: the same as a `Mask`, in values, gradients and messages."""

from typing import Any

import pytest
import torch
from engine_steps import with_gradients
from torch import Tensor

import relpos
from covering import pairwise
from relpos import Mask, attention, attention_weights, explain

B, H, N, D = 2, 4, 6, 8
TRIL = torch.ones(N, N, dtype=torch.bool).tril()
VALID = torch.tensor([[True] * 6, [True] * 4 + [False] * 2])


def inputs(m: int = N, dtype: torch.dtype = torch.float64, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    sizes = ((B, H, N, D), (B, 2, m, D), (B, 2, m, D))
    q, k, v = (torch.randn(size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def random_pairs(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6


def assert_same_under(mask: Any, wanted: Any, **more: Any) -> None:
    """Output and gradients under two masks, by as many engines."""
    found = []
    for one in (mask, wanted):
        leaves = inputs()
        found.append(with_gradients(attention(*leaves, mask=one, **more), leaves))
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("backend", ["auto", "reference", "sdpa"])
@pytest.mark.parametrize(
    ("mask", "wanted"),
    [
        ("causal", Mask.causal()),
        (TRIL, Mask.causal()),
        (TRIL[None, None].expand(B, H, N, N), Mask.causal()),
        (VALID[:, None, None], Mask.padding(VALID, queries=torch.ones(B, N, dtype=torch.bool))),
        (VALID[:, None, None] & VALID[:, None, :, None], Mask.padding(VALID)),
        (VALID[:, None, :, None], Mask.padding(torch.ones(B, N, dtype=torch.bool), queries=VALID)),
        (TRIL.T.contiguous().T, Mask.causal()),
        (torch.ones(2 * N, 2 * N, dtype=torch.bool).tril()[::2, ::2], Mask.causal()),
        (torch.ones(N, N, dtype=torch.bool), None),
    ],
    ids=["causal", "tril", "expanded", "keys", "both", "queries", "transposed", "strided", "all"],
)
def test_it_is_the_mask_that_says_the_same(mask: Any, wanted: Mask | None, backend: str) -> None:
    assert_same_under(mask, wanted, backend=backend)


@pytest.mark.parametrize(
    ("shape", "position", "dtype"),
    pairwise(
        [(N, N), (B, 1, N, N), (1, H, N, N), (B, H, N, N)],
        [None, relpos.T5Bias(H), relpos.ShawPosition(D), relpos.CoPE(D)],
        [torch.float64, torch.float32, torch.bfloat16, torch.float16],
    ),
    ids=repr,
)
def test_auto_is_the_reference(shape: tuple[int, ...], position: Any, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {} if position is None else {"position": position, "queries": relpos.Sequence(N)}
    tensors, pairs = inputs(dtype=dtype), random_pairs(*shape)
    found = attention(*tensors, mask=pairs, **given)
    assert found.dtype == dtype
    wanted = attention(*(x.double() for x in tensors), mask=pairs, backend="reference", **given)
    close = 1e-6 if dtype == torch.float64 else 0.02  # a mechanism's parameters are in float32
    torch.testing.assert_close(found.double(), wanted, rtol=close, atol=close)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_rows_that_see_nothing_give_zero_and_the_hidden_may_hold_anything(backend: str) -> None:
    pairs = torch.ones(B, 1, N, N, dtype=torch.bool)
    pairs[0, 0, 2] = False
    pairs[:, :, :, 4] = False
    found = []
    for junk in (0.0, float("nan")):
        leaves = [x.detach() for x in inputs()]
        leaves[0][0, :, 2] = leaves[1][:, :, 4] = leaves[2][:, :, 4] = junk
        leaves = [x.requires_grad_() for x in leaves]
        found.append(with_gradients(attention(*leaves, mask=pairs, backend=backend), leaves))
        assert not found[-1][0][0, :, 2].any()
    torch.testing.assert_close(*found)


def test_weights_and_the_log_sum_exp() -> None:
    q, k, v = inputs()
    found, wanted = (
        (attention_weights(q, k, mask=mask), *attention(q, k, v, mask=mask, return_lse=True))
        for mask in (TRIL, "causal")
    )
    torch.testing.assert_close(found, wanted)


def test_causal_wants_an_order_where_queries_and_keys_differ() -> None:
    q, k, v = inputs(m=9)
    with pytest.raises(ValueError, match="query_order and key_order for a causal or windowed mask of 6 queries and 9"):
        attention(q, k, v, mask="causal")


def test_with_other_masks_and_in_parts() -> None:
    pairs = random_pairs(B, H, N, N)
    joined = Mask.of(pairs) & Mask.causal()
    assert torch.equal(joined.dense(N, N), pairs & TRIL)
    assert torch.equal((joined & Mask.of(TRIL)).dense(N, N), pairs & TRIL)
    part = joined.narrow(slice(2, 5), slice(1, 6))
    assert torch.equal(part.dense(3, 5), (pairs & TRIL)[:, :, 2:5, 1:6])
    of_keys = Mask.of(VALID[:, None, None]).narrow(slice(0, 2), slice(3, 6))
    assert torch.equal(of_keys.dense(2, 3), VALID[:, None, None, 3:6].expand(B, 1, 2, 3))


def test_layers_take_them() -> None:
    x = torch.randn(B, N, 32)
    for layer in (relpos.MultiHeadAttention(32, 4), relpos.TransformerBlock(32, 4, position=relpos.T5Bias(4))):
        wanted = layer(x, mask=Mask.causal())
        torch.testing.assert_close(layer(x, mask="causal"), wanted)
        torch.testing.assert_close(layer(x, mask=TRIL), wanted)
    linear = relpos.MultiHeadAttention(32, 4, kind="linear")
    torch.testing.assert_close(linear(x, mask="causal"), linear(x, mask=Mask.causal()))
    with pytest.raises(NotImplementedError, match="a causal mask or none"):
        linear(x, mask=TRIL)
    dot = relpos.ScaledDotProductAttention()
    q = torch.randn(B, H, N, D)
    torch.testing.assert_close(dot(q, q, q, mask=TRIL), dot(q, q, q, mask="causal"))


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (TRIL, "Mask.causal()"),
        (TRIL.triu(-2), "Mask.window(2, 0)"),
        (torch.ones(N, N, dtype=torch.bool).triu(-1), "Mask.window(1, None)"),
        (torch.ones(N, N, dtype=torch.bool), "mask=None"),
        (VALID[:, None, None], "Mask.padding(valid, queries=torch.ones(...))"),
        (VALID[:, None, None] & VALID[:, None, :, None], "Mask.padding(valid)"),
        (VALID[:, None, None] & VALID[:, None, :, None] & TRIL, "Mask.causal() & Mask.padding(valid)"),
        (torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool(), "Mask.packed(segments)"),
        (torch.block_diag(torch.ones(2, 2), torch.ones(4, 4)).bool() & TRIL, "Mask.causal() & Mask.packed(segments)"),
        (random_pairs(N, N), "Mask.causal(), window(...), packed(...), padding(...)"),
        (random_pairs(B, H, N, N), "Mask.causal(), window(...), packed(...), padding(...)"),
        (torch.zeros(N, N, dtype=torch.bool), "Mask.padding(valid, queries=torch.ones(...))"),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_explain_says_that_it_is_dense_and_what_is_not(pairs: Tensor, said: str) -> None:
    q, k, v = inputs()
    why = explain(q, k, v, mask=pairs)
    (note,) = why.notes
    assert note.startswith("the mask is dense, 6 x 6 numbers. ")
    assert note.endswith((f" as {said}", f": {said}"))
    assert str(why).endswith(f"\n  note: {note}")
    assert why.passed_over["streaming"] == "it lacks a mask as a tensor"
    assert not explain(q, k, v, mask="causal").notes
