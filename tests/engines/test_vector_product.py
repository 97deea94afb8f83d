"""Attention under vectors in one node of autograd: values, gradients, second derivatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import relpos
from covering import pairwise
from relpos.core import LineVectors, Mask, Positions, QueryBias, Scale, Sequence, Terms
from relpos.engines import vector_product

FAST_CASES = 12  # of each of its tests, in the fast part

Side = Literal["query", "key"]
ROWS, WIDTH, HEADS = 5, 8, 2
PLACES = {
    "line": (Sequence(7), Sequence(7)),
    "late queries": (Sequence(3, start=4), Sequence(7)),
    "prefix": (Sequence(5, prefix=1), Sequence(6, prefix=2)),
    "anywhere": (Positions(torch.tensor([[0, 3, 1], [5, 5, 2]]), low=0, high=5), Sequence(6)),
}
MASKS = {
    "causal": Mask.causal(),
    "padding": Mask.padding(torch.tensor([[True] * 5 + [False] * 2, [True] * 2 + [False] * 5])),
    "each head": Mask.of(torch.rand(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(0)) < 0.7),
}


def terms_of(place: str, sides: tuple[Side, ...], dtype: torch.dtype, heads: int = HEADS) -> tuple[Terms, list[Tensor]]:
    """Vectors by an index, some entries of which read zeros; the first of two terms with a bias."""
    lines = relpos.lines(*PLACES[place])
    index = (torch.arange(lines.length) * 3) % (ROWS + 2) - 1  # -1, and beyond the last row
    terms, tensors = Terms(Scale(0.7)), list[Tensor]()
    for number, side in enumerate(sides):
        vectors = torch.randn(heads, ROWS, WIDTH, dtype=dtype, requires_grad=True)
        bias = torch.randn(heads, WIDTH, dtype=dtype, requires_grad=True) if number == 0 else None
        terms = terms + LineVectors(vectors, index, lines, side, scaled=number == 0, bias=bias)
        tensors += [vectors] if bias is None else [vectors, bias]
    return terms, tensors


def results(
    backend: str,
    place: str,
    sides: tuple[Side, ...],
    mask: Mask | None,
    dtype: torch.dtype,
    *,
    create_graph: bool = False,
) -> list[Tensor]:
    torch.manual_seed(0)
    queries, keys = PLACES[place]
    terms, tensors = terms_of(place, sides, dtype)
    q = torch.randn(2, queries.count, HEADS, WIDTH, dtype=dtype, requires_grad=True)  # as a projection leaves it
    k, v = (torch.randn(2, HEADS, keys.count, WIDTH, dtype=dtype, requires_grad=True) for _ in range(2))
    out = relpos.attention(q.transpose(1, 2), k, v, position=terms, mask=mask, backend=backend)
    assert isinstance(out, Tensor)
    return [out, *torch.autograd.grad(out, (q, k, v, *tensors), torch.randn_like(out), create_graph=create_graph)]


WAYS = {"stored": (vector_product.STORED, 256), "again": (0, 256), "turned round": (0, 1)}
SIDES: tuple[tuple[Side, ...], ...] = (("query",), ("key",), ("key", "query"), ("query", "query"))


@pytest.mark.parametrize(
    ("place", "sides", "at_once", "way", "dtype"),
    pairwise(PLACES, SIDES, (vector_product.AT_ONCE, 50, 1), WAYS, (torch.float32, torch.float64)),
    ids=str,
)
def test_equals_the_reference(
    place: str, sides: Any, at_once: int, way: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored, far = WAYS[way]
    monkeypatch.setattr(vector_product, "AT_ONCE", at_once)
    monkeypatch.setattr(vector_product, "STORED", stored)
    monkeypatch.setattr(vector_product, "_FAR", far)
    with mock.patch.object(vector_product, "attend", wraps=vector_product.attend) as taken:
        got = results("sdpa", place, sides, None, dtype)
    assert taken.call_count == 1
    for one, wanted in zip(got, results("reference", place, sides, None, dtype), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-12)


@pytest.mark.parametrize("at_once", [vector_product.AT_ONCE, 1], ids=["at once", "by heads"])
@pytest.mark.parametrize("mask", MASKS)
def test_masks_forbid_the_same(mask: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vector_product, "AT_ONCE", at_once)
    got = results("sdpa", "line", ("query", "key"), MASKS[mask], torch.float64)
    wanted = results("reference", "line", ("query", "key"), MASKS[mask], torch.float64)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_a_row_that_sees_nothing_is_blank_and_has_no_gradient() -> None:
    terms, tensors = terms_of("line", ("query", "key"), torch.float32)
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH, requires_grad=True) for _ in range(3))
    mask = Mask.packed(torch.tensor([[0, 0, 0, -1, 1, 1, 1]]))
    out = relpos.attention(q, k, v, position=terms, mask=mask, backend="sdpa")
    d_q, *others = torch.autograd.grad(out, (q, k, v, *tensors), torch.randn_like(out))
    assert (out[:, :, 3] == 0).all()
    assert (d_q[:, :, 3] == 0).all()
    assert all(x.isfinite().all() for x in others)


@pytest.mark.slow
@pytest.mark.parametrize(  # far: turned round beyond; heads: one vector for all
    ("heads", "far", "at_once"), pairwise((1, HEADS), (256, 1), (vector_product.AT_ONCE, 1))
)
def test_gradcheck_also_twice(at_once: int, far: int, heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where q meets keys and vectors, each way has its own part of the gradient."""
    monkeypatch.setattr(vector_product, "AT_ONCE", at_once)
    monkeypatch.setattr(vector_product, "STORED", 0)
    monkeypatch.setattr(vector_product, "_FAR", far)
    lines = relpos.lines(Sequence(4))
    q, k, v = (torch.randn(2, HEADS, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    met, keys = (torch.randn(heads, 7, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def attended(q: Tensor, k: Tensor, v: Tensor, met: Tensor, keys: Tensor) -> Any:
        terms = Terms(LineVectors(met, None, lines, "query")) + LineVectors(keys, None, lines, "key")
        return relpos.attention(q, k, v, position=terms, backend="sdpa")

    assert torch.autograd.gradcheck(attended, (q, k, v, met, keys))
    assert torch.autograd.gradgradcheck(attended, (q, k, v, met, keys))


@pytest.mark.parametrize("mask", [None, *MASKS])
@pytest.mark.parametrize("sides", [("query",), ("key", "query")], ids="+".join)
def test_gradients_of_which_another_is_wanted_are_the_same(sides: Any, mask: str | None) -> None:
    own = None if mask is None else MASKS[mask]
    once, twice = (results("sdpa", "line", sides, own, torch.float64, create_graph=x) for x in (False, True))
    for one, other in zip(once, twice, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("frozen", range(5), ids=["q", "k", "v", "query vectors", "key vectors"])
def test_what_is_frozen_has_no_gradient_and_changes_none(frozen: int) -> None:
    def gradients(frozen: int | None) -> list[Tensor | None]:
        torch.manual_seed(0)
        lines = relpos.lines(Sequence(6))
        q, k, v = (torch.randn(2, HEADS, 6, WIDTH) for _ in range(3))
        vectors = [torch.randn(HEADS, 11, WIDTH) for _ in range(2)]
        tensors = [x.requires_grad_(number != frozen) for number, x in enumerate((q, k, v, *vectors))]
        terms = Terms(LineVectors(vectors[0], None, lines, "query")) + LineVectors(vectors[1], None, lines, "key")
        relpos.attention(q, k, v, position=terms, backend="sdpa").square().sum().backward()
        return [x.grad for x in tensors]

    for number, (got, wanted) in enumerate(zip(gradients(frozen), gradients(None), strict=True)):
        assert (got is None) == (number == frozen)
        if got is not None:
            assert wanted is not None
            assert torch.equal(got, wanted)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("side", ["query", "key"])
@pytest.mark.parametrize("narrow", ["bias", "index"])
def test_narrow_numbers_cost_no_digits(narrow: str, side: Side, backend: str) -> None:
    """A bias of few digits is exact in q's; an index may be of any integers."""
    torch.manual_seed(0)
    lines = relpos.lines(Sequence(7))
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH) for _ in range(3))
    vectors, bias, index = torch.randn(HEADS, 200, WIDTH), torch.randn(HEADS, WIDTH).bfloat16(), torch.arange(-1, 12)
    wide = LineVectors(vectors, index, lines, side, bias=bias.float())
    given = {"bias": bias} if narrow == "bias" else {"index": index.to(torch.int8)}
    one, other = (relpos.attention(q, k, v, position=x, backend=backend) for x in (wide, replace(wide, **given)))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_vectors_meet_queries_before_they_are_turned() -> None:
    """With a rotation, a bias of queries, one bias for all heads and values of another width."""
    torch.manual_seed(0)
    lines = relpos.lines(Sequence(7))
    q, k, v = (torch.randn(2, HEADS, 7, width, requires_grad=True) for width in (WIDTH, WIDTH, 5))
    vectors, bias = torch.randn(1, 13, WIDTH, requires_grad=True), torch.randn(1, WIDTH, requires_grad=True)
    met = [LineVectors(vectors, None, lines, side, bias=bias) for side in ("query", "key")]
    terms = relpos.RotaryEmbedding(WIDTH).terms(Sequence(7)) + QueryBias(torch.randn(HEADS, WIDTH)) + met[0] + met[1]
    results = []
    for backend in ("sdpa", "reference"):
        out = relpos.attention(q, k, v, position=terms, backend=backend)
        direction = torch.linspace(-1, 1, out.numel()).view(out.shape)
        results.append([out, *torch.autograd.grad(out, (q, k, v, vectors, bias), direction)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_jacobian_of_all_rows_at_once() -> None:
    terms, _ = terms_of("line", ("query", "key"), torch.float64)
    q = torch.randn(1, HEADS, 7, WIDTH, dtype=torch.float64)

    def attended(q: Tensor) -> Any:
        return relpos.attention(q, q, q, position=terms, backend="sdpa")

    once, by_rows = (torch.autograd.functional.jacobian(attended, q, vectorize=x) for x in (True, False))
    torch.testing.assert_close(once, by_rows)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_may_compute_it_again(reentrant: bool) -> None:
    terms, tensors = terms_of("line", ("query", "key"), torch.float32)
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH, requires_grad=True) for _ in range(3))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return relpos.attention(q, k, v, position=terms, backend="sdpa")

    gradients = []
    for out in (attended(q, k, v), checkpoint(attended, q, k, v, use_reentrant=reentrant)):
        assert isinstance(out, Tensor)
        out.square().sum().backward()
        gradients.append([x.grad for x in (q, k, v, *(() if reentrant else tensors))])
        for x in (q, k, v, *tensors):
            x.grad = None
    for once, again in zip(*gradients, strict=True):
        assert once is not None
        assert again is not None
        assert torch.equal(once, again)


def test_two_runs_agree_bit_for_bit() -> None:
    one, two = (results("sdpa", "line", ("query", "key"), None, torch.float32) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_without_gradients_nothing_else_comes_out() -> None:
    terms, _ = terms_of("line", ("query",), torch.float32)
    q, k, v = (torch.randn(1, HEADS, 7, WIDTH) for _ in range(3))
    with torch.no_grad():
        found = relpos.attention(q, k, v, position=terms, backend="sdpa")
    torch.testing.assert_close(found, relpos.attention(q, k, v, position=terms, backend="reference").detach())
