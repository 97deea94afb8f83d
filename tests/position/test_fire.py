"""FIRE: the share of the query's place, its threshold, and weights of before."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import FIREBias, Sequence, Site
from relpos.core import Coordinates, RowRule
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


def bias(own: FIREBias, queries: Sequence, keys: Sequence | None = None) -> Tensor:
    """`[1, H, N, M]`."""
    n, m = queries.count, (queries if keys is None else keys).count
    (term,) = own.terms(queries, keys).of(RowRule)
    q, k = (torch.zeros(1, own.num_heads, count, 4, dtype=own.c.dtype) for count in (n, m))
    return term(q, k, torch.ones(1, 1, n, m, dtype=torch.bool), slice(0, n)).detach()


@pytest.mark.parametrize("c", [0.01, 5.0])
def test_what_lies_behind_a_query_is_never_outside_0_to_1(c: float) -> None:
    """What the network is given, which here returns it."""
    own = FIREBias(1, hidden_dim=1, c=c).double()
    for name, parameter in own.mlp.named_parameters():
        torch.nn.init.constant_(parameter, 0.0 if "bias" in name else 1.0)
    for start in (0, 10, 1000, 1_000_000):
        found = bias(own, Sequence(1, start=start), Sequence(min(start, 1000) + 1))
        assert found.min() >= 0
        assert found.max() <= 1


def test_signs_of_c_and_threshold_do_not_matter() -> None:
    own = FIREBias(3, threshold=2.0)
    other = copy.deepcopy(own)
    with torch.no_grad():
        other.c.neg_()
        other.multiplier.neg_()
    assert torch.equal(bias(own, Sequence(6)), bias(other, Sequence(6)))


def test_weights_of_before_have_no_axis() -> None:
    saved = FIREBias(4, c=0.3).state_dict()
    for name in ("c", "multiplier"):
        saved[name] = saved[name][0] * 2
    fresh = FIREBias(4)
    fresh.load_state_dict(saved)
    assert fresh.c.tolist() == [pytest.approx(0.6)]
    assert fresh.multiplier.tolist() == [2.0]
    assert saved["c"].dim() == 0  # the caller's stays
