"""A bias that learns nothing, read by PyTorch's kernel as a view of one number an offset."""

from typing import Any
from unittest import mock

import pytest
import torch
from engine_steps import with_gradients
from torch import Tensor

import relpos
from covering import pairwise
from relpos.core import densify
from relpos.engines.sdpa import strided_bias

HEADS, WIDTH = 4, 8
MASKS = {
    "none": None,
    "causal": relpos.Mask.causal(),
    "window": relpos.Mask.window(3, 2),
    "left": relpos.Mask.window(5, None),
    "ahead": relpos.Mask.window(None, 1),
}
FAR = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


def by_view(*tensors: Tensor, **given: Any) -> Tensor:
    """Attention by PyTorch's kernel, without a look-up for each pair of query and key."""
    refuse = mock.Mock(side_effect=AssertionError("each pair was looked up"))
    with mock.patch.object(densify, "expand_regular", refuse):
        return relpos.attention(*tensors, **given, backend="sdpa")


def made(batch: int, n: int, m: int, groups: int = HEADS, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """As projections leave them."""
    sizes = ((HEADS, n), (groups, m), (groups, m))
    return [torch.randn(batch, tokens, heads, WIDTH).to(dtype).transpose(1, 2) for heads, tokens in sizes]


def frozen(n: int, dtype: torch.dtype = torch.float32, *, m: int | None = None, start: int = 0) -> dict[str, Any]:
    """A position that learns nothing, and the tokens."""
    bias = relpos.T5Bias(HEADS, num_buckets=8, max_distance=16, init_std=1.0).requires_grad_(False)
    keys = {} if m is None else {"keys": relpos.Sequence(m)}
    return {"position": bias.to(torch.promote_types(dtype, torch.float32)),
            "queries": relpos.Sequence(n, start=start), **keys}  # fmt: skip


@pytest.mark.parametrize(
    ("n", "mask", "groups", "dtype"), pairwise((37, 24), MASKS, (HEADS, 2), FAR), ids=str
)  # 37: q is turned; 24: the bias
def test_equals_the_reference_with_all_gradients(n: int, mask: str, groups: int, dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in made(2, n, n, groups, dtype)]
    given = frozen(n, dtype) | {"mask": MASKS[mask]}
    ours, wanted = by_view(*leaves, **given), relpos.attention(*leaves, **given, backend="reference")
    direction = torch.randn(wanted.shape).to(dtype)
    for own, right in zip(*(with_gradients(x, leaves, direction) for x in (ours, wanted)), strict=True):
        assert (own - right).abs().max() <= FAR[dtype] * right.abs().max()


@pytest.mark.parametrize(
    ("start", "n", "m"), [(0, 5, 40), (35, 5, 40), (100, 16, 20), (0, 40, 24), (0, 20, 16), (9, 12, 16)]
)
def test_queries_that_are_elsewhere_than_the_keys(start: int, n: int, m: int) -> None:
    given, tensors = frozen(n, m=m, start=start), made(1, n, m)
    wanted = relpos.attention(*tensors, **given, backend="reference")
    torch.testing.assert_close(by_view(*tensors, **given), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups", [HEADS, 2])
@pytest.mark.parametrize("shared", [False, True], ids=["a bias each", "one for all heads"])
@pytest.mark.parametrize("at_once", [1, 3 * 2 * 40 * WIDTH], ids=["one by one", "three"])
def test_a_few_heads_at_once_are_the_same(
    at_once: int, shared: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = made(2, 40, 40, groups)
    lines = relpos.lines(relpos.Sequence(40))
    bias = relpos.LineBias(torch.randn(1 if shared else HEADS, lines.length), lines)
    wanted = by_view(q, k, v, position=bias)  # whole
    monkeypatch.setattr(strided_bias, "_AT_ONCE", at_once)
    monkeypatch.setattr(strided_bias, "_FEW", 0)
    with torch.no_grad(), mock.patch.object(strided_bias, "_turned", wraps=strided_bias._turned) as parts:
        got = by_view(q, k, v, position=bias)
    assert parts.call_count == {(1, HEADS): 4, (1, 2): 2}.get((at_once, groups), 2)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-6)


def test_the_view_is_left_where_it_does_not_pay() -> None:
    given, (q, k, v) = frozen(24), made(4, 24, 24)  # turning 4 x 8 numbers a token round costs more than 24
    with pytest.raises(AssertionError, match="each pair"):
        by_view(q, k, v, **given)
    by_view(q[:3], k[:3], v[:3], **given)


def operators(*tensors: Tensor, **given: Any) -> set[str]:
    """The operators that PyTorch ran."""
    with torch.profiler.profile() as profile:
        relpos.attention(*tensors, **given, backend="sdpa")
    return {event.key for event in profile.key_averages()}


FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.filterwarnings("default")  # of the profiler
@pytest.mark.parametrize("n", [12, 40], ids=["bias turned", "q turned"])
def test_the_flash_kernel_runs_however_q_lies(n: int) -> None:
    """PyTorch's other path would make all scores."""
    given, (q, k, v) = frozen(n), made(1, n, n)
    for own in (q, q.contiguous(), q.repeat_interleave(2, dim=3)[..., ::2], q.mT.contiguous().mT):
        found = operators(own, k, v, **given)
        assert FLASH in found
        assert "aten::softmax" not in found


@pytest.mark.filterwarnings("default")  # of the profiler
def test_the_flash_kernel_runs_or_the_view_is_left() -> None:
    """Where PyTorch's kernel takes none of it, its other path would make all scores."""
    given = {"position": relpos.ALiBi(1), "queries": relpos.Sequence(1500)}
    q, k, v = torch.randn(3, 1, 1, 1500, WIDTH)
    assert FLASH in operators(q, k, v, **given)
    assert relpos.explain(q, k, v, **given).backend == "sdpa"
    others = {
        "narrow values": (q, k, v[..., :4]),
        "keys with their axes turned": (q, k.mT.contiguous().mT, v),
        "values alike": (q, k, v.mT.contiguous().mT),
    }
    for name, tensors in others.items():
        with pytest.raises(AssertionError, match="each pair"):
            by_view(*tensors, **given)
        assert relpos.explain(*tensors, **given).backend == "streaming", name


@pytest.mark.parametrize("position", ["rotation", "one row for all heads", "learned, without gradients"])
def test_what_else_comes_beside_it(position: str) -> None:
    at = relpos.Sequence(30)
    line = relpos.lines(at)
    terms = {
        "rotation": relpos.RotaryEmbedding(WIDTH).terms(at) + relpos.LineBias(torch.randn(HEADS, line.length), line),
        "one row for all heads": relpos.LineBias(torch.randn(1, line.length), line),
        "learned, without gradients": relpos.T5Bias(HEADS, init_std=1.0).terms(at),
    }[position]
    with torch.set_grad_enabled(position != "learned, without gradients"):
        tensors = made(1, 30, 30)
        wanted = relpos.attention(*tensors, position=terms, backend="reference")
        torch.testing.assert_close(by_view(*tensors, position=terms), wanted, rtol=0, atol=1e-5)


def test_the_log_sum_exp_is_not_pytorchs() -> None:
    given, tensors = frozen(600), made(1, 600, 600)
    with torch.no_grad():
        assert relpos.explain(*tensors, **given).backend == "sdpa"
        assert relpos.explain(*tensors, **given, return_lse=True).backend == "streaming"
