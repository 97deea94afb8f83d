"""Terms of vectors on lines: Shaw, Transformer-XL, DeBERTa, and one set per axis (MViTv2, SAM).

Every pair of query and key reads one row of the vectors. The products of all queries (or keys) with all rows are
computed first, `[N, R]` numbers, and each pair looks up its own, so that nothing of size N x M x D is stored. The
backward sums over the pairs that read a row, in a fixed order.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core.algebra import Keys, Queries, Term
from relpos.core.cache import may_cache
from relpos.core.checks import fail, require_choice, require_flag, require_floating, shape_of
from relpos.core.densify import expand_regular
from relpos.core.gather import lookup, segment_sum
from relpos.core.line import Lines
from relpos.core.terms.fitting import check_device, check_lines, check_shape, heads_first, require_lines
from relpos.core.tree import register, static

Side = Literal["query", "key", "value"]


@register("relpos.core.terms.LineVectors")
@dataclass(frozen=True, eq=False)
class LineVectors(Term):
    """Vectors on the line. With `r = index[query_line[i] - key_line[j] + origin]` and `w = vectors[h, r]`,

        side "query"   adds  s * <q[i] + bias, w>  to the score (Shaw's keys, DeBERTa's c2p, Transformer-XL)
        side "key"     adds  s * <k[j] + bias, w>  (DeBERTa's p2c)
        side "value"   adds  p[i, j] * w           to the output (Shaw's values)

    where s is the attention's scale if `scaled`, else 1. With `content`, side "query" adds

        s * <content[i], w>     (Inkling: content is projected from the hidden states, 16 wide; not scaled)

    Attributes:
        vectors: `[1 or H, R, D]`, D the width of what they meet; R may be far below L (clipping, buckets).
        index: `Int[L]`, the row each entry of the line reads; -1 reads a row of zeros. None: entry l reads row l,
            and entries from R on read zeros.
        lines: the line coordinates of queries and keys.
        side: what the vectors are multiplied with.
        scaled: whether the attention's scale applies.
        bias: `[1 or H, D]`, added to q or k in this product only (Transformer-XL's v).
        content: `[1 or B, 1 or H, N, D]`, what the vectors meet in place of q; D may be far below the width of q.

    Raises:
        ValueError: vectors, index, bias or content of another shape; content on another side than "query", or beside a
            bias; in attention, for other heads, widths or tokens.

    Examples:
        >>> lines = relpos.lines(relpos.Sequence(5))  # 9 offsets
        >>> vectors = relpos.LineVectors(torch.randn(1, 9, 8), None, lines, side="query")
        >>> q = k = v = torch.randn(1, 2, 5, 8)
        >>> relpos.attention(q, k, v, position=vectors).shape
        torch.Size([1, 2, 5, 8])
        >>> narrow = relpos.LineVectors(torch.randn(2, 9, 3), None, lines, side="query", scaled=False,
        ...                             content=torch.randn(1, 2, 5, 3))  # of 3 numbers a token and head, not of q
        >>> relpos.attention(q, k, v, position=narrow).shape
        torch.Size([1, 2, 5, 8])
    """

    vectors: Float[Tensor, "#H R D"]
    index: Int[Tensor, " L"] | None
    lines: Lines
    side: Side = static()
    scaled: bool = static(default=True)
    bias: Float[Tensor, "#H D"] | None = None
    content: Float[Tensor, "#B #H N D"] | None = None

    def __post_init__(self) -> None:
        heads_first(self.vectors, "LineVectors vectors", "R, D")
        require_lines(self.lines, "LineVectors")
        require_choice(self.side, "side", ("query", "key", "value"))
        require_flag(self.scaled, "scaled")
        if self.index is not None:
            whole = isinstance(self.index, Tensor) and not self.index.is_floating_point()
            if not whole or self.index.dtype == torch.bool or self.index.shape != (self.lines.length,):
                wanted = f"LineVectors index of integers of shape [{self.lines.length}]"
                fail(wanted, shape_of(self.index), "Give one row number for each entry of the line.")
        if self.bias is not None:
            if self.side == "value":
                fail("no bias with value vectors", shape_of(self.bias), "A bias works with query or key vectors only.")
            heads_first(self.bias, "LineVectors bias", "D")
        if self.content is not None:
            self._check_content(self.content)

    def _check_content(self, content: Tensor) -> None:
        require_floating(content, "LineVectors content", dims=4)
        if self.side != "query":
            fail("LineVectors content on the query side", f"side {self.side!r}", 'Content stands for queries: "query".')
        if self.bias is not None:
            fail("no LineVectors bias beside content", shape_of(self.bias), "Add it to the content.")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        check_device(self.vectors, "LineVectors", q)
        check_device(self.index, "LineVectors index", q)
        check_device(self.bias, "LineVectors bias", q)
        meets = v if self.side == "value" else q
        if self.content is not None:
            meets = self.content
            check_device(meets, "LineVectors content", q)
            every = ((1, q.shape[0]), (1, q.shape[1]), (q.shape[2],), (meets.shape[3],))
            check_shape(meets, "LineVectors content", every)
        wanted = ((1, q.shape[1]), (self.vectors.shape[1],), (meets.shape[3],))
        check_shape(self.vectors, "LineVectors vectors", wanted)
        if self.bias is not None:
            check_shape(self.bias, "LineVectors bias", ((1, q.shape[1]), (q.shape[3],)))
        check_lines(self.lines, "LineVectors", q, k)

    def rows(self) -> Int[Tensor, "*B N M"]:
        """The row of `vectors` that each pair reads; R, one past the last, means a row of zeros."""
        return rows_read(self.lines, self.vectors.shape[1], self.index)

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "B H N M"] | None:
        if self.side == "value":
            return None
        factor = scale if self.scaled else 1.0
        if self.side == "query":
            x = q if self.content is None else self.content.to(q.dtype).expand(*q.shape[:2], -1, -1)
            return meet(x, self.bias, self.vectors, self.rows(), factor)
        return _meet_keys(k, self.bias, self.vectors, self.rows(), factor)

    def outputs(self, weights: Float[Tensor, "B H N M"]) -> Float[Tensor, "B H N V"]:
        """The part that value-side vectors add to the output. Weights are first summed by the row that they read."""
        sums = sum_rows(weights, self.rows(), self.vectors.shape[1] + 1)
        return sums @ with_zero_row(self.vectors, weights.dtype)

    def narrow(self, queries: slice, keys: slice) -> LineVectors:
        content = None if self.content is None else self.content[:, :, queries]
        return replace(self, lines=self.lines.narrow(queries, keys), content=content)


@register("relpos.core.terms.AxisVectors")
@dataclass(frozen=True, eq=False)
class AxisVectors(Term):
    """Adds, for each axis a, `<q[i], vectors[a][h, query_line_a[i] - key_line_a[j] + origin_a]>`, q unscaled.

    The decomposed relative positions of MViTv2, ViTDet and SAM. Entries beyond the last vector (pairs with a prefix)
    add 0. Engines exploit that a grid's key line of one axis takes few values.

    Attributes:
        vectors: one `[1 or H, R_a, D]` per axis.
        lines: one per axis, as `core.axis_lines` makes them.

    Raises:
        ValueError: not one of each per axis; in attention, vectors or lines for other heads, widths or tokens.

    Examples:
        >>> lines = relpos.core.axis_lines(relpos.Grid(3, 4))  # 5 offsets of rows, 7 of columns
        >>> term = relpos.AxisVectors((torch.randn(1, 5, 8), torch.randn(1, 7, 8)), lines)
        >>> q = k = v = torch.randn(1, 2, 12, 8)
        >>> relpos.attention(q, k, v, position=term).shape
        torch.Size([1, 2, 12, 8])
    """

    vectors: tuple[Float[Tensor, "#H _ D"], ...]
    lines: tuple[Lines, ...]

    def __post_init__(self) -> None:
        if not isinstance(self.vectors, tuple) or not isinstance(self.lines, tuple):
            came = f"{shape_of(self.vectors)} and {shape_of(self.lines)}"
            fail("AxisVectors vectors and lines as tuples", came, "Give one of each per axis.")
        if len(self.vectors) != len(self.lines):
            fail("as many vectors as lines", f"{len(self.vectors)} and {len(self.lines)}", "Give one of each per axis.")
        for vectors, lines in zip(self.vectors, self.lines, strict=True):
            heads_first(vectors, "AxisVectors vectors", "R, D")
            require_lines(lines, "AxisVectors")

    def check(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        for vectors, lines in zip(self.vectors, self.lines, strict=True):
            check_device(vectors, "AxisVectors", q)
            check_shape(vectors, "AxisVectors vectors", ((1, q.shape[1]), (vectors.shape[1],), (q.shape[3],)))
            check_lines(lines, "AxisVectors", q, k)

    def rows(self) -> Iterator[Int[Tensor, "*B N M"]]:
        """For each axis, the row that each pair reads; one past the last means a row of zeros."""
        for vectors, lines in zip(self.vectors, self.lines, strict=True):
            yield rows_read(lines, vectors.shape[1])

    def scores(self, q: Queries, k: Keys, scale: float, allowed: Tensor | None) -> Float[Tensor, "B H N M"]:
        parts = (meet(q, None, vectors, rows) for vectors, rows in zip(self.vectors, self.rows(), strict=True))
        return reduce(torch.add, parts)

    def narrow(self, queries: slice, keys: slice) -> AxisVectors:
        return replace(self, lines=tuple(lines.narrow(queries, keys) for lines in self.lines))


def rows_read(lines: Lines, count: int, index: Int[Tensor, " L"] | None = None) -> Int[Tensor, "*B N M"]:
    """The row that each pair reads: `index[entry]`, or the entry itself. `count` means no row."""
    every = torch.arange(lines.length, device=lines.query.device) if index is None else index.long()
    every = torch.where((every < 0) | (every >= count), count, every)  # `count` might not fit into a narrow dtype
    if lines.layout.kind != "irregular" and may_cache(lines.query.device):
        return expand_regular(every[None], lines)[0]
    return every[lines.index().long()]


def meet(
    x: Float[Tensor, "B H N D"],
    bias: Tensor | None,
    vectors: Float[Tensor, "#H R D"],
    rows: Int[Tensor, "*B N M"],
    factor: float = 1.0,
) -> Float[Tensor, "B H N M"]:
    """`factor * <x[i] + bias, vectors[rows[i, j]]>`, never storing N x M x D."""
    x = with_bias(x, bias, factor)
    return _pick(x @ with_zero_row(vectors, x.dtype).mT, rows.expand(x.shape[0], -1, -1) if rows.dim() == 3 else rows)


def _meet_keys(
    k: Float[Tensor, "B H M D"],
    bias: Tensor | None,
    vectors: Float[Tensor, "#H R D"],
    rows: Int[Tensor, "*B N M"],
    factor: float,
) -> Float[Tensor, "B H N M"]:
    """`factor * <k[j] + bias, vectors[rows[i, j]]>`: `meet` transposed; a CPU gathers without transposing scores."""
    if not _gathers(k):
        return meet(k, bias, vectors, rows.mT, factor).mT
    return (with_zero_row(vectors, k.dtype) @ with_bias(k, bias, factor).mT).gather(-2, _of_heads(rows, k))


def with_bias(x: Float[Tensor, "B H N D"], bias: Tensor | None, factor: float = 1.0) -> Float[Tensor, "B H N D"]:
    """`factor * (x + bias)`, in x's dtype."""
    x = x if bias is None else x + bias[:, None, :].to(x.dtype)
    return x if factor == 1 else x * factor


def _gathers(x: Tensor) -> bool:
    """Whether PyTorch's own gradient of `gather` adds in a fixed order: on a CPU, but not under a compiler."""
    return x.device.type == "cpu" and may_cache(x.device)


def _of_heads(rows: Int[Tensor, "*B N M"], x: Float[Tensor, "B H _ _"]) -> Int[Tensor, "B H N M"]:
    return rows.unsqueeze(-3).expand(*x.shape[:2], -1, -1)


def _pick(products: Float[Tensor, "B H N R"], rows: Int[Tensor, "*B N M"]) -> Float[Tensor, "B H N M"]:
    """`out[b, h, i, j] = products[b, h, i, rows[i, j]]`, with an ordered backward."""
    if _gathers(products):
        return products.gather(-1, _of_heads(rows, products))
    flat = _flat_index(rows, products.shape[-1])
    if rows.dim() == 3:
        table = products.transpose(1, 2).transpose(2, 3).flatten(0, 2)  # [B N R, H]
        return lookup(table, flat).movedim(-1, 1)
    table = products.permute(2, 3, 0, 1).flatten(0, 1)  # [N R, B, H]
    return lookup(table, flat).permute(2, 3, 0, 1)


def sum_rows(x: Float[Tensor, "B H N M"], rows: Int[Tensor, "*B N M"], count: int) -> Float[Tensor, "B H N R"]:
    """`out[b, h, i, r] = sum of x[b, h, i, j] where rows[i, j] == r`: the adjoint of reading `rows`."""
    batch, _, n, _ = x.shape
    if _gathers(x):
        return x.new_zeros(*x.shape[:3], count).scatter_add(-1, _of_heads(rows, x), x)
    if rows.dim() == 3:
        rows = rows.expand(batch, -1, -1)
        sums = segment_sum(x.movedim(1, -1), _flat_index(rows, count), batch * n * count)  # [B N R, H]
        return torch.unflatten(sums, 0, (batch, n, count)).movedim(-1, 1)
    sums = segment_sum(x.permute(2, 3, 0, 1), _flat_index(rows, count), n * count)  # [N R, B, H]
    return torch.unflatten(sums, 0, (n, count)).permute(2, 3, 0, 1)


def _flat_index(rows: Int[Tensor, "*B N M"], count: int) -> Int[Tensor, "*B N M"]:
    """Row numbers that also differ between queries: `(b * N + i) * count + row`."""
    lead = torch.arange(math.prod(rows.shape[:-1]), device=rows.device).view(*rows.shape[:-1], 1)
    return lead * count + rows


def with_zero_row(vectors: Float[Tensor, "H R D"], dtype: torch.dtype) -> Float[Tensor, "H R1 D"]:
    """The vectors, followed by a row of zeros."""
    return torch.nn.functional.pad(vectors.to(dtype), (0, 0, 0, 1))
