"""T5's relative bias: a learned number for each bucket of distances, added to the scores.

    score[h, i, j] += relative_attention_bias[bucket(j - i), h]

T5 writes the offset as key - query; here it is query - key everywhere, and this file converts once. With
`bidirectional` half the buckets are for keys up to the query and the upper half for keys after it; otherwise all are
for the past and every later key shares bucket 0 (a causal mask hides it). In its half, of size n, distance d has

    d                                                            for d < n / 2
    n / 2 + log(d / (n / 2)) / log(max_distance / (n / 2)) * n / 2     rounded down, at most n - 1, beyond

The logarithm is computed once, in float32 as published, for every distance up to `max_distance`. Only integers remain,
the same on every device and in every dtype.

Source: Raffel et al. 2020, section 2.1; mesh-tensorflow and Hugging Face `T5Attention`. T5 does not scale scores by
1/sqrt(D): the mechanism sets that scale, unless `scaled=True`. In T5 layer 0 owns the table and later layers share it;
cross-attention has none.

Not to be confused with DeBERTa's buckets, which round up, or with a plain table (`RelativePositionBias`).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from relpos.core import Offsets, Scale, Term, constant
from relpos.core.checks import fail, require_flag, require_int
from relpos.core.private import real_numbers
from relpos.position.base.mechanism import AS_IS
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.table_bias import TableBias
from relpos.position.base.tables import require_std, start_table

_UNSCALED = Scale(1.0)


def _edges(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of bucket 1, 2, ... of one half; empty buckets begin where the next one does."""
    exact = buckets // 2
    distance = torch.arange(max_distance + 1, device="cpu")
    ratio = torch.log(distance.float() / exact) / math.log(max_distance / exact)
    beyond = (ratio.clamp(min=0) * (buckets - exact)).long()  # before the sum: exact + 39.999999 rounds up in float32
    far = (exact + beyond).clamp(max=buckets - 1)
    bucket = torch.where(distance < exact, distance, far)
    return tuple(torch.searchsorted(bucket, torch.arange(1, buckets, device="cpu")).tolist())


class T5Bias(TableBias):
    """A learned bias per bucket of distances and head.

    `score[h, i, j] += relative_attention_bias[bucket(i - j), h]`: near distances have a bucket each, far ones share.
    Any length; a grid is read in raster order.

    Source: Raffel et al. 2020, section 2.1.

    Args:
        num_heads: query heads, H.
        num_buckets: rows of the table.
        max_distance: from here on all distances share the last bucket, which begins a little before.
        bidirectional: whether keys after the query have buckets of their own; False in decoders.
        scaled: False for T5's own scale of 1; True for 1/sqrt(D), as in other mechanisms.
        init_std: standard deviation that the table starts from; 0 for zeros.

    Attributes:
        relative_attention_bias: `[num_buckets, num_heads]`, the weight of T5's embedding of that name.

    Raises:
        ValueError: too few buckets, or a `max_distance` within those that stand for one distance each.

    Examples:
        >>> bias = relpos.T5Bias(num_heads=8, bidirectional=False)
        >>> bias.bucket(torch.tensor([0, 1, 15, 16, 20, 127, 500])).tolist()
        [0, 1, 15, 16, 17, 31, 31]
        >>> q = k = v = torch.randn(1, 8, 10, 64)
        >>> relpos.attention(q, k, v, position=bias, queries=relpos.Sequence(10), mask=relpos.Mask.causal()).shape
        torch.Size([1, 8, 10, 64])
    """

    growth = (AS_IS,)
    saved_settings = ("max_distance", "bidirectional", "scaled")

    def __init__(
        self,
        num_heads: int,
        *,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        scaled: bool = False,
        init_std: float = 0.02,
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        for name, flag in (("bidirectional", bidirectional), ("scaled", scaled)):
            require_flag(flag, name)
        require_int(num_buckets, "num_buckets", at_least=4 if bidirectional else 2)
        if num_buckets % (4 if bidirectional else 2):
            wanted = "4 (half per direction, half of those exact)" if bidirectional else "2"
            fail(f"num_buckets to be a multiple of {wanted}", str(num_buckets), "T5 uses 32.")
        half = num_buckets // 2 if bidirectional else num_buckets
        require_int(max_distance, "max_distance", at_least=half // 2 + 1)
        require_std(init_std)
        self.num_heads, self.num_buckets, self.max_distance = num_heads, num_buckets, max_distance
        self.bidirectional, self.scaled, self.init_std = bidirectional, scaled, init_std
        self.relative_attention_bias = nn.Parameter(torch.empty(num_buckets, num_heads))
        with real_numbers():
            self._edges = _edges(half, max_distance)
        start_table(self.relative_attention_bias, init_std)

    @classmethod
    def from_site(cls, site: Site) -> Self:
        return cls(site.num_heads, bidirectional=not site.causal, scaled=True, init_std=site.init_std)

    def bucket(self, offsets: Int[Tensor, "*L"]) -> Int[Tensor, "*L"]:
        """The row of the table that each offset (query - key) reads."""
        edges = constant(self._edges, torch.int64, offsets.device)
        distance = offsets.abs() if self.bidirectional else offsets.clamp(min=0)
        bucket = torch.bucketize(distance, edges, right=True)
        return bucket + (offsets < 0) * (len(self._edges) + 1) if self.bidirectional else bucket

    def _table(self) -> Float[Tensor, "R H"]:
        return self.relative_attention_bias

    def _row_of(self, offsets: Offsets) -> Int[Tensor, " L"]:
        return self.bucket(offsets.axes[:, 0])

    def _settings(self) -> Hashable:
        return self._edges, self.bidirectional

    def _extra_terms(self) -> tuple[Term, ...]:
        return () if self.scaled else (_UNSCALED,)


PRESETS = [
    Preset(
        name="t5",
        title="T5 bias",
        build=T5Bias.from_site,
        summary="Each head learns one bias per bucket of distances: near ones have their own, far ones share. Here it "
        "has the usual scale of 1/sqrt(D) instead of T5's 1; on images the distance follows the raster order.",
        source="Raffel et al. 2020, section 2.1; 32 buckets up to 128",
        token_axes=(1, 2),
        family="bias",
    )
]
