"""A description as a call of relpos, and as plain entries for the oracle, over the same tensors."""

from __future__ import annotations

import math
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

import relpos
from fuzz import plain
from fuzz.description import Described, Layout, Part, Tokens
from relpos import Grid, Mask, Positions, Sequence
from relpos.core import (
    AxisVectors,
    Blocks,
    Coordinates,
    DenseBias,
    LineBias,
    Lines,
    LineVectors,
    LowRank,
    QueryBias,
    Rotation,
    RowRule,
    Scale,
    Sinks,
    Softcap,
    Term,
    Terms,
    axis_lines,
    lines,
)
from relpos.patterns import big_bird, block_sparse, dilated, fixed, local, longformer, strided, windows
from relpos.position import Site
from relpos.position.preset import find

HALF = (torch.bfloat16, torch.float16)


def lay_out(x: Tensor, layout: Layout | None) -> Tensor:
    """The same numbers as x, whose expanded dimensions are of size 1, elsewhere in memory; around them lies NaN."""
    if layout is None or not layout.order:
        return x
    padded = [
        start + (size - 1) * step + 1 + extra if size else start + extra
        for size, start, step, extra in zip(x.shape, layout.start, layout.step, layout.extra, strict=True)
    ]
    around: Any = math.nan if x.is_floating_point() else True if x.dtype == torch.bool else 2**30
    memory = torch.full([padded[dim] for dim in layout.order], around, dtype=x.dtype)
    view = memory.permute([layout.order.index(dim) for dim in range(x.dim())])
    for dim, (size, start, step) in enumerate(zip(x.shape, layout.start, layout.step, strict=True)):
        view = view[(slice(None),) * dim + (slice(start, start + (size - 1) * step + 1 if size else start, step),)]
    view.copy_(x)
    return view


@dataclass
class Built:
    """A call, ready to be run.

    Attributes:
        arguments: of `relpos.attention`, but for the engine. leaves: the tensors with gradients by name.
        truth: the same call for the oracle. d_out, d_lse: gradients of the results, or None.
        seed: of PyTorch's generator. precision: of the arithmetic.
    """

    arguments: dict[str, Any]
    leaves: dict[str, Tensor]
    plain: plain.Plain
    d_out: Tensor | None
    d_lse: Tensor | None
    seed: int
    precision: plain.Precision
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Builder:
    """Makes one call."""

    def __init__(self, call: Described) -> None:
        self.call = call
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.named: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.entries: list[plain.Entry] = []
        self.coordinates = [self._coordinates(tokens, side) for side, tokens in zip("qk", call.sides, strict=True)]
        if call.keys is None:
            self.coordinates[1] = self.coordinates[0]
        self.cuts = None if call.cut is None else tuple(slice(*cut) for cut in call.cut)

    # numbers

    def chance(self, name: str) -> random.Random:
        return random.Random(zlib.crc32(f"{self.call.seed} {name}".encode()))

    def generator(self, name: str) -> torch.Generator:
        return torch.Generator().manual_seed(zlib.crc32(f"{self.call.seed} {name}".encode()))

    def _shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        layout = self.call.layouts.get(name)
        expanded = () if layout is None else layout.expanded
        return tuple(1 if dim in expanded and size else size for dim, size in enumerate(shape))

    def _placed(self, name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
        layout = self.call.layouts.get(name)
        if layout is not None and len(layout.order) not in (0, x.dim()):
            layout = None
        return lay_out(x, layout).expand(shape)

    def floats(self, name: str, shape: tuple[int, ...], gain: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that may learn."""
        x = torch.randn(self._shape(name, shape), generator=self.generator(name), dtype=torch.float64) * gain
        return self.learned(name, self._placed(name, x.to(dtype or self.dtype), shape))

    def learned(self, name: str, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_(name not in self.call.frozen)
        self.named[name] = x
        self.names[id(x)] = name
        return x

    def whole(self, name: str, low: int, high: int, shape: tuple[int, ...], dtype: str = "int64") -> Tensor:
        """Integers from low to high, both included."""
        x = torch.randint(low, high + 1, self._shape(name, shape), generator=self.generator(name))
        return self._placed(name, x.to(getattr(torch, dtype)), shape)

    def placed(self, name: str, x: Tensor) -> Tensor:
        """Integers or booleans as the layout of this name wants them; expanded is what is alike anyway."""
        layout = self.call.layouts.get(name)
        if layout is None or len(layout.order) != x.dim() or layout.expanded:
            return x
        return lay_out(x, layout)

    # coordinates

    def _coordinates(self, tokens: Tokens, side: str) -> Coordinates | None:
        match tokens.kind:
            case "sequence":
                return Sequence(tokens.sizes[0], start=tokens.start, prefix=tokens.prefix)
            case "grid":
                return Grid(*tokens.sizes, prefix=tokens.prefix)
            case "positions":
                low = tuple(tokens.start for _ in tokens.spans)
                high = tuple(tokens.start + span - 1 for span in tokens.spans)
                lead = (self.call.batch,) if tokens.batched else ()
                columns = [
                    torch.randint(a, b + 1, (*lead, tokens.sizes[0]), generator=self.generator(f"places {side} {axis}"))
                    for axis, (a, b) in enumerate(zip(low, high, strict=True))
                ]
                values = self.placed(f"{side}.values", torch.stack(columns, -1))
                low, high = tuple(x - tokens.wide for x in low), tuple(x + tokens.wide for x in high)
                if len(low) == 1:
                    return Positions(values[..., 0], low=low[0], high=high[0], prefix=tokens.prefix)
                return Positions(values, low=low, high=high, prefix=tokens.prefix)
            case _:
                return None

    def sides(self, raster: bool = False) -> tuple[Coordinates, Coordinates]:
        first, second = self.coordinates
        assert first is not None
        assert second is not None
        return (first.raster(), second.raster()) if raster else (first, second)

    def index(self, sides: tuple[Coordinates, Coordinates], axis: int | None = None) -> tuple[Tensor, int]:
        """The oracle's own reading of which entry each pair has."""
        own = []
        for tokens, raster in zip(self.call.sides, sides, strict=True):
            side = self._side(tokens, raster)
            if axis is not None:
                side = plain.Side(side.places[..., axis : axis + 1], side.prefix, side.low[axis:][:1], side.high[axis:][:1])
            own.append(side)
        index, length = plain.line_index(*own)
        return self._cut(index), length

    def _side(self, tokens: Tokens, given: Coordinates) -> plain.Side:
        if isinstance(given, Positions):
            return plain.Side(given.values, tokens.prefix, given.low, given.high)
        if tokens.kind == "grid" and given.axes == len(tokens.sizes) > 1:
            cells = torch.cartesian_prod(*(torch.arange(size) for size in tokens.sizes))
            return plain.Side(cells, tokens.prefix, (0,) * given.axes, tuple(size - 1 for size in tokens.sizes))
        count, start = math.prod(tokens.sizes), tokens.start if tokens.kind == "sequence" else 0
        places = torch.arange(start, start + count)[:, None]
        return plain.Side(places, tokens.prefix, (start,), (start + max(count, 1) - 1,))

    def _cut(self, x: Tensor) -> Tensor:
        return x if self.cuts is None else x[..., self.cuts[0], self.cuts[1]]

    # terms

    def terms(self) -> Terms:
        total = Terms()
        for part in self.call.terms:
            for term in getattr(self, f"_{part.kind.lower()}")(part):
                total = total + term
        return total

    def _narrowed(self, term: Term) -> Term:
        """The part of a term that the call wants, of one that was made for more."""
        return term if self.cuts is None else term.narrow(*self.cuts)

    def _heads(self, part: Part) -> int:
        return self.call.heads if part.options.get("heads", True) else 1

    def _batch(self, part: Part, option: str = "batched") -> int:
        return self.call.batch if part.options.get(option, False) else 1

    def _dtype(self, part: Part, least: torch.dtype | None = None) -> torch.dtype:
        dtype = getattr(torch, part.options.get("dtype", self.call.dtype))
        return torch.promote_types(dtype, least) if least is not None else dtype

    def _lines(self, part: Part) -> tuple[Lines, Tensor]:
        sides = self.sides(raster=part.options.get("raster", False))
        line = lines(sides[0]) if sides[0] is sides[1] else lines(*sides)
        index, length = self.index(sides)
        assert line.length == length, "the lines have another length than their documentation says"
        return replace(line, query=self.placed(f"{part.name}.query", line.query)), index

    def _linebias(self, part: Part) -> list[Term]:
        line, index = self._lines(part)
        values = self.floats(
            f"{part.name}.values", (self._heads(part), line.length), part.options.get("gain", 1.0),
            self._dtype(part, torch.float32),
        )  # fmt: skip
        self.entries.append(("line", {"values": f"{part.name}.values", "index": index}))
        return [self._narrowed(LineBias(values, line))]

    def _rotation(self, part: Part) -> list[Term]:
        options, (n, m) = part.options, self.call.counts
        pairs, wide = options["pairs"], torch.promote_types(self.dtype, torch.float32)
        dtype = getattr(torch, options.get("dtype", str(wide).removeprefix("torch.")))
        heads = self._heads(part)
        entry: dict[str, Any] = {"layout": options["layout"], "magnitude": options.get("magnitude", 1.0)}
        made: dict[str, Tensor | None] = {}
        for side, count in (("query", n), ("key", m)):
            shape = (self._batch(part, f"{side}_batched"), heads if options.get(f"{side}_heads", True) else 1, count, pairs)
            for name, wanted in ((side, side == "query" or options.get("keys", True)), (f"{side}_magnitude", False)):
                if name == f"{side}_magnitude":
                    wanted = options.get("magnitudes", False) and (side == "query" or options.get("keys", True))
                made[name] = None
                if wanted:
                    full = f"{part.name}.{name}"
                    made[name] = self.floats(full, shape, 3.0 if name == side else 0.5, dtype)
                    entry[name] = full
        self.entries.append(("rotation", entry))
        return [Rotation(**made, layout=options["layout"], magnitude=entry["magnitude"])]  # type: ignore[arg-type]

    def _querybias(self, part: Part) -> list[Term]:
        u = self.floats(f"{part.name}.u", (self._heads(part), self.call.width), dtype=self._dtype(part))
        self.entries.append(("query_bias", {"u": f"{part.name}.u"}))
        return [QueryBias(u)]

    def _linevectors(self, part: Part) -> list[Term]:
        call, options, name = self.call, part.options, part.name
        line, entry = self._lines(part)
        side, width = options["side"], call.value_width if options["side"] == "value" else call.width
        count, kind = options["rows"], options.get("index")
        if kind is None:
            count = max(1, line.length + options.get("more", 0))
        vectors = self.floats(f"{name}.vectors", (self._heads(part), count, width), dtype=self._dtype(part))
        index = None
        if kind == "random":
            index = self.whole(f"{name}.index", -1, count - 1, (line.length,), options.get("index_dtype", "int64"))
        elif kind == "clip":
            centre = line.length // 2
            index = self.placed(f"{name}.index", (torch.arange(line.length) - centre + count // 2).clamp(0, count - 1))
        rows = entry if index is None else index.long()[entry]
        bias = None
        if options.get("bias", False):
            bias = self.floats(f"{name}.bias", (self._heads(part), width), dtype=self._dtype(part))
        self.entries.append(
            (
                "vectors",
                {
                    "vectors": f"{name}.vectors",
                    "bias": None if bias is None else f"{name}.bias",
                    "rows": rows,
                    "side": side,
                    "scaled": options.get("scaled", True),
                },
            )
        )
        return [self._narrowed(LineVectors(vectors, index, line, side, options.get("scaled", True), bias))]

    def _axisvectors(self, part: Part) -> list[Term]:
        sides = self.sides()
        every = axis_lines(sides[0]) if sides[0] is sides[1] else axis_lines(*sides)
        vectors = []
        for axis, line in enumerate(every):
            index, _ = self.index(sides, axis)
            count = max(1, line.layout.tokens + part.options.get("more", 0))
            name = f"{part.name}.{axis}"
            vectors.append(self.floats(name, (self._heads(part), count, self.call.width), dtype=self._dtype(part)))
            entry = {"vectors": name, "bias": None, "rows": index, "side": "query", "scaled": False}
            self.entries.append(("vectors", entry))
        return [self._narrowed(AxisVectors(tuple(vectors), every))]

    def _lowrank(self, part: Part) -> list[Term]:
        (n, m), rank = self.call.counts, part.options["rank"]
        made = []
        for side, count in (("query", n), ("key", m)):
            lead = (self._batch(part, f"{side}_batched"),) if part.options.get(f"{side}_wide", False) else ()
            heads = self._heads(part) if part.options.get(f"{side}_heads", True) else 1
            made.append(self.floats(f"{part.name}.{side}", (*lead, heads, count, rank), dtype=self._dtype(part)))
        self.entries.append(("low_rank", {"query": f"{part.name}.query", "key": f"{part.name}.key"}))
        return [LowRank(*made)]

    def _densebias(self, part: Part) -> list[Term]:
        shape = (self._batch(part), self._heads(part), *self.call.counts)
        bias = self.floats(f"{part.name}.bias", shape, part.options.get("gain", 1.0), self._dtype(part))
        self.entries.append(("dense", {"bias": f"{part.name}.bias"}))
        return [DenseBias(bias)]

    def _rowrule(self, part: Part) -> list[Term]:
        name, rule = f"{part.name}.w", part.options["rule"]
        wide = torch.promote_types(self.dtype, torch.float32)
        w = self.floats(name, (self.call.heads, self.call.width), dtype=wide)
        self.entries.append(("rule", {"rule": rule, "parameters": (name,)}))
        return [RowRule(_RULES[rule], (w,))]

    def _scale(self, part: Part) -> list[Term]:
        return [Scale(part.options["value"])]

    def _softcap(self, part: Part) -> list[Term]:
        self.entries.append(("softcap", {"cap": part.options["cap"]}))
        return [Softcap(part.options["cap"])]

    def _sinks(self, part: Part) -> list[Term]:
        logits = self.floats(f"{part.name}.logits", (self.call.heads,), 2.0, self._dtype(part))
        self.entries.append(("sinks", {"logits": f"{part.name}.logits"}))
        return [Sinks(logits)]

    # what mechanisms say

    def _mechanism(self, part: Part) -> list[Term]:
        """The terms of a mechanism, as data: each floating tensor becomes one of the call's own."""
        call = self.call
        queries, keys = self.sides()
        wide = torch.promote_types(self.dtype, torch.float32)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{call.seed} {part.name}".encode()))
            site = Site(
                num_heads=call.heads, head_dim=call.width, embed_dim=call.heads * call.width, queries=queries,
                keys=None if keys is queries else keys, causal=part.options.get("causal", False), init_std=0.5,
            )  # fmt: skip
            mechanism = find(part.options["preset"]).make(site).to(wide)
            with torch.no_grad():
                for parameter in mechanism.parameters():
                    if not parameter.any():
                        parameter.normal_(std=0.3)
        terms = mechanism.terms(queries, None if keys is queries else keys)
        terms = terms if self.cuts is None else terms.narrow(*self.cuts)
        made: list[Term] = []
        known: dict[int, Tensor] = {}
        for place, term in enumerate(terms):
            own = self._own(term, f"{part.name}.{place}", known)
            self._describe(own)
            made.append(own)
        return made

    def _own(self, node: Any, name: str, known: dict[int, Tensor]) -> Any:
        """The same with detached tensors that are known by a name."""
        if isinstance(node, Tensor):
            if not node.is_floating_point():
                return node
            if id(node) not in known:
                own = self._placed(name, node.detach().clone(), tuple(node.shape))
                known[id(node)] = self.learned(name, own)
            return known[id(node)]
        if isinstance(node, tuple):
            return tuple(self._own(x, f"{name}.{i}", known) for i, x in enumerate(node))
        if is_dataclass(node) and not isinstance(node, (Lines, type)):
            changed = {f.name: self._own(getattr(node, f.name), f"{name}.{f.name}", known) for f in fields(node)}
            return replace(node, **changed)
        return node

    def _name(self, x: Tensor | None) -> str | None:
        return None if x is None else self.names[id(x)]

    def _describe(self, term: Term) -> None:
        """An entry of what a term says, read off its fields."""
        entries = self.entries
        match term:
            case LineBias(values=values, lines=line):
                entries.append(("line", {"values": self._name(values), "index": _pairs(line)}))
            case Rotation():
                named = ("query", "key", "query_magnitude", "key_magnitude")
                entry: dict[str, Any] = {name: self._name(getattr(term, name)) for name in named}
                entries.append(("rotation", {**entry, "layout": term.layout, "magnitude": term.magnitude}))
            case QueryBias(u=u):
                entries.append(("query_bias", {"u": self._name(u)}))
            case LineVectors():
                rows = _pairs(term.lines)
                rows = rows if term.index is None else term.index[rows]
                own = {"vectors": self._name(term.vectors), "bias": self._name(term.bias), "rows": rows}
                entries.append(("vectors", {**own, "side": term.side, "scaled": term.scaled}))
            case AxisVectors():
                for vectors, line in zip(term.vectors, term.lines, strict=True):
                    own = {"vectors": self._name(vectors), "bias": None, "rows": _pairs(line)}
                    entries.append(("vectors", {**own, "side": "query", "scaled": False}))
            case LowRank(query=query, key=key):
                entries.append(("low_rank", {"query": self._name(query), "key": self._name(key)}))
            case DenseBias(bias=bias):
                entries.append(("dense", {"bias": self._name(bias)}))
            case RowRule():
                names = tuple(self._name(x) for x in term.parameters)
                entries.append(("rule", {"rule": term.rule, "parameters": names}))
            case Softcap(cap=cap):
                entries.append(("softcap", {"cap": cap}))
            case Sinks(logits=logits):
                entries.append(("sinks", {"logits": self._name(logits)}))
            case Scale():
                pass
            case _:
                raise TypeError(f"the fuzzer knows no {type(term).__name__}")

    # masks

    def masks(self) -> tuple[Mask | None, Tensor]:
        """The mask, and the pairs that the oracle finds it to allow."""
        n, m = (side.count for side in self.call.sides)
        allowed = torch.ones(1, 1, n, m, dtype=torch.bool)
        made = []
        for part in self.call.masks:
            mask, own = self._fields(part) if part.kind == "fields" else self._pattern(part)
            made.append(mask)
            allowed = allowed & own
        mask = reduce(lambda a, b: a & b, made) if made else None
        if self.cuts is None:
            return mask, allowed
        return None if mask is None else mask.narrow(*self.cuts), self._cut(allowed)

    def _fields(self, part: Part) -> tuple[Mask, Tensor]:
        options, name = part.options, part.name
        n, m = (side.count for side in self.call.sides)
        given: dict[str, Any] = {x: options[x] for x in ("left", "right", "limit") if x in options}

        def shape(option: str, count: int) -> tuple[int, ...]:
            kind = options.get(f"{option}_batch", 0)
            return (count,) if kind == 0 else (1 if kind == 1 else self.call.batch, count)

        dtype = options.get("int", "int64")
        for side, count in (("query", n), ("key", m)):
            order = options.get(f"{side}_order")
            if order is not None:
                own = shape(f"{side}_order", count)
                if order == "random":
                    given[f"{side}_order"] = self.whole(f"{name}.{side}_order", -3, max(n, m), own, dtype)
                else:  # where it begins
                    line = (torch.arange(count) + order).to(getattr(torch, dtype)).expand(own)
                    given[f"{side}_order"] = self.placed(f"{name}.{side}_order", line)
            if options.get(f"{side}_global") is not None:
                share = options[f"{side}_global"]
                drawn = self.whole(f"{name}.{side}_global", 0, 99, shape(f"{side}_global", count))
                given[f"{side}_global"] = drawn < share
        if options.get("interval") is not None:
            reach = options["interval"]
            own = shape("interval", n)
            centre = torch.arange(n) * max(m, 1) // max(n, 1)
            for bound, sign in (("low", -1), ("high", 1)):
                if options.get(bound, True):
                    away = self.whole(f"{name}.{bound}", -reach // 3, reach, own)
                    made = (centre + sign * away).to(getattr(torch, dtype))
                    given[bound] = made
        segments = options.get("segments")
        if segments is not None:
            kind, number = segments
            both = []
            for side, count in (("query", n), ("key", m)):
                own = shape(f"{side}_segments", count)
                if kind == "remainder":
                    made = (torch.arange(count) % number).expand(own)
                elif kind == "random":
                    made = self.whole(f"{name}.{side}_segments", -1, number - 1, own)
                elif kind == "padding":
                    made = torch.where(torch.arange(count) < self.whole(f"{name}.{side}_end", 0, count, (*own[:-1], 1)), 0, -1)
                    made = made.view(own)
                else:  # documents one after another, the last ones padding
                    made = self.whole(f"{name}.{side}_segments", 0, 2 * number, own).clamp(max=1).diff(dim=-1).abs()
                    made = torch.cat([made.new_zeros(*own[:-1], 1), made.cumsum(-1)], dim=-1)[..., :count]
                    made = torch.where(made > number, -1, made)
                both.append(self.placed(f"{name}.{side}_segments", made.to(getattr(torch, dtype))))
            if options.get("one_segments", False) and both[0].shape == both[1].shape:
                both[1] = both[0]
            given["query_segments"], given["key_segments"] = both
        plainly = dict(given)
        if options.get("blocks") is not None:
            size, share, a_head = options["blocks"]
            shape_of = (self.call.heads if a_head else 1, -(-n // size), -(-m // size))
            layout = self.whole(f"{name}.layout", 0, 99, shape_of) < share
            given["blocks"] = Blocks(layout, size)
            plainly |= {"layout": layout, "size": size}
        return self._mask(given), plain.allowed_by(plainly, n, m)

    @staticmethod
    def _mask(given: dict[str, Any]) -> Mask:
        """The mask of these fields, made as users make it where there is a way."""
        names = set(given)
        if names <= {"right", "query_order", "key_order"} and given.get("right") == 0:
            return Mask.causal(given.get("query_order"), given.get("key_order"))
        if names and names <= {"left", "right"} and min(given.values()) >= 0:
            return Mask.window(given.get("left"), given.get("right"))
        if names == {"query_segments", "key_segments"}:
            mine, theirs = given["query_segments"], given["key_segments"]
            if all(bool(((x == 0) | (x == -1)).all()) for x in (mine, theirs)):
                return Mask.padding(theirs == 0, queries=None if mine is theirs else mine == 0)
            return Mask.packed(mine, None if mine is theirs else theirs)
        return Mask(**given)

    def _pattern(self, part: Part) -> tuple[Mask, Tensor]:
        options, (n, m) = dict(part.options), self.call.counts
        match part.kind:
            case "local":
                mask = local(**options)
            case "dilated":
                mask = dilated(n, **options)
            case "fixed":
                mask = fixed(n, **options)
            case "strided":
                mask = strided(n, **options)
            case "longformer":
                mask = longformer(n, **options)
            case "windows":
                mask = windows(Grid(*options["grid"]), options["size"], options["shift"])
            case "block_sparse":
                size, share, a_head = options["size"], options["share"], options["a_head"]
                shape = (self.call.heads if a_head else 1, -(-n // size), -(-m // size))
                layout = self.whole(f"{part.name}.layout", 0, 99, shape) < share
                own = plain.allowed_by({"layout": layout, "size": size}, n, m)
                return block_sparse(layout if a_head else layout[0], size), own
            case "big_bird":
                mask = big_bird(n, heads=self.call.heads, **options)
                assert mask.blocks is not None  # drawn by PyTorch's generator: read as data
                return mask, plain.allowed_by({"layout": mask.blocks.layout, "size": mask.blocks.size}, n, m)
            case _:
                raise ValueError(f"no mask {part.kind}")
        return mask, plain.PATTERNS[part.kind](n, m, **options)[None, None]

    # the whole

    def build(self) -> Built:
        call, (n, m) = self.call, self.call.counts
        q = self.floats("q", (call.batch, call.heads, n, call.width), call.gain)
        k = v = q
        names = {"q": "q", "k": "q", "v": "q"}
        if call.shared != "qkv":
            k = v = self.floats("k", (call.batch, call.groups, m, call.width), call.gain)
            names |= {"k": "k", "v": "k"}
            if call.shared != "kv":
                v = self.floats("v", (call.batch, call.groups, m, call.value_width))
                names |= {"v": "v"}
        terms = self.terms()
        mask, allowed = self.masks()
        own = terms.one(Scale)
        scale = call.scale if call.scale is not None else own.value if own is not None else call.width**-0.5
        seed = zlib.crc32(f"{call.seed} dropout".encode())
        kept = None
        if call.dropout > 0:
            torch.default_generator.manual_seed(seed)
            word = int(torch.randint(2**32, ()))
            kept = plain.kept_pairs(word, (call.batch, call.heads, n, m), call.dropout)
        numbers = {name: x.detach().double().contiguous() for name, x in self.named.items()}
        if call.poison:
            hidden = ~allowed.any(dim=2).any(dim=1)  # [1 or B, M]
            hidden = hidden.expand(call.batch, m)[:, None, :, None]
            anything = math.nan if call.poison == "nan" else math.inf
            for name in {names["k"], names["v"]} - {"q"}:
                numbers[name] = torch.where(hidden, 0.0, numbers[name])
                with torch.no_grad():
                    _fill(self.named[name], hidden, anything)
        d_out = d_lse = None
        if call.upstream in ("out", "both"):
            d_out = self.floats("d_out", (call.batch, call.heads, n, call.value_width))
        if call.lse and call.upstream in ("lse", "both"):
            wide = torch.promote_types(self.dtype, torch.float32)
            d_lse = self.floats("d_lse", (call.batch, call.heads, n), dtype=wide)
        for name in ("d_out", "d_lse"):
            self.named.pop(name, None)
        position: Any = terms
        if not len(terms) and self.chance("position").random() < 0.5:
            position = None
        arguments = {
            "q": q, "k": k, "v": v, "position": position, "mask": mask, "scale": call.scale, "dropout": call.dropout,
            "return_lse": call.lse,
        }  # fmt: skip
        leaves = {name: x for name, x in self.named.items() if x.requires_grad}
        told = plain.Plain(self.entries, allowed, scale, numbers, kept, **names)
        return Built(
            arguments, leaves, told, None if d_out is None else d_out.detach(),
            None if d_lse is None else d_lse.detach(), seed, self._precision(), self.named,
        )  # fmt: skip

    def _precision(self) -> plain.Precision:
        call, (n, m) = self.call, self.call.counts
        wide = torch.promote_types(self.dtype, torch.float32)
        for x in self.named.values():  # the arithmetic of a term is in its own dtype where that is coarser
            wide = min(wide, torch.promote_types(x.dtype, torch.float32), key=lambda dtype: torch.finfo(dtype).bits)
        arithmetic = torch.finfo(wide).eps
        halves = [torch.finfo(x.dtype) for x in self.named.values() if x.dtype in HALF]
        weights = max([arithmetic, *(half.eps for half in halves)])
        own = torch.finfo(self.dtype)
        turned = any(kind in ("rotation", "query_bias") for kind, _ in self.entries)
        tiny = torch.finfo(torch.float16).tiny if any(x.dtype == torch.float16 for x in self.named.values()) else 1e-38
        return plain.Precision(
            arithmetic, weights, max(own.eps, arithmetic) if turned else arithmetic, tiny if wide != torch.float64 else 1e-300,
            max(m, call.width, call.batch * call.heads * n),
        )  # fmt: skip


def _fill(x: Tensor, where: Tensor, value: float) -> None:
    """Write where x lies, which may be the same place for several entries."""
    if 0 in x.stride():
        return
    x.masked_fill_(where, value)


def _pairs(line: Lines) -> Tensor:
    """The entry of each pair, from the two lines as data."""
    return line.query.long()[..., :, None] - line.key.long()[..., None, :] + line.origin


def _gate(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    return (q * w[:, None, :].to(q.dtype)) @ k.mT


def _slope(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    apart = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(k.shape[2])
    return (-w[:, 0, None, None] * (apart.abs() / 16).to(w.dtype))[None]


def _before(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    met = torch.where(allowed, (q * w[:, None, :].to(q.dtype)) @ k.mT, 0.0)
    return met.cumsum(-1) / max(1, k.shape[2])


_RULES: dict[str, Callable[..., Tensor]] = {"gate": _gate, "slope": _slope, "before": _before}


def build(call: Described) -> Built:
    """The call that is described."""
    return Builder(call).build()


__all__ = ["Built", "build", "lay_out", "relpos"]
