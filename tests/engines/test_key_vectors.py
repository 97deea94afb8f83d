"""Vectors on the key side in the streaming engine: by the products of bands, or of a head's keys at once."""

from collections.abc import Callable

import pytest
import torch
from engine_steps import assert_as_reference, step, with_gradients
from torch import Tensor

from covering import pairwise
from relpos.core import LineBias, LineVectors, Mask, Rotation, Sequence, Softcap, Terms, lines
from relpos.engines import attention
from relpos.engines.call import Call
from relpos.engines.streaming.plan import planning
from relpos.engines.streaming.plan.planning import make_plan
from relpos.engines.streaming.terms import key_vectors, vector_term, vectors
from relpos.engines.streaming.terms.key_vectors import KeyBands, KeyProducts

FAST_CASES = 3  # of each of its tests, in the fast part

B, H, D, ROWS = 2, 4, 4, 11
EXACT = {"rtol": 1e-9, "atol": 1e-10}


def leaves(n: int, m: int, *, groups: int = H, for_all: bool = False) -> list[Tensor]:
    """q, k and v, vectors on the key side and their bias."""
    own = 1 if for_all else H
    shapes = (B, H, n, D), (B, groups, m, D), (B, groups, m, D), (own, ROWS, D), (own, D)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def on_keys(n: int, m: int, *, buckets: bool = True) -> Callable[[Tensor, Tensor], LineVectors]:
    """Offsets beyond a few read the first vector or the last; or each its own, and the others zeros."""
    line = lines(Sequence(n), Sequence(m))
    index = (torch.arange(line.length) - line.length // 2 + ROWS // 2).clamp(0, ROWS - 1) if buckets else None
    return lambda vectors, bias: LineVectors(vectors, index, line, "key", bias=bias)


def term_of_plan(q: Tensor, k: Tensor, v: Tensor, term: LineVectors, mask: Mask | None = None) -> object:
    plan = make_plan(Call(q, k, v, Terms(term), mask, D**-0.5), backward=True)
    (term,) = plan.vectors.terms
    return term


PADDING = Mask.padding(torch.arange(170) < torch.tensor([[170], [60]]))


@pytest.mark.parametrize(
    ("n", "buckets", "mask", "kind"),
    [
        (170, True, None, KeyProducts),
        (170, True, Mask.causal(), KeyProducts),
        (170, True, Mask.window(9, 2), KeyProducts),
        (170, True, PADDING, KeyBands),
        (170, False, None, KeyBands),
        (ROWS, True, None, KeyBands),
        (ROWS + 1, True, None, KeyProducts),
    ],
    ids=["all", "causal", "window", "padding", "an entry each", "few queries", "a query more"],
)
def test_keys_are_multiplied_once_where_vectors_are_fewer_than_queries(
    n: int, buckets: bool, mask: Mask | None, kind: type
) -> None:
    own, term = leaves(n, 170), on_keys(n, 170, buckets=buckets)
    assert type(term_of_plan(*own[:3], term(*own[3:]), mask)) is kind
    assert_as_reference("streaming", own, term, mask=mask, **EXACT)


def test_many_vectors_are_not_stored_with_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    own = leaves(170, 170)
    monkeypatch.setattr(vectors, "_MOST_VECTORS", ROWS - 1)
    assert type(term_of_plan(*own[:3], on_keys(170, 170)(*own[3:]))) is KeyBands


def test_vectors_learn_where_keys_do_not() -> None:
    own, term = leaves(90, 80), on_keys(90, 80)
    learned = [x.requires_grad_() for x in (own[0], *own[2:])]
    outs = (attention(*own[:3], position=term(*own[3:]), backend=name) for name in ("streaming", "reference"))
    found, wanted = (with_gradients(out, learned) for out in outs)
    torch.testing.assert_close(found, wanted, **EXACT)


def errors(n: int, dtype: torch.dtype, *, heads: int, groups: int, width: int, std: float) -> list[tuple[float, float]]:
    """Of output and gradients the distance to float64's, by streaming and by the reference."""
    torch.manual_seed(n)
    shapes = [*[(B, heads, n, width)] * 4, (heads, ROWS, width), (heads, width)]
    q, k, v, upstream, vectors, bias = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    k, v, vectors = k[:, :groups], v[:, :groups], std * vectors
    low, term = [x.to(dtype) for x in (q, k, v, vectors, bias, upstream)], on_keys(n, n)
    exact = step("reference", [x.double() for x in low[:5]], term, low[5].double())
    results = (step(backend, low[:5], term, low[5]) for backend in ("streaming", "reference"))
    far = ([float((x.double() - y).square().mean().sqrt()) for x, y in zip(r, exact, strict=True)] for r in results)
    return list(zip(*far, strict=True))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1.6), (torch.bfloat16, 2.0), (torch.float16, 2.0)], ids=str
)
def test_errors_of_far_offsets(dtype: torch.dtype, most: float) -> None:
    """Sums over a thousand offsets are hardly further from float64's than those of all pairs at once."""
    of_vectors, of_bias = errors(700, dtype, heads=3, groups=3, width=16, std=3.0)[-2:]
    for error, expected in (of_vectors, of_bias):
        assert error <= most * expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_keys_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared key's gradient is summed over blocks and heads, and rounded once."""
    monkeypatch.setattr(planning, "ROWS", 5)
    for error, expected in errors(40, dtype, heads=H, groups=1, width=D, std=1.0):
        assert error <= 2 * expected


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a block, bands a tile and parts a band."""
    monkeypatch.setattr(planning, "ROWS", 5)
    monkeypatch.setattr(planning, "WIDTH", 17)
    monkeypatch.setattr(planning, "_BACKWARD_WIDTH", 13)
    monkeypatch.setattr(key_vectors, "_KEYS_AT_ONCE", 4)
    monkeypatch.setattr(vector_term, "_LEAST_ALIKE", 2)


LINE = lines(Sequence(40))
INDEX = (torch.arange(LINE.length) - 39 + ROWS // 2).clamp(0, ROWS - 1)
BESIDE: dict[str, tuple[Callable[..., object], tuple[int, ...]]] = {
    "nothing": (lambda x: Terms(), (1,)),
    "a bias": (lambda x: LineBias(x, LINE), (H, LINE.length)),
    "the same again": (lambda x: LineVectors(x, INDEX.int(), LINE, "key"), (1, ROWS, D)),
    "queries' vectors": (lambda x: LineVectors(x, INDEX.to(torch.int8), LINE, "query"), (H, ROWS, D)),
    "a soft cap": (lambda x: Softcap(2.0), (1,)),
    "a rotation by head": (lambda x: Rotation(x, x, "half"), (1, H, 40, D // 2)),
}
MASKS = {
    "all": None,
    "causal": Mask.causal(),
    "rows without a key": Mask(left=-3),
    "a window": Mask.window(6, 2),
    "padding": Mask.padding(torch.arange(40) < torch.tensor([[40], [9]])),
}


@pytest.mark.parametrize(("beside", "mask", "for_all"), pairwise(BESIDE, MASKS, (False, True)))
def test_many_small_tiles(beside: str, mask: str, for_all: bool, small_tiles: None) -> None:
    """Two query heads share a key head."""
    make, shape = BESIDE[beside]
    x, term = torch.randn(shape, dtype=torch.float64), on_keys(40, 40)
    assert_as_reference(
        "streaming", leaves(40, 40, groups=2, for_all=for_all),
        lambda vectors, bias: Terms(term(vectors, bias)) + make(x), mask=MASKS[mask], **EXACT,
    )  # fmt: skip


def test_one_key(small_tiles: None) -> None:
    assert_as_reference("streaming", leaves(40, 1), on_keys(40, 1), **EXACT)


def test_heads_that_share_a_plain_key_stay_in_one_thread() -> None:
    """Rotated by head each has a key of its own, but the gradient of the plain one is a sum."""
    q, k, v, *rest = leaves(40, 40)
    call = Call(q, k, v, Terms(on_keys(40, 40)(*rest)), None, 1.0, plain_q=q, plain_k=k[:, ::2])
    assert make_plan(call, backward=True).share_count == 2
