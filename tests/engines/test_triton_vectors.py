"""Vectors on offsets in the Triton engine: sides, indices, lines, and the parts that a call is computed in.

Without a GPU the kernels run in Triton's interpreter (tests/conftest.py sets it).
"""

import importlib
import weakref
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import test_streaming
import torch
from engine_steps import assert_as_reference, call_of, step
from test_streaming import B, D, check
from test_triton import DTYPES
from torch import Tensor

from relpos import (
    AxisVectors,
    Grid,
    LineBias,
    LineVectors,
    Mask,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    Sequence,
    Sinks,
    Terms,
    lines,
)
from relpos.core import axis_lines
from relpos.testing.devices import attention

limits = importlib.import_module("relpos.engines.triton.limits")
launch = importlib.import_module("relpos.engines.triton.launch")
spans = importlib.import_module("relpos.engines.triton.spans")
vector_sets = importlib.import_module("relpos.engines.triton.vector_sets")
vectors = importlib.import_module("relpos.engines.triton.vectors")
H, N, R = 2, 21, 9
LINE, CROSS = lines(Sequence(N)), lines(Sequence(11, start=4), Sequence(N))
BUCKETS = torch.arange(LINE.length) // 3 % (R + 2) - 1  # some entries read zeros, each column several runs
CLIPPED = (torch.arange(LINE.length) - N + 1).clamp(-4, 4) + 4
AXES = axis_lines(Grid(4, 5, prefix=1))
PLACES = lines(Positions(torch.tensor([[5, 1, 1, 9, 0, 3], [2, 1, 0, 7, 7, 9]]), low=0, high=9), Sequence(13))
SCATTERED = torch.randint(-1, R + 1, (PLACES.length,), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _few_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_streaming, "H", H)


@dataclass
class Case:
    """A position made of leaves of some shapes, between n queries and m keys."""

    position: Any
    shapes: list[tuple[int, ...]]
    n: int = N
    m: int = N
    groups: int = H
    mask: Mask | None = None
    dtypes: tuple[torch.dtype, ...] = DTYPES[:1]


def deberta(q: Tensor, k: Tensor) -> Terms:
    return LineVectors(q, BUCKETS, LINE, "query") + LineVectors(k, BUCKETS, LINE, "key")


CASES = {
    "of queries and keys": Case(deberta, [(H, R, D)] * 2, dtypes=(DTYPES[0], DTYPES[2])),
    "of grouped keys, causal": Case(
        lambda q, k: Terms(LineVectors(q, BUCKETS, LINE, "query"), LineVectors(k, CLIPPED, LINE, "key", scaled=False)),
        [(1, R, D)] * 2, groups=1, mask=Mask.causal(), dtypes=DTYPES[1:2],
    ),
    "of values too": Case(
        lambda q, v: Terms(LineVectors(q, CLIPPED, LINE, "query"), LineVectors(v, CLIPPED, LINE, "value")),
        [(1, R, D), (H, R, D)], mask=Mask.window(7, 3), dtypes=DTYPES[2:3],
    ),
    "unclipped, with a bias, beside a rotation": Case(
        lambda w, own, u, angles: (
            LineVectors(w, None, LINE, "query", bias=own) + QueryBias(u) + Rotation(angles, angles, "half")
        ),
        [(H, LINE.length, D), (1, D), (H, D), (1, 1, N, D // 2)], dtypes=DTYPES[1:2],
    ),
    "of content, fewer than offsets": Case(
        lambda w, x, y: Terms(
            LineVectors(w, None, CROSS, "query", scaled=False, content=x),
            LineVectors(w, None, CROSS, "query", scaled=False, content=y),
        ),
        [(1, R, 3), (1, H, 11, 3), (B, 1, 11, 3)], n=11,
    ),
    "axes, scaled by query, and a sink": Case(
        lambda rows, columns, factor, logits: (
            AxisVectors((rows, columns), AXES) + QueryScale(factor, "scores") + Sinks(logits)
        ),
        [(1, 7, D), (H, 9, D), (B, 1, N), (H,)],
    ),
    "irregular lines": Case(
        lambda q, k, fixed: (
            LineVectors(q, SCATTERED, PLACES, "query") + LineVectors(k, SCATTERED, PLACES, "key")
            + LineBias(fixed.detach(), PLACES)
        ),
        [(H, R, D), (1, R, D), (H, PLACES.length)], n=6, m=13, groups=1,
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_vectors(name: str) -> None:
    case = CASES[name]
    check(case.position, case.shapes, case.n, case.m, case.groups, backend="triton", dtypes=case.dtypes, mask=case.mask)


@pytest.mark.slow
def test_however_tensors_lie() -> None:
    """Tokens before heads, every other number of a head, vectors that heads share, an upstream gradient turned so."""
    q, k = (torch.randn(B, N, H, D, requires_grad=True) for _ in range(2))
    v, w = torch.randn(B, H, N, 2 * D, requires_grad=True), torch.randn(D, R, requires_grad=True)
    upstream = torch.randn(B, N, H, D).transpose(1, 2)
    found = []
    for backend in ("triton", "reference"):
        laid = q.transpose(1, 2), k.transpose(1, 2), v[..., ::2]
        terms = deberta(w.mT.expand(H, -1, -1), w.mT[None])
        out = attention(*laid, position=terms, backend=backend)
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out, [q, k, v, w], upstream)])
    torch.testing.assert_close(*found, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("kib", "parts"), [(60, "elements"), (32, "heads"), (14, "rows")])
def test_parts_add_up(kib: int, parts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks as large as the workspace; the same bits each time."""
    monkeypatch.setattr(vector_sets, "WORKSPACE", kib * 1024)
    if parts == "rows":
        monkeypatch.setattr(spans, "COARSE", 16)
        for key in launch.SHAPES:
            monkeypatch.setitem(launch.SHAPES, key, launch._shape(16, 16, 4, 1))
    seen: set[tuple[bool, ...]] = set()
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    product = vectors.CallVectors._product

    def one_part_at_a_time(self: Any, one: Any, side: str, part: Any) -> Any:
        made = product(self, one, side, part)
        most = sum(len(one.met) for one in self.sets)
        assert len(alive) < most, "products of an earlier part"
        if made is not None:
            alive.add(made)
        return made

    monkeypatch.setattr(vectors.CallVectors, "_product", one_part_at_a_time)
    real = vectors.CallVectors._parts

    def watched(self: Any) -> Any:
        found = real(self)
        one = found[0]
        seen.add((one.shape[0] == B, one.shape[1] == H, one.rows.stop - one.rows.start == N))
        return found

    monkeypatch.setattr(vectors.CallVectors, "_parts", watched)
    qkv = torch.randn(3, 1 if parts == "rows" else B, H, N, D, dtype=torch.float64)
    leaves = [*qkv, *torch.randn(3, H, R, D, dtype=torch.float64)]
    prefixed = lines(Sequence(N - 1, prefix=1))
    read = torch.arange(prefixed.length) // 3 % R

    def position(q: Tensor, k: Tensor, v: Tensor) -> Terms:
        return deberta(q, k) + LineVectors(k, read, prefixed, "key") + LineVectors(v, read, prefixed, "value")

    given: dict[str, Any] = {"dropout": 0.3, "mask": Mask.causal()}
    found, exact = (step(name, leaves, position, **given) for name in ("triton", "reference"))
    torch.testing.assert_close(found, exact, rtol=1e-9, atol=1e-10)
    if parts == "rows":
        torch.testing.assert_close(step("triton", leaves, position, **given), found, rtol=0, atol=0)
    wanted = {"elements": (False, True, True), "heads": (False, False, True), "rows": (False, False, False)}[parts]
    assert wanted in seen


@pytest.mark.slow
def test_rows_of_a_chunk_read_some_of_the_vectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where each offset has its own: the products of a chunk are those with the vectors that its rows reach."""
    monkeypatch.setattr(vector_sets, "WORKSPACE", 2048)
    monkeypatch.setattr(spans, "COARSE", 16)
    for key in launch.SHAPES:
        monkeypatch.setitem(launch.SHAPES, key, launch._shape(16, 32, 4, 1))
    seen: list[tuple[int, int]] = []
    real = vectors.CallVectors._product

    def watched(self: Any, one: Any, side: Any, part: Any) -> Any:
        seen.append((one.first, one.count))
        return real(self, one, side, part)

    monkeypatch.setattr(vectors.CallVectors, "_product", watched)
    leaves = [*torch.randn(3, 1, H, N, D), torch.randn(H, LINE.length - 3, D)]
    assert_as_reference("triton", leaves, lambda w: LineVectors(w, None, LINE, "query"), rtol=1e-4, atol=1e-5)
    assert set(seen) == {(0, 36), (16, LINE.length - 3 - 16)}


@pytest.mark.slow
def test_shared_keys_that_each_head_turns() -> None:
    """Vectors meet the keys before they are turned, which heads share."""
    leaves = [*(torch.randn(1, heads, N, D) for heads in (4, 2, 2)), torch.randn(4, R, D)]
    angles = torch.randn(1, 4, N, D // 2)

    def position(k: Tensor) -> Terms:
        return LineVectors(k, BUCKETS, LINE, "key") + Rotation(angles, angles, "half")

    assert_as_reference("triton", leaves, position, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_inputs_in_other_memory() -> None:
    """Heads behind tokens, as projections leave them, and vectors column by column."""
    plain, own = torch.randn(3, B, H, N, D), torch.randn(2, H, R, D)
    wanted = step("triton", [*plain, *own], deberta)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in plain]
    found = step("triton", [*turned, *(x.mT.contiguous().mT for x in own)], deberta)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_coordinates_are_copied_where_kernels_may_read_four_at_once() -> None:
    """Calls of one structure are launched as the first one, whose coordinates may have begun elsewhere."""
    places = torch.arange(12, dtype=torch.int32)
    for x in launch.in_32_bits(replace(PLACES, query=places[1:7], key=places[:13])):
        assert x.data_ptr() % 16 == 0


ONE = torch.tensor([[0], [1]])


@pytest.mark.parametrize(
    "one", [lines(Sequence(1)), lines(Sequence(1), Sequence(2)), lines(Positions(ONE, low=0, high=1))]
)
def test_no_number_of_products_is_one(one: Any) -> None:
    """Beside a single query's 1 Triton 3.6 would forget it, and fail to compile."""
    vector, m = LineVectors(torch.zeros(1, 3, D), None, one, "query"), one.key.shape[-1]
    q, k, v = (torch.zeros(2, H, n, D) for n in (1, m, m))
    call = call_of(q, k, v, position=vector)
    launches = launch.Launches(call)
    (piece,) = vectors.CallVectors(call, vector_sets.sets_of(call), launches).pieces()
    assert piece.rows == 1
    assert not any(x == 1 for x in piece.arguments.one if isinstance(x, int))


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "batch", "n", "m", "count"),
    [
        (12, 12, 2, 2048, 2048, 512),
        (12, 12, 2, 8192, 8192, 512),
        (16, 2, 3, 1000, 4000, 64),
        (8, 8, 1, 32768, 32768, 65535),
    ],
)
def test_parts_fit_into_the_workspace_and_cover_a_call_once(
    backward: bool, heads: int, groups: int, batch: int, n: int, m: int, count: int
) -> None:
    launches = SimpleNamespace(heads=heads, own_heads=groups, batch=batch, n=n, m=m, dtype=torch.bfloat16)
    met = vector_sets.Met(torch.zeros(1, 1, 1).expand(1, count, 1))
    sides = {"query": [met]} if count > m else {"query": [met], "key": [met]}
    one = vector_sets.Set(lines(Sequence(2)), None, count, cast(Any, sides))
    upstream = torch.zeros(()) if backward else None
    parts = vectors.CallVectors(call_of(*torch.zeros(3, 1, 1, 1, 1)), [one], launches, upstream).parts
    seen = torch.zeros(batch, heads, n, dtype=torch.int8)
    width = vector_sets.Set.width.fget(one)
    for part in parts:
        rows = part.rows.stop - part.rows.start
        by_key = m * width if "key" in sides else 0
        numbers = rows * width + by_key + backward * (rows * m + max(rows * width, by_key))
        assert 4 * part.all_heads * numbers <= vector_sets.WORKSPACE
        assert part.shape[1] % (heads // groups) == 0
        seen[part.batch, part.heads, part.rows] += 1
    assert bool((seen == 1).all())


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    few, values = torch.randn(1, R, D), torch.randn(H, LINE.length, requires_grad=True)
    by_query = LineVectors(few, CLIPPED, LINE, "query")
    several = Terms(*(LineVectors(few, CLIPPED.roll(shift), LINE, "query") for shift in range(4)))
    places = lines(Positions(torch.arange(N), low=0, high=N - 1))
    scattered = Terms(*(LineVectors(few, CLIPPED, places, "query") for _ in range(4)))
    q = torch.randn(1, H, N, D)
    for position, words in (
        (several, "more than 3"),
        (scattered, "more than 3"),  # a plan would be used for lines of their own, too
        (by_query + LineBias(values, LINE), "gradient of a bias beside vectors"),
    ):
        with pytest.raises(NotImplementedError, match=words):
            attention(q, q, q, position=position, backend="triton")
    monkeypatch.setattr(vector_sets, "WORKSPACE", 1000)
    with pytest.raises(NotImplementedError, match="products of all keys with 16 vectors"):
        attention(q, q, q, position=LineVectors(few, CLIPPED, LINE, "key"), backend="triton")
