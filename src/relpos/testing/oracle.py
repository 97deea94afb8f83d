"""Attention and positions written as loops. Nothing here imports relpos, so no error of the library is repeated here.

All functions are differentiable by autograd and compute in the dtype of their arguments. In float64 the result is the
oracle, in the dtype under test it is the yardstick of rounding (`relpos.testing.tolerance`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

Place = tuple[int, ...] | None
"""A token's coordinates, or None for a prefix token."""


def at(x: Tensor, *index: int) -> Tensor:
    """`x[index]` where an axis of size 1 stands for every index."""
    return x[tuple(0 if size == 1 else i for size, i in zip(x.shape, index, strict=False))]


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    bias: Tensor | None = None,
    allowed: Tensor | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    value_vectors: Tensor | None = None,
    kept: Tensor | None = None,
    dropout: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Attention one query at a time: output `[B, H, N, V]` and log-sum-exp `[B, H, N]`.

    q `[B, H, N, D]`, k `[B, G, M, D]`, v `[B, G, M, V]`; bias and allowed `[1 or B, 1 or H, N, M]`; sinks `[H]` or
    `[1 or B, 1 or H, N]`; value_vectors `[1 or H, N, M, V]`; kept `[B, H, N, M]`, the pairs that dropout leaves.
    Batches and heads that see the same keys are taken at once.
    """
    batch, heads, _, width = q.shape
    scale = width**-0.5 if scale is None else scale
    k, v = heads_of(k, heads), heads_of(v, heads)
    sinks = sinks[None, :, None] if sinks is not None and sinks.dim() == 1 else sinks
    value_vectors = None if value_vectors is None else value_vectors[None]
    tensors = _Operands(q, k, v, bias, allowed, sinks, value_vectors, kept)

    def attended(b: slice, h: slice) -> tuple[Tensor, Tensor]:
        block: list[Any] = [x if x is None else x[_within(x, 0, b), _within(x, 1, h)] for x in tensors]
        return _attended(_Operands(*block), scale, softcap, dropout)

    masks = (1, 1) if allowed is None else allowed.shape[:2]
    blocks = [[attended(b, h) for h in _blocks(heads, masks[1])] for b in _blocks(batch, masks[0])]
    output, sums = (torch.cat([torch.cat([pair[n] for pair in row], dim=1) for row in blocks]) for n in range(2))
    return output, sums


def _blocks(count: int, masks: int) -> list[slice]:
    """Of a batch or of heads, those that have a mask in common."""
    return [slice(None)] if masks == 1 else [slice(n, n + 1) for n in range(count)]


def _within(x: Tensor, axis: int, block: slice) -> slice:
    """A block of an axis, of which one stands for all where it is of size 1."""
    return slice(None) if x.shape[axis] == 1 else block


class _Operands(NamedTuple):
    """The tensors of `attention`, each with an axis for the batch and one for the heads, k and v of the query heads."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    allowed: Tensor | None
    sinks: Tensor | None
    value_vectors: Tensor | None
    kept: Tensor | None


def _attended(tensors: _Operands, scale: float, softcap: float | None, dropout: float) -> tuple[Tensor, Tensor]:
    """`attention` where all batches and heads have one mask: `allowed[1, 1, N, M]`."""
    q, k, v, bias, allowed, sinks, value_vectors, kept = tensors
    outputs, sums = [], []
    biases = None if bias is None else bias.expand(-1, -1, q.shape[2], -1).unbind(2)
    for i, query in enumerate(q.unbind(2)):  # not q[:, :, i], whose backward writes all of q
        seen = slice(None) if allowed is None else at(allowed, 0, 0, i).expand(k.shape[2]).nonzero()[:, 0].tolist()
        row = scale * (query[:, :, None] * k[:, :, seen]).sum(dim=-1)
        scored = row.shape[-1]
        if softcap is not None:
            row = softcap * torch.tanh(row / softcap)
        if biases is not None:
            row = row + biases[i][..., seen]
        if sinks is not None:
            own = sinks[:, :, min(i, sinks.shape[2] - 1), None]
            row = torch.cat([row, own.to(row.dtype).expand(*row.shape[:2], 1)], dim=-1)
        sums.append(row.logsumexp(dim=-1))
        if not row.shape[-1]:
            outputs.append(v.new_zeros(*row.shape[:2], v.shape[3]))
            continue
        weights = torch.softmax(row, dim=-1)[..., :scored]
        if kept is not None:
            weights = weights * kept[:, :, i, seen] / (1 - dropout)
        carried = v[:, :, seen]
        if value_vectors is not None:
            carried = carried + value_vectors[:, :, i, seen]
        outputs.append((weights[..., None] * carried).sum(dim=-2))
    return torch.stack(outputs, dim=2), torch.stack(sums, dim=2)


def rotate(x: Tensor, angles: Tensor, layout: str, magnitude: Tensor | float = 1.0) -> Tensor:
    """Each pair of numbers of `x[B, H, N, D]` turned by its angle `[1 or B, 1 or H, N, P]`, one pair at a time."""
    pairs = angles.shape[-1]
    columns = list(x.unbind(-1))
    for p in range(pairs):
        first, second = (p, p + pairs) if layout == "half" else (2 * p, 2 * p + 1)
        size = magnitude if isinstance(magnitude, float) else magnitude[..., p]
        cos, sin = torch.cos(angles[..., p]) * size, torch.sin(angles[..., p]) * size
        a, b = x[..., first], x[..., second]
        columns[first], columns[second] = a * cos - b * sin, a * sin + b * cos
    return torch.stack(columns, dim=-1)


def places(coordinates: Any) -> list[Place]:
    """The tokens of a sequence, grid or unbatched positions, prefix first, from their plain attributes."""
    prefix: list[Place] = [None] * coordinates.prefix
    if hasattr(coordinates, "sizes"):
        return [*prefix, *itertools.product(*(range(size) for size in coordinates.sizes))]
    if hasattr(coordinates, "length"):
        return [*prefix, *((coordinates.start + n,) for n in range(coordinates.length))]
    return [*prefix, *(tuple(token) for token in coordinates.values.tolist())]


def raster(coordinates: Any) -> list[Place]:
    """The same tokens as a mechanism of one axis sees them: a grid's cells are numbered row by row."""
    tokens = places(coordinates)
    if not hasattr(coordinates, "sizes"):
        return tokens
    return [*tokens[: coordinates.prefix], *((n,) for n in range(len(tokens) - coordinates.prefix))]


def reach(queries: Sequence[Place], keys: Sequence[Place]) -> tuple[int, ...]:
    """The largest |query - key| on each axis."""
    pairs = [(a, b) for a in queries for b in keys if a is not None and b is not None]
    return tuple(max(abs(a[axis] - b[axis]) for a, b in pairs) for axis in range(len(pairs[0][0])))


def table_row(query: Place, key: Place, window: Sequence[int]) -> int:
    """The row of a relative table that a pair reads.

    Swin (Liu et al. 2021, section 3.2): offsets run from -(W - 1) to W - 1 on each axis and are numbered row-major.
    BEiT (Bao et al. 2022, appendix): after them class to token, token to class, class to class.
    """
    count = math.prod(2 * size - 1 for size in window)
    if query is None and key is None:
        return count + 2
    if key is None:
        return count + 1
    if query is None:
        return count
    row = 0
    for a, b, size in zip(query, key, window, strict=True):
        assert abs(a - b) <= size - 1, "beyond the table"
        row = row * (2 * size - 1) + (a - b) + (size - 1)
    return row


def table_rows(queries: Sequence[Place], keys: Sequence[Place], window: Sequence[int]) -> Tensor:
    """`table_row` of every pair, `[N, M]`."""
    return torch.tensor([[table_row(query, key, window) for key in keys] for query in queries])


def relative_bias(table: Tensor, queries: Sequence[Place], keys: Sequence[Place], window: Sequence[int]) -> Tensor:
    """`bias[h, i, j] = table[row(i, j), h]`, `[H, N, M]`."""
    rows = [table[[table_row(query, key, window) for key in keys]] for query in queries]  # N times [M, H]
    return torch.stack(rows).permute(2, 0, 1)


def learned_absolute(x: Tensor, table: Tensor, indices: Sequence[int]) -> Tensor:
    """`x[b, n] + table[indices[n]]`, a token at a time."""
    return torch.stack([x[:, n] + table[index] for n, index in enumerate(indices)], dim=1)


def angles(tokens: Sequence[Place], axes: int, pairs: int, base: float) -> Tensor:
    """`place[axis] / base^(p / pairs)` of every token, `[N, axes * pairs]`, axis after axis, float64; 0 for a prefix.

    Vaswani et al. 2017, section 3.5 and Su et al. 2021, section 3.2 write the exponent 2p / d with d = 2 pairs.
    """
    rows = []
    for place in tokens:
        own = (0,) * axes if place is None else place
        rows.append([own[axis] / base ** (2 * p / (2 * pairs)) for axis in range(axes) for p in range(pairs)])
    return torch.tensor(rows, dtype=torch.float64)


def rotated(x: Tensor, tokens: Sequence[Place], axes: int, pairs: int, base: float, layout: str) -> Tensor:
    """Queries or keys turned by their places; the product in float32 or wider, rounded once."""
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return rotate(wide, angles(tokens, axes, pairs, base).to(wide.dtype)[None, None], layout).to(x.dtype)


def sinusoid(place: Place, width: int, axes: int, base: float, layout: str) -> list[float]:
    """The vector added to one token; see `relpos.position.sinusoidal` for the three layouts."""
    if place is None:
        return [0.0] * width
    pairs, both = width // (2 * axes), (math.sin, math.cos)
    every = itertools.product
    match layout:
        case "interleaved":
            order = [(axis, p, turn) for axis, p, turn in every(range(axes), range(pairs), both)]
        case "half":
            order = [(axis, p, turn) for axis, turn, p in every(range(axes), both, range(pairs))]
        case _:
            order = [(axis, p, turn) for turn, axis, p in every(both, range(axes), range(pairs))]
    return [turn(place[axis] / base ** (2 * p / (2 * pairs))) for axis, p, turn in order]


def t5_bucket(offset: int, buckets: int, most: int, bidirectional: bool) -> int:
    """Raffel et al. 2020, section 2.1, for offset = query - key, in whole numbers: no logarithm, nothing to round.

    Of n buckets per direction, e = n // 2 hold one distance each. Distance d is in bucket e + k or a later one if
    d >= e * (most / e)^(k / (n - e)), that is if d^(n - e) * e^k >= most^k * e^(n - e).
    """
    first, n, distance = 0, buckets, max(offset, 0)
    if bidirectional:
        n, distance = buckets // 2, abs(offset)
        first = n if offset < 0 else 0  # a key after the query
    e = n // 2
    if distance < e:
        return first + distance
    far = [k for k in range(n - e) if distance ** (n - e) * e**k >= most**k * e ** (n - e)]
    return first + e + max(far)


def alibi_slopes(heads: int) -> list[float]:
    """Press et al. 2022: a geometric sequence; between two powers of two every other slope of the next is added."""

    def power_of_two(count: int) -> list[float]:
        start = 2 ** (-(2 ** -(math.log2(count) - 3)))
        return [start * start**i for i in range(count)]

    lower = max(2**n for n in range(20) if 2**n <= heads)
    return power_of_two(lower) + power_of_two(2 * lower)[0::2][: heads - lower]


def alibi(heads: int, queries: Sequence[Place], keys: Sequence[Place], distance: str) -> Tensor:
    """`-slope * distance`, `[H, N, M]` in float32, computed in Python's floats and rounded once; 0 with a prefix."""

    def apart(a: Place, b: Place) -> float:
        if a is None or b is None:
            return 0.0
        return math.dist(a, b) if distance == "euclidean" else sum(abs(x - y) for x, y in zip(a, b, strict=True))

    bias = [[[-slope * apart(a, b) for b in keys] for a in queries] for slope in alibi_slopes(heads)]
    return torch.tensor(bias, dtype=torch.float64).float()


def meet(x: Tensor, vectors: Sequence[Sequence[Tensor]]) -> Tensor:
    """`out[b, h, i, j] = <x[b, h, i], vectors[i][j][h]>` a query at a time; vectors `[1 or H, D]`."""
    rows = zip(x.unbind(2), vectors, strict=True)
    return torch.stack([(query[:, :, None] * torch.stack(list(row), dim=-2)).sum(dim=-1) for query, row in rows], dim=2)


def heads_of(k: Tensor, heads: int) -> Tensor:
    """Keys or values repeated to the query heads."""
    group = heads // k.shape[1]
    return torch.stack([k[:, h // group] for h in range(heads)], dim=1)
