"""T5's relative bias: buckets, their edges and their sign, and the scale of 1."""

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.published import attended
from position.suites import OffsetSuite
from relpos import RelativePositionBias, Scale, Sequence, Site, T5Bias
from relpos.testing import oracle

BUCKETS, MOST = 8, 9  # so that the cases' offsets reach every bucket


class T5(OffsetSuite):
    axes: ClassVar[tuple[int, ...]] = (1, 2)
    raster = True
    translation_invariant = True
    bidirectional: ClassVar[bool] = True
    scaled: ClassVar[bool] = True

    def build(self, site: Site) -> T5Bias:
        return T5Bias(
            site.num_heads,
            num_buckets=BUCKETS,
            max_distance=MOST,
            bidirectional=self.bidirectional,
            scaled=self.scaled,
            init_std=1.0,
        )

    def value(self, own: Any, *offset: int) -> Tensor:
        row: Tensor = own.relative_attention_bias[oracle.t5_bucket(offset[0], BUCKETS, MOST, self.bidirectional)]
        return row

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        return {**super().said(own, q, k, queries, keys), "scale": None if self.scaled else 1.0}


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
@pytest.mark.parametrize(("buckets", "most"), [(32, 20), (64, 128), (16, 100), (8, 5), (4, 3), (12, 256)])
def test_every_distance(buckets: int, most: int, bidirectional: bool) -> None:
    """Against whole numbers, up to four times the largest distance on both sides."""
    offsets = torch.arange(-4 * most, 4 * most + 1)
    found = T5Bias(1, num_buckets=buckets, max_distance=most, bidirectional=bidirectional).bucket(offsets)
    assert found.tolist() == [oracle.t5_bucket(n, buckets, most, bidirectional) for n in offsets.tolist()]
    assert (found.min(), found.max()) == (0, buckets - 1)


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


# scale


def test_published_scale_is_one() -> None:
    assert [term.value for term in T5Bias(3).terms(Sequence(4)).of(Scale)] == [1.0]
    total = T5Bias(3) + T5Bias(3) + RelativePositionBias(3, seq_len=4)
    assert [term.value for term in total.terms(Sequence(4)).of(Scale)] == [1.0], "they share one, and a sum keeps it"


def test_the_scale_of_a_call_goes_before() -> None:
    published, usual = T5Bias(3), T5Bias(3, scaled=True)
    usual.relative_attention_bias = published.relative_attention_bias
    q, k, v = torch.randn(3, 1, 3, 4, 4, dtype=torch.float64)
    told = attended(published, q, k, v, queries=Sequence(4), scale=0.5)
    torch.testing.assert_close(attended(usual, q, k, v, queries=Sequence(4)), told)
