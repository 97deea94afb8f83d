"""Vectors that meet a tensor of its own in place of the queries: against loops, in every engine and on every way."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from engine_steps import assert_accurate, assert_as_reference, step, with_gradients
from torch import Tensor

import relpos
from covering import pairwise
from relpos import LineBias, LineVectors, LowRank, Mask, Rotation, Sequence, Sinks, Terms, lines
from relpos.core import private
from relpos.engines.streaming import engine as streaming
from relpos.engines.streaming.cpu import by_products, cpu_kernel
from relpos.engines.streaming.plan import planning
from relpos.engines.streaming.terms import near, vector_term
from relpos.engines.streaming.workspace import Buffer
from relpos.testing import oracle
from relpos.testing.engines import engines, lacking
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import yardstick_dtype

FAST_CASES = 8  # of its largest test, in the fast part

B, H, D, WIDTH, EXTENT = 2, 4, 8, 3, 11
COUNTS = {"square": (40, 40), "late queries": (7, 40), "one query": (1, 40)}
SHAPES = {"of each": (B, H, H), "of each head": (1, H, 1), "of each element": (B, 1, H), "one": (1, 1, 1)}
"""How many elements and heads the content has, and how many heads the vectors."""


def places(n: int, m: int) -> tuple[Sequence, Sequence]:
    return Sequence(n, start=m - n), Sequence(m)


def ended(rows: Tensor, content: Tensor, n: int, m: int, low: int = 0) -> LineVectors:
    """Zeros but for `low <= query - key < low + EXTENT`."""
    line = lines(*places(n, m))
    row = line.offsets().axes[:, 0] - low
    index = torch.where((row >= 0) & (row < EXTENT), row, -1)
    return LineVectors(rows, index, line, "query", scaled=False, content=content)


def bias_by_loops(rows: Tensor, content: Tensor, n: int, m: int, low: int = 0) -> Tensor:
    """`[B, H, N, M]`, a query at a time."""
    rows, content = rows.expand(H, -1, -1), content.expand(B, H, -1, -1)
    found = []
    for i in range(n):
        row = [m - n + i - j - low for j in range(m)]
        vectors = torch.stack([rows[:, r] if 0 <= r < EXTENT else torch.zeros_like(rows[:, 0]) for r in row], dim=1)
        found.append((content[:, :, i, None] * vectors).sum(-1))
    return torch.stack(found, dim=2)


def mask_of(name: str, n: int, m: int) -> Mask | None:
    query, key = torch.arange(m - n, m), torch.arange(m)
    known = {
        "all": None,
        "causal": Mask.causal() if n == m else Mask.causal(query, key),
        "padding": Mask.causal(query, key)
        & Mask.padding(key < torch.tensor([m, m - 3])[:, None], queries=torch.ones(n).bool()),
        "packed": Mask.causal(query, key) & Mask(query_segments=query // 9 % 3, key_segments=key // 9 % 3),
        "window": Mask(left=13, right=2, query_order=query, key_order=key) if n != m else Mask.window(13, 2),
    }
    return known[name]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles so small that some are far from the vectors."""
    for module, sizes in {
        planning: {"ROWS": 4, "WIDTH": 9, "_BACKWARD_WIDTH": 8},
        cpu_kernel: {"_CAUSAL_ROWS": 5},
        near: {"_LEAST_FAR": 3},
        vector_term: {"_ROWS_AT_ONCE": 3},
    }.items():
        for name, size in sizes.items():
            monkeypatch.setattr(module, name, size)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("count", "shape", "groups", "mask", "low", "dtype", "backend"),
    pairwise(
        COUNTS, SHAPES, (H, 2, 1), ("all", "causal", "padding", "packed", "window"), (0, -4),
        (torch.float64, torch.float32, torch.bfloat16), engines(),
    ),
    ids=str,
)  # fmt: skip
def test_against_loops(
    count: str, shape: str, groups: int, mask: str, low: int, dtype: torch.dtype, backend: str
) -> None:
    (n, m), (elements, heads, vectors) = COUNTS[count], SHAPES[shape]
    torch.manual_seed(1)
    tensors = [torch.randn(size).to(dtype) for size in ((B, H, n, D), (B, groups, m, D), (B, groups, m, D))]
    rows = torch.randn(vectors, EXTENT, WIDTH).to(torch.promote_types(dtype, torch.float32))
    content = torch.randn(elements, n, heads, WIDTH).to(dtype).transpose(1, 2)  # as a projection leaves it
    every, upstream, own_mask = [*tensors, rows, content], torch.randn(B, H, n, D).to(dtype), mask_of(mask, n, m)

    def position(rows: Tensor, content: Tensor) -> Terms:
        return Terms(ended(rows, content, n, m, low))

    if (lack := lacking(backend, position(rows, content), mask=own_mask)) is not None:
        with pytest.raises(NotImplementedError, match=lack):
            step(backend, every, position, upstream, mask=own_mask)
        return

    def meant(wide: torch.dtype) -> list[Tensor]:
        own = [x.to(wide).requires_grad_() for x in every]
        allowed = None if own_mask is None else own_mask.dense(n, m)
        out, _ = oracle.attention(*own[:3], bias=bias_by_loops(*own[3:], n, m, low), allowed=allowed)
        return with_gradients(out, own, upstream.to(wide))

    exact, cost = meant(torch.float64), in_orders(lambda: meant(yardstick_dtype(dtype)))
    assert_accurate(step(backend, every, position, upstream, mask=own_mask), exact, cost, dtype)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("threads", [1, 2])
def test_far_keys_are_left_to_the_kernel(biased: bool, threads: int) -> None:
    """Of a causal call in float32: the forward, and the gradients by one thread where no bias is added."""
    n, line = 40, lines(Sequence(40))

    def position(rows: Tensor, content: Tensor, sinks: Tensor, *values: Tensor) -> Terms:
        return Terms(ended(rows, content, n, n), Sinks(sinks), *(LineBias(x, line) for x in values))

    shapes = [*[(B, H, n, D)] * 3, (H, EXTENT, WIDTH), (B, H, n, WIDTH), (H,), *[(H, line.length)] * biased]
    leaves = [torch.randn(shape) for shape in shapes]
    kernel, before = mock.Mock(side_effect=private.flash_kernel_backward()), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            mock.patch.object(streaming, "flash_kernel_backward", return_value=kernel),
            mock.patch.object(cpu_kernel, "ByProducts", side_effect=by_products.ByProducts) as forward,
        ):
            assert_as_reference("streaming", leaves, position, mask=Mask.causal(), rtol=1e-4, atol=1e-4)
    finally:
        torch.set_num_threads(before)
    assert forward.called
    assert kernel.called == (threads == 1 and not biased)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("reach", [13, 14, 30])
def test_rows_that_see_none_of_a_tile(reach: int) -> None:
    """A window that ends shortly behind the vectors: of a block's far keys its last rows see none."""
    leaves = [torch.randn(shape) for shape in (*[(B, H, 40, D)] * 3, (H, EXTENT, WIDTH), (B, H, 40, WIDTH))]
    mask = Mask.window(reach, 0)
    assert_as_reference("streaming", leaves, lambda *x: ended(*x, 40, 40), mask=mask, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("small")
def test_gradients_without_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private, "_FLASH_BACKWARD", "aten::_of_yesterday() -> Tensor")
    private.flash_kernel_backward.cache_clear()
    leaves = [torch.randn(shape) for shape in (*[(B, H, 40, D)] * 3, (H, EXTENT, WIDTH), (B, H, 40, WIDTH))]
    try:
        assert_as_reference("streaming", leaves, lambda *x: ended(*x, 40, 40), mask=Mask.causal(), rtol=1e-4, atol=1e-4)
        assert private.flash_kernel_backward() is None
    finally:
        private.flash_kernel_backward.cache_clear()


@pytest.mark.parametrize("backend", ["sdpa", "streaming"])
def test_beside_a_rotation(backend: str) -> None:
    """What the vectors meet is not turned."""
    shapes = (*[(B, H, 9, D)] * 3, (H, EXTENT, WIDTH), (B, H, 9, WIDTH), (1, 1, 9, 4))
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_reference(
        backend, leaves, lambda rows, content, turn: ended(rows, content, 9, 9) + Rotation(turn, turn, "half")
    )


def test_beside_a_term_of_the_dense_plan() -> None:
    shapes = (*[(B, H, 9, D)] * 3, (H, EXTENT, WIDTH), (B, 1, 9, WIDTH), (H, 9, 2), (H, 9, 2))
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    assert_as_reference("streaming", leaves, lambda rows, content, *low: ended(rows, content, 9, 9) + LowRank(*low))


@pytest.mark.usefixtures("small")
def test_without_a_mask() -> None:
    """Vectors end on both sides; what a buffer held for another tile is written over."""
    leaves = [torch.randn(shape) for shape in (*[(B, H, 40, D)] * 3, (H, EXTENT, WIDTH), (B, H, 40, WIDTH))]
    with mock.patch.object(Buffer, "skewed", side_effect=_dirty(Buffer.skewed), autospec=True):
        assert_as_reference("streaming", leaves, lambda *x: ended(*x, 40, 40, -4), rtol=1e-4, atol=1e-4)


def _dirty(skewed: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A buffer's tile with 7 everywhere, also around it, on its first use."""

    def made(self: Buffer, *shape: int, **named: int) -> Tensor:
        before, found = self.store.numel(), skewed(self, *shape, **named)
        if self.store.numel() != before:
            self.store.fill_(7.0)
        return found

    return made


@pytest.mark.parametrize("backend", ["reference", "sdpa", "streaming"])
def test_a_step_of_decoding_is_a_row_of_all(backend: str) -> None:
    """Terms made for all tokens, narrowed to the last three."""
    q, k, v = torch.randn(3, B, H, 9, D)
    term = ended(torch.randn(H, EXTENT, WIDTH), torch.randn(B, H, 9, WIDTH), 9, 9)
    whole = relpos.attention(q, k, v, position=term, mask="causal", backend=backend)
    late, every = slice(6, 9), slice(0, 9)
    mask = Mask.causal(torch.arange(6, 9), torch.arange(9))
    part = relpos.attention(q[:, :, late], k, v, position=term.narrow(late, every), mask=mask, backend=backend)
    torch.testing.assert_close(part, whole[:, :, late])


@pytest.mark.parametrize("backend", ["sdpa", "streaming"])
def test_content_of_a_query_that_sees_nothing_may_be_anything(backend: str) -> None:
    """Where q, k and v are finite too: the content alone holds NaN."""
    padding = Mask.padding(torch.arange(9) < torch.tensor([[9], [6]]))
    shapes = (*[(B, H, 9, D)] * 3, (H, EXTENT, WIDTH), (B, H, 9, WIDTH))
    leaves = [torch.randn(shape) for shape in shapes]
    wanted = step(backend, leaves, lambda *x: ended(*x, 9, 9), mask=padding)
    leaves[4][1, :, 6:] = torch.nan
    found = step(backend, leaves, lambda *x: ended(*x, 9, 9), mask=padding)
    for ours, exact in zip(found, wanted, strict=True):
        assert not ours.isnan().any()
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_on_meta() -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(*shape, device="meta", requires_grad=True)

    leaves = [empty(B, H, 9, D), empty(B, H, 9, D), empty(B, H, 9, D), empty(H, 17, WIDTH), empty(1, H, 9, WIDTH)]
    term = LineVectors(leaves[3], None, lines(Sequence(9)).to("meta"), "query", content=leaves[4])
    out = relpos.attention(*leaves[:3], position=term, mask="causal")
    assert [x.shape for x in torch.autograd.grad(out.sum(), leaves)] == [x.shape for x in leaves]


def test_under_vmap() -> None:
    """Over several contents, as an ensemble has them."""
    q, k, v = torch.randn(3, B, H, 9, D)
    rows, contents = torch.randn(H, EXTENT, WIDTH), torch.randn(3, B, H, 9, WIDTH)

    def attend(content: Tensor) -> Any:
        return relpos.attention(q, k, v, position=ended(rows, content, 9, 9), mask="causal", backend="reference")

    torch.testing.assert_close(torch.vmap(attend)(contents), torch.stack([attend(x) for x in contents]))
