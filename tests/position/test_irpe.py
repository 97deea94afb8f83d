"""iRPE: the piecewise index, five ways to a bucket, and what they are read by."""

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from position.suites import PositionSuite
from relpos import ImageRelativePosition, Site
from relpos.core import Offsets
from relpos.testing import oracle

RATIOS = [0.4, 0.5, 1, 1.9, 2.3, 3, 7.5, 20, 33]


def piecewise(x: int, ratio: float) -> int:
    """Wu et al. 2021, equation 18, with alpha : beta : gamma = 1 : 2 : 8; Python rounds halves to even, too."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    if abs(x) <= alpha:
        return x
    far = round(alpha + math.log(abs(x) / alpha) / math.log(gamma / alpha) * (beta - alpha))
    return int(math.copysign(min(beta, far), x))  # beta is no whole number: rounded first, then cut at it, then down


def bucket(row: int, column: int, method: str, ratio: float) -> int:
    beta = int(2 * ratio)
    if method == "product":
        return (piecewise(row, ratio) + beta) * (2 * beta + 1) + piecewise(column, ratio) + beta
    if method == "euclidean":
        return piecewise(round(math.hypot(row, column)), ratio)
    if method == "quantization":
        return piecewise(row * row + column * column, ratio)
    return piecewise(row if method == "rows" else column, ratio) + beta


class ImageRPE(PositionSuite):
    axes = (2,)
    translation_invariant = True
    method: ClassVar[Any] = "product"
    ratio: ClassVar[float] = 1.9
    contextual: ClassVar[bool] = True

    def build(self, site: Site) -> ImageRelativePosition:
        heads = 1 if self.preset else site.num_heads
        width = site.head_dim if self.contextual else None
        return ImageRelativePosition(heads, width, method=self.method, ratio=self.ratio, init_std=1.0)

    def said(self, own: Any, q: Tensor, k: Tensor, queries: Any, keys: Any) -> dict[str, Any]:
        entries = own.table.unbind(dim=1)
        rows = self.by_offset(queries, keys, lambda *n: entries[bucket(*n, self.method, self.ratio)], entries[-1])
        if self.contextual:
            return {"bias": oracle.meet(q, rows) * q.shape[-1] ** -0.5}
        return {"bias": torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)[None]}


class TestProduct(ImageRPE):
    preset = "irpe_product"


class TestEuclidean(ImageRPE):
    alike = True
    preset = "irpe_euclidean"
    method = "euclidean"
    ratio = 1.4
    every = 2


class TestProductBias(ImageRPE):
    alike = True
    contextual = False
    every = 2
    sampled = 4


class TestQuantizationBias(ImageRPE):
    alike = True
    method = "quantization"
    ratio = 2.6
    contextual = False
    every = 3
    sampled = 4


class TestRows(ImageRPE):
    """Of the cross method, the rows; a vector a head."""

    alike = True
    method = "rows"
    every = 3
    sampled = 4


class TestColumns(ImageRPE):
    alike = True
    method = "columns"
    every = 3
    sampled = 4


@pytest.mark.parametrize("ratio", [*RATIOS, 1.5, 4.5, 6, 12.5])
def test_every_distance(ratio: float) -> None:
    """By loops, and in float32 as the authors compute it; halfway as they round: of ratio 1.5 distance 6 is at 2.5."""
    own = ImageRelativePosition(1, None, ratio=ratio)
    x = torch.arange(1, 40 * math.ceil(ratio) + 1)
    far = ratio + torch.log(x / ratio) / math.log(8 * ratio / ratio) * (2 * ratio - ratio)
    theirs = torch.where(x <= ratio, x, far.round().clip(max=2 * ratio)).long()
    assert torch.equal(own.piecewise(x), theirs)
    both = [*range(-len(x), 1), *x.tolist()]
    assert own.piecewise(torch.tensor(both)).tolist() == [piecewise(one, ratio) for one in both]


def between_tokens(offsets: Tensor) -> Offsets:
    return Offsets(offsets, torch.zeros(len(offsets), dtype=torch.long), (-160, -160), (160, 160))


@pytest.mark.parametrize(
    ("method", "ratio", "count"),
    [("product", 1.9, 49), ("euclidean", 20, 41), ("quantization", 33, 67), ("rows", 1.9, 7), ("columns", 20, 81)],
)
def test_counts(method: Any, ratio: float, count: int) -> None:
    """ctx_product_50: 7 x 7 and the class token's."""
    own = ImageRelativePosition(4, 8, method=method, ratio=ratio)
    assert own.table.shape == (4, count + 1, 8)
    assert not own.table.any(), "zeros, as published"
    far = torch.tensor([*range(-5, 6), *range(-160, 161, 2)])
    found = own.bucket(between_tokens(torch.cartesian_prod(far, far)))
    assert (found.min(), found.max()) == (0, count - 1)


@pytest.mark.parametrize(
    ("method", "ratio", "buckets"), [("euclidean", 5, [0, 1, 3, 5]), ("quantization", 25, [0, 2, 8, 25])]
)
def test_euclidean_rounds_the_distance_first(method: Any, ratio: float, buckets: list[int]) -> None:
    """(1, 1) is at 1.41, which rounds to 1; (2, 2) at 2.83, to 3. The squares are 2 and 8."""
    where = between_tokens(torch.tensor([(0, 0), (1, 1), (2, 2), (3, 4)]))
    assert ImageRelativePosition(1, None, method=method, ratio=ratio).bucket(where).tolist() == buckets
