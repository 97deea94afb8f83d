"""CoPE: gates, counts, and what the mask does to them."""

import math
from typing import Any

import torch
from torch import Tensor

import parity
from conformance.suite import LibrarySuite
from position.published import BOTH, attended
from relpos import CoPE, Grid, Mask, Sequence, Site
from relpos.core import Coordinates, RowRule
from relpos.testing import oracle

PLACES = 4  # so that counts go beyond


def contextual(vectors: Tensor, q: Tensor, k: Tensor, allowed: Tensor | None) -> Tensor:
    """Golovneva et al. 2024, equations 3 to 5, a pair at a time: `[B, H, N, M]`."""
    batch, heads, n, width = q.shape
    k, last, rows = oracle.heads_of(k, heads), len(vectors) - 1, []
    for i in range(n):
        row, count = [], q.new_zeros(batch, heads)
        for j in reversed(range(k.shape[2])):
            gate = torch.sigmoid((q[:, :, i] * k[:, :, j]).sum(dim=-1) / math.sqrt(width))
            count = count + (gate if allowed is None else gate * allowed[..., i, j])
            place = count.clamp(max=last)
            low = place.detach().floor()
            below, above = (vectors[x.long()] for x in (low, (low + 1).clamp(max=last)))
            share = (place - low)[..., None]
            row.append((q[:, :, i] * (below * (1 - share) + above * share)).sum(dim=-1))
        rows.append(torch.stack(row[::-1], dim=-1))
    return torch.stack(rows, dim=-2)


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


def test_counts_what_the_query_cares_about() -> None:
    """Five keys, of which the first, second and fourth match (gate 1) and the others do not (gate 0). Vector p is
    (0, p), and the queries' second number is 1: the bias is the place."""

    def counts(allowed: Tensor, places: int) -> list[list[float]]:
        own = CoPE(2, places).double()
        with torch.no_grad():
            own.pos_emb[:, 1] = torch.arange(places)
        (term,) = own.terms(Sequence(5)).of(RowRule)
        found: list[list[float]] = term(q, k, allowed, slice(0, 5))[0, 0].tolist()
        return found

    q = torch.tensor([3000.0, 1.0]).expand(1, 1, 5, 2).double()
    k = torch.zeros(1, 1, 5, 2).double()
    k[0, 0, :, 0] = torch.tensor([1.0, 1.0, -1.0, 1.0, -1.0])
    every = torch.ones(1, 1, 5, 5, dtype=torch.bool)
    assert counts(every.tril(), 64) == [
        [1, 0, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [2, 1, 0, 0, 0],
        [3, 2, 1, 1, 0],
        [3, 2, 1, 1, 0],
    ]
    assert counts(every, 64) == [[3, 2, 1, 1, 0]] * 5, "without a mask all that follow count"
    assert counts(every, 3) == [[2, 2, 1, 1, 0]] * 5, "the last place is shared"
    assert counts(every, 1) == [[0] * 5] * 5


def test_gates_have_their_own_scale() -> None:
    """1/sqrt(D), whatever scale attention is given."""
    own = CoPE(4, PLACES, init_std=1.0).double()
    q, k, v = torch.randn(3, 1, 2, 5, 4, dtype=torch.float64)
    wanted = oracle.attention(q, k, v, bias=contextual(own.pos_emb, q, k, None), scale=1.0)[0]
    torch.testing.assert_close(attended(own, q, k, v, queries=Sequence(5), scale=1.0), wanted)


@BOTH
def test_what_is_hidden_does_not_count(backend: str, dtype: torch.dtype) -> None:
    """Grouped keys, padding and a causal mask, by loops: output and all gradients."""
    own = CoPE(4, PLACES, init_std=1.0).to(dtype)
    q, k, v = (torch.randn(2, heads, 6, 4).to(dtype).requires_grad_() for heads in (4, 2, 2))
    valid = torch.tensor([[False, True, True, True, True, True], [True, True, False, True, True, False]])
    mask = Mask.padding(valid) & Mask.causal()
    leaves = {"q": q, "k": k, "v": v, "pos_emb": own.pos_emb}
    upstream = torch.randn(2, 4, 6, 4).to(dtype)
    output = attended(own, q, k, v, queries=Sequence(6), mask=mask, backend=backend)
    found = parity.with_gradients(output, leaves, upstream)

    wide = {name: x.detach().double().requires_grad_() for name, x in leaves.items()}
    allowed = torch.ones(6, 6, dtype=torch.bool).tril() & (valid[:, :, None] & valid[:, None, :])
    bias = contextual(wide["pos_emb"], wide["q"], wide["k"], allowed[:, None])
    theirs = oracle.attention(wide["q"], wide["k"], wide["v"], bias=bias, allowed=allowed[:, None])[0]
    exact = parity.with_gradients(theirs, wide, upstream.double())
    parity.agree("cope", "loops", found, exact, dtype=dtype)


def test_coordinates_are_not_looked_at() -> None:
    own = CoPE(4, PLACES, init_std=1.0)
    q, k, v = torch.randn(3, 1, 2, 6, 4)
    here = attended(own, q, k, v, queries=Sequence(6))
    for where in (Sequence(6, start=90), Sequence(4, prefix=2), Grid(2, 3)):
        assert torch.equal(attended(own, q, k, v, queries=where), here)
