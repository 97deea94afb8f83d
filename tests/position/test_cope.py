"""CoPE: gates, counts, and what the mask does to them."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import parity
from conformance.suite import LibrarySuite
from position.published import largest_tensor
from relpos import CoPE, Grid, Mask, Sequence, Site, attention
from relpos.core import Coordinates, RowRule
from relpos.testing import oracle

PLACES = 4  # so that counts go beyond


def contextual(vectors: Tensor, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Golovneva et al. 2024, equations 3 to 5, a pair at a time: `[B, H, N, M]`."""
    batch, heads, n, width = q.shape
    k = oracle.heads_of(k, heads)
    last, rows = len(vectors) - 1, []
    for b, h, i in itertools.product(range(batch), range(heads), range(n)):
        row, count = [], q.new_zeros(())
        for j in reversed(range(k.shape[2])):
            if allowed is None or bool(oracle.at(allowed, b, h, i, j)):
                count = count + torch.sigmoid((q[b, h, i] * k[b, h, j]).sum() / math.sqrt(width))
            if float(count.detach()) >= last:
                vector = vectors[last]
            else:
                low = math.floor(float(count.detach()))
                vector = vectors[low] * (low + 1 - count) + vectors[low + 1] * (count - low)
            row.append((q[b, h, i] * vector).sum())
        rows.append(torch.stack(row[::-1]))
    return torch.stack(rows).view(batch, heads, n, -1)


class TestCoPE(LibrarySuite):
    axes = (1,)
    causal = True
    preset = "cope"

    def build(self, site: Site) -> CoPE:
        return CoPE(site.head_dim, PLACES, init_std=1.0)

    def oracle_attention(
        self,
        mechanism: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: Coordinates,
        keys: Coordinates,
        allowed: Tensor | None,
    ) -> Tensor:
        bias = contextual(mechanism.pos_emb, q, k, allowed)
        return oracle.attention(q, k, v, bias=bias, allowed=allowed)[0]


def counts(q: Tensor, k: Tensor, allowed: Tensor | None = None, places: int = 64) -> Tensor:
    """The places themselves: vector p is (0, p), and the queries' second number is 1."""
    own = CoPE(2, places).to(q.dtype)
    with torch.no_grad():
        own.pos_emb[:, 1] = torch.arange(places)
    (term,) = own.terms(Sequence(q.shape[2]), Sequence(k.shape[2])).of(RowRule)
    seen = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool) if allowed is None else allowed
    return term(q, k, seen, slice(0, q.shape[2])).detach()


# counting


def test_counts_what_the_query_cares_about() -> None:
    """Five keys, of which the first, second and fourth match (gate 1) and the others do not (gate 0)."""
    q = torch.tensor([3000.0, 1.0]).expand(1, 1, 5, 2).double()
    k = torch.zeros(1, 1, 5, 2).double()
    k[0, 0, :, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    causal = torch.ones(5, 5, dtype=torch.bool).tril()[None, None]
    assert counts(q, k, causal)[0, 0].tolist() == [
        [1, 0, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [3, 2, 1, 1, 0],
        [3, 2, 1, 1, 0],
    ]
    assert counts(q, k)[0, 0].tolist() == [[3, 2, 1, 1, 0]] * 5, "without a mask all that follow count"
    assert counts(q, k, places=3)[0, 0].tolist() == [[2, 2, 1, 1, 0]] * 5, "the last place is shared"
    assert counts(q, k, places=1)[0, 0].tolist() == [[0] * 5] * 5


def test_indifferent_gates_count_tokens_by_halves() -> None:
    """Where nothing matches every gate is 1/2: CoPE then is a relative position."""
    q, k = torch.tensor([0.0, 1.0]).expand(1, 1, 6, 2), torch.zeros(1, 1, 6, 2)
    causal = torch.ones(6, 6, dtype=torch.bool).tril()[None, None]
    found = counts(q, k, causal)[0, 0]
    for i, j in itertools.product(range(6), range(6)):
        assert float(found[i, j]) == (0.5 * (i - j + 1) if j <= i else 0)


def test_gates_have_their_own_scale() -> None:
    """1/sqrt(D), whatever scale attention is given."""
    q, k = torch.tensor([3.0, 1.0]).expand(1, 1, 1, 2), torch.tensor([0.5, 0.0]).expand(1, 1, 1, 2)
    assert float(counts(q, k)) == pytest.approx(1 / (1 + math.exp(-1.5 / math.sqrt(2))), rel=1e-6)
    own = CoPE(4, PLACES, init_std=1.0).double()
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    wanted = oracle.attention(q, k, v, bias=contextual(own.pos_emb, q, k, None), scale=1.0)[0]
    torch.testing.assert_close(attention(q, k, v, position=own, queries=Sequence(5), scale=1.0), wanted)


# masks


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_causal_by_loops(backend: str, dtype: torch.dtype) -> None:
    """Grouped keys, padding and a causal mask: output and all gradients."""
    own = CoPE(4, PLACES, init_std=1.0).to(dtype)
    q, k, v = (torch.randn(2, heads, 6, 4).to(dtype).requires_grad_() for heads in (4, 2, 2))
    valid = torch.tensor([[False, True, True, True, True, True], [True, True, False, True, True, False]])
    mask = Mask.padding(valid) & Mask.causal()
    leaves = {"q": q, "k": k, "v": v, "pos_emb": own.pos_emb}
    upstream = torch.randn(2, 4, 6, 4).to(dtype)
    output = attention(q, k, v, position=own, queries=Sequence(6), mask=mask, backend=backend)
    assert isinstance(output, Tensor)
    found = parity.with_gradients(output, leaves, upstream)

    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    allowed = torch.ones(6, 6, dtype=torch.bool).tril() & (valid[:, :, None] & valid[:, None, :])
    bias = contextual(wide["pos_emb"], wide["q"], wide["k"], allowed[:, None])
    theirs = oracle.attention(wide["q"], wide["k"], wide["v"], bias=bias, allowed=allowed[:, None])[0]
    exact = parity.with_gradients(theirs, wide, upstream.double())
    parity.agree("cope", "loops", found, exact, dtype=dtype)


def test_what_is_hidden_does_not_count() -> None:
    """Other keys after the query, or in another document, change nothing."""
    own = CoPE(4, PLACES, init_std=1.0).double()
    q, k, v = torch.randn(3, 1, 2, 6, 4, dtype=torch.float64)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, :, 4:], other_v[:, :, 4:] = torch.randn(2, 1, 2, 2, 4, dtype=torch.float64) * 5
    for mask, rows in ((Mask.causal(), slice(0, 4)), (Mask.packed(torch.tensor([0, 0, 0, 0, 1, 1])), slice(0, 4))):
        here, there = (
            attention(q, *kv, position=own, queries=Sequence(6), mask=mask) for kv in ((k, v), (other_k, other_v))
        )
        assert isinstance(here, Tensor)
        assert isinstance(there, Tensor)
        assert torch.equal(here[:, :, rows], there[:, :, rows])
        assert not torch.equal(here[:, :, 4:], there[:, :, 4:])


def test_a_block_of_rows_is_the_same_rows() -> None:
    own = CoPE(4, PLACES, init_std=1.0).double()
    q, k = torch.randn(2, 2, 3, 7, 4, dtype=torch.float64)
    (term,) = own.terms(Sequence(7)).of(RowRule)
    allowed = torch.ones(7, 7, dtype=torch.bool).tril()[None, None]
    whole = term(q, k, allowed, slice(0, 7))
    blocks = [term(q[:, :, a:b], k, allowed[:, :, a:b], slice(a, b)) for a, b in ((0, 3), (3, 4), (4, 7))]
    torch.testing.assert_close(torch.cat(blocks, dim=2), whole, rtol=1e-13, atol=1e-13)


# a module like any other


def test_coordinates_are_not_looked_at() -> None:
    own = CoPE(4, PLACES, init_std=1.0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    outputs = [
        attention(q, k, v, position=own, queries=where)
        for where in (Sequence(6), Sequence(6, start=90), Sequence(4, prefix=2), Grid(2, 3))
    ]
    assert all(torch.equal(output, outputs[0]) for output in outputs)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_never_a_vector_a_pair(backend: str) -> None:
    """Of 256 tokens and width 64: two numbers a pair, a place's and the next one's."""
    assert largest_tensor(CoPE(64, 64, init_std=1.0), backend) <= 2 * 256 * 256


def test_from_site_and_growth() -> None:
    own = CoPE.from_site(Site(3, 4, 12, Sequence(5)))
    assert {name: tuple(x.shape) for name, x in own.state_dict().items()} == {"pos_emb": (64, 4)}
    assert 0 < own.pos_emb.std() < 0.05
    assert not CoPE(4).pos_emb.any(), "zeros, as published"
    assert own.growth == ("as is",)
    assert own.grow(Sequence(900), "as is") is own
    assert repr(own).startswith("CoPE(head_dim=")
