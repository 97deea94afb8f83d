"""The lines of a pair: integers whose difference names the offset between a query and a key.

    index[i, j] = query[i] - key[j] + origin        0 <= index < length

so that every content-free relative bias is one vector `values[length]`, read at `index`. With query coordinates from
`ql` to `qh` and key coordinates from `kl` to `kh` on an axis, the offset query - key takes `(qh - ql) + (kh - kl) + 1`
values: the axis's *span*. Axes are nested with a stride each, the last fastest,

    stride[a] = product of the spans of the axes after a
    query     = sum over a of (coordinate[a] - ql[a]) * stride[a]       key likewise, minus kl
    origin    = sum over a of (kh[a] - kl[a]) * stride[a]

and the first `L = product of spans` entries of `values` are the flattened table of offsets, lowest offset first: for
two equal grids Swin's (2H - 1) x (2W - 1) table. The stride belongs to the pair, not to either grid.

Prefix tokens have the coordinate `L` as queries and `-(L + 1)` as keys, the same for all of them. After the L offsets
between tokens, `values` then has these regions

    [L, L + origin]              prefix to token
    [L + origin + 1, 2L]         token to prefix
    2L + origin + 1              prefix to prefix (the entries just below it are never read)

Symmetric choices would collide. Lines do not say which documents are separate; segments of a mask do.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int
from torch import Tensor

from relpos.core.cache import cached
from relpos.core.checks import broadcasts, consecutive, fail, require_device, require_int, require_tensor, shape_of
from relpos.core.coordinates import Coordinates, Grid, Positions, Sequence, require_coordinates
from relpos.core.tree import Movable, changed, register, static


class Kind(enum.IntEnum):
    """The kind of a pair of tokens: the values of `Offsets.kind`.

    Compare a tensor with `int(Kind.TOKENS)`: torch.compile evaluates a tensor == an enumeration to a plain False.
    """

    TOKENS = 0
    PREFIX_TO_TOKEN = 1
    TOKEN_TO_PREFIX = 2
    PREFIX_TO_PREFIX = 3


@dataclass(frozen=True, eq=False)
class Offsets:
    """What each entry of `values` means.

    Attributes:
        axes: `Int[L, A]`, query - key along each axis; 0 where a prefix takes part.
        kind: `Int[L]`, a `Kind`.
        low, high: the smallest and largest offset of each axis, plain numbers.

    Examples:
        >>> offsets = relpos.lines(relpos.Sequence(3)).offsets()
        >>> offsets.axes[:, 0]  # query - key, for every entry of `values`
        tensor([-2, -1,  0,  1,  2])
    """

    axes: Int[Tensor, "L A"]
    kind: Int[Tensor, " L"]
    low: tuple[int, ...]
    high: tuple[int, ...]


@dataclass(frozen=True)
class Ramp:
    """The queries or the keys of regular lines: `prefix` tokens, then nested arithmetic progressions.

    Attributes:
        prefix: tokens before them, all with one coordinate.
        sizes, strides: of each progression, the last fastest.
        start: the coordinate of the first token after the prefix.
    """

    prefix: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    start: int = 0

    @property
    def is_affine(self) -> bool:
        """Whether it is consecutive integers."""
        return self.prefix == 0 and len(self.sizes) == 1

    @property
    def extent(self) -> int:
        """How far the last token after the prefix is from the first."""
        if len(self.sizes) == 1:  # asked for by every small call
            return (self.sizes[0] - 1) * self.strides[0]
        return sum((size - 1) * stride for size, stride in zip(self.sizes, self.strides, strict=True))

    def narrow(self, start: int, stop: int) -> Ramp | None:
        """The ramp of tokens `start` to `stop - 1`; None if they are not whole rows of the first axis."""
        row = math.prod(self.sizes[1:])
        first, last = max(start - self.prefix, 0), stop - self.prefix
        if last <= first or first % row or last % row:
            return None
        sizes = ((last - first) // row, *self.sizes[1:])
        return Ramp(max(self.prefix - start, 0), sizes, self.strides, self.start + first // row * self.strides[0])


@dataclass(frozen=True)
class Layout:
    """The shape of lines, in plain numbers, so that no engine reads a tensor to learn it.

    Attributes:
        low: the smallest offset along each axis.
        spans: how many offsets each axis has.
        query, key: the progression of each, or None where it is irregular.
    """

    low: tuple[int, ...]
    spans: tuple[int, ...]
    query: Ramp | None = None
    key: Ramp | None = None

    @property
    def kind(self) -> Literal["affine", "nested", "irregular"]:
        """`affine`: queries and keys are consecutive integers; `nested`: grids and prefixes; `irregular`: anything."""
        if self.query is None or self.key is None:
            return "irregular"
        return "affine" if self.query.is_affine and self.key.is_affine else "nested"

    @property
    def tokens(self) -> int:
        """L, the number of offsets between tokens; the entries of `values` after them belong to prefixes."""
        return math.prod(self.spans)


@register("relpos.core.lines.Lines")
@dataclass(frozen=True, eq=False)
class Lines(Movable):
    """The line coordinates of queries and keys. Usually made by `core.lines`.

    Attributes:
        query: `Int[N]` or `Int[B, N]`.
        key: `Int[M]` or `Int[B, M]`.
        origin: added to query - key.
        length: entries that `values` must have.
        layout: the structure, in plain numbers.

    Raises:
        ValueError: vectors that are no integers, on two devices, or of unequal batches.

    Examples:
        >>> line = relpos.lines(relpos.Sequence(3))
        >>> line.query, line.key, line.origin, line.length
        (tensor([0, 1, 2]), tensor([0, 1, 2]), 2, 5)
        >>> line.index()
        tensor([[2, 1, 0],
                [3, 2, 1],
                [4, 3, 2]])
    """

    query: Int[Tensor, "*#B N"]
    key: Int[Tensor, "*#B M"]
    origin: int = static()
    length: int = static()
    layout: Layout = static()

    def __post_init__(self) -> None:
        for name, line in (("the query line", self.query), ("the key line", self.key)):
            require_tensor(line, name, dims=(1, 2))
            if line.dtype == torch.bool or line.is_floating_point():
                fail(f"{name} to be an integer tensor", shape_of(line), "Make lines with relpos.lines(queries, keys).")
        require_device(self.key, "the key line", self.query.device, "Make both lines on one device.")
        batch, other = (line.shape[0] if line.dim() == 2 else 1 for line in (self.query, self.key))
        if not (broadcasts(batch, other) or other == 1):
            sizes = f"{batch} and {other}"
            fail("query and key lines of one batch size", sizes, "Give both one row per element of the batch.")
        require_int(self.origin, "the origin of the lines", at_least=None, remedy="Pass a Python int.")
        require_int(self.length, "the length of the lines", at_least=1)
        if not isinstance(self.layout, Layout):
            fail("lines with a Layout", shape_of(self.layout), "Make lines with relpos.lines(queries, keys).")

    def index(self) -> Int[Tensor, "*B N M"]:
        """`query[i] - key[j] + origin` for every pair: the dense meaning of the lines."""
        return cached(self, "index", self.query.device, self._index, lambda: 8 * self.query.numel() * self.key.numel())

    def _index(self) -> Int[Tensor, "*B N M"]:
        return self.query[..., :, None] - self.key[..., None, :] + self.origin

    def offsets(self) -> Offsets:
        """What each of the `length` entries means; see the file's head for the regions."""
        return cached(
            self, "offsets", self.query.device, self._offsets, lambda: 8 * self.length * (1 + len(self.layout.spans))
        )

    def _offsets(self) -> Offsets:
        layout, tokens = self.layout, self.layout.tokens
        entry = torch.arange(self.length, device=self.query.device)
        high = tuple(low + span - 1 for low, span in zip(layout.low, layout.spans, strict=True))
        kind = torch.zeros_like(entry)
        if self.length != tokens:
            for edge in (tokens, tokens + self.origin + 1, 2 * tokens + 1):  # in plain numbers: no copy to the device
                kind = kind + (entry >= edge).long()
        columns = []
        stride = tokens
        for low, span in zip(layout.low, layout.spans, strict=True):
            stride //= span
            columns.append((entry // stride) % span + low)
        axes = torch.stack(columns, dim=-1)
        return Offsets(torch.where(kind[:, None] == int(Kind.TOKENS), axes, 0), kind, layout.low, high)

    def narrow(self, queries: slice, keys: slice) -> Lines:
        """The lines of some consecutive queries and keys; they read the same `values`. `keys` may have a step."""
        query, query_ramp = _narrow(self.query, self.layout.query, queries)
        apart = keys.step is not None and keys.step > 1
        key, key_ramp = (self.key[..., keys], None) if apart else _narrow(self.key, self.layout.key, keys)
        return changed(self, query=query, key=key, layout=changed(self.layout, query=query_ramp, key=key_ramp))

    def same_structure(self, other: Lines) -> bool:
        """Whether both are known, without reading tensors, to be the same lines."""
        if self.query is other.query and self.key is other.key and self.origin == other.origin:
            return self.length == other.length
        regular = self.layout.kind != "irregular" and self.query.device == other.query.device
        return regular and (self.origin, self.length, self.layout) == (other.origin, other.length, other.layout)


def _narrow(line: Tensor, ramp: Ramp | None, part: slice) -> tuple[Tensor, Ramp | None]:
    count = line.shape[-1]
    span = consecutive(part, count)
    if span is None or span == (0, count):
        return line, ramp
    return line[..., slice(*span)], None if ramp is None else ramp.narrow(*span)


def _ramp(coordinates: Coordinates, strides: tuple[int, ...]) -> Ramp | None:
    if not isinstance(coordinates, Sequence | Grid):
        return None
    sizes = coordinates.sizes if isinstance(coordinates, Grid) else (coordinates.length,)
    return Ramp(coordinates.prefix, sizes, strides)


def _line_of(
    coordinates: Coordinates, strides: tuple[int, ...], prefix_place: int, device: torch.device | None
) -> Int[Tensor, "*B N"]:
    if isinstance(coordinates, Positions) and coordinates.values.is_floating_point():
        fail("integer coordinates", "floating-point Positions", "Only rotations support floating-point positions.")
    tokens = coordinates.tokens(device).long()
    line = torch.zeros_like(tokens[..., 0])
    for axis, (low, stride) in enumerate(zip(coordinates.low, strides, strict=True)):
        line = line + (tokens[..., axis] - low) * stride
    if coordinates.prefix:
        line = torch.cat([line.new_full((*line.shape[:-1], coordinates.prefix), prefix_place), line], dim=-1)
    return line


def _paired(queries: Coordinates, keys: Coordinates | None, remedy: str) -> Coordinates:
    """The keys, by default the queries; raises unless both have equally many axes."""
    require_coordinates(queries, "queries")
    keys = queries if keys is None else keys
    require_coordinates(keys, "keys")
    if queries.axes != keys.axes:
        came = f"{queries.axes} and {keys.axes} ({queries!r} and {keys!r})"
        fail("queries and keys with the same number of axes", came, remedy)
    return keys


def lines(queries: Coordinates, keys: Coordinates | None = None, *, device: torch.device | None = None) -> Lines:
    """The lines of a pair of coordinate systems.

    Args:
        queries: where the query tokens are.
        keys: where the key tokens are, by default the queries; with as many axes.
        device: the device of both vectors; Positions default to their own device.

    Returns:
        `Lines`: two vectors `[N]` and `[M]`, with a batch axis where positions have one.

    Raises:
        ValueError: the numbers of axes differ, or a coordinate is floating point.

    Examples:
        >>> line = relpos.lines(relpos.Grid(2, 3))
        >>> line.query  # a stride of 2 * 3 - 1 a row
        tensor([0, 1, 2, 5, 6, 7])
        >>> line.length  # 3 offsets of rows times 5 of columns
        15
    """
    keys = _paired(queries, keys, "For one axis, pass grid.raster().")
    bounds = list(zip(queries.low, queries.high, keys.low, keys.high, strict=True))
    spans = tuple((qh - ql) + (kh - kl) + 1 for ql, qh, kl, kh in bounds)
    strides = tuple(math.prod(spans[axis + 1 :]) for axis in range(len(spans)))
    origin = sum((kh - kl) * stride for (_, _, kl, kh), stride in zip(bounds, strides, strict=True))
    tokens = math.prod(spans)
    length = tokens
    if queries.prefix and keys.prefix:
        length = 2 * tokens + origin + 2
    elif keys.prefix:
        length = 2 * tokens + 1
    elif queries.prefix:
        length = tokens + origin + 1
    layout = Layout(
        low=tuple(ql - kh for ql, _, _, kh in bounds),
        spans=spans,
        query=_ramp(queries, strides),
        key=_ramp(keys, strides),
    )
    query = _line_of(queries, strides, tokens, device)
    key = query if keys is queries and not keys.prefix else _line_of(keys, strides, -(tokens + 1), device)
    return Lines(query, key, origin, length, layout)


def axis_lines(
    queries: Coordinates, keys: Coordinates | None = None, *, device: torch.device | None = None
) -> tuple[Lines, ...]:
    """One pair of lines for each axis alone, for mechanisms that add a term per axis.

    A grid's key line then takes only as many values as that axis has cells, which engines exploit. Prefix tokens keep
    their regions after the offsets between tokens.

    Args:
        queries: where the query tokens are.
        keys: where the key tokens are, by default the queries.
        device: the device of the vectors.

    Returns:
        One `Lines` per axis.

    Raises:
        ValueError: the numbers of axes differ.

    Examples:
        >>> rows, columns = relpos.core.axis_lines(relpos.Grid(2, 3))
        >>> rows.length, columns.length
        (3, 5)
    """
    keys = _paired(queries, keys, "Give both as grids.")
    return tuple(
        lines(_one_axis(queries, axis, device), _one_axis(keys, axis, device), device=device)
        for axis in range(queries.axes)
    )


def _one_axis(coordinates: Coordinates, axis: int, device: torch.device | None) -> Coordinates:
    if coordinates.axes == 1:
        return coordinates.raster()
    return Positions(
        coordinates.tokens(device)[..., axis],
        low=coordinates.low[axis],
        high=coordinates.high[axis],
        prefix=coordinates.prefix,
    )
