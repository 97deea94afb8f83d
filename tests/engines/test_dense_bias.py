"""A dense bias whose axes may each be of size 1: every engine, dtype and mask, cut to some tokens, and its memory."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import relpos
from covering import pairwise
from relpos import DenseBias, LineBias, Mask, RowRule, Sequence, Sinks, Terms, attention, lines
from relpos.core.terms import LineVectors
from relpos.engines.streaming import masks, planning
from relpos.engines.streaming.dense_plan import DensePlan
from relpos.testing import devices, oracle
from relpos.testing.engines import engines, lacking
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import assert_close, rms, yardstick_dtype

FAST_CASES = 8  # of each of its tests, in the fast part

B, H, N, M, D = 2, 3, 7, 11, 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
SHAPES = tuple(itertools.product((1, B), (1, H), (1, N), (1, M)))
HIDDEN = torch.arange(M) % 4 == 1
MASKS: dict[str, Mask | None] = {
    "no mask": None,
    "causal": Mask.causal(torch.arange(4, N + 4), torch.arange(M)),
    "padding": Mask.packed(torch.zeros(N).int(), -torch.stack([torch.arange(M) > 5, HIDDEN]).int()),
    "rows that see nothing": Mask.packed(torch.arange(N) // 3, torch.arange(M) // 4 + 1),
}
EXACT = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and of keys where a mask lets them be cut, in every engine that has some."""
    monkeypatch.setattr(planning, "PAIRS", 80)
    monkeypatch.setattr(sys.modules["relpos.engines.streaming.dense_plan"], "MOST_ROWS", 3)
    monkeypatch.setattr(sys.modules["relpos.engines.dense"], "PAIRS_AT_ONCE", 40)
    monkeypatch.setattr(masks, "GAP", 2)
    monkeypatch.setattr(masks, "ALIGNED", 2)


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...], groups: int = H) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k, v; biases, float32 in half precision; the gradient of the output."""
    torch.manual_seed(3)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    qkv = [torch.randn(shape).to(dtype) for shape in ((B, H, N, D), (B, groups, M, D), (B, groups, M, D))]
    return qkv, [torch.randn(shape).to(wide) for shape in shapes], torch.randn(B, H, N, D).to(dtype)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("shape", "backend", "dtype", "mask", "groups"), pairwise(SHAPES, engines(), DTYPES, MASKS, (H, 1)), ids=str
)
def test_values_and_gradients(shape: tuple[int, ...], backend: str, dtype: torch.dtype, mask: str, groups: int) -> None:
    given = MASKS[mask]
    qkv, leaves, upstream = tensors(dtype, shape, groups=groups)
    lack = lacking(backend, Terms(DenseBias(leaves[0])), mask=given)
    if lack is not None:
        with pytest.raises(NotImplementedError, match=lack):
            devices.attention(*qkv, position=DenseBias(leaves[0]), mask=given, backend=backend)
        return

    def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        output = devices.attention(q, k, v, position=DenseBias(bias), mask=given, backend=backend)
        assert isinstance(output, Tensor)
        return output

    def meaning(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        allowed = None if given is None else given.dense(N, M)
        return oracle.attention(q, k, v, bias=bias.expand(B, H, N, M), allowed=allowed)[0]

    def run(function: object, wide: torch.dtype | None) -> list[Tensor]:
        own = [(x if wide is None else x.to(wide)).detach().clone().requires_grad_() for x in (*qkv, *leaves)]
        output = function(*own)  # type: ignore[operator]
        return [output, *torch.autograd.grad(output, own, upstream.to(output.dtype))]

    exact = run(meaning, torch.float64)
    cost = in_orders(lambda: run(meaning, yardstick_dtype(dtype)))
    size = max(rms(x) for x in exact[1:])
    names = ("output", "dq", "dk", "dv", "gradient of the bias")
    for what, a, e, c in zip(names, run(ours, None), exact, cost, strict=True):
        assert_close(a, e, c, what=what, terms=0.0 if what == "output" else size, dtype=dtype)


LINE = lines(Sequence(N, start=4), Sequence(M))


def rule(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, x: Tensor) -> Tensor:
    return x.to(q.dtype) * (q @ k.mT).tanh()


BESIDE = {
    "a bias of rows": ((B, 1, N, 1), DenseBias),
    "a line": ((H, LINE.length), lambda x: LineBias(x, LINE)),
    "vectors": ((1, LINE.length, D), lambda x: LineVectors(x, None, LINE, "query")),
    "sinks": ((H,), Sinks),
    "a rule": ((1, H, 1, 1), lambda x: RowRule(rule, (x,))),
}


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(("backend", "dropout"), [("sdpa", 0.0), ("streaming", 0.0), ("streaming", 0.3)])
@pytest.mark.parametrize("name", BESIDE)
def test_beside_other_terms(name: str, backend: str, mask: str, dropout: float) -> None:
    """As in the reference with the bias written out."""
    shape, make = BESIDE[name]
    qkv, leaves, upstream = tensors(torch.float64, (B, 1, 1, M), shape)

    def run(backend: str, written_out: bool) -> list[Tensor]:
        own = [x.clone().requires_grad_() for x in (*qkv, *leaves)]
        *inputs, keys, other = own
        terms = DenseBias(keys.expand(B, H, N, M) if written_out else keys) + make(other)
        torch.manual_seed(9)
        out = attention(*inputs, position=terms, mask=MASKS[mask], dropout=dropout, backend=backend)
        assert isinstance(out, Tensor)
        return [out, *torch.autograd.grad(out, own, upstream)]

    for found, wanted in zip(run(backend, False), run("reference", True), strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_narrow_is_that_of_the_bias_written_out(shape: tuple[int, ...]) -> None:
    bias = torch.randn(shape)
    for queries, keys in ((slice(2, 5), slice(3, 4)), (slice(6, 7), slice(0, 9)), (slice(0, 7), slice(1, 11, 3))):
        narrowed = DenseBias(bias).narrow(queries, keys).bias
        whole = bias.expand(B, H, N, M)[:, :, queries, keys]
        assert torch.equal(narrowed.expand_as(whole), whole)
        for axis, size in enumerate(shape):
            assert size > 1 or narrowed.shape[axis] == 1, "an axis that stands for all was written out"


@pytest.mark.parametrize("backend", ["reference", "sdpa", "streaming"])
@pytest.mark.parametrize("shape", [(B, 1, 1, M), (1, H, N, 1), (1, 1, 1, 1)], ids=str)
def test_decoding(shape: tuple[int, ...], backend: str) -> None:
    """One query at a time under the narrowed terms, as the whole."""
    (q, k, v), (bias,), _ = tensors(torch.float64, shape)
    terms = Terms(DenseBias(bias))
    whole = attention(q, k, v, position=terms, backend=backend)
    assert isinstance(whole, Tensor)
    for i in range(N):
        step = terms.narrow(slice(i, i + 1), slice(0, M))
        out = attention(q[:, :, i : i + 1], k, v, position=step, backend=backend)
        torch.testing.assert_close(out, whole[:, :, i : i + 1], **EXACT)


@pytest.mark.parametrize("backend", ["reference", "sdpa", "streaming"])
def test_a_bias_of_keys_may_forbid(backend: str) -> None:
    """-inf at padded keys, as other libraries have it, is a mask; a hidden key may hold anything."""
    (q, k, v), _, _ = tensors(torch.float64)
    forbidding = torch.zeros(1, 1, 1, M, dtype=torch.float64).masked_fill(HIDDEN, -torch.inf)
    mask = Mask.packed(torch.zeros(N).int(), -HIDDEN.int())
    wanted = attention(q, k, v, mask=mask, backend=backend)
    torch.testing.assert_close(attention(q, k, v, position=DenseBias(forbidding), backend=backend), wanted, **EXACT)
    held = torch.zeros_like(forbidding).masked_fill(HIDDEN, torch.nan).requires_grad_()
    found = attention(q, k, v, position=DenseBias(held), mask=mask, backend=backend)
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found, wanted, **EXACT)
    (gradient,) = torch.autograd.grad(found.square().sum(), held)
    assert gradient.isfinite().all()


def test_a_bias_of_keys_is_never_written_out() -> None:
    """Forward and backward at 2,048 tokens, whose scores take 16 MiB: nothing above a block's buffer is made."""
    n = 2048
    q, k, v = (torch.randn(1, 1, n, 8, requires_grad=True) for _ in range(3))
    for shape in ((1, 1, 1, n), (1, 1, n, 1)):
        bias = torch.randn(shape, requires_grad=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            out = attention(q, k, v, position=DenseBias(bias), backend="streaming")
            assert isinstance(out, Tensor)
            out.sum().backward()
        largest = max(event.self_cpu_memory_usage for event in found.events())
        assert largest <= 4 * planning.PAIRS + 2**18, f"{largest:,} bytes at once"
        assert bias.grad is not None
        assert bias.grad.shape == shape


@pytest.mark.usefixtures("small_blocks")
def test_a_tile_holds_one_row_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    made = DensePlan._bias

    def watched(self: DensePlan, *arguments: object) -> Tensor | None:
        found = made(self, *arguments)  # type: ignore[arg-type]
        sizes.append(tuple(found.shape) if found is not None else ())
        return found

    monkeypatch.setattr(DensePlan, "_bias", watched)
    (q, k, v), (bias,), _ = tensors(torch.float32, (B, 1, 1, M))
    attention(q, k, v, position=DenseBias(bias), backend="streaming")
    assert set(sizes) == {(B * H, 1, M)}


@pytest.mark.parametrize("shape", [(B, H, 2, M), (B, H, N, 2), (3, 1, 1, M), (1, 2, N, 1)], ids=str)
def test_other_sizes_are_refused(shape: tuple[int, ...]) -> None:
    (q, k, v), (bias,), _ = tensors(torch.float32, shape)
    with pytest.raises(ValueError, match=r"expected DenseBias of shape \[1 or 2, 1 or 3, 1 or 7, 1 or 11\]; got"):
        relpos.attention(q, k, v, position=DenseBias(bias))
