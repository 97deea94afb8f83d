"""Vectors on the key side in the streaming engine: by the products of bands, or of a head's keys at once."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from relpos.core import LineBias, LineVectors, Mask, Rotation, Sequence, Softcap, Terms, lines
from relpos.core.line import Lines
from relpos.engines import attention
from relpos.engines.call import Call
from relpos.engines.streaming import key_vectors, planning, vector_term, vectors
from relpos.engines.streaming.key_vectors import KeyBands, KeyProducts
from relpos.engines.streaming.planning import make_plan

FAST_CASES = 6  # of each of its tests, in the fast part

B, H, D, ROWS = 2, 3, 4, 11


@dataclass
class Inputs:
    """What a call reads, and the vectors of a term on the key side."""

    q: Tensor
    k: Tensor
    v: Tensor
    upstream: Tensor
    vectors: Tensor
    bias: Tensor

    @staticmethod
    def random(n: int, m: int, dtype: torch.dtype = torch.float64, width: int = D, std: float = 1.0) -> Inputs:
        generator = torch.Generator().manual_seed(n)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

        q, k, v, upstream = (random(B, H, count, width) for count in (n, m, m, n))
        inputs = Inputs(q, k, v, upstream, std * random(H, ROWS, width), random(H, width))
        for x in inputs.learned:
            x.requires_grad_()
        return inputs

    @property
    def learned(self) -> list[Tensor]:
        return [self.q, self.k, self.v, self.vectors, self.bias]

    def terms(self, *, buckets: bool = True) -> Terms:
        """Offsets beyond a few read the first vector or the last; or each its own, and the others zeros."""
        line = lines(Sequence(self.q.shape[2]), Sequence(self.k.shape[2]))
        middle = torch.arange(line.length) - line.length // 2 + ROWS // 2
        index = middle.clamp(0, ROWS - 1) if buckets else None
        return Terms(LineVectors(self.vectors, index, line, "key", bias=self.bias))

    def results(self, backend: str, mask: Mask | None = None, *, buckets: bool = True) -> list[Tensor]:
        """Output and gradients, of keys that are not learned none."""
        terms = self.terms(buckets=buckets)
        out = attention(self.q, self.k, self.v, position=terms, mask=mask, backend=backend)
        assert isinstance(out, Tensor)
        learned = [x for x in self.learned if x.requires_grad]
        return [out, *torch.autograd.grad(out, learned, self.upstream)]


def _close(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-10 * max(1.0, float(other.detach().abs().max())))


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
    inputs = Inputs.random(n, 170)
    call = Call(inputs.q, inputs.k, inputs.v, inputs.terms(buckets=buckets), mask, D**-0.5)
    (term,) = make_plan(call, backward=True).vectors.terms  # type: ignore[attr-defined]
    assert type(term) is kind
    _close(inputs.results("streaming", mask, buckets=buckets), inputs.results("reference", mask, buckets=buckets))


def test_vectors_learn_where_keys_do_not() -> None:
    inputs = Inputs.random(90, 80)
    inputs.k.requires_grad_(False)
    _close(inputs.results("streaming"), inputs.results("reference"))


def test_inputs_whose_rows_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a layer, whose heads lie side by side in each token; in blocks of few rows."""
    monkeypatch.setattr(planning, "ROWS", 5)
    inputs = Inputs.random(90, 90)
    for name in ("q", "k", "v", "upstream"):
        tokens = getattr(inputs, name)[:1].detach().transpose(1, 2).contiguous()
        setattr(inputs, name, tokens.transpose(1, 2).requires_grad_(name != "upstream"))
    assert not inputs.q.flatten(0, 1)[:1].is_contiguous()
    _close(inputs.results("streaming"), inputs.results("reference"))


@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1.6), (torch.bfloat16, 2.0), (torch.float16, 2.0)], ids=str
)
def test_errors_of_far_offsets(dtype: torch.dtype, most: float) -> None:
    """Sums over a thousand offsets are hardly further from float64's than those of all pairs at once."""
    inputs = Inputs.random(700, 700, dtype, width=16, std=3.0)
    wide = Inputs(*(x.detach().double() for x in vars(inputs).values()))
    for x in wide.learned:
        x.requires_grad_()
    exact = wide.results("reference")
    results = (inputs.results("streaming"), inputs.results("reference"), exact)
    for ours, theirs, true in list(zip(*results, strict=True))[-2:]:  # of the vectors and their bias
        error, expected = ((x.double() - true).square().mean().sqrt() for x in (ours, theirs))
        assert error <= most * expected


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several tiles a block, bands a tile and parts a band."""
    monkeypatch.setattr(planning, "ROWS", 5)
    monkeypatch.setattr(planning, "WIDTH", 17)
    monkeypatch.setattr(planning, "_BACKWARD_WIDTH", 13)
    monkeypatch.setattr(key_vectors, "_KEYS_AT_ONCE", 4)
    monkeypatch.setattr(vector_term, "_LEAST_ALIKE", 2)


def _beside(line: Lines, index: Tensor) -> dict[str, Terms]:
    """What may stand beside vectors on keys."""
    random = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    angles = random(1, 2 * G, line.length // 2 + 1, D // 2)
    return {
        "nothing": Terms(),
        "a bias": Terms(LineBias(random(2 * G, line.length), line)),
        "the same again": Terms(LineVectors(random(1, ROWS, D), index.int(), line, "key")),
        "queries' vectors": Terms(LineVectors(random(2 * G, ROWS, D), index.to(torch.int8), line, "query")),
        "a soft cap": Terms(Softcap(2.0)),
        "a rotation by head": Terms(Rotation(angles, angles, "half")),
    }


G, BESIDE = 2, ("nothing", "a bias", "the same again", "queries' vectors", "a soft cap", "a rotation by head")
MASKS = {
    "all": None,
    "causal": Mask.causal(),
    "rows without a key": Mask(left=-3),
    "a window": Mask.window(6, 2),
    "padding": Mask.padding(torch.arange(40) < torch.tensor([[40], [9]])),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("for_all", [False, True])
def test_many_small_tiles(beside: str, mask: str, for_all: bool, small_tiles: None) -> None:
    """Two query heads share a key head."""
    random = functools.partial(torch.randn, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    line = lines(Sequence(40))
    index = (torch.arange(line.length) - line.length // 2 + ROWS // 2).clamp(0, ROWS - 1)
    q, k, v = (random(B, heads, 40, D).requires_grad_() for heads in (2 * G, G, G))
    vectors, bias = (random(1 if for_all else 2 * G, *shape).requires_grad_() for shape in ((ROWS, D), (D,)))
    terms = Terms(LineVectors(vectors, index, line, "key", bias=bias)) + _beside(line, index)[beside]
    upstream, found = random(q.shape), []
    for backend in ("streaming", "reference"):
        out = attention(q, k, v, position=terms, mask=MASKS[mask], backend=backend)
        assert isinstance(out, Tensor)
        found.append([out, *torch.autograd.grad(out, [q, k, v, vectors, bias], upstream)])
    _close(*found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_shared_keys_in_half_precision(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shared key's gradient is summed over blocks and heads, and rounded once."""
    monkeypatch.setattr(planning, "ROWS", 5)
    inputs = Inputs.random(40, 40, dtype)
    shared = {name: getattr(inputs, name)[:, :1].detach().requires_grad_() for name in ("k", "v")}
    own, wide = replace(inputs, **shared), {}
    for name, x in vars(own).items():
        wide[name] = x.detach().double().requires_grad_(name != "upstream")
    exact = Inputs(**wide).results("reference")
    for ours, theirs, true in zip(own.results("streaming"), own.results("reference"), exact, strict=True):
        error, expected = ((x.double() - true).square().mean().sqrt() for x in (ours, theirs))
        assert error <= 2 * expected


def test_one_key(small_tiles: None) -> None:
    inputs = Inputs.random(40, 1)
    _close(inputs.results("streaming"), inputs.results("reference"))


def test_heads_that_share_a_plain_key_stay_in_one_thread() -> None:
    """Rotated by head each has a key of its own, but the gradient of the plain one is a sum."""
    inputs = Inputs.random(40, 40)
    q, k, v = (torch.randn(1, 4, 40, D) for _ in range(3))
    plain_k = k[:, ::2]
    call = Call(q, k, v, inputs.terms(), None, 1.0, plain_q=q, plain_k=plain_k)
    assert make_plan(call, backward=True).share_count == 2


def test_many_vectors_are_not_stored_with_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = Inputs.random(170, 170)
    monkeypatch.setattr(vectors, "_MOST_VECTORS", ROWS - 1)
    call = Call(inputs.q, inputs.k, inputs.v, inputs.terms(), None, D**-0.5)
    (term,) = make_plan(call, backward=True).vectors.terms  # type: ignore[attr-defined]
    assert type(term) is KeyBands
