"""Every term in every engine: values and all gradients against hand-written loops in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from engine_steps import assert_accurate, step, with_gradients
from torch import Tensor
from torch.nn.functional import softplus

import relpos
from covering import pairwise
from relpos import (
    AxisVectors,
    Blocks,
    DenseBias,
    Grid,
    IndexedBias,
    LineBias,
    LineVectors,
    LowRank,
    Mask,
    PairRotations,
    Polar,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    RowRule,
    Scale,
    Sequence,
    Sinks,
    Softcap,
    Terms,
    lines,
)
from relpos.core import axis_lines
from relpos.engines import dense
from relpos.testing import oracle
from relpos.testing.engines import INTERPRETED, engines, lacking
from relpos.testing.orders import in_orders
from relpos.testing.tolerance import yardstick_dtype

FAST_SHARE = 8  # of its tests, in the fast part

B, H, N, M, D = 2, 3, 4, 6, 4
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass
class Case:
    """One use of terms, and what it means.

    Attributes:
        leaves: shapes of the learned tensors the terms are built from.
        terms: builds the terms from the leaves.
        meaning: the same attention by the oracle, from q, k, v and the leaves.
        lacks: engine to the word its NotImplementedError must hold.
        groups: key heads.
        values: the width of v.
    """

    leaves: list[tuple[int, ...]]
    terms: Callable[..., Terms | relpos.core.Term]
    meaning: Callable[..., tuple[Tensor, Tensor]]
    mask: Mask | None = None
    lacks: dict[str, str] = field(default_factory=dict)
    groups: int = H
    values: int = D


SEQUENCE = lines(Sequence(N, start=2), Sequence(M))
GRIDS = Grid(2, 2), Grid(2, 3)
GRID = lines(*GRIDS)
AXES = axis_lines(*GRIDS)
PREFIXED = lines(Sequence(3, prefix=1), Sequence(4, prefix=2))
SHUFFLED = lines(Positions(torch.tensor([[3, 1, 0, 5], [2, 2, 4, 1]]), low=0, high=5), Sequence(M))
CLIPPED = torch.arange(SEQUENCE.length).sub(SEQUENCE.length // 2).clamp(-2, 2) + 2
HOLES = torch.where(CLIPPED == 2, -1, CLIPPED)
PAIRS = (torch.arange(B * N * M).view(B, N, M) * 5 % 11 % 7).short()


def gathered(values: Tensor, index: Tensor) -> Tensor:
    """`[.., N, M]` of a line's values by loops, heads first; entries beyond the last or below 0 are zero."""

    def one(entry: int) -> Tensor:
        return values[:, entry] if 0 <= entry < values.shape[1] else torch.zeros_like(values[:, 0])

    if index.dim() == 3:
        return torch.stack([gathered(values, each) for each in index])
    return torch.stack([torch.stack([one(int(e)) for e in row], dim=1) for row in index], dim=1)


def line_bias(index: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    def meaning(q: Tensor, k: Tensor, v: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        bias = gathered(values, index)
        return oracle.attention(q, k, v, bias=bias if bias.dim() == 4 else bias[None])

    return meaning


def met(x: Tensor, vectors: Tensor) -> Tensor:
    """`[B, H, N, M]`: x[b, h, i] against vectors[h, i, j]."""
    heads = [(x[:, h, :, None] * oracle.at(vectors, h)).sum(-1) for h in range(x.shape[1])]
    return torch.stack(heads, dim=1)


def query_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(q, k, v, bias=D**-0.5 * met(q, gathered(vectors, SEQUENCE.index())))


def clipped_query_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    chosen = gathered(vectors, HOLES[SEQUENCE.index()])
    return oracle.attention(q, k, v, bias=met(q + u[:, None], chosen))


def content_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(q, k, v, bias=met(r, gathered(vectors, HOLES[SEQUENCE.index()])))


def key_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    chosen = gathered(vectors, CLIPPED[SEQUENCE.index()])
    return oracle.attention(q, k, v, bias=D**-0.5 * met(k + u[:, None], chosen.transpose(1, 2)).mT)


def value_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(q, k, v, value_vectors=gathered(vectors, CLIPPED[SEQUENCE.index()]))


def batched_vectors(q: Tensor, k: Tensor, v: Tensor, vectors: Tensor) -> tuple[Tensor, Tensor]:
    index = SHUFFLED.index()
    parts = []
    for b in range(B):
        chosen = gathered(vectors, index[b])
        one = slice(b, b + 1)
        bias = D**-0.5 * (met(q[one], chosen) + met(k[one], chosen.transpose(1, 2)).mT)
        parts.append(oracle.attention(q[one], k[one], v[one], bias=bias, value_vectors=chosen))
    return torch.cat([output for output, _ in parts]), torch.cat([lse for _, lse in parts])


def axis_vectors(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor]:
    bias = met(q, gathered(rows, AXES[0].index())) + met(q, gathered(columns, AXES[1].index()))
    return oracle.attention(q, k, v, bias=bias)


def rotated(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(oracle.rotate(q, query, "half"), oracle.rotate(k, key, "half"), v)


def rotated_by_head(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    return rotated(q, *(x.expand(-1, H, -1, -1) for x in (k, v)), query, key)


def xpos(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(
        oracle.rotate(q, query, "interleaved", a * 1.25), oracle.rotate(k, key, "interleaved", b * 1.25), v
    )


def cached(q: Tensor, k: Tensor, v: Tensor, query: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention(oracle.rotate(q, query, "half") + u[:, None], k, v)


def turned_values(layout: str, start: int, *, keys: bool = True) -> Callable[..., tuple[Tensor, Tensor]]:
    """Keys and values turned, the output turned back; `keys=False`: k and v come so."""

    def turn(x: Tensor, angles: Tensor) -> Tensor:
        return torch.cat([x[..., :start], oracle.rotate(x[..., start:], angles, layout)], dim=-1)

    def meaning(q: Tensor, k: Tensor, v: Tensor, *angles: Tensor) -> tuple[Tensor, Tensor]:
        k, v = (turn(x, angles[1]) for x in (k, v)) if keys else (k, v)
        out, lse = oracle.attention(turn(q, angles[0]), k, v)
        return turn(out, -angles[0]), lse

    return meaning


def rule(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, weight: Tensor) -> Tensor:
    place = torch.arange(rows.start, rows.stop).to(q.dtype)
    return weight.to(q.dtype)[:, None, None] * (q.sum(-1) + place)[..., None] * k.sum(-1)[..., None, :]


def ruled(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    bias = [
        torch.stack([weight[h] * (q[:, h, i].sum(-1) + i)[:, None] * k[:, h].sum(-1) for h in range(H)], dim=1)
        for i in range(N)
    ]
    return oracle.attention(q, k, v, bias=torch.stack(bias, dim=2))


def low_rank(q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (x if x.dim() == 4 else x[None] for x in (a, b))
    rows = [torch.stack([(a[:, :, i] * b[:, :, j]).sum(-1) for j in range(M)], dim=-1) for i in range(N)]
    return oracle.attention(q, k, v, bias=torch.stack(rows, dim=2))


EVERYTHING = Mask(
    left=3,
    query_order=torch.arange(2, 6),
    key_order=torch.arange(6),
    query_segments=torch.tensor([0, 0, 1, -1]),
    key_segments=torch.tensor([[0, 0, 1, 1, 0, 0], [-1, 0, 0, 1, 1, 1]]),
    key_global=torch.tensor([True, False, False, False, False, False]),
    blocks=Blocks(torch.tensor([[[True, True, False], [True, False, True]]]), 2),
)


def composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    values: Tensor,
    query: Tensor,
    key: Tensor,
    u: Tensor,
    vectors: Tensor,
    bias: Tensor,
) -> tuple[Tensor, Tensor]:
    turned = oracle.rotate(q, query, "half") + u[:, None]
    total = gathered(values, GRID.index())[None] + 0.4 * met(q, gathered(vectors, SEQUENCE.index())) + bias
    return oracle.attention(turned, oracle.rotate(k, key, "half"), v, scale=0.4, bias=total)


def tempered(q: Tensor, k: Tensor, v: Tensor, factor: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    return oracle.attention((q + u[:, None]) * factor[..., None], k, v)


def all_tempered(q: Tensor, k: Tensor, v: Tensor, factor: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    bias = gathered(values, SEQUENCE.index())[None] * factor[..., None]
    return oracle.attention(q * factor[..., None], k, v, bias=bias)


def polar(q: Tensor, k: Tensor, v: Tensor, query: Tensor, key: Tensor, phase: Tensor) -> tuple[Tensor, Tensor]:
    def both(x: Tensor, angle: Tensor) -> Tensor:
        return torch.cat([softplus(x) * angle.cos(), softplus(x) * angle.sin()], dim=-1)

    return oracle.attention(both(q, query), both(k, key + phase), v, scale=D**-0.5)


NEAR = torch.tensor([[True, True, False, False, False, False], [True, True, True, False, False, False],
                     [False, False, True, True, True, False], [False, False, False, True, True, False]])  # fmt: skip
LOW, HIGH, ORDER = torch.tensor([1, 1, 3, 4]), torch.tensor([2, 3, 5, 5]), torch.arange(1, 7)
IN_PAIRS = (
    Mask(low=LOW, high=HIGH, key_order=ORDER),
    Mask(high=LOW - 1, key_order=ORDER),
    Mask(low=HIGH + 1, key_order=ORDER),
)
CAUSAL = Mask(right=1, query_order=torch.arange(N), key_order=torch.arange(M))
PACKED = CAUSAL & Mask.packed(torch.tensor([0, 0, 1, 1]), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, -1, -1]]))


def by_pair(query: Tensor, key: Tensor, far: Tensor) -> PairRotations:
    turns = Rotation(query, key, "half"), *(Rotation(x, None, "half") for x in (far, query))
    return PairRotations(turns, IN_PAIRS)


def turned_by_pair(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query: Tensor,
    key: Tensor,
    far: Tensor,
    u: Any = 0,
    values: Any = None,
    **more: Any,
) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (k, v))
    own, before, after = (oracle.rotate(q, x, "half") + u for x in (query, far, query))
    past = torch.arange(M) < LOW[:, None] - 1
    content = torch.where(past, before @ k.mT, after @ k.mT).where(~NEAR, own @ oracle.rotate(k, key, "half").mT)
    bias = 0 if values is None else gathered(values, SEQUENCE.index())[None]
    return oracle.attention(q * 0, k, v, bias=D**-0.5 * content + bias, **more)


CASES: dict[str, Case] = {
    "PairRotations": Case([(1, 1, N, 2), (1, 1, M, 2), (1, H, N, 2)], by_pair, turned_by_pair, groups=1),
    "PairRotations among others": Case(
        [(1, 1, N, 2), (1, 1, M, 2), (1, 1, N, 2), (H, D), (H, SEQUENCE.length), (H,)],
        lambda a, b, c, u, x, sinks: by_pair(a, b, c) + QueryBias(u) + LineBias(x, SEQUENCE) + Sinks(sinks),
        lambda q, k, v, a, b, c, u, x, sinks: turned_by_pair(
            q, k, v, a, b, c, u[:, None], x, sinks=sinks, allowed=PACKED.dense(N, M)
        ),
        mask=PACKED,
    ),
    "nothing": Case([], Terms, oracle.attention),
    "LineBias": Case([(H, SEQUENCE.length)], lambda x: LineBias(x, SEQUENCE), line_bias(SEQUENCE.index())),
    "LineBias for all heads": Case([(1, GRID.length)], lambda x: LineBias(x, GRID), line_bias(GRID.index())),
    "LineBias with prefix": Case([(H, PREFIXED.length)], lambda x: LineBias(x, PREFIXED), line_bias(PREFIXED.index())),
    "LineBias, batched": Case([(H, SHUFFLED.length)], lambda x: LineBias(x, SHUFFLED), line_bias(SHUFFLED.index())),
    "Rotation": Case([(1, 1, N, 2), (1, 1, M, 2)], lambda a, b: Rotation(a, b, "half"), rotated),
    "Rotation of trailing dimensions": Case(
        [(1, 1, N, 1), (B, H, M, 1)],
        lambda a, b: Rotation(a, b, "half", start=2),
        lambda q, k, v, a, b: oracle.attention(
            *(torch.cat([x[..., :2], oracle.rotate(x[..., 2:], y, "half")], dim=-1) for x, y in ((q, a), (k, b))), v
        ),
    ),
    "Rotation of values": Case(
        [(1, 1, N, 1), (1, 1, M, 1)],
        lambda a, b: Rotation(a, b, "interleaved", start=1, values=True),
        turned_values("interleaved", 1),
        groups=1,
        values=5,
    ),
    "Rotation of values by head": Case(
        [(B, H, N, 2), (1, H, M, 2)], lambda a, b: Rotation(a, b, "half", values=True), turned_values("half", 0)
    ),
    "Rotation of values, rotated cache": Case(
        [(1, 1, N, 1)],
        lambda a: Rotation(a, None, "interleaved", start=2, values=True),
        turned_values("interleaved", 2, keys=False),
    ),
    "Polar": Case([(1, 1, N, D), (1, 1, M, D), (1, D)], lambda a, b, c: Polar(a, b, phase=c), polar),
    "Rotation by head": Case(
        [(B, H, N, 1), (1, H, M, 1)], lambda a, b: Rotation(a, b, "half"), rotated_by_head, groups=1
    ),
    "xPos": Case(
        [(1, 1, N, 2), (1, 1, M, 2), (1, 1, N, 2), (1, 1, M, 2)],
        lambda a, b, c, d: Rotation(a, b, "interleaved", 1.25, query_magnitude=c, key_magnitude=d),
        xpos,
    ),
    "rotated cache and QueryBias": Case(
        [(1, 1, N, 1), (H, D)], lambda a, u: Rotation(a, None, "half") + QueryBias(u), cached
    ),
    "LineVectors of queries": Case(
        [(H, SEQUENCE.length, D)], lambda x: LineVectors(x, None, SEQUENCE, "query"), query_vectors
    ),
    "LineVectors of queries, clipped": Case(
        [(1, 5, D), (H, D)],
        lambda x, u: LineVectors(x, HOLES, SEQUENCE, "query", scaled=False, bias=u),
        clipped_query_vectors,
    ),
    "LineVectors of a content": Case(
        [(1, 5, 3), (B, 1, N, 3)],
        lambda x, r: LineVectors(x, HOLES, SEQUENCE, "query", scaled=False, content=r),
        content_vectors,
    ),
    "LineVectors of keys": Case(
        [(H, 5, D), (1, D)], lambda x, u: LineVectors(x, CLIPPED, SEQUENCE, "key", bias=u), key_vectors
    ),
    "LineVectors of values": Case(
        [(1, 5, 5)],
        lambda x: LineVectors(x, CLIPPED, SEQUENCE, "value"),
        value_vectors,
        lacks={"sdpa": "LineVectors on the value side"},
        values=5,
    ),
    "LineVectors, batched": Case(
        [(H, SHUFFLED.length, D)],
        lambda x: Terms(*(LineVectors(x, None, SHUFFLED, side) for side in ("query", "key", "value"))),  # type: ignore[arg-type]
        batched_vectors,
        lacks={"sdpa": "LineVectors on the value side"},
    ),
    "AxisVectors": Case(
        [(1, AXES[0].length, D), (H, AXES[1].length, D)], lambda a, b: AxisVectors((a, b), AXES), axis_vectors
    ),
    "LowRank": Case([(H, N, 2), (1, M, 2)], LowRank, low_rank),
    "LowRank, batched": Case([(B, 1, N, 2), (B, H, M, 2)], LowRank, low_rank),
    "LowRank, batched on one side": Case([(B, H, N, 2), (1, M, 2)], LowRank, low_rank),
    "LowRank, one for all": Case([(1, N, 2), (1, 1, M, 2)], LowRank, low_rank),
    "DenseBias": Case([(B, 1, N, M)], DenseBias, lambda q, k, v, bias: oracle.attention(q, k, v, bias=bias)),
    "DenseBias of keys": Case(
        [(B, 1, 1, M)], DenseBias, lambda q, k, v, bias: oracle.attention(q, k, v, bias=bias.expand(-1, -1, N, -1))
    ),
    "IndexedBias": Case([(H, 7)], lambda x: IndexedBias(x, PAIRS), line_bias(PAIRS)),
    "IndexedBias for all heads, one index": Case(
        [(1, 7)], lambda x: IndexedBias(x, PAIRS[:1].to(torch.uint8)), line_bias(PAIRS[:1])
    ),
    "RowRule": Case([(H,)], lambda weight: RowRule(rule, (weight,)), ruled),
    "Scale": Case([], lambda: Scale(1.0), lambda q, k, v: oracle.attention(q, k, v, scale=1.0)),
    "QueryScale": Case([(1, H, N), (H, D)], lambda f, u: QueryScale(f) + QueryBias(u), tempered),
    "QueryScale on scores": Case(
        [(B, 1, N), (H, SEQUENCE.length)],
        lambda f, x: LineBias(x, SEQUENCE) + QueryScale(f, "scores"),
        all_tempered,
    ),
    "Sinks of queries": Case(
        [(B, 1, N)],
        Sinks,
        lambda q, k, v, x: oracle.attention(q, k, v, sinks=x.expand(-1, H, -1)),
    ),
    "Softcap": Case(
        [], lambda: Softcap(0.8), lambda q, k, v: oracle.attention(q, k, v, softcap=0.8), lacks={"sdpa": "Softcap"}
    ),
    "Sinks": Case([(H,)], Sinks, lambda q, k, v, sinks: oracle.attention(q, k, v, sinks=sinks)),
    "a mask of every part": Case(
        [], Terms, lambda q, k, v: oracle.attention(q, k, v, allowed=EVERYTHING.dense(N, M)), mask=EVERYTHING
    ),
    "a mask and Sinks": Case(
        [(H,)],
        Sinks,
        lambda q, k, v, sinks: oracle.attention(q, k, v, allowed=EVERYTHING.dense(N, M), sinks=sinks),
        mask=EVERYTHING,
    ),
    "grouped keys": Case(
        [(H, SEQUENCE.length)], lambda x: LineBias(x, SEQUENCE), line_bias(SEQUENCE.index()), groups=1
    ),
    "several": Case(
        [(H, GRID.length), (1, 1, N, 2), (1, H, M, 2), (1, D), (1, SEQUENCE.length, D), (1, H, N, M)],
        lambda values, a, b, u, vectors, bias: (
            LineBias(values, GRID)
            + Rotation(a, b, "half")
            + QueryBias(u)
            + LineVectors(vectors, None, SEQUENCE, "query")
            + DenseBias(bias)
            + Scale(0.4)
        ),
        composed,
    ),
}


PUBLIC = [getattr(relpos, name) for name in relpos.__all__]
EVERY_TERM = {kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, relpos.core.Term)}


def kinds(case: Case) -> set[type]:
    return {type(term) for term in as_terms(case.terms(*(torch.zeros(shape) for shape in case.leaves)))}


def test_the_cases_hold_every_term() -> None:
    assert set.union(*map(kinds, CASES.values())) == EVERY_TERM


def inputs(case: Case, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """q, k, v; leaves (float32 in half precision, as learned tables reach an engine); the output's gradient."""
    torch.manual_seed(3)
    shapes = [(B, H, N, D), (B, case.groups, M, D), (B, case.groups, M, case.values)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    leaves = [torch.randn(shape).to(torch.promote_types(dtype, torch.float32)) for shape in case.leaves]
    return tensors, leaves, torch.randn(B, H, N, case.values).to(dtype)


def as_terms(position: Terms | relpos.core.Term) -> Terms:
    return position if isinstance(position, Terms) else Terms(position)


def lack_of(backend: str, case: Case, leaves: list[Tensor]) -> str | None:
    terms = as_terms(case.terms(*(x.clone().requires_grad_() for x in leaves)))
    return case.lacks.get(backend) or lacking(backend, terms, mask=case.mask)


@pytest.mark.parametrize(("name", "backend", "dtype"), pairwise(CASES, engines(), DTYPES), ids=str)
def test_values_and_gradients(name: str, backend: str, dtype: torch.dtype) -> None:
    case = CASES[name]
    tensors, leaves, upstream = inputs(case, dtype)
    every = [*tensors, *leaves]
    lack = lack_of(backend, case, leaves)
    if lack is not None:
        with pytest.raises(NotImplementedError, match=lack):
            step(backend, every, case.terms, upstream, mask=case.mask)
        return

    def meant(wide: torch.dtype) -> list[Tensor]:
        own = [x.to(wide).requires_grad_() for x in every]
        return with_gradients(case.meaning(*own)[0], own, upstream.to(wide))

    exact, cost = meant(torch.float64), in_orders(lambda: meant(yardstick_dtype(dtype)))
    actual = step(backend, every, case.terms, upstream, mask=case.mask)
    assert_accurate(actual, exact, cost, dtype)


@pytest.mark.parametrize("name", CASES)
def test_log_sum_exp(name: str) -> None:
    case = CASES[name]
    tensors, leaves, _ = inputs(case, torch.float64)
    _, wanted = case.meaning(*tensors, *leaves)
    _, lse = relpos.attention(*tensors, position=case.terms(*leaves), mask=case.mask, return_lse=True)
    torch.testing.assert_close(lse, wanted, rtol=1e-12, atol=1e-12)
    with pytest.raises(NotImplementedError):
        relpos.attention(*tensors, position=case.terms(*leaves), return_lse=True, mask=case.mask, backend="sdpa")


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", [name for name in engines() if name not in INTERPRETED])
def test_the_same_on_every_run(name: str, backend: str) -> None:
    case = CASES[name]
    tensors, leaves, upstream = inputs(case, torch.float32)
    if lack_of(backend, case, leaves) is None:
        first, second = (step(backend, [*tensors, *leaves], case.terms, upstream, mask=case.mask) for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_a_rule_sees_many_pairs_a_block_of_rows_at_a_time(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same values and gradients as all at once; what a block needs inside is computed again for the gradient."""
    rows_seen: list[tuple[int, int]] = []

    def rule(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, weight: Tensor) -> Tensor:
        rows_seen.append((rows.start, rows.stop))
        assert q.shape[2] == allowed.shape[2] == rows.stop - rows.start
        places = torch.arange(rows.start, rows.stop, dtype=q.dtype)[:, None] * weight
        return (q @ k.mT).sigmoid() * places + allowed.to(q.dtype)

    leaves = [torch.randn(shape, dtype=torch.float64) for shape in ((2, 3, 7, 4), (2, 3, 5, 4), (2, 3, 5, 4), ())]
    mask = Mask.causal(torch.arange(7), torch.arange(5))
    found, blocks = [], [(0, 2), (2, 4), (4, 6), (6, 7)]
    for pairs, forward, backward in ((10**6, [(0, 7)], []), (10, blocks, blocks[::-1])):
        monkeypatch.setattr(dense, "PAIRS_AT_ONCE", pairs)
        rows_seen.clear()
        found.append(step(backend, leaves, lambda weight: RowRule(rule, (weight,)), mask=mask))
        assert rows_seen == [*forward, *backward], "forward, and blocks again for the gradient"
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)
