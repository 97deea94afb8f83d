"""PyTorch's private parts: they are given what they believe, and without one, or with another, results stay right."""

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_streaming import B, D, H, biased, check
from torch import Tensor
from torch.autograd import forward_ad

from relpos import Grid, LineBias, Mask, Sequence, Sinks, Terms, attention, lines
from relpos.core import private
from relpos.engines.streaming.cpu import cpu_kernel, matmul, partial_softmax

FLASH, BFLOAT16 = "_scaled_dot_product_flash_attention_for_cpu", "_is_mkldnn_bf16_supported"


@pytest.fixture
def anew() -> Iterator[None]:
    """What is looked for once is looked for again, before and after."""
    for place in range(2):
        private.flash_kernel.cache_clear()
        private.multiplies_bfloat16.cache_clear()
        if place == 0:
            yield


def refuse(*given: Any, **named: Any) -> Any:
    raise AssertionError("an operator with another signature was called")


def change(monkeypatch: pytest.MonkeyPatch, how: str, namespace: str, name: str, constant: str) -> None:
    """Make a PyTorch without an operator, or with another signature of it."""
    known = getattr(private, constant)
    if how == "absent":
        monkeypatch.setattr(private, constant, known.replace(name, name + "_of_yesterday"))
        return
    other = SimpleNamespace(_schema=known.replace("(", "(int version, ", 1), __call__=refuse)
    monkeypatch.setattr(getattr(torch.ops, namespace), name, SimpleNamespace(default=other))


def test_they_are_there() -> None:
    """Of the PyTorch under test, or the engine is slow without a word."""
    assert private.flash_kernel() is getattr(torch.ops.aten, FLASH).default
    assert private.multiplies_bfloat16() == getattr(torch.ops.mkldnn, BFLOAT16)()


CALLS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "bias": (Sequence(23), None, {}),
    "causal, prefix": (Sequence(20, prefix=3), None, {"mask": Mask.causal()}),
    "grid": (Grid(4, 5, prefix=1), None, {"groups": 2}),
    "cross": (Sequence(9, prefix=2), Sequence(14, prefix=1), {}),
}


@pytest.mark.parametrize("how", ["absent", "another signature"])
@pytest.mark.parametrize("name", CALLS)
def test_without_the_kernel(name: str, how: str, monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    change(monkeypatch, how, "aten", FLASH, "_FLASH")
    monkeypatch.setattr(cpu_kernel, "forward", refuse)
    queries, keys, given = CALLS[name]
    position, shapes = biased(queries, keys)
    check(
        lambda values, logits: Terms(position(values), Sinks(logits)), [*shapes, (H,)], queries.count,
        (keys or queries).count, dtypes=(torch.float32,), **given,
    )  # fmt: skip
    assert private.flash_kernel() is None


@pytest.mark.parametrize("how", ["absent", "another signature"])
def test_without_an_answer_about_bfloat16(how: str, monkeypatch: pytest.MonkeyPatch, anew: None) -> None:
    change(monkeypatch, how, "mkldnn", BFLOAT16, "_BFLOAT16")
    assert not matmul.native(torch.zeros(1, dtype=torch.bfloat16))
    check(*biased(Sequence(23)), 23, 23, dtypes=(torch.bfloat16,))


def attended(q: Tensor, backend: str = "streaming") -> Any:
    n = q.shape[2]
    position = LineBias(torch.linspace(-1, 1, 2 * n - 1)[None], lines(Sequence(n)))
    return attention(q, q, q, position=position, backend=backend)


of_pytorch = pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
"""What it says of itself when a transform is first used."""

LEVELS = {"absent": {}, "another kind": {"_current_level": lambda: -1}}


@of_pytorch
@pytest.mark.parametrize("how", LEVELS)
def test_forward_mode_is_known_without_its_level(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator of ours would drop these derivatives without a word."""
    monkeypatch.setattr(private, "forward_ad", SimpleNamespace(make_dual=forward_ad.make_dual, **LEVELS[how]))
    q, along = torch.randn(2, 1, 2, 6, D)
    assert not private.inside_forward_mode()
    assert torch.allclose(attended(q), attended(q, "reference"), atol=1e-6)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="forward-mode"):
        attended(forward_ad.make_dual(q, along))
    monkeypatch.setattr(private, "torch", SimpleNamespace(_C=None, ops=torch.ops, zeros=torch.zeros))
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(attended, (q,), (along,))


def of_yesterday(*, depth: int) -> None:
    """A function that wants an argument."""


@of_pytorch
@pytest.mark.parametrize("functions", [{}, {"peek_interpreter_stack": of_yesterday}], ids=["absent", "another"])
def test_transforms_raise_where_nobody_tells_of_them(functions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(2, 1, 2, 6, D)
    transforms: list[Callable[[], Any]] = [
        lambda: torch.vmap(attended)(q),
        lambda: torch.func.grad(lambda x: attended(x).sum())(q[0]),
        lambda: torch.func.vjp(attended, q[0])[1](q[0]),
        lambda: torch.func.jvp(attended, (q[0],), (q[1],)),
    ]
    for transform in transforms:
        with pytest.raises(NotImplementedError, match=r"torch\.func|forward-mode"):
            transform()
    untold = SimpleNamespace(_functorch=SimpleNamespace(**functions))
    monkeypatch.setattr(private, "torch", SimpleNamespace(_C=untold, ops=torch.ops))
    assert torch.allclose(attended(q[0]), attended(q[0], "reference"), atol=1e-6)
    for transform in transforms:
        with pytest.raises((RuntimeError, NotImplementedError)):
            transform()


def test_the_kernel_is_given_what_it_believes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of every layout of keys and values, grid and mask."""
    monkeypatch.setattr(cpu_kernel, "_ROWS", 8)
    monkeypatch.setattr(cpu_kernel, "_CAUSAL_ROWS", 5)
    kernel, with_masks = private.flash_kernel(), set()

    def asked(q: Tensor, k: Tensor, v: Tensor, *plain: Any, attn_mask: Tensor | None, scale: float) -> Any:
        for x in (q, k, v) if attn_mask is None else (q, k, v, attn_mask):
            assert (x.device.type, x.dtype, x.stride(3)) == ("cpu", torch.float32, 1)
        assert q.shape[:2] == k.shape[:2]
        assert q.shape[3] == k.shape[3]
        assert k.shape == v.shape
        assert k.shape[2] > 0
        if attn_mask is not None:
            assert attn_mask.shape[2:] == (q.shape[2], k.shape[2])
            assert all(own in (1, all_) for own, all_ in zip(attn_mask.shape, q.shape[:2], strict=False))
        with_masks.add(attn_mask is not None)
        return kernel(q, k, v, *plain, attn_mask=attn_mask, scale=scale)

    monkeypatch.setattr(partial_softmax, "flash_kernel", lambda: asked)
    pairs = [(Sequence(20), Sequence(20)), (Grid(4, 5), Grid(20, 1)), (Grid(6, 3, prefix=2), Grid(5, 1, prefix=1))]
    orders = [lambda x: x, lambda x: x.mT.contiguous().mT, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2)]
    masks = [None, Mask.causal(), Mask.window(3, 2)]
    for (queries, keys), batch, order, mask in itertools.product(pairs, (1, B), orders, masks):
        if mask is None or queries.count == keys.count:
            q, k, v = (order(torch.randn(batch, H, side.count, D)) for side in (queries, keys, keys))
            line = lines(queries, keys)
            for position in (LineBias(torch.randn(H, line.length), line), None):
                attention(q, k, v, position=position, mask=mask, backend="streaming")
    assert with_masks == {True, False}
