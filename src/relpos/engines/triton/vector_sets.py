"""The vectors of a call, those that are read by one index on one line together, and which of them are supported."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from relpos.core import AxisVectors, LineBias, Lines, LineVectors, LowRank, Term
from relpos.core.terms.vectors import Side
from relpos.engines.call import Call
from relpos.engines.operators import Gradients
from relpos.engines.triton.limits import cdiv

WORKSPACE = 2**29
"""Bytes of products and pairs at once: those of DeBERTa's step for one text of 2,048 tokens (12 heads, 512 vectors)
take 300 MB. Not measured on a GPU."""
MOST_SETS = 3
"""Sets that a pair may read: grids have up to three axes."""


@dataclass(frozen=True, eq=False)
class Met:
    """What one term adds to a set.

    Attributes:
        vectors: `[1 or H, R, D]`.
        x: `[1 or B, 1 or H or G, tokens, D]`, what they are multiplied with; None for value vectors.
        bias: `[1 or H, D]`, added to x.
        factor: on the product.
    """

    vectors: Float[Tensor, "#H R D"]
    x: Float[Tensor, "#B _ T D"] | None = None
    bias: Float[Tensor, "#H D"] | None = None
    factor: float = 1.0

    def is_wanted(self, gradients: Gradients) -> bool:
        """Whether a gradient is."""
        return any(gradients.wants(x) for x in (self.vectors, self.x, self.bias))


@dataclass(frozen=True, eq=False)
class Set:
    """The vectors that are read by one index on one line.

    Attributes:
        index: `[L]`, the row that each entry reads, or None for its own.
        count: R, how many there are.
        met: what they are, by side.
        first: the first of them, if only some of them are read.
    """

    lines: Lines
    index: Int[Tensor, " L"] | None
    count: int
    met: dict[Side, list[Met]]
    first: int = 0

    def reads_like(self, other: Set) -> bool:
        """Whether pairs read the same columns."""
        same = self.index is other.index and self.count == other.count
        return same and (self.lines is other.lines or self.lines.same_structure(other.lines))

    @property
    def terms(self) -> int:
        """How many terms it is made of."""
        return sum(map(len, self.met.values()))

    def within(self, rows: slice, keys: int) -> Set:
        """Those that some queries read, as far as that is known: on consecutive integers each entry its own."""
        starts = starts_of(self.lines)
        if self.index is not None or starts is None:
            return self
        entries = self.lines.origin + starts + rows.start - (keys - 1), self.lines.origin + starts + rows.stop
        first, stop = (min(max(entry, 0), self.count) for entry in entries)
        return replace(self, first=first, count=stop - first)

    @property
    def width(self) -> int:
        """Columns of its products: those of the vectors, at least one of zeros, and more up to a multiple of 16."""
        return cdiv(self.count + 1, 16) * 16

    def columns(self) -> Int[Tensor, " L"] | None:
        """The column that each entry of the line reads."""
        if self.index is None:
            return None
        index = self.index.to(torch.int64)
        return torch.where((index < 0) | (index >= self.count), self.count, index).to(torch.int32)


def sets_of(call: Call) -> list[Set]:
    """The vectors of a call."""
    q = call.q if call.plain_q is None else call.plain_q
    k = call.k if call.plain_k is None else call.plain_k
    found: list[Set] = []
    for term in call.terms.items:
        for one in _sets_of_term(term, q, k, call.scale):
            known = next((other for other in found if other.reads_like(one)), None)
            if known is None:
                found.append(one)
            else:
                for side, own in one.met.items():
                    known.met.setdefault(side, []).extend(own)
    return found


def _sets_of_term(term: Term, q: Tensor, k: Tensor, scale: float) -> Iterator[Set]:
    if isinstance(term, AxisVectors):
        for vectors, lines in zip(term.vectors, term.lines, strict=True):
            yield Set(lines, None, vectors.shape[1], {"query": [Met(vectors, q)]})
    elif isinstance(term, LineVectors):
        x = {"query": q if term.content is None else term.content, "key": k, "value": None}[term.side]
        factor = scale if term.scaled and x is not None else 1.0
        met = Met(term.vectors, x, term.bias, factor)
        yield Set(term.lines, term.index, term.vectors.shape[1], {term.side: [met]})


def unsupported(call: Call) -> str | None:
    """What vectors need that the kernels lack."""
    sets = sets_of(call)
    if not sets:
        return None
    if call.scale == 0:
        return "a scale of 0 with vectors"
    # A plan of calls does not know which irregular lines are one: each term may have its own.
    if sum(one.terms if one.lines.layout.kind == "irregular" else 1 for one in sets) > MOST_SETS:
        return f"vectors on more than {MOST_SETS} different indices"
    learned = [term.values for term in call.terms.of(LineBias)]
    learned += [x for term in call.terms.of(LowRank) for x in (term.query, term.key)]
    if torch.is_grad_enabled() and any(x.requires_grad for x in learned):
        return "the gradient of a bias beside vectors"
    width = sum(one.width for one in sets if "key" in one.met)
    if call.groups * call.k.shape[2] * width * 2 * number_bytes(call.q.dtype) > WORKSPACE:
        return f"products of all keys with {width} vectors, which take over {WORKSPACE // 2**20} MiB"
    return None


def number_bytes(dtype: torch.dtype) -> int:
    """Bytes of a product, or of a pair's number, of a call in some dtype."""
    return 8 if dtype == torch.float64 else 4


def starts_of(lines: Lines) -> int | None:
    """The first query minus the first key, on lines of consecutive integers; None for others, which are read."""
    layout = lines.layout
    if layout.kind != "affine":
        return None
    assert layout.query is not None
    assert layout.key is not None
    return layout.query.start - layout.key.start
