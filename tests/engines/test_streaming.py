"""The streaming engine where it differs from the others: tiles, skipped keys, repeated bits, operators, memory."""

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from engine_steps import assert_accurate, assert_as_reference, call_of, with_gradients
from torch import Tensor

from covering import pairwise
from loaded import Loaded
from relpos import (
    Blocks,
    DenseBias,
    Grid,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    Positions,
    QueryBias,
    Rotation,
    RowRule,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    explain,
    lines,
)
from relpos.core import Coordinates
from relpos.engines import dense
from relpos.engines.packing import Packed, pack, unpack
from relpos.engines.streaming import forward, scores
from relpos.engines.streaming.cpu import cpu_kernel, materialized_bias, matmul
from relpos.engines.streaming.plan import hankel, masks, planning, regroup
from relpos.engines.streaming.terms import key_vectors
from relpos.patterns import dilated
from relpos.testing.devices import attention
from relpos.testing.orders import in_orders

FAST_CASES = 6  # of each of its tests, in the fast part

B, H, D = 2, 4, 8
DTYPES = (torch.float64, torch.float32, torch.bfloat16)


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of a few rows and keys, so that small calls have many of each."""
    for module, sizes in {
        planning: {"ROWS": 4, "WIDTH": 7, "_BACKWARD_WIDTH": 6, "_NATIVE_ROWS": 5, "_NATIVE_WIDTH": 9, "PAIRS": 60},
        cpu_kernel: {"_ROWS": 8, "_CAUSAL_ROWS": 5},
        materialized_bias: {"_ROWS": 6, "_PAIRS": 60},
        masks: {"GAP": 2, "ALIGNED": 8},
        regroup: {"_LEAST": 1},
    }.items():
        for name, size in sizes.items():  # rows of a grid: two of two columns
            monkeypatch.setattr(module, name, size)


def run(
    backend: str, position: Callable[..., Any], given: dict[str, Any], inputs: list[Tensor], upstream: list[Tensor]
) -> list[Tensor]:
    """Output, log-sum-exp and the gradient of every input, from q, k, v and what the position is made of."""
    own = [x.clone().requires_grad_() for x in inputs]
    q, k, v, *rest = own
    out, lse = attention(q, k, v, position=position(*rest), backend=backend, return_lse=True, **given)
    up, up_lse = (x.to(y.dtype) for x, y in zip(upstream, (out, lse), strict=True))
    blank = lse.isinf()
    found = torch.autograd.grad(
        [out, torch.where(blank, 0, lse)], own, [up, torch.where(blank, 0, up_lse)], allow_unused=True
    )
    return [out, lse, *(torch.zeros_like(x) if g is None else g for x, g in zip(own, found, strict=True))]


def check(
    position: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    n: int,
    m: int,
    groups: int | None = None,
    *,
    backend: str = "streaming",
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    width: int = D,
    **given: Any,
) -> None:
    """Against the definition in float64, in every dtype; the cost of rounding is the definition's in the dtype."""
    for dtype in dtypes:
        torch.manual_seed(5)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        qkv = [torch.randn(size).to(dtype) for size in ((B, H, n, width), *[(B, groups or H, m, width)] * 2)]
        leaves = [torch.randn(shape).to(wide) for shape in shapes]
        upstream = [torch.randn(B, H, n, width).to(dtype), torch.randn(B, H, n)]
        inputs = [*qkv, *leaves]
        exact = run("reference", position, given, [x.double() for x in inputs], upstream)
        lower = [x.float() if dtype == torch.float64 else x for x in inputs]
        cost = in_orders(functools.partial(run, "reference", position, given, lower, upstream))
        mine = run(backend, position, given, inputs, upstream)
        assert_accurate(mine, exact, cost, dtype, outputs=2, terms=1.0)


def biased(queries: Coordinates, keys: Coordinates | None = None) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    line = lines(queries, keys)
    return (lambda values: LineBias(values, line)), [(H, line.length)]


COORDINATES = {
    "sequence": (Sequence(23), None),
    "cross": (Sequence(11, start=4), Sequence(23)),
    "prefix": (Sequence(20, prefix=2), None),
    "prefix of keys": (Sequence(9), Sequence(14, prefix=3)),
    "no other keys": (Sequence(9), Sequence(0, prefix=3)),
    "prefix of queries": (Sequence(9, prefix=2), Sequence(14)),
    "grid": (Grid(5, 4), None),
    "grid with prefix": (Grid(4, 5, prefix=1), None),
    "unequal grids": (Grid(3, 4), Grid(5, 2, prefix=2)),
    "three axes": (Grid(3, 2, 4, prefix=1), None),
    "irregular": (Positions(torch.tensor([5, 1, 1, 9, 0, 3]), low=0, high=9), Sequence(13)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "rows", "transposed", "dtype", "written", "sinks"),  # rows: a part of a strip, or several together
    pairwise(COORDINATES, (3, 11), (False, True), DTYPES, (False, True), (False, True)),
    ids=str,
)
def test_tiles_of_every_layout(
    name: str,
    rows: int,
    transposed: bool,
    dtype: torch.dtype,
    written: bool,
    sinks: bool,
    small_tiles: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not written:  # as on grids too large to be
        monkeypatch.setattr(materialized_bias, "_MOST_PAIRS", 0)
    monkeypatch.setattr(planning, "ROWS", rows)
    monkeypatch.setattr(planning, "_NATIVE_ROWS", rows)
    queries, keys = COORDINATES[name]
    position, (shape,) = biased(queries, keys)

    def made(table: Tensor, *logits: Tensor) -> Terms:
        return Terms(position(table.T if transposed else table), *map(Sinks, logits))  # T: as its lookup leaves values

    shapes = [shape[::-1] if transposed else shape, *[(H,)] * sinks]
    check(made, shapes, queries.count, (queries if keys is None else keys).count, dtypes=(dtype,))


N = 29
MASKS = {
    "causal": Mask.causal(),
    "window": Mask.window(4, 2),
    "left window": Mask.window(3, 0),
    "a window that blanks rows": Mask(left=-3),
    "packed": Mask.packed(torch.arange(N) // 8),
    "packed and causal": Mask.packed(torch.arange(N) // 8) & Mask.causal(),
    "padding, a batch": Mask.padding(torch.arange(N) < torch.tensor([[20], [3]])),
    "orders": Mask.causal(torch.arange(N).flip(0), torch.arange(N)),
    "intervals": Mask(low=torch.arange(N) // 3, high=torch.arange(N) // 2 + 1),
    "globals": Mask(left=2, right=2, query_global=torch.arange(N) == 4, key_global=torch.arange(N) == 0),
    "scattered segments": Mask.packed(torch.arange(N) % 3) & Mask.window(9, 6),
    "steps": Mask(left=1, right=1, key_global=torch.arange(N) % 5 == 4) & Mask.causal(),
    "blocks a head": Mask(
        blocks=Blocks((torch.arange(4) + torch.arange(H)[:, None, None]) % 4 <= torch.arange(4)[:, None], 8)
    ),
    "blocks": Mask(blocks=Blocks(torch.eye(4, dtype=torch.bool).expand(H, 4, 4) | (torch.arange(4) == 2), 8)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layout", "dtype"), pairwise(MASKS, ("sequence", "grid", "prefix", "none"), DTYPES), ids=str
)
def test_tiles_under_every_mask(name: str, layout: str, dtype: torch.dtype, small_tiles: None) -> None:
    coordinates = {"sequence": Sequence(N), "grid": Grid(7, 4, prefix=1), "prefix": Sequence(N - 2, prefix=2)}
    position, shapes = biased(coordinates[layout]) if layout != "none" else ((lambda: Terms()), [])
    check(position, shapes, N, N, mask=MASKS[name], dtypes=(dtype,))


def vectors(n: int, sides: tuple[str, ...]) -> tuple[Callable[..., Any], list[tuple[int, ...]]]:
    line = lines(Sequence(n, start=1), Sequence(n + 3))
    clipped = torch.arange(line.length).sub(line.length // 2).clamp(-3, 3) + 3

    def made(u: Tensor, rows: Tensor, few: Tensor, bias: Tensor) -> Terms:
        parts = [
            LineVectors(few, clipped, line, side) if side == "value" else LineVectors(rows, None, line, side, bias=bias)
            for side in sides
        ]
        return Terms(QueryBias(u), *parts)

    return made, [(H, D), (1, line.length, D), (H, 7, D), (H, D)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sides", "causal", "dtype"),
    pairwise((("query",), ("key",), ("value",), ("query", "key", "value"), ("query", "query")), (False, True), DTYPES),
    ids=str,
)
def test_tiles_with_vectors(
    sides: tuple[str, ...], causal: bool, dtype: torch.dtype, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_vectors, "_KEYS_AT_ONCE", 4)
    mask = Mask.causal(torch.arange(3, 22), torch.arange(22)) if causal else None
    check(*vectors(19, sides), 19, 22, mask=mask, dtypes=(dtype,))


def ruled(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, weight: Tensor) -> Tensor:
    return torch.tanh(q @ k.mT) * weight[:, None, None] * allowed


LINE = lines(Sequence(N))
SCATTERED = lines(Positions(torch.arange(N) ** 2 // 7, low=0, high=N**2 // 7))
HOLES = torch.where(torch.arange(LINE.length) % 5 == 0, -1, torch.arange(LINE.length) % 4)
OTHERS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "sinks": (Sinks, [(H,)]),
    "sinks and a bias": (lambda x, y: Terms(Sinks(x), LineBias(y, LINE)), [(H,), (H, 2 * N - 1)]),
    "soft cap": (lambda x: Terms(Softcap(0.7), LineBias(x, LINE)), [(1, 2 * N - 1)]),
    "low rank": (LowRank, [(H, N, 2), (1, N, 2)]),
    "dense": (DenseBias, [(B, 1, N, N)]),
    "a row rule": (lambda x: RowRule(ruled, (x,)), [(H,)]),
    "rotation": (lambda x: Rotation(x, x, "half"), [(1, 1, N, D // 2)]),
    "rotation a head and vectors": (
        lambda x, y: Terms(Rotation(x, x, "interleaved"), LineVectors(y, None, LINE, "query")),
        [(1, H, N, D // 2), (1, 2 * N - 1, D)],
    ),
    "the same under a soft cap": (
        lambda x, y: Terms(Rotation(x, x, "half"), LineVectors(y, None, LINE, "key"), Softcap(2.0)),
        [(1, H, N, D // 2), (1, 2 * N - 1, D)],
    ),
    "vectors with holes, more vectors than entries and a bias": (
        lambda x, y, z: LineVectors(x, HOLES, LINE, "query") + LineVectors(y, None, LINE, "key") + LineBias(z, LINE),
        [(1, 4, D), (H, 2 * N + 4, D), (H, 2 * N - 1)],
    ),
    "vectors with a bias, at irregular places": (
        lambda x, y: LineVectors(x, None, SCATTERED, "query", bias=y) + LineVectors(x, None, SCATTERED, "key", bias=y),
        [(1, SCATTERED.length, D), (H, D)],
    ),
    "fewer vectors than entries": (
        lambda x, y: LineVectors(x, None, LINE, "query") + LineVectors(y, None, LINE, "value"),
        [(1, N + 4, D), (H, N - 5, D)],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "groups", "mask", "dtype"),
    pairwise(OTHERS, (H, 2, 1), ("causal", "scattered segments"), DTYPES),
    ids=str,
)
def test_tiles_of_other_terms(
    name: str, groups: int, mask: str, dtype: torch.dtype, small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense, "PAIRS_AT_ONCE", 100)
    check(*OTHERS[name], N, N, groups=groups, mask=MASKS[mask], dtypes=(dtype,))


FORBIDDING: dict[str, tuple[Coordinates, Coordinates | None, Mask | None]] = {
    "grid": (Grid(5, 4), None, None),
    "grid with prefix": (Grid(5, 4, prefix=1), None, None),
    "causal grid": (Grid(5, 4), None, Mask.causal()),
    "sequence": (Sequence(20), None, None),
    "prefix of keys": (Sequence(20), Sequence(5, prefix=1), None),
    "causal": (Sequence(20, prefix=2), None, Mask.causal()),
}


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("name", FORBIDDING)
@pytest.mark.parametrize("reach", [0, 1, 3])
def test_a_bias_that_forbids(reach: int, name: str, sinks: bool, small_tiles: None) -> None:
    """The softmax over some keys becomes that over all, also where nothing of them counts, or nothing at all."""
    queries, keys, mask = FORBIDDING[name]
    line = lines(queries, keys)
    offsets = line.offsets()
    forbidden = (offsets.kind == 0) & (offsets.axes[:, 0].abs() >= reach)
    q, k, v = torch.randn(3, B, H, queries.count, D)
    k, v = (x[:, :, : (queries if keys is None else keys).count] for x in (k, v))

    def terms(values: Tensor, logits: Tensor) -> Terms:
        bias = LineBias(values.masked_fill(forbidden, -torch.inf), line)
        return Terms(bias, Sinks(logits)) if sinks else Terms(bias)

    inputs = [q, k, v, torch.randn(H, line.length), torch.randn(H)]
    upstream = [torch.randn(q.shape), torch.randn(q.shape[:3])]
    found, expected = (run(backend, terms, {"mask": mask}, inputs, upstream) for backend in ("streaming", "reference"))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_rows_too_long_to_write_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel call takes whole rows of the grid's first axis, and keys of the prefix with the first of theirs."""
    monkeypatch.setattr(materialized_bias, "_ROWS", 6)
    wide, prefixed = Grid(2, 10), Grid(2, 2, prefix=20)
    for most, grid, is_written in ((200, wide, 1), (199, wide, 0), (96, prefixed, 1), (95, prefixed, 0)):
        monkeypatch.setattr(materialized_bias, "_MOST_PAIRS", most)
        q, values = torch.randn(1, H, grid.count, D), torch.randn(H, lines(grid).length)
        with mock.patch.object(materialized_bias, "attend", wraps=materialized_bias.attend) as attend:
            attention(q, q, q, position=LineBias(values, lines(grid)), backend="streaming")
        assert attend.call_count == is_written


def test_what_a_mask_forbids_is_not_computed(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores that are computed stay near those that are allowed."""
    monkeypatch.setattr(planning, "_BACKWARD_WIDTH", 512)
    monkeypatch.setattr(planning, "WIDTH", 512)  # of one tile nothing is computed twice
    computed = 0
    compute = scores.Scores.compute

    def counted(self: scores.Scores, *arguments: Any) -> Tensor:
        nonlocal computed
        found = compute(self, *arguments)
        computed += found.numel()
        return found

    monkeypatch.setattr(scores.Scores, "compute", counted)
    n = 512
    some = torch.zeros(8, 8, dtype=torch.bool)
    some[:, 2] = some[:, 7] = True
    masks = {
        "window": (Mask.window(8, 0), 0.06),
        "packed": (Mask.packed(torch.arange(n) // 64), 0.2),
        "blocks": (Mask(blocks=Blocks(some[None], 64)), 0.55),  # two tiles, twice
        "causal": (Mask.causal(), 0.55),
        "orders": (Mask.causal(torch.arange(n), torch.arange(n)), 0.55),
    }
    line = lines(Sequence(n))
    for name, (mask, share) in masks.items():
        computed = 0
        leaf = torch.randn(1, line.length, requires_grad=True)
        q = torch.randn(1, 1, n, D, dtype=torch.float64)  # which no kernel takes
        attention(q, q, q, position=LineBias(leaf, line), mask=mask, backend="streaming")
        assert 0 < computed <= share * n * n, name


def test_a_bound_that_is_too_far_away_gives_way_to_the_maximum(
    small_tiles: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16, of long vectors that stand at right angles."""
    monkeypatch.setattr(matmul, "native", lambda q: q.dtype == torch.bfloat16)
    for far in (False, True):
        q, k = torch.zeros(2, 1, 1, 16, D)
        q[..., 0], k[..., 1], k[..., 0] = (90, 90, torch.linspace(-1, 1, 16)) if far else (1, 1, 0)
        low = [x.bfloat16() for x in (q, k, torch.randn(1, 1, 16, D))]
        largest = forward.Forward._maximum
        with mock.patch.object(forward.Forward, "_maximum", autospec=True, side_effect=largest) as asked:
            out = attention(*low, backend="streaming")
        exact = attention(*(x.double() for x in low), backend="reference")
        assert asked.called == far
        assert (out.double() - exact).abs().max() < 0.02 * exact.abs().max()


def test_one_long_key_bounds_the_scores() -> None:
    """In bfloat16 the shift of a row is a bound by the longest key: by a shorter one exp2 would overflow."""
    q, k, v = (torch.randn(1, 1, 64, 32).mul(scale).bfloat16() for scale in (8.0, 0.01, 1.0))
    k[0, 0, 5] = q[0, 0, 9] * 4
    exact = attention(q.double(), k.double(), v.double(), backend="reference")
    assert (attention(q, k, v, backend="streaming") - exact).abs().max() < 0.05


def test_native_products_leave_the_setting_alone() -> None:
    settings = torch.backends.mkldnn.matmul
    before = settings.fp32_precision
    a, b, into = torch.randn(1, 5, D), torch.randn(1, D, 7), torch.zeros(1, 5, 7)
    matmul.add_matmul(into, a.bfloat16().float(), b.bfloat16().float(), rounded=True)
    assert settings.fp32_precision == before
    torch.testing.assert_close(into, a.bfloat16().float() @ b.bfloat16().float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("coordinates", [Sequence(300), Grid(16, 17, prefix=1)], ids=["sequence", "grid"])
def test_two_runs_agree_bit_for_bit(coordinates: Coordinates, dtype: torch.dtype) -> None:
    position, shapes = biased(coordinates)
    n = coordinates.count
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = [torch.randn(B, H, n, D).to(dtype) for _ in range(3)] + [torch.randn(shapes[0]).to(wide)]
    upstream = [torch.randn(B, H, n, D), torch.randn(B, H, n)]
    once, again = (run("streaming", position, {}, inputs, upstream) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(once, again, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "causal"), [*zip(DTYPES, (True, False, True), strict=True)], ids=str)
def test_two_thousand_tokens(dtype: torch.dtype, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a size where it is chosen, within the tolerances of every other test."""
    for name in ("B", "H"):
        monkeypatch.setattr(sys.modules[__name__], name, 1)
    mask = Mask.causal() if causal else None
    check(*biased(Sequence(2048)), 2048, 2048, dtypes=(dtype,), width=64, mask=mask)


def test_one_tensor_in_several_places() -> None:
    """Its gradient is the sum over the places."""
    line = lines(Sequence(9))
    x, values = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(2, line.length, dtype=torch.float64)

    def attended(backend: str, position: Callable[..., Any]) -> list[Tensor]:
        leaves = [x.clone().requires_grad_(), values.clone().requires_grad_()]
        return with_gradients(attention(*leaves[:1] * 3, position=position(leaves[1]), backend=backend), leaves)

    for position in (
        lambda x: LineBias(x, line),
        lambda x: Terms(LineBias(x, line), LowRank(x[:, :9, None], x[:, :9, None])),
    ):
        found, wanted = (attended(backend, position) for backend in ("streaming", "reference"))
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "pair",
    [(Sequence(12), Sequence(9, prefix=3)), (Sequence(11, prefix=1), Sequence(9, prefix=3))],
    ids=["keys alone", "more keys"],
)
def test_causal_with_more_prefix_keys_than_queries(pair: tuple[Coordinates, Coordinates], small_tiles: None) -> None:
    """Some rows may then not see some prefix keys."""
    position, shapes = biased(*pair)
    check(position, shapes, 12, 12, mask=Mask.causal())


ONE_COLUMN = {
    "two axes": (Grid(6, 5), Grid(7, 1)),
    "a prefix of queries": (Grid(6, 5, prefix=2), Grid(7, 1)),
    "a prefix of keys": (Grid(6, 5), Grid(7, 1, prefix=2)),
    "long": (Grid(40, 3), Grid(40, 1)),
    "three axes": (Grid(3, 1, 4), Grid(2, 3, 1)),
    "three axes, two of one cell": (Grid(3, 2, 4), Grid(5, 1, 1)),
    "the first of one cell": (Grid(3, 2, 4), Grid(1, 2, 1)),
    "of queries": (Grid(7, 1), Grid(6, 5)),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ONE_COLUMN)
def test_keys_on_a_grid_of_one_column(name: str, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their entries of the line lie apart, while those of a wider grid's row lie side by side."""
    monkeypatch.setattr(planning, "ROWS", 50)
    monkeypatch.setattr(cpu_kernel, "_CAUSAL_ROWS", 5)
    queries, keys = ONE_COLUMN[name]
    position, shapes = biased(queries, keys)
    mask = Mask(high=torch.arange(queries.count), key_order=torch.arange(keys.count)) if masked else None
    check(position, shapes, queries.count, keys.count, dtypes=DTYPES[:2], mask=mask)


@pytest.mark.parametrize("mask", [Mask.causal(), Mask.window(4, 2)], ids=["causal", "window"])
@pytest.mark.parametrize(
    "pair", [(Grid(6, 4), Grid(4, 6)), (Grid(3, 4, prefix=1), Grid(6, 2, prefix=1))], ids=["plain", "prefix"]
)
def test_a_mask_by_index_on_unequal_grids(pair: tuple[Coordinates, Coordinates], mask: Mask) -> None:
    """As many tokens in rows of another width: what a pair's mask goes by is then no entry of the line."""
    position, shapes = biased(*pair)
    check(position, shapes, pair[0].count, pair[1].count, mask=mask, dtypes=DTYPES[:2])


@pytest.mark.parametrize("prefix", [1, 2, 4])
def test_gradient_of_a_prefix_against_keys_at_equal_distances(prefix: int) -> None:
    """All queries of the prefix stand at one place, so that none of their windows is shifted."""
    n = 61
    steps = Mask(left=2, right=2, query_order=torch.arange(n), key_global=torch.arange(n) % 5 == 1)
    position, shapes = biased(Sequence(n - prefix, prefix=prefix), Sequence(n))
    with mock.patch.object(hankel, "add_strided", side_effect=hankel.add_strided) as gathered:
        check(position, shapes, n, n, mask=steps, dtypes=DTYPES[:2])
    assert gathered.called


def test_a_view_of_one_row_gets_its_gradient(small_tiles: None) -> None:
    leaves = [*torch.randn(3, 1, 2, 6, 4), torch.randn(1, 6, 6), torch.randn(1, 6, 6)]
    assert_as_reference("streaming", leaves, lambda x, y: LowRank(x.expand(4, -1, -1)[:1], y))
    assert_as_reference("streaming", leaves[:4], lambda x: DenseBias(x.expand(4, 6, 6)[None, :1]))


def test_long_calls_on_a_gpu_stay_with_engines_in_a_fixed_order() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        q = torch.empty(1, 8, 4096, 64, device="cuda")
        assert explain(q, q, q, position=Softcap(30.0)).backend == "streaming"


def test_a_dense_bias_that_learns_nothing_is_left_to_the_kernel_that_reads_it() -> None:
    q, bias = torch.zeros(1, 8, 4096, 4), torch.zeros(1, 1, 1, 1).expand(1, 8, 4096, 4096)
    for given in ({}, {"mask": Mask.causal()}):
        assert explain(q, q, q, position=DenseBias(bias), **given).backend == "sdpa"
    for given in ({"dropout": 0.1}, {"mask": Mask.window(100, 0)}):
        assert explain(q, q, q, position=DenseBias(bias), **given).backend == "streaming"
    assert explain(q, q, q, position=Terms(DenseBias(bias), Softcap(1.0))).backend == "streaming"
    assert explain(q, q, q, position=DenseBias(bias.detach().requires_grad_())).backend == "streaming"


def test_long_calls_never_fall_to_the_reference() -> None:
    q = torch.empty(1, 8, 16384, 64, device="meta")
    assert explain(q, q, q, return_lse=True).backend == "streaming"
    assert explain(*(q[:, :, :64] for _ in range(3)), return_lse=True).backend == "reference"


# operators


def packed() -> Iterator[Packed]:
    for position, mask in (
        (LineBias(torch.randn(2, 11), lines(Sequence(6))), Mask.causal()),
        (LineBias(torch.randn(2, lines(Grid(2, 3)).length), lines(Grid(2, 3))), None),
        (LineVectors(torch.randn(1, 11, 4), None, lines(Sequence(6)), "value"), None),
        (Terms(DenseBias(torch.randn(1, 2, 6, 6)), Sinks(torch.randn(2))), None),
    ):
        call = call_of(*torch.randn(3, 1, 2, 6, 4), position=position, mask=mask)
        tensors, *rest = pack(call.rotated())
        yield [x.requires_grad_() if x.is_floating_point() else x for x in tensors], *rest


@pytest.mark.traced
@pytest.mark.slow
def test_operators_pass_opcheck() -> None:
    for call in packed():
        torch.library.opcheck(torch.ops.relpos.streaming.default, call)


def test_a_call_survives_packing() -> None:
    for tensors, *rest in packed():
        again, *same = pack(unpack(tensors, *rest))
        assert same == rest
        assert all(x is y for x, y in zip(tensors, again, strict=True))


# choice


def test_auto_takes_it_where_it_is_faster() -> None:
    def chosen(
        n: int, *, learned: bool = True, heads: int = 16, coordinates: Coordinates | None = None, **given: Any
    ) -> str:
        line = lines(Sequence(n) if coordinates is None else coordinates)
        values = torch.zeros(1, line.length, requires_grad=learned)
        q = torch.zeros(1, heads, n, 4)
        return explain(q, q, q, position=LineBias(values, line), **given).backend

    assert chosen(64) == "sdpa"
    assert chosen(256) == "streaming"
    assert chosen(256, heads=8) == "sdpa"
    assert chosen(1024, learned=False) == "sdpa"
    assert chosen(1024, learned=False, mask=Mask.causal()) == "streaming"
    assert chosen(2048, learned=False) == "sdpa"  # which reads a view of it
    assert chosen(2048, learned=False, coordinates=Grid(64, 32)) == "streaming"
    assert chosen(2048, learned=False, heads=1, return_lse=True) == "streaming"  # which PyTorch does not return
    assert chosen(196, coordinates=Grid(14, 14)) == "sdpa"
    assert chosen(1024, coordinates=Grid(32, 32)) == "streaming"
    assert chosen(512, learned=False, mask=Mask.causal()) == "streaming"
    with torch.no_grad():
        assert chosen(256) == chosen(2048) == chosen(256, mask=Mask.causal()) == "sdpa"
        assert chosen(512, mask=Mask.causal()) == chosen(1024, coordinates=Grid(32, 32)) == "streaming"
    q = torch.zeros(1, 1, 2048, 4)
    assert explain(q, q, q).backend == "sdpa"
    assert explain(q, q, q, mask=Mask.causal()).backend == "sdpa"
    assert explain(q, q, q, mask=Mask.window(100, 0)).backend == "streaming"
    why = explain(q[:, :, :64], q[:, :, :64], q[:, :, :64], position=Softcap(1.0))
    assert why.backend == "reference"
    assert "this call is too small" in str(why)
    few = torch.zeros(1, 1024, 64, 4)
    why = explain(few, few, few, position=LineBias(torch.zeros(1, 127, requires_grad=True), lines(Sequence(64))))
    assert "it is faster only at more tokens" in str(why)


# memory

WORK = """
import sys
import torch
from relpos import LineBias, Sequence, attention, lines
from relpos.comparison.memory import PeakMemory

def step(n):
    line = lines(Sequence(n))
    values = torch.randn(8, line.length, requires_grad=True)
    q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for _ in range(3))
    memory = PeakMemory(torch.device("cpu"))
    out = attention(q, k, v, position=LineBias(values, line), backend="streaming")
    torch.autograd.grad(out, [q, k, v, values], torch.ones_like(out))
    return memory.mib()

step(64)
print(step(int(sys.argv[1])))
"""


@pytest.mark.slow
def test_memory_grows_with_the_tokens(loaded: Loaded) -> None:
    """A training step, 8 heads of 64: linear, and at 4,096 tokens at most a quarter of what the scores alone take."""

    def mib(n: int) -> float:
        done = loaded.run("-c", WORK, n)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    small, large = mib(1024), mib(4096)
    assert large < 4.6 * small
    assert large < 8 * 4096**2 * 4 / 2**20 / 4


def test_biases_on_lines_that_are_alike_inside_a_segment_keep_their_gradients() -> None:
    """A column of a grid and a sequence are two kinds of lines; inside a segment they read the same entries."""
    column = Grid(32, 1)
    both = [lines(column), lines(column.raster())]
    leaves = [*torch.randn(3, 2, 3, 32, 8), *(torch.randn(3, line.length) for line in both)]
    assert_as_reference(
        "streaming", [x.double() for x in leaves], lambda *values: Terms(*map(LineBias, values, both)),
        mask=dilated(32, 5, 2),
    )  # fmt: skip
