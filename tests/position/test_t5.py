"""T5's relative bias: buckets, their edges and their sign, and the scale of 1."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from relpos import Grid, LineBias, Mask, RelativePositionBias, Scale, Sequence, Site, T5Bias, attention
from relpos.core import Coordinates
from relpos.testing import SuiteCase, oracle

BUCKETS, MOST = 8, 9  # so that the cases' offsets reach every bucket


class T5(LibrarySuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    translation_invariant = True
    bidirectional: ClassVar[bool] = True
    scaled: ClassVar[bool] = True
    every: ClassVar[int] = 1  # of the cases

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def takes(self, case: Any) -> bool:
        return super().takes(case) and not (case.axes == 2 and case.irregular)  # those have no raster order

    def build(self, site: Site) -> T5Bias:
        return T5Bias(
            site.num_heads,
            num_buckets=BUCKETS,
            max_distance=MOST,
            bidirectional=self.bidirectional,
            scaled=self.scaled,
            init_std=1.0,
        )

    def oracle_bias(self, mechanism: Any, queries: Coordinates, keys: Coordinates) -> Tensor:
        table: Tensor = mechanism.relative_attention_bias
        rows = []
        for query in oracle.raster(queries):
            for key in oracle.raster(keys):
                if query is None or key is None:
                    rows.append(torch.zeros_like(table[0]))
                else:
                    rows.append(table[oracle.t5_bucket(query[0] - key[0], BUCKETS, MOST, self.bidirectional)])
        return torch.stack(rows, dim=-1).view(-1, queries.count, keys.count)

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
        bias = self.oracle_bias(mechanism, queries, keys)[None]
        scale = None if self.scaled else 1.0
        return oracle.attention(q, k, v, bias=bias, allowed=allowed, scale=scale)[0]

    def test_a_part_of_a_grid_reads_the_same_numbers(self) -> None:
        """In raster order a corner of a grid has no offsets of its own."""


class TestT5(T5):
    interpreted = True
    preset = "t5"


class TestT5Unscaled(T5):
    alike = True
    row = "t5 (scale 1)"
    every = 3
    sampled = 4
    scaled = False


class TestT5Causal(T5):
    alike = True
    axes = (1,)
    causal = True
    bidirectional = False
    preset = "t5"


class TestT5CausalUnscaled(TestT5Causal):
    row = "t5 (scale 1)"
    every = 3
    sampled = 2
    scaled = False


# buckets


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "most"), [(32, 128), (32, 20), (64, 128), (16, 100), (8, 5), (4, 3), (12, 256)])
def test_every_distance(buckets: int, most: int, bidirectional: bool) -> None:
    """Against whole numbers, up to four times the largest distance on both sides."""
    offsets = torch.arange(-4 * most, 4 * most + 1)
    found = T5Bias(1, num_buckets=buckets, max_distance=most, bidirectional=bidirectional).bucket(offsets)
    assert found.tolist() == [oracle.t5_bucket(n, buckets, most, bidirectional) for n in offsets.tolist()]
    assert found.min() == 0
    assert found.max() == buckets - 1


def test_edges_and_sign() -> None:
    """32 buckets up to 128: the published table, written out. A negative offset is a key after the query."""
    own = T5Bias(1)
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    assert own.bucket(torch.tensor(first)).tolist() == list(range(16))
    assert own.bucket(torch.tensor([edge - 1 for edge in first[1:]])).tolist() == list(range(15))
    assert own.bucket(-torch.tensor(first[1:])).tolist() == list(range(17, 32))
    assert own.bucket(torch.tensor([128, 10**6, -(10**6)])).tolist() == [15, 15, 31]
    causal = T5Bias(1, bidirectional=False)
    past = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    assert causal.bucket(torch.tensor(past)).tolist() == list(range(32))
    assert causal.bucket(torch.tensor([edge - 1 for edge in past[1:]])).tolist() == list(range(31))
    assert causal.bucket(torch.tensor([-1, -5, -500])).tolist() == [0, 0, 0], "a causal mask hides them"


def test_a_distance_just_below_an_edge() -> None:
    """Whole buckets are taken before they are counted on: 50 + 39.9999995 is 90 in float32, and the bucket is 89."""
    far = torch.tensor([1696, 1697, 1698])
    found = T5Bias(1, num_buckets=100, max_distance=4096, bidirectional=False).bucket(far)
    assert found.tolist() == [oracle.t5_bucket(n, 100, 4096, False) for n in far.tolist()] == [89, 89, 90]


def test_buckets_do_not_depend_on_the_models_dtype() -> None:
    offsets = torch.arange(-600, 601)
    own = T5Bias(1)
    before = own.bucket(offsets)
    assert torch.equal(copy.deepcopy(own).to(torch.bfloat16).bucket(offsets), before)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(own.bucket(offsets), before)


def test_far_apart() -> None:
    own = T5Bias(2, init_std=1.0)
    (term,) = own.terms(Sequence(3, start=100_000), Sequence(2)).of(LineBias)
    table = own.relative_attention_bias
    assert torch.equal(term.values, table[15][:, None].expand(2, term.values.shape[1]))


# scale


def test_published_scale_is_one() -> None:
    published, usual = T5Bias(3), T5Bias(3, scaled=True)
    assert [term.value for term in published.terms(Sequence(4)).of(Scale)] == [1.0]
    assert not usual.terms(Sequence(4)).of(Scale)
    with torch.no_grad():
        usual.relative_attention_bias.copy_(published.relative_attention_bias)
    q, k, v = torch.randn(3, 1, 3, 4, 4, dtype=torch.float64)
    ours = attention(q, k, v, position=published, queries=Sequence(4))
    torch.testing.assert_close(attention(2 * q, k, v, position=usual, queries=Sequence(4)), ours)  # 2 = sqrt(4)
    beaten = attention(q, k, v, position=published, queries=Sequence(4), scale=0.5)
    torch.testing.assert_close(attention(q, k, v, position=usual, queries=Sequence(4)), beaten)


def test_two_unscaled_share_a_scale_and_a_sum_keeps_it() -> None:
    total = T5Bias(3) + T5Bias(3) + RelativePositionBias(3, seq_len=4)
    assert [term.value for term in total.terms(Sequence(4)).of(Scale)] == [1.0]


def test_later_keys_do_not_matter_under_a_causal_mask() -> None:
    """All keys after the query share bucket 0 with the query itself."""
    own = T5Bias(2, bidirectional=False, init_std=1.0)
    (term,) = own.terms(Sequence(4)).of(LineBias)
    assert torch.equal(term.values[:, :4], own.relative_attention_bias[0][:, None].expand(2, 4))
    q, k, v = torch.randn(3, 1, 2, 4, 4)
    table = RelativePositionBias(2, seq_len=4)
    with torch.no_grad():
        table.relative_position_bias_table[:3] = 7.0  # whatever there is for the future
        table.relative_position_bias_table[3:] = own.relative_attention_bias[:4]
    ours = attention(q, k, v, position=own, queries=Sequence(4), mask=Mask.causal(), scale=0.5)
    theirs = attention(q, k, v, position=table, queries=Sequence(4), mask=Mask.causal(), scale=0.5)
    torch.testing.assert_close(ours, theirs)


# a module like any other


def test_from_site_and_growth() -> None:
    own = T5Bias.from_site(Site(3, 4, 12, Grid(2, 5)))
    assert own.bidirectional
    assert own.scaled
    assert not T5Bias.from_site(Site(3, 4, 12, Sequence(5), causal=True)).bidirectional
    assert own.relative_attention_bias.shape == (32, 3)
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    own.terms(Grid(9, 9))
    with pytest.raises(ValueError, match="growth rule"):
        own.grow(Grid(9, 9), "interpolated")


def test_can_be_built_without_memory() -> None:
    """Under the meta device, as large models are: the edges are numbers and not tensors."""
    with torch.device("meta"):
        own = T5Bias(3)
    assert own.relative_attention_bias.is_meta
    assert own.bucket(torch.tensor([91])).tolist() == [15]
