"""What no query sees may hold anything, and so may a query that sees nothing: forward and backward, in every engine."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_streaming import small_tiles as small_tiles
from torch import Tensor

from covering import pairwise
from relpos import (
    AxisVectors,
    Blocks,
    DenseBias,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    QueryBias,
    Rotation,
    RowRule,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    attention,
    attention_weights,
    lines,
)
from relpos.core import axis_lines
from relpos.testing.devices import ON_GPU
from relpos.testing.engines import engines

FAST_SHARE = 12  # of its tests, in the fast part

ENGINES = [name for name in engines() if name not in ON_GPU]
B, H, G, N, D = 2, 4, 2, 24, 6
I = torch.arange(N)  # noqa: E741
LATE = I >= 18
ROW, GRID = lines(Sequence(N)), lines(Grid(4, 6))

MASKS: dict[str, Mask] = {
    "padding": Mask.padding(torch.tensor([20, 9])[:, None] > I),
    "padded keys alone": Mask.padding(torch.tensor([20, 9])[:, None] > I, queries=torch.ones(N).bool()),
    "packed, with padding": Mask.packed(torch.where(LATE, -1, I % 3)),
    "an unused cache": Mask.causal(I.clamp(max=10), I),
    "a strict bound": Mask(right=-3),
    "intervals that meet few keys": Mask(low=I // 12 * 12, high=I // 12 * 12 + 4),
    "segments and intervals": Mask(low=I - 1, high=I + 1) & Mask.packed(I // 4 % 2, torch.where(LATE, 0, 1)),
    "globals within a limit": Mask(left=0, right=-1, query_global=I == 4, key_global=I > 20, limit=2),
    "blocks": Mask(blocks=Blocks(torch.tensor([[0, 1, 0], [0, 1, 0], [0, 1, 1]]).bool()[None], 8)),
    "blocks of each head": Mask(
        blocks=Blocks(torch.tensor([[[0, 1, 0]] * 3, [[0, 1, 1]] * 3, [[1, 0, 0]] * 3, [[1, 0, 0]] * 3]).bool(), 8)
    ),
    "blocks and an order": Mask(right=-2, blocks=Blocks(torch.eye(3).bool()[None], 8)),
}


def rule(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, x: Tensor) -> Tensor:
    return x.to(q.dtype)[:, None, None] * (q @ k.mT).tanh()


SIDES = ("query", "key", "value")
POSITIONS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "none": (lambda: None, []),
    "line bias": (lambda x: LineBias(x, ROW), [(H, ROW.length)]),
    "grid bias and sinks": (lambda x, s: LineBias(x, GRID) + Sinks(s), [(H, GRID.length), (H,)]),
    "rotation": (lambda a, u: Rotation(a, a, "half") + QueryBias(u), [(1, H, N, 2), (H, D)]),
    "vectors": (
        lambda *every: Terms(*(LineVectors(x, None, ROW, side) for x, side in zip(every, SIDES, strict=True))),
        [(1, ROW.length, D)] * 3,
    ),
    "vectors that are met": (
        lambda a, b: LineVectors(a, None, ROW, "query") + LineVectors(b, None, ROW, "key"),
        [(H, ROW.length, D)] * 2,
    ),
    "axis vectors": (lambda a, b: AxisVectors((a, b), axis_lines(Grid(4, 6))), [(1, 7, D), (1, 11, D)]),
    "low rank and a cap": (lambda a, b: LowRank(a, b) + Softcap(2.0), [(H, N, 3), (H, N, 3)]),
    "dense": (DenseBias, [(1, H, N, N)]),
    "rule": (lambda x: RowRule(rule, (x,)), [(H,)]),
}


def run(tensors: list[Tensor], leaves: list[Tensor], position: Callable[..., Any], mask: Mask, backend: str) -> Any:
    """Output, log-sum-exp where the engine gives it, and all gradients."""
    own = [x.clone().requires_grad_() for x in (*tensors, *leaves)]
    beside = backend != "sdpa"
    found: Any = attention(*own[:3], position=position(*own[3:]), mask=mask, return_lse=beside, backend=backend)
    out, *lse = found if beside else (found,)
    torch.manual_seed(3)
    total = (out * torch.randn(out.shape).to(out.dtype)).sum()
    total = total + sum(torch.where(x.isinf(), 0, x).sin().sum() for x in lse)
    return [out, *lse, *torch.autograd.grad(total, own, allow_unused=True)]


def reach(mask: Mask, groups: int = G) -> tuple[Tensor, Tensor]:
    """Which queries see nothing and which keys are seen by none, `[B, H, N]` and `[B, G, N]`."""
    whole = mask.dense(N, N).expand(B, H, N, N)
    return ~whole.any(dim=3), ~whole.any(dim=2).unflatten(1, (groups, -1)).any(dim=2)


FILLINGS = {"NaN, inf, NaN": (torch.nan, torch.inf, torch.nan), "inf, NaN, inf": (torch.inf, torch.nan, torch.inf)}
"""What q, k and v hold where no one may look."""


def check(mask: Mask, name: str, backend: str, dtype: torch.dtype, filled: str) -> None:
    """What is hidden changes no bit, is given a gradient of 0, and a query that sees nothing an output of 0."""
    position, shapes = POSITIONS[name]
    tensors = [torch.randn(shape).to(dtype) for shape in ((B, H, N, D), (B, G, N, D), (B, G, N, D))]
    leaves = [torch.randn(shape) for shape in shapes]
    blank, hidden = reach(mask)
    assert blank.any() or hidden.any()
    places = (blank, hidden, hidden)

    def of(fillings: tuple[float, ...]) -> Any:
        every = zip(tensors, places, fillings, strict=True)
        return run([x.masked_fill(at[..., None], one) for x, at, one in every], leaves, position, mask, backend)

    try:
        wanted = of((0.0, 0.0, 0.0))  # keys that are seen by none may set a bound
    except NotImplementedError:
        assert backend in ("sdpa", "triton")
        return
    found = of(FILLINGS[filled])
    for ours, exact in zip(found, wanted, strict=True):
        assert (ours is None and exact is None) or torch.equal(ours, exact)
    out, gradients = found[0], found[len(found) - len(leaves) - 3 :]
    for x, at in ((out, blank), *zip(gradients[:3], places, strict=True)):
        assert not x[at].any()


DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.mark.parametrize(
    ("mask", "name", "backend", "filled", "dtype"), pairwise(MASKS, POSITIONS, ENGINES, FILLINGS, DTYPES), ids=str
)
def test_every_mask_and_term(mask: str, name: str, backend: str, filled: str, dtype: torch.dtype) -> None:
    check(MASKS[mask], name, backend, dtype, filled)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    ("mask", "dtype", "name", "filled"), pairwise(MASKS, DTYPES, ("line bias", "vectors"), FILLINGS), ids=str
)
def test_tiles_of_streaming(mask: str, dtype: torch.dtype, name: str, filled: str) -> None:
    check(MASKS[mask], name, "streaming", dtype, filled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("backend", ["reference", "streaming", "sdpa"])
def test_a_dense_bias_may_hold_anything_where_pairs_are_forbidden(backend: str, dtype: torch.dtype) -> None:
    mask = MASKS["padding"] & Mask.causal()
    bias = torch.randn(B, H, N, N)
    tensors = [torch.randn(B, H, N, D).to(dtype) for _ in range(3)]
    wanted = run(tensors, [bias], DenseBias, mask, backend)
    for filling in (torch.nan, torch.inf, -torch.inf):
        found = run(tensors, [bias.masked_fill(~mask.dense(N, N), filling)], DenseBias, mask, backend)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


def test_weights_for_pictures() -> None:
    mask = MASKS["padded keys alone"]
    q, k = torch.randn(B, H, N, D, requires_grad=True), torch.randn(B, G, N, D)
    bad = k.masked_fill(reach(mask)[1][..., None], torch.nan)
    weights = attention_weights(q, bad, mask=mask)
    assert torch.autograd.grad(weights.square().sum(), q)[0].isfinite().all()


@pytest.mark.parametrize(
    "mask", [None, Mask.causal(), Mask.padding(torch.arange(N) < 3), Mask.padding(torch.ones(N).bool())],
    ids=["none", "causal", "padding", "no padding"],
)  # fmt: skip
def test_nothing_is_copied_where_all_are_numbers(mask: Mask | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from relpos.engines import api, reference

    given: list[Any] = []
    q, k, v = (torch.randn(1, H, N, D) for _ in range(3))
    monkeypatch.setattr(reference.REFERENCE, "run", lambda call: given.append(call) or (call.q, None))
    api.attention(q, k, v, mask=mask, backend="reference")
    assert all(x is y for x, y in zip((given[0].q, given[0].k, given[0].v), (q, k, v), strict=True))


def test_numbers_whose_products_are_none_count_as_such() -> None:
    """The sum of two of them overflows where a forbidden pair has -inf added to its score."""
    q, k, v = (torch.randn(1, H, N, D) for _ in range(3))
    seen = torch.arange(N) < N - 2
    clean = attention(q, k, v, mask=Mask.padding(seen), backend="streaming")
    huge = k.masked_fill(~seen[:, None], 3e38)
    assert torch.equal(attention(q, huge, v, mask=Mask.padding(seen), backend="streaming")[:, :, :-2], clean[:, :, :-2])
