"""iRPE: the piecewise index, five ways to a bucket, and what they are read by."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from conformance.suite import LibrarySuite
from position.published import largest_tensor
from relpos import Grid, ImageRelativePosition, LineBias, LineVectors, Positions, Sequence, Site
from relpos.core import Coordinates, Offsets
from relpos.testing import SuiteCase, oracle

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


class ImageRPE(LibrarySuite):
    axes = (2,)
    translation_invariant = True
    method: ClassVar[Any] = "product"
    ratio: ClassVar[float] = 1.9
    contextual: ClassVar[bool] = True
    every: ClassVar[int] = 1

    def cases(self) -> list[SuiteCase]:
        return super().cases()[:: self.every]

    def build(self, site: Site) -> ImageRelativePosition:
        heads = 1 if self.preset else site.num_heads
        width = site.head_dim if self.contextual else None
        return ImageRelativePosition(heads, width, method=self.method, ratio=self.ratio, init_std=1.0)

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
        def entry(a: Any, b: Any) -> Tensor:
            if a is None or b is None:
                return mechanism.table[:, -1]
            return mechanism.table[:, bucket(a[0] - b[0], a[1] - b[1], self.method, self.ratio)]

        table = [[entry(a, b) for b in oracle.places(keys)] for a in oracle.places(queries)]
        if self.contextual:
            bias = oracle.meet(q, table) * q.shape[-1] ** -0.5
        else:
            bias = torch.stack([torch.stack(row, dim=-1) for row in table], dim=-2)[None]
        return oracle.attention(q, k, v, bias=bias, allowed=allowed)[0]


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


# the piecewise index


@pytest.mark.parametrize("ratio", RATIOS)
def test_every_distance(ratio: float) -> None:
    own = ImageRelativePosition(1, None, ratio=ratio)
    x = torch.arange(-40 * math.ceil(ratio), 40 * math.ceil(ratio) + 1)
    found = own.piecewise(x)
    assert found.tolist() == [piecewise(one, ratio) for one in x.tolist()]
    assert found.max() == int(2 * ratio) == -found.min()
    assert (found.diff() >= 0).all()


@pytest.mark.parametrize("ratio", [*RATIOS, 1.5, 4.5, 6, 12.5])
def test_every_distance_as_published(ratio: float) -> None:
    """In float32 as the authors compute it, and halfway as they round: of ratio 1.5 distance 6 is at 2.5."""
    x = torch.arange(1, 20 * math.ceil(ratio))
    far = ratio + torch.log(x / ratio) / math.log(8 * ratio / ratio) * (2 * ratio - ratio)
    theirs = torch.where(x <= ratio, x, far.round().clip(max=2 * ratio)).long()
    assert torch.equal(ImageRelativePosition(1, None, ratio=ratio).piecewise(x), theirs)


def test_by_hand() -> None:
    """alpha 2, beta 4, gamma 16: up to 2 as it is, then 2 + 2 log8(x / 2): 3.4 at 9 and 3.5 from 9.5 on."""
    own = ImageRelativePosition(1, None, ratio=2)
    assert own.piecewise(torch.arange(-3, 12)).tolist() == [-2, -2, -1, 0, 1, 2, 2, 3, 3, 3, 3, 3, 3, 4, 4]
    assert own.piecewise(torch.tensor([16, 1000])).tolist() == [4, 4]


# buckets


def line(*offsets: tuple[int, int]) -> Offsets:
    axes = torch.tensor(offsets)
    return Offsets(axes, torch.zeros(len(offsets), dtype=torch.long), (-20, -20), (20, 20))


def test_the_product_is_directed_and_the_distance_is_not() -> None:
    around = line((2, 1), (-2, 1), (2, -1), (-2, -1), (1, 2), (-1, -2))
    assert len(ImageRelativePosition(1, None).bucket(around).unique()) == 6
    assert len(ImageRelativePosition(1, None, method="euclidean").bucket(around).unique()) == 1
    assert len(ImageRelativePosition(1, None, method="rows").bucket(around).unique()) == 4


@pytest.mark.parametrize(
    ("method", "ratio", "count"),
    [("product", 1.9, 49), ("euclidean", 20, 41), ("quantization", 33, 67), ("rows", 1.9, 7), ("columns", 20, 81)],
)
def test_counts(method: Any, ratio: float, count: int) -> None:
    """ctx_product_50: 7 x 7 and the class token's."""
    own = ImageRelativePosition(4, 8, method=method, ratio=ratio)
    assert own.buckets == count
    assert own.table.shape == (4, count + 1, 8)
    assert not own.table.any(), "zeros, as published"
    far = [*range(-5, 6), *range(-160, 161, 2)]
    found = own.bucket(line(*((row, column) for row in far for column in far)))
    assert found.min() == 0
    assert found.max() == count - 1


def test_euclidean_rounds_the_distance_first() -> None:
    """(1, 1) is at 1.41, which rounds to 1; (2, 2) at 2.83, to 3. The squares are 2 and 8."""
    where = line((0, 0), (1, 1), (2, 2), (3, 4))
    assert ImageRelativePosition(1, None, method="euclidean", ratio=5).bucket(where).tolist() == [0, 1, 3, 5]
    assert ImageRelativePosition(1, None, method="quantization", ratio=25).bucket(where).tolist() == [0, 2, 8, 25]


def test_cross_is_a_sum() -> None:
    """Rows and columns, each with a table: numbers join into one line."""
    rows, columns = (
        ImageRelativePosition(2, None, method=method, init_std=1.0)  # type: ignore[arg-type]
        for method in ("rows", "columns")
    )
    (term,) = (rows + columns).terms(Grid(3, 4, prefix=1)).of(LineBias)
    parts = [each.terms(Grid(3, 4, prefix=1)).of(LineBias)[0].values for each in (rows, columns)]
    assert torch.equal(term.values, parts[0] + parts[1])


def test_all_pairs_with_a_prefix_share_the_last_bucket() -> None:
    own = ImageRelativePosition(2, None, init_std=1.0)
    (term,) = own.terms(Grid(2, 3, prefix=2)).of(LineBias)
    bias = term.values[:, term.lines.index()]
    last = own.table[:, -1]
    for pairs in (bias[:, :2].flatten(1), bias[:, :, :2].flatten(1)):
        assert torch.equal(pairs, last[:, None].expand_as(pairs))
    assert not (bias[:, 2:, 2:] == last[:, None, None]).any()


# a module like any other


@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_never_a_vector_a_pair(backend: str) -> None:
    own = ImageRelativePosition(1, 64)
    grid = Grid(16, 16)

    class Raster(ImageRelativePosition):
        def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Any:
            return own.terms(grid)

    assert largest_tensor(Raster(1, 64), backend) <= 2 * 256 * 256


def test_from_site_and_growth() -> None:
    site = Site(3, 4, 12, Grid(2, 5))
    own = ImageRelativePosition.from_site(site)
    assert own.table.shape == (1, 50, 4)
    assert own.terms(Grid(2, 5)).of(LineVectors)[0].scaled
    assert ImageRelativePosition.from_site(site, "euclidean", 20.0).table.shape == (1, 42, 4)
    assert own.growth == ("as is",)
    assert own.grow(Grid(9, 9), "as is") is own
    assert repr(own).startswith("ImageRelativePosition(num_heads=1, head_dim=4")
    with pytest.raises(ValueError, match="rows and columns"):
        own.terms(Sequence(10))
    cells = Positions(torch.tensor([[0, 1], [30, 2]]), low=(0, 0), high=(40, 40))
    assert own.terms(cells).of(LineVectors)[0].index is not None


def test_can_be_built_without_memory() -> None:
    with torch.device("meta"):
        own = ImageRelativePosition(3, 4)
    assert own.table.is_meta
    assert own.piecewise(torch.tensor([-9, 0, 2, 30])).tolist() == [-3, 0, 2, 3]
