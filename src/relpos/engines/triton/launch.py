"""The arguments of the kernels: constants and tile sizes for all calls of one structure, and tensors of a call.

No tensor is read, so a call can be captured in a CUDA graph once a first call has compiled the kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any, TypeVar

import torch
import triton.language as tl
from torch import Tensor

from relpos.core import AxisVectors, LineBias, Lines, LineVectors, LowRank, QueryScale, Sinks, cached
from relpos.core.terms.table_lookup import TableLookup
from relpos.engines.call import Call
from relpos.engines.triton import grids, spans, table_kernels, tiles
from relpos.engines.triton.handles import Alignment, Kernel
from relpos.engines.triton.limits import HOPPERS, are_few, cdiv, interpreting, power_of_2, shared_memory
from relpos.engines.triton.low_rank import LowRankSides

T = TypeVar("T")
KernelInputs = tuple[tiles.QKV, tiles.Bias, tiles.Allowed, tiles.Spans, tiles.Spans, int]
"""What the kernels are given of a call: q, k and v, the bias, the mask, the spans of queries and of keys; and where
tensors begin that are not fresh (`Alignment`)."""


class Launches:
    """What the kernels of all calls of one structure have in common. Holds no tensor.

    Args:
        call: the first of them, its rotation applied.
    """

    def __init__(self, call: Call) -> None:
        self.batch, self.heads, self.n, self.d = call.q.shape
        self.own_heads, self.m, self.v = call.v.shape[1:]
        self.device, self.dtype, self.scale = call.q.device, call.q.dtype, call.scale
        self.readers = q, k, v = [_Reader(x) for x in (call.q, call.k, call.v)]
        self.copies = q.copied or k.copied or v.copied
        contiguous = all(x.is_contiguous() for x in (call.q, call.k, call.v))
        self.empty_like: Callable[[Tensor], Tensor] = torch.empty_like if contiguous else _contiguous_like
        """Memory for the gradient of q, k or v."""
        self.size = tiles.Counts(self.heads, self.heads // self.own_heads, self.n, self.m)
        self.wide = torch.promote_types(call.q.dtype, torch.float32)
        self.unit = 1.0 if call.q.dtype == self.wide else math.log2(math.e)
        kinds = [type(term) for term in call.terms.items]
        self.line_at = next((at for at, kind in enumerate(kinds) if kind in (LineBias, TableLookup)), None)
        line = self.line(call)
        self.layout = None if line is None else line.lines.layout
        self.few = line is not None and are_few(line.lines)
        self.affine = self.layout is not None and self.layout.kind == "affine"
        self.pad = 0 if self.layout is None else grids.padding(self.layout, spans.COARSE)
        self.low_rank_at = [index for index, kind in enumerate(kinds) if kind is LowRank]
        self.sinks_at = kinds.index(Sinks) if Sinks in kinds else None
        self.factor_at = kinds.index(QueryScale) if QueryScale in kinds else None
        self.has_vectors = LineVectors in kinds or AxisVectors in kinds
        self.keeps_bias = self.factor_at is None and not self.low_rank_at
        """Whether the bias of the forward is kept for the backward: a table is short, other numbers are many."""
        self.tested = call.mask is not None
        plain = call.mask is None or call.mask.is_interval
        self.spans = spans.allowed(call.mask, self.n, self.m, self.device) if plain else None
        self.threshold = int(call.dropout * 2**32)
        self.aligned = Alignment()
        self.inverse = tl.constexpr(1 / self.scale) if self.scale else None
        self.backwards: dict[Hashable, Any] = {}
        """What a backward launches, by which gradients are wanted."""
        self._made: dict[str, Any] = {}

    def line(self, call: Call) -> LineBias | TableLookup | None:
        """The bias of a call."""
        found: LineBias | TableLookup | None = None if self.line_at is None else call.terms.items[self.line_at]  # type: ignore[assignment]
        return found

    def low_rank(self, call: Call) -> list[LowRank]:
        """The biases of low rank of a call."""
        return [call.terms.items[index] for index in self.low_rank_at]  # type: ignore[misc]

    def sinks(self, call: Call) -> Sinks | None:
        """The sinks of a call."""
        found: Sinks | None = None if self.sinks_at is None else call.terms.items[self.sinks_at]  # type: ignore[assignment]
        return found

    def factor(self, call: Call) -> QueryScale | None:
        """What the bias of a call is multiplied by; q has been already."""
        found: QueryScale | None = None if self.factor_at is None else call.terms.items[self.factor_at]  # type: ignore[assignment]
        return found

    def given(self, call: Call) -> KernelInputs:
        """What the kernels are given of a call."""
        qkv, bias, (allowed, of_queries, of_keys) = self.qkv(call), self.bias(call), self.allowed(call)
        at = self.aligned(qkv, allowed) if self.keeps_bias else self.aligned(qkv, allowed, bias)
        return qkv, bias, allowed, of_queries, of_keys, at

    def given_back(self, call: Call) -> KernelInputs:
        """The same for the backward of a call, with what the forward left."""
        if call.prepared is None:
            return self.given(call)
        bias, at = call.prepared
        return self.qkv(call), bias, *self.allowed(call), at

    def qkv(self, call: Call) -> tiles.QKV:
        """The queries, keys and values of a call."""
        q, k, v = self.readers
        if not self.copies:
            return tiles.QKV(call.q, *q.strides, call.k, *k.strides, call.v, *v.strides)
        return tiles.QKV(q.readable(call.q), *q.strides, k.readable(call.k), *k.strides, v.readable(call.v), *v.strides)

    def bias(self, call: Call) -> tiles.Bias:
        """The table of a call, its lines, and its biases of low rank."""
        line = self.line(call)
        rest = _NOTHING_BESIDE if self.keeps_bias else self._beside_table(call)
        if line is None:
            return tiles.Bias(*_NO_TABLE, *rest)
        values = parameter_of(line)
        kernel, size, head, place, strides = self.once("padded", lambda: self._table(line))
        table = torch.empty(size, dtype=self.wide, device=self.device)
        kernel.launch(values.data_ptr() % 16, table, values, *strides, line.lines.length, _rows_read(line))
        if self.affine:
            return tiles.Bias(table, head, None, 0, None, 0, *place, *rest)
        query, key = in_32_bits(line.lines)
        return tiles.Bias(table, head, query, batch_stride(query), key, batch_stride(key), *place, *rest)

    def _beside_table(self, call: Call) -> tuple[Any, ...]:
        """The factor of the bias with its strides, and the biases of low rank."""
        scale = self.factor(call)
        factor = (None, 0, 0) if scale is None else _with_head_strides(scale.factor.to(self.wide))
        return *factor, tuple([self._ranks(term) for term in self.low_rank(call)]), self.inverse

    def _table(
        self, line: LineBias | TableLookup
    ) -> tuple[Kernel, tuple[int, int], int, tuple[int, ...], tuple[int, ...]]:
        """The kernel that pads the values; the size of what it writes; a stride of heads; where entries are; and the
        strides of heads and of entries, or rows, in what it reads."""
        values, lines = parameter_of(line), line.lines
        values = values.T if isinstance(line, TableLookup) else values
        rows, size = values.shape[0], (values.shape[0], lines.length + 2 * self.pad)
        constants = {"PAD": self.pad, "ENTRIES": _ENTRIES, "SCALE": self.scale, "SUM": self.constants["SUM"]}
        kernel = Kernel(table_kernels.padded, (cdiv(size[1], _ENTRIES), rows), constants)
        apart, *prefixes = grids.starts(lines.layout)
        first = self.pad + lines.origin + apart
        affine = lines.layout.kind == "affine"
        place = (first, first, 0, 0) if affine else (self.pad + lines.origin, first, *prefixes)
        return kernel, size, 0 if rows == 1 else size[1], place, values.stride()

    def _ranks(self, term: LowRank) -> LowRankSides:
        """A bias of low rank, rank by rank, with as many zeros at the ends as the table has."""
        pad = 3 * min(spans.COARSE, max(16, power_of_2(max(self.n, self.m))))
        sides: list[Any] = []
        for given in (term.query, term.key):
            x = given.detach() if given.dim() == 4 else given.detach()[None]
            batch, heads, tokens, rank = x.shape
            side = x.new_zeros((batch, heads, rank, tokens + pad), dtype=self.wide)
            side[..., :tokens] = x.mT
            sides += [side, (batch > 1) * side.stride(0), (heads > 1) * side.stride(1), tokens + pad]
        return LowRankSides._make((*sides, tl.constexpr(term.query.shape[-1])))

    def allowed(self, call: Call) -> tuple[tiles.Allowed, tiles.Spans, tiles.Spans]:
        """The mask of a call, and the spans of queries and of keys."""
        return spans.allowed(call.mask, self.n, self.m, self.device) if self.spans is None else self.spans

    def sink(self, call: Call) -> tiles.Sink:
        """The sinks of a call."""
        sinks = self.sinks(call)
        if sinks is None:
            return _NO_SINK
        logits, batch, head = _with_head_strides(sinks.rows(self.wide) * self.unit)
        return tiles.Sink(logits, batch, head, int(sinks.of_queries))

    def dropout(self, call: Call) -> tiles.Dropout:
        """The dropout of a call."""
        if call.seed is None:
            return _NO_DROPOUT
        factor = torch.full((1,), 1 / (1 - call.dropout), dtype=self.wide, device=self.device)
        return tiles.Dropout(call.seed.view(1), self.threshold, factor)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """The result of `make`, cached by name: a kernel, with all that depends on the structure."""
        known = self._made.get(name)
        if known is None:
            known = self._made[name] = make()
        made: T = known
        return made

    @cached_property
    def constants(self) -> dict[str, Any]:
        """The constants that all kernels take."""
        padded = (max(16, power_of_2(width)) for width in (self.d, self.v))
        return {
            **dict(zip(("D_PAD", "V_PAD"), padded, strict=True)),
            "D": self.d,
            "V": self.v,
            "PRECISION": "widened" if interpreting() else "ieee",  # no effect in half precision
            "SCALE": self.scale,
            "UNIT": self.unit,
            "SUM": tl.float64 if self.wide == torch.float64 else tl.float32,
        }

    def shape(self, kind: str) -> dict[str, int]:
        """Rows, columns, warps and stages of a kernel: fixed, so that sums have the same order in every run."""
        half = self.dtype in (torch.float16, torch.bfloat16)
        kind += " of ranks" * (bool(self.low_rank_at) and kind in ("queries", "keys"))
        classes = [width for width in _CLASSES if width >= max(self.d, self.v)]
        large_memory = shared_memory(self.device) >= HOPPERS
        wider = 0 if large_memory else 2 if kind == "table" or self.has_vectors else 1
        width = classes[min(wider, len(classes) - 1)]
        key = "forward" if kind == "weights" else kind, "half" if half else "full", width
        crowded = half and (not large_memory or self._is_crowded(kind))
        found = (self.has_vectors and WITH_VECTORS.get(key)) or (crowded and CROWDED.get(key[::2])) or SHAPES[key]
        found = dict(found)
        if not large_memory:  # the tiles of wider heads, or of the widest, without pipelining
            found["num_stages"] = 1
        for name, count in (("ROWS", self.n), ("COLUMNS", self.m)):  # short sequences need no more
            found[name] = min(found[name], max(16, power_of_2(count)))
        if kind == "forward" and half and found["ROWS"] <= 64:  # half of a tile for half of the threads
            found["num_warps"] = min(4, found["num_warps"])
        return found

    def _is_crowded(self, kind: str) -> bool:
        """Whether a kernel needs more registers than that of a plain bias: it reads factors, it goes through the query
        heads of a key head, or it keeps all pairs of a tile."""
        more = self.few if kind == "table" else self.own_heads < self.heads
        return more or self.factor_at is not None

    def tests(self, full: bool) -> dict[str, bool]:
        """Whether all tiles are full, and whether some are tested for pairs that are not allowed or outside."""
        return {"FULL": full, "TESTED": self.tested or not full}

    def tiled(self, shape: dict[str, int]) -> dict[str, Any]:
        """Where tiles of a shape begin, and whether all are alike; see `grids`."""
        sides = None if self.layout is None else grids.sides(self.layout, shape["ROWS"], shape["COLUMNS"], spans.COARSE)
        plain = grids.PLAIN_SIDE, grids.PLAIN_SIDE
        if self.has_vectors and sides != plain:  # they are read and written as rows of plain tiles
            sides = None
        queries, keys = sides or plain
        return {"ALIKE": sides is not None, "QUERIES": queries, "KEYS": keys}


class _Reader:
    """How the kernels read a tensor: its strides, and whether it must be copied."""

    def __init__(self, x: Tensor) -> None:
        read = with_strides(x.detach())
        self.copied, self.strides = read[0].data_ptr() != x.data_ptr(), read[1:]

    def readable(self, x: Tensor) -> Tensor:
        return x.contiguous() if self.copied else x


_CLASSES = (64, 128, 256)
_ENTRIES = 1024
"""Numbers of a table that a program of `padded` writes."""
_NO_TABLE = (None, 0, None, 0, None, 0, 0, 0, 0, 0)
_NOTHING_BESIDE = (None, 0, 0, (), None)
_NO_SINK = tiles.Sink(None, 0, 0, 0)
_NO_DROPOUT = tiles.Dropout(None, 0, None)


def parameter_of(line: LineBias | TableLookup) -> Tensor:
    """What a gradient of a bias is taken of: its values, or the table that they are read from."""
    return line.table if isinstance(line, TableLookup) else line.values


def _rows_read(line: LineBias | TableLookup) -> Tensor | None:
    """The row of the table that each entry reads; None where rows are read in order."""
    return line.rows.in_32_bits if isinstance(line, TableLookup) and not line.rows.in_order else None


def in_32_bits(lines: Lines) -> tuple[Tensor, Tensor]:
    """The coordinates of queries and keys, cached. Always copies, which begin where 16 divides the address."""

    def made() -> tuple[Tensor, Tensor]:
        query, key = (x.to(torch.int32, copy=True).contiguous() for x in (lines.query, lines.key))
        return query, key

    return cached(lines, "in 32 bits", lines.query.device, made, lambda: 4 * (lines.query.numel() + lines.key.numel()))


def batch_stride(x: Tensor) -> int:
    """The stride along the batch of coordinates, `[N]` or `[1 or B, N]`."""
    return x.stride(0) if x.dim() == 2 and x.shape[0] > 1 else 0


def _with_head_strides(x: Tensor) -> tuple[Tensor, int, int]:
    """Numbers of queries, `[1 or B, 1 or H, N or 1]`, contiguous, with their strides along batch and head."""
    batch, head = (x.shape[axis] > 1 for axis in (0, 1))
    return x.detach().contiguous(), batch * x.shape[1] * x.shape[2], head * x.shape[2]


def _contiguous_like(x: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def with_strides(x: Tensor) -> tuple[Tensor, int, int, int]:
    """The tensor, if the kernels can read it (last stride 1, offsets within a tile in 32 bits), else a copy; with its
    strides along batch, head and token."""
    batch, head, token, last = x.stride()
    if last != 1 or token * spans.COARSE >= 2**31:
        x = x.contiguous()
        batch, head, token, _ = x.stride()
    return x, batch, head, token


def _shape(rows: int, columns: int, warps: int, stages: int) -> dict[str, int]:
    return {"ROWS": rows, "COLUMNS": columns, "num_warps": warps, "num_stages": stages}


SHAPES: dict[tuple[str, str, int], dict[str, int]] = {
    ("forward", "half", 64): _shape(128, 64, 8, 3),
    ("forward", "half", 128): _shape(128, 64, 8, 3),
    ("forward", "half", 256): _shape(64, 32, 8, 2),
    ("forward", "full", 64): _shape(64, 32, 4, 2),
    ("forward", "full", 128): _shape(64, 32, 8, 2),
    ("forward", "full", 256): _shape(32, 16, 8, 1),
    ("queries", "half", 64): _shape(64, 64, 4, 2),
    ("queries", "half", 128): _shape(64, 64, 4, 2),
    ("queries", "half", 256): _shape(64, 32, 8, 1),
    ("queries", "full", 64): _shape(64, 32, 4, 2),
    ("queries", "full", 128): _shape(32, 32, 8, 1),
    ("queries", "full", 256): _shape(32, 16, 8, 1),
    ("keys", "half", 64): _shape(64, 64, 4, 2),
    ("keys", "half", 128): _shape(64, 128, 8, 2),
    ("keys", "half", 256): _shape(32, 64, 8, 1),
    ("keys", "full", 64): _shape(32, 64, 4, 2),
    ("keys", "full", 128): _shape(32, 32, 8, 1),
    ("keys", "full", 256): _shape(16, 32, 8, 1),
    ("queries of ranks", "half", 64): _shape(64, 32, 4, 2),
    ("queries of ranks", "half", 128): _shape(64, 32, 4, 2),
    ("queries of ranks", "half", 256): _shape(64, 16, 8, 1),
    ("queries of ranks", "full", 64): _shape(64, 16, 4, 2),
    ("queries of ranks", "full", 128): _shape(32, 16, 8, 1),
    ("queries of ranks", "full", 256): _shape(16, 16, 8, 1),
    ("keys of ranks", "half", 64): _shape(32, 64, 4, 2),
    ("keys of ranks", "half", 128): _shape(32, 64, 8, 2),
    ("keys of ranks", "half", 256): _shape(16, 64, 8, 1),
    ("keys of ranks", "full", 64): _shape(16, 64, 4, 2),
    ("keys of ranks", "full", 128): _shape(16, 32, 8, 1),
    ("keys of ranks", "full", 256): _shape(16, 32, 8, 1),
    ("table", "half", 64): _shape(64, 64, 4, 3),
    ("table", "half", 128): _shape(64, 64, 4, 3),
    ("table", "half", 256): _shape(32, 32, 8, 1),
    ("table", "full", 64): _shape(32, 32, 8, 1),
    ("table", "full", 128): _shape(32, 32, 8, 1),
    ("table", "full", 256): _shape(16, 16, 4, 1),
}
"""By kernel, precision and head width, for Hopper; powers of two that divide `spans.COARSE`. Those of widths 64 and 128
in half precision are the best of a few on an H200 (docs/log.md, 2026-11-27), also that of keys at 128, which spills a
few registers on Hopper. The others are not measured. Those of ranks are half as large, since registers hold numbers of
low-rank biases too: none is spilled up to rank 6, nor at 7 of which 3 are learned (CABLE)."""
WITH_VECTORS: dict[tuple[str, str, int], dict[str, int]] = {
    ("keys", "half", 64): _shape(64, 64, 8, 2),
    ("forward", "half", 128): _shape(128, 32, 8, 3),
    ("queries", "half", 128): _shape(64, 32, 8, 2),
    ("keys", "half", 128): _shape(32, 64, 8, 2),
}
"""The same beside vectors, whose addresses need registers: the tiles above would spill some. Not measured."""
CROWDED: dict[tuple[str, int], dict[str, int]] = {
    ("keys", 64): _shape(64, 64, 8, 2),
    ("keys", 128): _shape(32, 128, 8, 2),
    ("keys of ranks", 256): _shape(32, 32, 8, 1),
    ("table", 128): _shape(64, 64, 8, 3),
}
"""The same in half precision where `_is_crowded` says so, and on GPUs with less shared memory. Not measured."""
