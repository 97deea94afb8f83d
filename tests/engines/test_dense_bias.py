"""A dense bias whose axes may each be of size 1: every engine, dtype and mask, cut to some tokens, and its memory."""

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from engine_steps import assert_accurate, step, with_gradients
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from covering import pairwise
from relpos import DenseBias, LineBias, LineVectors, Mask, RowRule, Sequence, Sinks, Terms, lines
from relpos.engines import dense
from relpos.engines.streaming.plan import dense_plan, masks, planning
from relpos.engines.streaming.plan.dense_plan import DensePlan
from relpos.testing import oracle
from relpos.testing.engines import engines, lacking
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import yardstick_dtype

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


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks of rows, and of keys where a mask lets them be cut, in every engine that has some."""
    for module, name, size in (
        (planning, "PAIRS", 80), (dense_plan, "MOST_ROWS", 3), (dense, "PAIRS_AT_ONCE", 40), (masks, "GAP", 2),
        (masks, "ALIGNED", 2),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, size)


def tensors(dtype: torch.dtype, *shapes: tuple[int, ...], groups: int = H) -> tuple[list[Tensor], Tensor]:
    """q, k, v and biases, these float32 in half precision; the gradient of the output."""
    torch.manual_seed(3)
    wide = torch.promote_types(dtype, torch.float32)
    qkv = [torch.randn(shape).to(dtype) for shape in ((B, H, N, D), (B, groups, M, D), (B, groups, M, D))]
    return [*qkv, *(torch.randn(shape).to(wide) for shape in shapes)], torch.randn(B, H, N, D).to(dtype)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("shape", "backend", "dtype", "mask", "groups"), pairwise(SHAPES, engines(), DTYPES, MASKS, (H, 1)), ids=str
)
def test_values_and_gradients(shape: tuple[int, ...], backend: str, dtype: torch.dtype, mask: str, groups: int) -> None:
    given = MASKS[mask]
    leaves, upstream = tensors(dtype, shape, groups=groups)
    lack = lacking(backend, Terms(DenseBias(leaves[3])), mask=given)
    if lack is not None:
        with pytest.raises(NotImplementedError, match=lack):
            step(backend, leaves, DenseBias, upstream, mask=given)
        return

    def meaning(wide: torch.dtype) -> list[Tensor]:
        own = [x.to(wide).requires_grad_() for x in leaves]
        allowed = None if given is None else given.dense(N, M)
        output, _ = oracle.attention(*own[:3], bias=own[3].expand(B, H, N, M), allowed=allowed)
        return with_gradients(output, own, upstream.to(wide))

    exact = meaning(torch.float64)
    cost = in_orders(lambda: meaning(yardstick_dtype(dtype)))
    assert_accurate(step(backend, leaves, DenseBias, upstream, mask=given), exact, cost, dtype)


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
@pytest.mark.parametrize(
    ("name", "engine", "mask"), pairwise(BESIDE, (("sdpa", 0.0), ("streaming", 0.0), ("streaming", 0.3)), MASKS)
)
def test_beside_other_terms(name: str, engine: tuple[str, float], mask: str) -> None:
    """As in the reference with the bias written out."""
    shape, make = BESIDE[name]
    (backend, dropout), (leaves, upstream) = engine, tensors(torch.float64, (B, 1, 1, M), shape)
    given = {"mask": MASKS[mask], "dropout": dropout}
    found = step(backend, leaves, lambda x, other: DenseBias(x) + make(other), upstream, **given)
    wanted = step(
        "reference", leaves, lambda x, other: DenseBias(x.expand(B, H, N, M)) + make(other), upstream, **given
    )
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


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
def test_a_bias_of_keys_may_forbid(backend: str) -> None:
    """-inf at padded keys, as other libraries have it, is a mask; a hidden key may hold anything."""
    leaves, _ = tensors(torch.float64, (1, 1, 1, M))
    mask = Mask.packed(torch.zeros(N).int(), -HIDDEN.int())
    wanted = step(backend, leaves[:3], mask=mask)
    for filling, given in ((-torch.inf, {}), (torch.nan, {"mask": mask})):
        bias = torch.zeros_like(leaves[3]).masked_fill(HIDDEN, filling)
        *found, of_bias = step(backend, [*leaves[:3], bias], DenseBias, **given)
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
        assert of_bias.isfinite().all()


@pytest.mark.parametrize("shape", [(1, 1, 1, 2048), (1, 1, 2048, 1)])
def test_a_bias_of_keys_is_never_written_out(shape: tuple[int, ...]) -> None:
    """Forward and backward at 2,048 tokens, whose scores take 16 MiB: nothing above a block's buffer is made."""
    leaves = [*torch.randn(3, 1, 1, 2048, 8), torch.randn(shape)]
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        assert step("streaming", leaves, DenseBias)[4].shape == shape
    largest = max(event.self_cpu_memory_usage for event in found.events())
    assert largest <= 4 * planning.PAIRS + 2**18, f"{largest:,} bytes at once"


@pytest.mark.usefixtures("small_blocks")
def test_a_tile_holds_one_row_of_it() -> None:
    leaves, _ = tensors(torch.float32, (B, 1, 1, M))
    made, sizes = DensePlan._bias, set()

    def watched(*arguments: Any) -> Tensor | None:
        found = made(*arguments)
        sizes.add(found.shape)
        return found

    with mock.patch.object(DensePlan, "_bias", watched):
        step("streaming", leaves, DenseBias)
    assert sizes == {(B * H, 1, M)}


@pytest.mark.parametrize("shape", [(B, H, 2, M), (B, H, N, 2), (3, 1, 1, M), (1, 2, N, 1)], ids=str)
def test_other_sizes_are_refused(shape: tuple[int, ...]) -> None:
    leaves, _ = tensors(torch.float32, shape)
    with pytest.raises(ValueError, match=r"expected DenseBias of shape \[1 or 2, 1 or 3, 1 or 7, 1 or 11\]; got"):
        step("auto", leaves, DenseBias)
