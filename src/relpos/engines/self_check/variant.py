"""The variant of a call: what decides which compiled kernels it runs; and small calls that run the same kernels.

A variant has the dtype, the head widths, the terms with their layouts, the parts of the mask, grouped keys and dropout,
as plain values that can be compared and hashed. What kernels take as run-time arguments (the number of tokens, the size
of a window) is not in it. Small calls hold random numbers; no tensor of a user is read.
"""

from __future__ import annotations

import math
from dataclasses import fields
from functools import cache
from operator import index
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from relpos.core import (
    AxisVectors,
    Blocks,
    Coordinates,
    Grid,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    Mask,
    Positions,
    QueryBias,
    QueryScale,
    Rotation,
    Sequence,
    Sinks,
    Softcap,
    Term,
    Terms,
    axis_lines,
    lines,
)
from relpos.core.line import Ramp
from relpos.engines.call import Call

FEW = (16, 32, 64, 256)
"""Up to so many tokens each, kernels may differ: tiles are smaller, a window is one tile; see `triton.limits.FEW`."""
BATCH, KEY_HEADS, SHARING = 2, 2, 2
_MOST_PREFIX = 5
"""Prefix tokens from which on kernels are the same."""
_CELLS = (16, 32, 64)
"""Lengths of rows to which tiles cannot be aligned are rounded up to these; tiles differ between them."""

_VECTORS, _WIDTH_OF_CONTENT = 13, 5

Size = Literal["odd", "full"]
TOKENS: dict[tuple[Size, bool], int] = {
    ("odd", False): 299, ("full", False): 384, ("odd", True): 197, ("full", True): 256,
}  # fmt: skip
"""About how many tokens a small call has, by whether they are few: several of the largest tiles, of 128 tokens, the
last one partial ("odd") or all full."""
_FULL = 64
"""A grid whose tiles are full has a multiple of this many cells."""
_CUT: dict[Size, int] = {"odd": 38, "full": 128}
"""How many fewer keys than queries there are, if their numbers differ."""


class Variant(NamedTuple):
    """What decides which kernels a call runs.

    Attributes:
        dtype: of q, k and v.
        widths: the head widths of q and k, and of v.
        grouped: whether query heads share key heads.
        few: the number of `FEW` that bounds queries and keys; 0 if there are more.
        cross: whether the numbers of queries and keys differ.
        terms: kind and layout of each term; see `_describe`.
        mask: for each tensor of the mask its dimensions and dtype, for each bound whether it is 0; None for no mask.
        dropout: whether there is dropout.
    """

    dtype: torch.dtype
    widths: tuple[int, int]
    grouped: bool
    few: int
    cross: bool
    terms: tuple[tuple[Any, ...], ...]
    mask: tuple[tuple[Any, ...], ...] | None
    dropout: bool

    def words(self) -> str:
        """A short description, for messages."""
        parts = [str(self.dtype).removeprefix("torch."), f"head width {self.widths[0]}"]
        parts += [str(term[0]) for term in self.terms]
        if self.mask is not None:
            parts.append("a mask of " + " and ".join(str(part[0]) for part in self.mask))
        parts += ["grouped keys"] * self.grouped + ["dropout"] * self.dropout
        return ", ".join(parts)


def variant_of(call: Call) -> Variant | None:
    """The variant of a call; None if no small call can be made for one of its terms."""
    terms = [_describe(term, call.terms) for term in call.terms]
    if any(term is None for term in terms):
        return None
    n, m = call.q.shape[2], call.k.shape[2]
    return Variant(
        dtype=call.q.dtype,
        widths=(index(call.q.shape[3]), index(call.v.shape[3])),  # symbols become plain numbers
        grouped=_known(call.q.shape[1] != call.k.shape[1]),
        few=next((most for most in FEW if _known(max(n, m) <= most)), 0),
        cross=_known(n != m),
        terms=tuple(term for term in terms if term is not None),
        mask=None if call.mask is None else _parts(call.mask),
        dropout=_known(call.dropout > 0),
    )


def _known(x: bool) -> bool:
    """A comparison as a plain value, even if a compiler holds sizes as symbols."""
    return True if x else False  # noqa: SIM210


def _describe(term: Term, terms: Terms) -> tuple[Any, ...] | None:
    """The kind of a term and its properties that select kernels; None if no small call can be made for it."""
    if isinstance(term, LineVectors):
        return ("LineVectors", _of_vectors(term), _like(term, terms), *_layout(term.lines))
    if isinstance(term, AxisVectors):
        of_axes = tuple((_known(x.shape[0] == 1), x.dtype) for x in term.vectors)
        axes, differ, *cells = _layout(term.lines[0])
        if len(term.lines) == 1:
            return ("AxisVectors", of_axes, 0, axes, differ, *cells)
        return None if differ else ("AxisVectors", of_axes, 0, len(term.lines), False, _SQUARE, _SQUARE)
    if isinstance(term, LineBias):
        return ("LineBias", _known(term.values.shape[0] == 1), term.values.dtype, *_layout(term.lines))
    if isinstance(term, Rotation) and term.widens == 1:
        given = (term.query, term.key, term.query_magnitude, term.key_magnitude)
        shared = tuple(None if x is None else (_known(x.shape[0] == 1), _known(x.shape[1] == 1)) for x in given)
        return ("Rotation", term.layout, index(term.query.shape[3]), term.query.dtype, shared)
    if isinstance(term, QueryBias):
        return ("QueryBias", _known(term.u.shape[0] == 1), term.u.dtype)
    if isinstance(term, QueryScale):
        return ("QueryScale", term.on, term.factor.dtype, *(_known(size == 1) for size in term.factor.shape[:2]))
    if isinstance(term, LowRank):
        sides = [(*_heads_and_batch(x), x.dtype) for x in (term.query, term.key)]
        return ("LowRank", index(term.query.shape[-1]), *sides)
    if isinstance(term, Sinks):
        axes = [_known(size == 1) for size in term.logits.shape[:2]] if term.of_queries else []
        return ("Sinks", term.logits.dtype, *axes)
    return ("Softcap",) if isinstance(term, Softcap) else None


def _heads_and_batch(x: Tensor) -> tuple[bool, bool]:
    """Whether a side of a low-rank bias is one for all heads, and one for all of the batch."""
    return _known(x.shape[-3] == 1), _known(x.dim() == 3 or x.shape[0] == 1)


def _of_vectors(term: LineVectors) -> tuple[Any, ...]:
    """Side, whether the scale applies, dtype of an index, and of each tensor which axes are shared, and its dtype."""
    index = None if term.index is None else term.index.dtype
    bias = None if term.bias is None else (_known(term.bias.shape[0] == 1), term.bias.dtype)
    shared = () if term.content is None else tuple(_known(size == 1) for size in term.content.shape[:2])
    content = None if term.content is None else (shared, term.content.dtype)
    return (term.side, term.scaled, index, (_known(term.vectors.shape[0] == 1), term.vectors.dtype), bias, content)


def _like(term: LineVectors, terms: Terms) -> int:
    """The number of the first vectors that are read by the same index on the same line."""
    for number, other in enumerate(terms.of(LineVectors)):
        same = other.index is term.index and _known(other.vectors.shape[1] == term.vectors.shape[1])
        if same and other.lines.same_structure(term.lines):
            return number
    return 0


def _layout(of_lines: Lines) -> tuple[Any, ...]:
    """Number of axes (0: irregular), whether lines differ in the batch, and what decides tiles of queries and keys."""
    query, key = of_lines.layout.query, of_lines.layout.key
    differ = any(_known(x.dim() == 2 and x.shape[0] > 1) for x in (of_lines.query, of_lines.key))
    if query is None or key is None:
        return (0, differ, _NO_CELLS, _NO_CELLS)
    return (len(query.sizes), differ, _cells(query), _cells(key))


_NO_CELLS, _SQUARE = (0, 0, 0), (0, 16, 0)
"""Of a sequence, and of any grid whose axes are read apart."""


def _cells(ramp: Ramp) -> tuple[int, int, int]:
    """Prefix tokens, and the cells of a row and of a plane in a small call; 0 where there are none."""
    row, plane = (math.prod(ramp.sizes[-axes:]) if len(ramp.sizes) > axes else 0 for axes in (1, 2))
    return min(index(ramp.prefix), _MOST_PREFIX), _aligned(row), _aligned(plane)


def _aligned(cells: int) -> int:
    """A number of cells to which the same tiles can be aligned: tiles have 16 to 128 tokens, powers of two."""
    power = cells & -cells
    if cells < 2 or power >= 128 or (cells == power and power >= 8):
        return min(power, 128)
    if power >= 32:  # tiles of at most so many
        return 3 * power
    return 4 if cells <= 4 else next((size for size in _CELLS if cells <= size), _CELLS[-1]) // 4 * 3


def _parts(mask: Mask) -> tuple[tuple[Any, ...], ...]:
    found: list[tuple[Any, ...]] = []
    for field in fields(mask):
        x = getattr(mask, field.name)
        if isinstance(x, Tensor):
            found.append((field.name, _known(x.dim() == 2 and x.shape[0] > 1), x.dtype))
        elif isinstance(x, Blocks):
            found.append((field.name, _known(x.layout.shape[0] > 1)))
        elif isinstance(x, Mask):
            found.append((field.name, _parts(x)))
        elif x is not None:
            found.append((field.name, _known(x == 0)))
    return tuple(found)


def small_call(variant: Variant, size: Size) -> Call:
    """A call of a variant on the CPU, with random numbers from its own generator.

    All floating-point tensors require gradients, except angles, because PyTorch applies learned ones.
    """
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = variant.dtype, learned: bool = True) -> Tensor:
        made = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
        return made.requires_grad_(learned)

    queries, keys = _coordinates(variant, size, generator)
    n, m = queries.count, keys.count
    heads = KEY_HEADS * (SHARING if variant.grouped else 1)
    width, value_width = variant.widths
    made: list[Term] = []
    indices: dict[Any, Tensor] = {}

    @cache
    def all_lines() -> Lines:
        return lines(queries, None if keys is queries else keys, device=torch.device("cpu"))

    for kind, *rest in variant.terms:
        match kind:
            case "LineVectors":
                (side, scaled, index_dtype, *tensors), like = rest[:2]
                line = all_lines()
                count = _VECTORS + like
                if index_dtype is not None and like not in indices:
                    entries = torch.arange(line.length, device="cpu")
                    indices[like] = (entries // 3 % (count + 1) - 1).to(index_dtype)  # -1 reads zeros
                met, bias, content = tensors
                inner = _WIDTH_OF_CONTENT if content else value_width if side == "value" else width
                sizes = [] if content is None else [
                    1 if one else size for one, size in zip(content[0], (BATCH, heads), strict=True)
                ]  # fmt: skip
                made.append(
                    LineVectors(
                        normal(1 if met[0] else heads, count, inner, dtype=met[1]),
                        None if index_dtype is None else indices[like],
                        line,
                        side,
                        scaled,
                        None if bias is None else normal(1 if bias[0] else heads, inner, dtype=bias[1]),
                        None if content is None else normal(*sizes, n, inner, dtype=content[1]),
                    )
                )
            case "AxisVectors":
                of_axes = axis_lines(queries, None if keys is queries else keys, device=torch.device("cpu"))
                vectors = tuple(
                    normal(1 if shared else heads, _VECTORS, width, dtype=dtype)
                    for (shared, dtype), _ in zip(rest[0], of_axes, strict=True)
                )
                made.append(AxisVectors(vectors, of_axes))
            case "LineBias":
                shared, dtype = rest[:2]
                line = all_lines()
                made.append(LineBias(normal(1 if shared else heads, line.length, dtype=dtype), line))
            case "Rotation":
                layout, pairs, dtype, shared = rest
                tensors = [
                    None if axes is None else normal(
                        1 if axes[0] else BATCH, 1 if axes[1] else heads, count, pairs, dtype=dtype, learned=False
                    )
                    for axes, count in zip(shared, (n, m, n, m), strict=True)
                ]  # fmt: skip
                assert tensors[0] is not None
                made.append(Rotation(tensors[0], tensors[1], layout, 1.0, tensors[2], tensors[3]))
            case "QueryBias":
                made.append(QueryBias(normal(1 if rest[0] else heads, width, dtype=rest[1])))
            case "LowRank":
                rank, *sides = rest
                shapes = [
                    (1 if one_batch else BATCH, 1 if one_head else heads, count, rank)
                    for (one_head, one_batch, _), count in zip(sides, (n, m), strict=True)
                ]
                dtypes = [side[2] for side in sides]
                made.append(LowRank(*(normal(*shape, dtype=x) for shape, x in zip(shapes, dtypes, strict=True))))
            case "Sinks":
                axes = [1 if one else size for one, size in zip(rest[1:], (BATCH, heads), strict=False)]
                made.append(Sinks(normal(*((*axes, n) if axes else (heads,)), dtype=rest[0])))
            case "QueryScale":
                on, dtype, *shared = rest
                axes = [1 if one else size for one, size in zip(shared, (BATCH, heads), strict=True)]
                made.append(QueryScale(normal(*axes, n, dtype=dtype), on))
            case "Softcap":
                made.append(Softcap(2.0))
    return Call(
        q=normal(BATCH, heads, n, width),
        k=normal(BATCH, KEY_HEADS, m, width),
        v=normal(BATCH, KEY_HEADS, m, value_width),
        terms=Terms(*made),
        mask=None if variant.mask is None else _mask(variant.mask, heads, n, m, generator),
        scale=width**-0.5,
        dropout=0.25 if variant.dropout else 0.0,
        seed=torch.tensor(12345, device="cpu") if variant.dropout else None,
        return_lse=False,  # engines that have it return it anyway
    )


def _coordinates(variant: Variant, size: Size, generator: torch.Generator) -> tuple[Coordinates, Coordinates]:
    """The coordinates of queries and keys of a small call; the same object if they are equal."""
    count, cut = TOKENS[size, variant.few > 0], _CUT[size]
    if 0 < variant.few < FEW[-1]:
        count = variant.few if size == "full" else variant.few * 3 // 4 + 1
        cut = variant.few // 4
    fewer = count - (cut if variant.cross else 0)
    on_lines = ("LineBias", "LineVectors", "AxisVectors")
    layout = next((term[3:] for term in variant.terms if term[0] in on_lines), (1, False, _NO_CELLS, _NO_CELLS))
    axes, differ, *cells = layout
    both: list[Coordinates] = []
    for tokens, (prefix, row, plane) in zip((count, fewer), cells, strict=True):
        if axes == 0:
            shape = (BATCH, tokens) if differ else (tokens,)
            positions = torch.randint(0, tokens, shape, generator=generator, device="cpu")
            both.append(Positions(positions, low=0, high=tokens - 1))
        elif axes == 1:
            full = tokens // 2 if variant.few else tokens
            both.append(Sequence(full if size == "full" and prefix else tokens - prefix, prefix=prefix))
        else:
            most = variant.few - prefix if variant.few else None
            both.append(Grid(*_sizes(axes, tokens - prefix, row, plane, size, most), prefix=prefix))
    return (both[0], both[1]) if variant.cross or cells[0] != cells[1] else (both[0], both[0])


def _sizes(axes: int, tokens: int, row: int, plane: int, size: Size, most: int | None) -> tuple[int, ...]:
    """The sizes of a grid of about so many tokens, and of at most so many."""
    if size == "odd" and row % 32 and row % 3 == 0:
        row -= 1  # as unaligned as before
    inner = row if axes == 2 else row * max(2, plane // row)
    if size == "odd":
        outer = max(3, tokens // inner | 1)
    else:
        step = _FULL // math.gcd(inner, _FULL)
        outer = (-(-tokens // (inner * step)) if most is None else max(1, round(tokens / inner) // step)) * step
    if most is not None:
        outer = max(1, min(outer, most // inner))
    if axes == 2:
        return outer, row
    more = axes - 3
    return (*(2,) * more, max(1, outer >> more), inner // row, row)


def _mask(parts: tuple[tuple[Any, ...], ...], heads: int, n: int, m: int, generator: torch.Generator) -> Mask:
    """A mask with these parts, under which some tiles are allowed whole, some in part and some not at all."""
    made: dict[str, Any] = {}
    far, near = max(n, m) // 3, max(n, m) // 16
    for name, detail, *dtype in parts:
        count = m if name.startswith("key") else n
        token = torch.arange(count, device="cpu")
        if name in ("left", "right", "limit"):
            made[name] = 0 if detail else far if name == "left" else near
            continue
        if name == "also":
            made[name] = _mask(detail, heads, n, m, generator)
            continue
        if name == "blocks":
            shape = (heads if detail else 1, -(-n // near), -(-m // near))
            made[name] = Blocks(torch.rand(shape, generator=generator, device="cpu") < 0.5, near)
            continue
        match name:
            case "low":
                x = token * m // n - far
            case "high":
                x = token * m // n + near
            case "query_order":
                x = token * m // n
            case "key_order":
                x = token
            case "query_global" | "key_global":
                x = token % 50 == 0
            case _:  # segments, the last of them padding
                x = torch.where(token >= count - 5, -1, token * 4 // count)
        if detail:  # different for each batch element
            x = torch.stack([x.roll(number * near) for number in range(BATCH)])
        made[name] = x.to(dtype[0])
    if n != m and not {"low", "high", "left", "right", "limit"}.isdisjoint(made):  # intervals then need orders
        made = {"query_order": torch.arange(n) * m // n, "key_order": torch.arange(m), **made}
    return Mask(**made)
