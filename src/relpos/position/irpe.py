"""iRPE: image offsets in buckets that widen with distance, as a bias or times the query.

    g(x) = x                                                                                      |x| <= alpha
           sign(x) * min(beta, round(alpha + ln(|x| / alpha) / ln(gamma / alpha) * (beta - alpha)))     beyond

    product         bucket = (g(row), g(column))                 (2 beta + 1)^2 of them, directed
    euclidean       bucket = g(round(sqrt(row^2 + column^2)))    beta + 1, undirected
    quantization    bucket = g(row^2 + column^2)                 beta + 1, undirected
    rows, columns   bucket = g(row), g(column)                   2 beta + 1, directed; their sum is the "cross" method

    bias            score[h, i, j] += table[h, bucket]
    contextual      score[h, i, j] += scale * <q[i], table[h, bucket]>

beta is rounded down to a whole number. alpha : beta : gamma = 1 : 2 : 8, and alpha is the `ratio`: 1.9 makes 7 x 7
buckets of the product; published undirected ones have 20 (euclidean, cross) and 33 (quantization). All pairs with
prefix tokens share one more bucket, the last. Authors' tables of undirected methods have 2 beta + 1 rows, of which the
first beta are never read.

The logarithm is computed once, in float32 as published, for every distance up to where g reaches beta; only integers
remain. round goes to the even number halfway, as PyTorch's and NumPy's do.

Source: Wu et al. 2021 ("Rethinking and Improving Relative Position Encoding for Vision Transformer"), section 3.2 and
its code (`piecewise_index`, the encoding on keys). Not to be confused with T5's buckets (rounded down, one axis), or
with decomposed positions, which have no buckets and multiply the unscaled query.
"""

from __future__ import annotations

import math
from typing import Literal, Self, get_args

import torch
from jaxtyping import Int
from torch import Tensor, nn

from relpos.core import (
    Coordinates,
    Kind,
    LineBias,
    LineVectors,
    Offsets,
    Terms,
    at_least_float32,
    constant,
    lookup,
    require_coordinates,
)
from relpos.core.checks import NO_OTHER, fail, require_choice, require_int, require_number, shape_of
from relpos.core.private import real_numbers
from relpos.position.base.mechanism import AS_IS, Mechanism
from relpos.position.base.preset import Preset
from relpos.position.base.site import Site
from relpos.position.base.tables import require_std, start_table

_WIDEST = 2**20
"""Maximum ratio; above it, buckets cover more distances than any grid is wide."""
Method = Literal["product", "euclidean", "quantization", "rows", "columns"]


def _edges(ratio: float) -> tuple[int, ...]:
    """The smallest distance of bucket 1, 2, ..., beta."""
    alpha, beta, gamma = ratio, 2 * ratio, 8 * ratio
    cpu = torch.device("cpu")  # also where a model is built on the meta device
    distance = torch.arange(math.ceil(gamma) + 2, device=cpu)
    share = torch.log(distance.clamp(min=1) / alpha) / math.log(gamma / alpha)
    far = (alpha + share * (beta - alpha)).round()
    bucket = torch.where(distance <= alpha, distance, far).clamp(max=int(beta)).long()
    return tuple(torch.searchsorted(bucket, torch.arange(1, int(beta) + 1, device=cpu)).tolist())


class ImageRelativePosition(Mechanism):
    """iRPE: vectors or numbers on bucketed offsets of a grid.

    `score[h, i, j] += table[h, bucket]`, or `scale * <q[i], table[h, bucket]>` with vectors. Buckets widen with
    distance; any grid. Pairs with prefix tokens share the last bucket.

    Source: Wu et al. 2021 (iRPE), section 3.2.

    Args:
        num_heads: query heads, H; 1 for one table that all heads share, as in the authors' models.
        head_dim: width of a head, D; None for a bias, which does not depend on queries.
        method: "product", "euclidean", "quantization", "rows" or "columns".
        ratio: alpha; beta and gamma are 2 and 8 times it.
        init_std: standard deviation that the table starts from; 0 for zeros, as published.

    Attributes:
        table: `[H, buckets + 1, D]` of vectors, or `[H, buckets + 1]` of numbers; the last bucket is the prefix's.

    Raises:
        ValueError: an argument out of its range; in `terms`, coordinates without rows and columns.

    Examples:
        >>> irpe = relpos.ImageRelativePosition(num_heads=1, head_dim=16, method="product")
        >>> q = k = v = torch.randn(1, 4, 49, 16)
        >>> relpos.attention(q, k, v, position=irpe, queries=relpos.Grid(7, 7)).shape
        torch.Size([1, 4, 49, 16])
    """

    growth = (AS_IS,)
    saved_settings = ("method", "ratio")

    def __init__(
        self,
        num_heads: int,
        head_dim: int | None,
        *,
        method: Method = "product",
        ratio: float = 1.9,
        init_std: float = 0.0,
    ) -> None:
        super().__init__()
        require_int(num_heads, "num_heads", at_least=1)
        if head_dim is not None:
            require_int(head_dim, "head_dim", at_least=1)
        require_choice(method, "method", get_args(Method), f"{NO_OTHER} 'cross' adds rows and columns.")
        authors = "The authors use 1.9 for products and 20 for distances."
        require_number(ratio, "ratio", "above 0", authors)
        if ratio > _WIDEST:
            fail(f"ratio to be at most {_WIDEST:,}", shape_of(ratio), authors)
        require_std(init_std)
        self.method: Method = method
        self.num_heads, self.head_dim, self.ratio, self.init_std = num_heads, head_dim, ratio, init_std
        with real_numbers():
            self._edges = _edges(ratio)
        self.table = nn.Parameter(torch.empty(num_heads, self.buckets + 1, *([] if head_dim is None else [head_dim])))
        start_table(self.table, init_std)

    @classmethod
    def from_site(cls, site: Site, method: Method = "product", ratio: float = 1.9) -> Self:
        return cls(1, site.head_dim, method=method, ratio=ratio, init_std=site.init_std)

    @property
    def buckets(self) -> int:
        """The number of buckets, without the prefix's."""
        beta = len(self._edges)
        if self.method in ("euclidean", "quantization"):
            return beta + 1
        return 2 * beta + 1 if self.method != "product" else (2 * beta + 1) ** 2

    def piecewise(self, x: Int[Tensor, "*L"]) -> Int[Tensor, "*L"]:
        """g of whole numbers, from -beta to beta."""
        edges = constant(self._edges, torch.int64, x.device)
        return torch.bucketize(x.abs(), edges, right=True) * x.sign()

    def bucket(self, offsets: Offsets) -> Int[Tensor, " L"]:
        """The row of the table that each entry of the line reads."""
        row, column = offsets.axes.unbind(dim=1)
        beta = len(self._edges)
        square = row.square() + column.square()
        match self.method:
            case "product":
                bucket = (self.piecewise(row) + beta) * (2 * beta + 1) + self.piecewise(column) + beta
            case "euclidean":
                bucket = self.piecewise(square.double().sqrt().round().long())
            case "quantization":
                bucket = self.piecewise(square)
            case "rows":
                bucket = self.piecewise(row) + beta
            case "columns":
                bucket = self.piecewise(column) + beta
        return torch.where(offsets.kind == int(Kind.TOKENS), bucket, self.buckets)

    def terms(self, queries: Coordinates, keys: Coordinates | None = None) -> Terms:
        require_coordinates(queries, "queries")
        keys = queries if keys is None else keys
        require_coordinates(keys, "keys")
        if queries.axes != 2 or keys.axes != 2:
            fail("coordinates with rows and columns", f"{queries!r} and {keys!r}", "Use a Grid(rows, columns).")
        line = self._lines(queries, keys)
        bucket = self.bucket(line.offsets())
        table = at_least_float32(self.table)
        if table.dim() == 3:
            return Terms(LineVectors(table, bucket, line, side="query"))
        return Terms(LineBias(lookup(table.T, bucket).T, line))


PRESETS = [
    Preset(
        name="irpe_product",
        title="iRPE, product, contextual",
        build=ImageRelativePosition.from_site,
        summary="Row and column offsets fall into buckets that widen with distance, and the query is multiplied by "
        "one learned vector per pair of buckets. It has direction, and far offsets share parameters.",
        source="Wu et al. 2021, section 3.2; ratio 1.9, shared by the heads",
        token_axes=(2,),
        family="vectors",
    ),
    Preset(
        name="irpe_euclidean",
        title="iRPE, Euclidean, contextual",
        build=lambda site: ImageRelativePosition.from_site(site, "euclidean", 20.0),
        summary="The query is multiplied by one learned vector per rounded distance between two patches; far "
        "distances share buckets. It has no direction: left and right, above and below look alike.",
        source="Wu et al. 2021, section 3.2; ratio 20, shared by the heads",
        token_axes=(2,),
        family="vectors",
    ),
]
