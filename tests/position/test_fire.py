"""FIRE: the share of the query's place, its threshold, and what a start means to it."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from position.published import largest_tensor
from relpos import FIREBias, Grid, Mask, Positions, Sequence, Site, attention
from relpos.core import Coordinates, RowRule, at_least_float32
from relpos.engines import attention_weights
from relpos.position.saved import is_settings
from relpos.testing import oracle


class TestFIRE(LibrarySuite):
    axes = (1,)
    causal = True
    preset = "fire"

    def build(self, site: Site) -> FIREBias:
        own = FIREBias(site.num_heads, hidden_dim=5, c=0.8, threshold=2.5)  # so that places lie on both sides of it
        torch.nn.init.constant_(own.multiplier, 1.3)
        for parameter in own.mlp.parameters():
            torch.nn.init.normal_(parameter, std=0.7)  # with more, the gradient of c is a difference of large terms
        return own

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        """Li et al. 2024, equation 5 with the code's 1e-6, one unit of the network at a time."""
        c, threshold = abs(mechanism.c), 2.5 * abs(mechanism.multiplier)
        first, _, second = mechanism.mlp
        entries = []
        for query in oracle.places(queries):
            for key in oracle.places(keys):
                if query is None or key is None:
                    entries.append(torch.zeros_like(second.bias))
                    continue
                reach = query[0] if query[0] > threshold else threshold
                share = torch.log(1 + c * abs(query[0] - key[0])) / (torch.log(1 + c * reach) + 1e-6)
                total = second.bias
                for unit in range(5):
                    lit = first.weight[unit, 0] * share + first.bias[unit]
                    if lit > 0:
                        total = total + second.weight[:, unit] * lit
                entries.append(total)
        return torch.stack(entries, dim=-1).view(-1, queries.count, keys.count)


def made(c: float = 1.0, threshold: float = 2.0) -> FIREBias:
    """Whose network returns what it is given: the bias is the share."""
    own = FIREBias(1, hidden_dim=1, c=c, threshold=threshold).double()
    for name, parameter in own.mlp.named_parameters():
        torch.nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)
    return own


def bias(own: FIREBias, queries: Coordinates, keys: Coordinates | None = None) -> Tensor:
    """`[1 or B, H, N, M]`."""
    keys_or_same = queries if keys is None else keys
    (term,) = own.terms(queries, keys).of(RowRule)
    heads = own.mlp[2].out_features
    q, k = (torch.zeros(1, heads, side.count, 4, dtype=own.c.dtype) for side in (queries, keys_or_same))
    if isinstance(queries, Positions) and queries.values.dim() == 3:
        q, k = (x.expand(queries.values.shape[0], -1, -1, -1) for x in (q, k))
    allowed = torch.ones(1, 1, queries.count, keys_or_same.count, dtype=torch.bool)
    return term(q, k, allowed, slice(0, queries.count)).detach()


# the formula


def test_by_hand() -> None:
    """c = 1, L = 2: up to place 2 over log 3, then over the logarithm of one more than the place."""
    found = bias(made(), Sequence(8))[0, 0]
    for i in range(8):
        for j in range(8):
            wanted = math.log(1 + abs(i - j)) / (math.log(1 + max(i, 2)) + 1e-6)
            assert float(found[i, j]) == pytest.approx(wanted, rel=1e-12)
    assert float(found[7, 0]) == pytest.approx(1, rel=1e-6), "the first key is all the way back"
    assert float(found[2, 2]) == 0


@pytest.mark.parametrize("c", [0.01, 0.1, 5.0])
def test_what_lies_behind_a_query_is_never_outside_0_to_1(c: float) -> None:
    for start in (0, 10, 1000, 1_000_000):
        found = bias(made(c, 512.0), Sequence(1, start=start), Sequence(start + 1) if start < 5000 else Sequence(9))
        assert found.min() >= 0
        assert found.max() <= 1


def test_signs_of_c_and_threshold_do_not_matter() -> None:
    own = FIREBias(3, threshold=2.0)
    other = copy.deepcopy(own)
    with torch.no_grad():
        other.c.neg_()
        other.multiplier.neg_()
    assert torch.equal(bias(own, Sequence(6)), bias(other, Sequence(6)))


# places


def test_a_start_is_a_place() -> None:
    """Up to the threshold moving both sides changes nothing; beyond, the same offset counts for less."""
    own = made(threshold=20.0)
    assert torch.equal(bias(own, Sequence(5)), bias(own, Sequence(5, start=15)))
    assert torch.equal(bias(own, Sequence(5)), bias(own, Sequence(5, start=-9)))
    later = bias(own, Sequence(5, start=40))
    below = torch.ones(5, 5).tril(-1).bool()
    assert (later[0, 0][below] < bias(own, Sequence(5))[0, 0][below]).all()


def test_a_part_of_the_rows_is_the_same_rows() -> None:
    """Chunked prefill: queries that start late against all keys; and a rule asked for a block of rows."""
    own = FIREBias(2, threshold=3.0).double()
    whole = bias(own, Sequence(9))
    torch.testing.assert_close(bias(own, Sequence(4, start=5), Sequence(9)), whole[:, :, 5:], rtol=0, atol=1e-14)
    (term,) = own.terms(Sequence(9)).of(RowRule)
    q, allowed = torch.zeros(1, 2, 9, 4).double(), torch.ones(1, 1, 9, 9, dtype=torch.bool)
    blocks = [term(q[:, :, a:b], q, allowed[:, :, a:b], slice(a, b)) for a, b in ((0, 4), (4, 5), (5, 9))]
    torch.testing.assert_close(torch.cat(blocks, dim=2).detach(), whole, rtol=0, atol=1e-14)


def test_batched_places_and_prefixes() -> None:
    own = FIREBias(2, threshold=3.0).double()
    places = torch.tensor([[0, 1, 2], [5, 9, 0]])
    together = bias(own, Positions(places, low=0, high=9, prefix=2))
    assert together.shape == (2, 2, 5, 5)
    for b in range(2):
        alone = bias(own, Positions(places[b], low=0, high=9, prefix=2))
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=1e-14)
    assert not together[:, :, :2].any()
    assert not together[:, :, :, :2].any()
    assert together[:, :, 2:, 2:].all()


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_packed_documents_have_places_of_their_own(backend: str) -> None:
    """In one row, each from 0: not what a row that counts on would say."""
    own = made(threshold=1.0)
    q, k, v = torch.randn(3, 1, 1, 6, 4, dtype=torch.float64)
    segments, places = torch.tensor([0, 0, 1, 1, 1, 1]), torch.tensor([0, 1, 0, 1, 2, 3])
    mask = Mask.packed(segments) & Mask.causal()
    packed = attention(q, k, v, position=own, queries=Positions(places, low=0, high=3), mask=mask, backend=backend)
    parts = [
        attention(*(x[:, :, a:b] for x in (q, k, v)), position=own, queries=Sequence(b - a), mask=Mask.causal())  # type: ignore[misc]
        for a, b in ((0, 2), (2, 6))
    ]
    torch.testing.assert_close(packed, torch.cat(parts, dim=2))  # type: ignore[arg-type]
    counted = attention(q, k, v, position=own, queries=Sequence(6), mask=mask)
    assert not torch.allclose(packed, counted, atol=1e-3)  # type: ignore[arg-type]


# a module like any other


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_no_more_than_the_network_for_every_pair(backend: str) -> None:
    """Of 256 tokens: the hidden units of every pair, once for all."""
    assert largest_tensor(FIREBias(1, hidden_dim=32), backend) <= 32 * 256 * 256


def test_starts_as_published() -> None:
    own = FIREBias.from_site(Site(6, 4, 24, Sequence(9)))
    assert (own.c.item(), own.multiplier.item(), own.threshold) == (pytest.approx(0.1), 1.0, 512.0)
    shapes = {name: tuple(x.shape) for name, x in own.state_dict().items() if not is_settings(name)}
    assert shapes == {
        "c": (1,),
        "multiplier": (1,),
        "mlp.0.weight": (32, 1),
        "mlp.0.bias": (32,),
        "mlp.2.weight": (6, 32),
        "mlp.2.bias": (6,),
    }
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    assert bias(own, Grid(2, 3)).equal(bias(own, Sequence(6))), "a grid in raster order"
    assert repr(own).startswith("FIREBias(num_heads=")


def test_bfloat16_parameters_compute_in_float32() -> None:
    """Place 1,995 is no 1,992 there."""
    own = made(0.5, 3.0).bfloat16()
    where = Sequence(1, start=1995), Sequence(1, start=7)
    (term,) = own.terms(*where).of(RowRule)
    q = torch.zeros(1, 1, 1, 4)
    found = term(q, q, torch.ones(1, 1, 1, 1, dtype=torch.bool), slice(0, 1))
    assert found.dtype == torch.float32
    assert all(x.dtype == at_least_float32(x).dtype for x in term.parameters if x.is_floating_point())
    assert found.item() == pytest.approx(math.log(1 + 0.5 * 1988) / (math.log(1 + 0.5 * 1995) + 1e-6), rel=1e-6)


def test_prefix_tokens_are_near_to_everything() -> None:
    zeros = torch.zeros(1, 2, 7, 4)
    weights = attention_weights(zeros, zeros, position=FIREBias(2).terms(Sequence(6, prefix=1)))[0]
    torch.testing.assert_close(weights[:, 0], torch.full((2, 7), 1 / 7))


def test_weights_of_before_have_no_axis() -> None:
    saved = FIREBias(4, c=0.3).state_dict()
    for name in ("c", "multiplier"):
        saved[name] = saved[name][0] * 2
    fresh = FIREBias(4)
    fresh.load_state_dict(saved)
    assert fresh.c.shape == (1,)
    assert fresh.c.item() == pytest.approx(0.6)
    assert fresh.multiplier.item() == 2.0
    assert saved["c"].dim() == 0  # the caller's stays
