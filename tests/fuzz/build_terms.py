"""The terms of a call, and the same for the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuzz.build_numbers import Numbers
from fuzz.description import Part
from fuzz.plain_pairs import allowed_by
from relpos import Mask, core


class TermBuilder(Numbers):
    """Terms as they are."""

    def terms(self) -> core.Terms:
        total = core.Terms()
        for part in self.call.terms:
            for term in getattr(self, f"_{part.kind.lower()}")(part):
                total = total + term
        return total

    def _narrowed(self, term: core.Term) -> core.Term:
        """The part of a term that the call wants, of one that was made for more."""
        return term if self.cuts is None else term.narrow(*self.cuts)

    def _heads(self, part: Part) -> int:
        return self.call.heads if part.options.get("heads", True) else 1

    def _batch(self, part: Part, option: str = "batched") -> int:
        return self.call.batch if part.options.get(option, False) else 1

    def _dtype(self, part: Part, least: torch.dtype | None = None) -> torch.dtype:
        dtype = getattr(torch, part.options.get("dtype", self.call.dtype))
        return torch.promote_types(dtype, least) if least is not None else dtype

    def _lines(self, part: Part) -> tuple[core.Lines, Tensor]:
        sides = self.sides(raster=part.options.get("raster", False))
        line = core.lines(sides[0]) if sides[0] is sides[1] else core.lines(*sides)
        index, length = self.index(sides)
        assert line.length == length, "the lines have another length than their documentation says"
        return replace(line, query=self.placed(f"{part.name}.query", line.query)), index

    def _linebias(self, part: Part) -> list[core.Term]:
        line, index = self._lines(part)
        shape, dtype = (self._heads(part), line.length), self._dtype(part, torch.float32)
        values = self.floats(f"{part.name}.values", shape, part.options.get("gain", 1.0), dtype)
        self.entries.append(("line", {"values": f"{part.name}.values", "index": index}))
        return [self._narrowed(core.LineBias(values, line))]

    def _rotation(self, part: Part) -> list[core.Term]:
        made, entry = self._turn(part, part.name)
        self.entries.append(("rotation", entry))
        return [made]

    def _pairrotations(self, part: Part) -> list[core.Term]:
        options, (n, m) = part.options, self.call.counts
        turns = [self._turn(part, f"{part.name}.{place}") for place in range(options["parts"])]
        orders: dict[str, Tensor] = {}
        if "orders" in options:
            for side, count in (("query", n), ("key", m)):
                lead = (self.call.batch,) if options["orders"] == 2 else ()
                orders[f"{side}_order"] = self.whole(f"{part.name}.{side}_order", 0, max(n, m), (*lead, count))
        low, high = (None, *(x + 1 for x in options["borders"])), (*options["borders"], None)
        bounds = [{"left": b, "right": None if a is None else -a, **orders} for a, b in zip(low, high, strict=True)]
        allowed = torch.stack(torch.broadcast_tensors(*(allowed_by(one, n, m) for one in bounds)))
        assert (allowed.sum(0) == 1).all(), "the rotations share the pairs out"
        self.entries.append(("by_pair", {"turns": [entry for _, entry in turns], "which": allowed.int().argmax(0)}))
        return [core.PairRotations(tuple(made for made, _ in turns), tuple(Mask(**one) for one in bounds))]  # type: ignore[arg-type]

    def _polar(self, part: Part) -> list[core.Term]:
        made, entry = self._turn(Part("Polar", part.name, part.options | {"pairs": self.call.width}), part.name)
        phase = None
        if (of := part.options["phase"]) is not None:
            shape = (self.call.heads if of == "heads" else 1, self.call.width)
            phase = self.floats(f"{part.name}.phase", shape, dtype=made.query.dtype)
            entry["phase"] = f"{part.name}.phase"
        self.entries.append(("polar", entry))
        named = ("query", "key", "magnitude", "query_magnitude", "key_magnitude")
        return [core.Polar(**{name: getattr(made, name) for name in named}, phase=phase)]

    def _turn(self, part: Part, prefix: str) -> tuple[core.Rotation, dict[str, Any]]:
        """A rotation, and the oracle's entry of it."""
        options, (n, m) = part.options, self.call.counts
        pairs, wide = options["pairs"], torch.promote_types(self.dtype, torch.float32)
        dtype = getattr(torch, options.get("dtype", str(wide).removeprefix("torch.")))
        heads = self._heads(part)
        layout = options.get("layout", "half")
        entry: dict[str, Any] = {"layout": layout, "magnitude": options.get("magnitude", 1.0)}
        slices = {"start": options.get("start", 0), "values": options.get("values", False)}
        entry |= slices
        made: dict[str, Tensor | None] = {}
        for side, count in (("query", n), ("key", m)):
            own = heads if options.get(f"{side}_heads", True) else 1
            shape = (self._batch(part, f"{side}_batched"), own, count, pairs)
            turned = side == "query" or options.get("keys", True)
            for name, wanted in ((side, turned), (f"{side}_magnitude", turned and options.get("magnitudes", False))):
                made[name] = None
                if wanted:
                    full = f"{prefix}.{name}"
                    made[name] = self.floats(full, shape, 3.0 if name == side else 0.5, dtype)
                    entry[name] = full
        return core.Rotation(**made, layout=layout, magnitude=entry["magnitude"], **slices), entry  # type: ignore[arg-type]

    def _querybias(self, part: Part) -> list[core.Term]:
        u = self.floats(f"{part.name}.u", (self._heads(part), self.call.width), dtype=self._dtype(part))
        self.entries.append(("query_bias", {"u": f"{part.name}.u"}))
        return [core.QueryBias(u)]

    def _linevectors(self, part: Part) -> list[core.Term]:
        call, options, name = self.call, part.options, part.name
        line, entry = self._lines(part)
        side, width = options["side"], call.value_width if options["side"] == "value" else call.width
        width = options.get("content", width)
        count, kind, scaled = options["rows"], options.get("index"), options.get("scaled", True)
        if kind is None:
            count = max(1, line.length + options.get("more", 0))
        vectors = self.floats(f"{name}.vectors", (self._heads(part), count, width), dtype=self._dtype(part))
        index = None
        if kind == "random":
            index = self.whole(f"{name}.index", -1, count - 1, (line.length,), options.get("index_dtype", "int64"))
        elif kind == "clip":
            centre = line.length // 2
            index = self.placed(f"{name}.index", (torch.arange(line.length) - centre + count // 2).clamp(0, count - 1))
        elif kind == "near":  # zeros but for some offsets from 0 on
            index = torch.arange(line.length) - line.length // 2
            index = self.placed(f"{name}.index", torch.where((index < 0) | (index >= count), -1, index))
        rows = entry if index is None else index.long()[entry]
        bias = None
        if options.get("bias", False):
            bias = self.floats(f"{name}.bias", (self._heads(part), width), dtype=self._dtype(part))
        content = None
        if "content" in options:
            heads = self._heads(part) if options.get("content_heads", True) else 1
            shape = (self._batch(part, "content_batched"), heads, call.sides[0].count, width)
            content = self.floats(f"{name}.content", shape, dtype=self._dtype(part))
        said = {"vectors": f"{name}.vectors", "bias": None if bias is None else f"{name}.bias", "rows": rows}
        said |= {"content": None if content is None else f"{name}.content", "queries": self.cuts and self.cuts[0]}
        self.entries.append(("vectors", said | {"side": side, "scaled": scaled}))
        return [self._narrowed(core.LineVectors(vectors, index, line, side, scaled, bias, content))]

    def _axisvectors(self, part: Part) -> list[core.Term]:
        sides = self.sides()
        every = core.axis_lines(sides[0]) if sides[0] is sides[1] else core.axis_lines(*sides)
        vectors = []
        for axis, line in enumerate(every):
            index, _ = self.index(sides, axis)
            count = max(1, line.layout.tokens + part.options.get("more", 0))
            name = f"{part.name}.{axis}"
            vectors.append(self.floats(name, (self._heads(part), count, self.call.width), dtype=self._dtype(part)))
            entry = {"vectors": name, "bias": None, "rows": index, "side": "query", "scaled": False}
            self.entries.append(("vectors", entry))
        return [self._narrowed(core.AxisVectors(tuple(vectors), every))]

    def _lowrank(self, part: Part) -> list[core.Term]:
        (n, m), rank = self.call.counts, part.options["rank"]
        made = []
        for side, count in (("query", n), ("key", m)):
            lead = (self._batch(part, f"{side}_batched"),) if part.options.get(f"{side}_wide", False) else ()
            heads = self._heads(part) if part.options.get(f"{side}_heads", True) else 1
            made.append(self.floats(f"{part.name}.{side}", (*lead, heads, count, rank), dtype=self._dtype(part)))
        self.entries.append(("low_rank", {"query": f"{part.name}.query", "key": f"{part.name}.key"}))
        return [core.LowRank(*made)]

    def _densebias(self, part: Part) -> list[core.Term]:
        rows, columns = (
            count if part.options.get(axis, True) else min(count, 1)
            for axis, count in zip(("rows", "columns"), self.call.counts, strict=True)
        )
        shape = (self._batch(part), self._heads(part), rows, columns)
        bias = self.floats(f"{part.name}.bias", shape, part.options.get("gain", 1.0), self._dtype(part))
        self.entries.append(("dense", {"bias": f"{part.name}.bias"}))
        return [core.DenseBias(bias)]

    def _indexedbias(self, part: Part) -> list[core.Term]:
        name, rows, wide = part.name, part.options["rows"], torch.promote_types(self.dtype, torch.float32)
        values = self.floats(f"{name}.values", (self._heads(part), rows), dtype=wide)
        shape = (self._batch(part), *self.call.counts)
        index = self.whole(f"{name}.index", 0, rows - 1, shape, part.options["index_dtype"])
        self.entries.append(("line", {"values": f"{name}.values", "index": index.long()}))
        return [core.IndexedBias(values, index)]

    def _rowrule(self, part: Part) -> list[core.Term]:
        name, rule = f"{part.name}.w", part.options["rule"]
        wide = torch.promote_types(self.dtype, torch.float32)
        w = self.floats(name, (self.call.heads, self.call.width), dtype=wide)
        self.entries.append(("rule", {"rule": rule, "parameters": (name,)}))
        return [core.RowRule(_RULES[rule], (w,))]

    def _scale(self, part: Part) -> list[core.Term]:
        return [core.Scale(part.options["value"])]

    def _softcap(self, part: Part) -> list[core.Term]:
        self.entries.append(("softcap", {"cap": part.options["cap"]}))
        return [core.Softcap(part.options["cap"])]

    def _queryscale(self, part: Part) -> list[core.Term]:
        shape = (self._batch(part), self._heads(part), self.call.counts[0])
        factor = self.floats(f"{part.name}.factor", shape, dtype=torch.promote_types(self.dtype, torch.float32))
        self.entries.append(("query_scale", {"factor": f"{part.name}.factor", "on": part.options["on"]}))
        return [core.QueryScale(factor, part.options["on"])]

    def _sinks(self, part: Part) -> list[core.Term]:
        shape: tuple[int, ...] = (self.call.heads,)
        if part.options.get("of_queries", False):
            shape = (self._batch(part), self._heads(part), self.call.counts[0])
        logits = self.floats(f"{part.name}.logits", shape, 2.0, self._dtype(part))
        self.entries.append(("sinks", {"logits": f"{part.name}.logits"}))
        return [core.Sinks(logits)]


def _gate(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    return (q * w[:, None, :].to(q.dtype)) @ k.mT


def _slope(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    apart = torch.arange(rows.start, rows.stop)[:, None] - torch.arange(k.shape[2])
    return (-w[:, 0, None, None] * (apart.abs() / 16).to(w.dtype))[None]


def _before(q: Tensor, k: Tensor, allowed: Tensor, rows: slice, w: Tensor) -> Tensor:
    met = torch.where(allowed, (q * w[:, None, :].to(q.dtype)) @ k.mT, 0.0)
    return met.cumsum(-1) / max(1, k.shape[2])


_RULES: dict[str, Callable[..., Tensor]] = {"gate": _gate, "slope": _slope, "before": _before}
