"""Attention under vectors in one node of autograd: values, gradients, second derivatives."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from engine_steps import assert_as_reference, with_gradients
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import relpos
from covering import pairwise
from relpos.core import LineVectors, Mask, Positions, QueryBias, Scale, Sequence, Terms
from relpos.engines.sdpa import vectors as sdpa_vectors

FAST_CASES = 12  # of each of its tests, in the fast part

Side = Literal["query", "key"]
ROWS, WIDTH, HEADS = 5, 8, 2
SIDES: tuple[tuple[Side, ...], ...] = (("query",), ("key",), ("key", "query"), ("query", "query"))
PLACES = {
    "line": (Sequence(7), Sequence(7)),
    "late queries": (Sequence(3, start=4), Sequence(7)),
    "prefix": (Sequence(5, prefix=1), Sequence(6, prefix=2)),
    "anywhere": (Positions(torch.tensor([[0, 3, 1], [5, 5, 2]]), low=0, high=5), Sequence(6)),
}
MASKS: dict[str, Callable[[int, int], Mask | None]] = {
    "all": lambda n, m: None,
    "causal": lambda n, m: Mask.causal(torch.arange(m - n, m), torch.arange(m)),
    "padding": lambda n, m: Mask.padding(torch.arange(m) < torch.tensor([[5], [2]]), queries=torch.ones(n).bool()),
    "each head": lambda n, m: Mask.of(torch.rand(1, HEADS, n, m) < 0.7),
}
WAYS = {"stored": (sdpa_vectors.STORED, 256), "again": (0, 256), "turned round": (0, 1)}


def terms_of(place: str, sides: tuple[Side, ...], dtype: torch.dtype) -> tuple[Terms, list[Tensor]]:
    """Vectors by an index, some entries of which read zeros; the first of two terms with a bias."""
    lines = relpos.lines(*PLACES[place])
    index = (torch.arange(lines.length) * 3) % (ROWS + 2) - 1  # -1, and beyond the last row
    terms, tensors = Terms(Scale(0.7)), list[Tensor]()
    for number, side in enumerate(sides):
        vectors = torch.randn(HEADS, ROWS, WIDTH, dtype=dtype, requires_grad=True)
        bias = torch.randn(HEADS, WIDTH, dtype=dtype, requires_grad=True) if number == 0 else None
        terms = terms + LineVectors(vectors, index, lines, side, scaled=number == 0, bias=bias)
        tensors += [vectors] if bias is None else [vectors, bias]
    return terms, tensors


def results(
    backend: str, place: str, sides: tuple[Side, ...], mask: str, dtype: torch.dtype, *, create_graph: bool = False
) -> list[Tensor]:
    torch.manual_seed(0)
    n, m = (side.count for side in PLACES[place])
    terms, tensors = terms_of(place, sides, dtype)
    q = torch.randn(2, n, HEADS, WIDTH, dtype=dtype, requires_grad=True)  # as a projection leaves it
    k, v = (torch.randn(2, HEADS, m, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    out = relpos.attention(q.transpose(1, 2), k, v, position=terms, mask=MASKS[mask](n, m), backend=backend)
    return [out, *torch.autograd.grad(out, (q, k, v, *tensors), torch.randn_like(out), create_graph=create_graph)]


@pytest.mark.parametrize(
    ("place", "sides", "at_once", "way", "mask", "dtype", "create_graph"),
    pairwise(PLACES, SIDES, (sdpa_vectors.AT_ONCE, 50, 1), WAYS, MASKS, (torch.float32, torch.float64), (False, True)),
    ids=str,
)
def test_equals_the_reference(
    place: str,
    sides: Any,
    at_once: int,
    way: str,
    mask: str,
    dtype: torch.dtype,
    create_graph: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also the gradients of which another is wanted."""
    stored, far = WAYS[way]
    monkeypatch.setattr(sdpa_vectors, "AT_ONCE", at_once)
    monkeypatch.setattr(sdpa_vectors, "STORED", stored)
    monkeypatch.setattr(sdpa_vectors, "_FAR", far)
    with mock.patch.object(sdpa_vectors, "attend", wraps=sdpa_vectors.attend) as taken:
        got = results("sdpa", place, sides, mask, dtype, create_graph=create_graph)
    assert taken.call_count == 1
    wanted = results("reference", place, sides, mask, dtype)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(  # far: turned round beyond; heads: one vector for all
    ("heads", "far", "at_once"), pairwise((1, HEADS), (256, 1), (sdpa_vectors.AT_ONCE, 1))
)
def test_gradcheck_also_twice(at_once: int, far: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where q meets keys and vectors, each way has its own part of the gradient."""
    monkeypatch.setattr(sdpa_vectors, "AT_ONCE", at_once)
    monkeypatch.setattr(sdpa_vectors, "STORED", 0)
    monkeypatch.setattr(sdpa_vectors, "_FAR", far)
    lines = relpos.lines(Sequence(3))
    q, k, v = (torch.randn(2, HEADS, 3, 2, dtype=torch.float64, requires_grad=True) for _ in range(3))
    met, keys = (torch.randn(heads, 5, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attended(q: Tensor, k: Tensor, v: Tensor, met: Tensor, keys: Tensor) -> Any:
        terms = Terms(LineVectors(met, None, lines, "query")) + LineVectors(keys, None, lines, "key")
        return relpos.attention(q, k, v, position=terms, backend="sdpa")

    assert torch.autograd.gradcheck(attended, (q, k, v, met, keys))
    assert torch.autograd.gradgradcheck(attended, (q, k, v, met, keys), fast_mode=True)


@pytest.mark.parametrize("frozen", range(5), ids=["q", "k", "v", "query vectors", "key vectors"])
def test_what_is_frozen_has_no_gradient_and_changes_none(frozen: int) -> None:
    def gradients(frozen: int | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        lines = relpos.lines(Sequence(6))
        tensors = [*torch.randn(3, 2, HEADS, 6, WIDTH), *torch.randn(2, HEADS, 11, WIDTH)]
        q, k, v, met, keys = (x.requires_grad_(number != frozen) for number, x in enumerate(tensors))
        terms = Terms(LineVectors(met, None, lines, "query")) + LineVectors(keys, None, lines, "key")
        relpos.attention(q, k, v, position=terms, backend="sdpa").square().sum().backward()
        return [x.grad for x in tensors]

    wanted = gradients(None)
    wanted[frozen] = None
    torch.testing.assert_close(gradients(frozen), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("narrow", ["bias", "index"])
def test_narrow_numbers_cost_no_digits(narrow: str, side: Side, backend: str) -> None:
    """A bias of few digits is exact in q's; an index may be of any integers."""
    lines = relpos.lines(Sequence(7))
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH) for _ in range(3))
    vectors, bias, index = torch.randn(HEADS, 200, WIDTH), torch.randn(HEADS, WIDTH).bfloat16(), torch.arange(-1, 12)
    wide = LineVectors(vectors, index, lines, side, bias=bias.float())
    given = {"bias": bias} if narrow == "bias" else {"index": index.to(torch.int8)}
    one, other = (relpos.attention(q, k, v, position=x, backend=backend) for x in (wide, replace(wide, **given)))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_vectors_meet_queries_before_they_are_turned() -> None:
    """With a rotation, a bias of queries, one bias for all heads and values of another width."""
    lines, turned = relpos.lines(Sequence(7)), relpos.RotaryEmbedding(WIDTH).terms(Sequence(7))
    shapes = [*((2, HEADS, 7, width) for width in (WIDTH, WIDTH, 5)), (HEADS, WIDTH), (1, 13, WIDTH), (1, WIDTH)]

    def terms(u: Tensor, vectors: Tensor, bias: Tensor) -> Terms:
        met = [LineVectors(vectors, None, lines, side, bias=bias) for side in ("query", "key")]
        return turned + QueryBias(u) + met[0] + met[1]

    assert_as_reference("sdpa", [torch.randn(shape) for shape in shapes], terms, rtol=1e-5, atol=1e-5)


def test_a_jacobian_of_all_rows_at_once() -> None:
    terms, _ = terms_of("line", ("query", "key"), torch.float64)
    q = torch.randn(1, HEADS, 7, WIDTH, dtype=torch.float64)

    def attended(q: Tensor) -> Any:
        return relpos.attention(q, q, q, position=terms, backend="sdpa")

    once, by_rows = (torch.autograd.functional.jacobian(attended, q, vectorize=x) for x in (True, False))
    torch.testing.assert_close(once, by_rows)


def test_checkpoints_may_compute_it_again() -> None:
    terms, tensors = terms_of("line", ("query", "key"), torch.float32)
    leaves = [*(torch.randn(1, HEADS, 7, WIDTH, requires_grad=True) for _ in range(3)), *tensors]

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return relpos.attention(q, k, v, position=terms, backend="sdpa")

    once = with_gradients(attended(*leaves[:3]), leaves)
    again = with_gradients(checkpoint(attended, *leaves[:3], use_reentrant=False), leaves)
    torch.testing.assert_close(again, once, rtol=0, atol=0)


def test_without_gradients_nothing_else_comes_out() -> None:
    terms, _ = terms_of("line", ("query",), torch.float32)
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH) for _ in range(3))
    with torch.no_grad():
        found, wanted = (relpos.attention(q, k, v, position=terms, backend=name) for name in ("sdpa", "reference"))
    torch.testing.assert_close(found, wanted)
