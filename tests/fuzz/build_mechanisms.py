"""What mechanisms say, as data: their terms' tensors become the call's own, and are told to the oracle as they are."""

from __future__ import annotations

import zlib
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fuzz.build_terms import TermBuilder
from fuzz.description import Part
from fuzz.plain_pairs import allowed_by
from relpos import core
from relpos.position import Site
from relpos.position.base.preset import find
from relpos.position.base.states import terms_of


class MechanismBuilder(TermBuilder):
    """Terms of mechanisms."""

    def _mechanism(self, part: Part) -> list[core.Term]:
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
        tokens = {"queries": queries.count, "keys": keys.count}
        states = tuple(
            torch.randn(call.batch, count, site.embed_dim, generator=self.generator(f"{part.name} {name}")).to(wide)
            for name, count in tokens.items()
        )
        terms = terms_of(mechanism, queries, None if keys is queries else keys, states)  # type: ignore[arg-type]
        terms = terms if self.cuts is None else terms.narrow(*self.cuts)
        made: list[core.Term] = []
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
        if is_dataclass(node) and not isinstance(node, (core.Lines, type)):
            changed = {f.name: self._own(getattr(node, f.name), f"{name}.{f.name}", known) for f in fields(node)}
            return replace(node, **changed)
        return node

    def _name(self, x: Tensor | None) -> str | None:
        return None if x is None else self.names[id(x)]

    def _turn_of(self, term: core.Rotation) -> dict[str, Any]:
        named = ("query", "key", "query_magnitude", "key_magnitude")
        entry: dict[str, Any] = {name: self._name(getattr(term, name)) for name in named}
        return entry | {name: getattr(term, name) for name in ("layout", "magnitude", "start", "values")}

    def _describe(self, term: core.Term) -> None:
        """An entry of what a term says, read off its fields."""
        entries = self.entries
        match term:
            case core.LineBias(values=values, lines=line):
                entries.append(("line", {"values": self._name(values), "index": _pairs(line)}))
            case core.Polar():
                entries.append(("polar", self._turn_of(term) | {"phase": self._name(term.phase)}))
            case core.Rotation():
                entries.append(("rotation", self._turn_of(term)))
            case core.PairRotations():
                known = [{one.name: getattr(mask, one.name) for one in fields(mask)} for mask in term.pairs]
                allowed = torch.stack(torch.broadcast_tensors(*(allowed_by(one, *self.call.counts) for one in known)))
                turns = [self._turn_of(rotation) for rotation in term.rotations]
                entries.append(("by_pair", {"turns": turns, "which": allowed.int().argmax(0)}))
            case core.QueryBias(u=u):
                entries.append(("query_bias", {"u": self._name(u)}))
            case core.LineVectors():
                rows = _pairs(term.lines)
                rows = rows if term.index is None else term.index[rows]
                own = {"vectors": self._name(term.vectors), "bias": self._name(term.bias), "rows": rows}
                own |= {"content": self._name(term.content), "queries": None}  # it is cut already
                entries.append(("vectors", {**own, "side": term.side, "scaled": term.scaled}))
            case core.AxisVectors():
                for vectors, line in zip(term.vectors, term.lines, strict=True):
                    own = {"vectors": self._name(vectors), "bias": None, "rows": _pairs(line)}
                    entries.append(("vectors", {**own, "side": "query", "scaled": False}))
            case core.LowRank(query=query, key=key):
                entries.append(("low_rank", {"query": self._name(query), "key": self._name(key)}))
            case core.DenseBias(bias=bias):
                entries.append(("dense", {"bias": self._name(bias)}))
            case core.RowRule():
                names = tuple(self.names.get(id(x), x) for x in term.parameters)
                entries.append(("rule", {"rule": term.rule, "parameters": names}))
            case core.Softcap(cap=cap):
                entries.append(("softcap", {"cap": cap}))
            case core.Sinks(logits=logits):
                entries.append(("sinks", {"logits": self._name(logits)}))
            case core.QueryScale(factor=factor, on=on):
                entries.append(("query_scale", {"factor": self._name(factor), "on": on}))
            case core.Scale():
                pass
            case _:
                raise TypeError(f"the fuzzer knows no {type(term).__name__}")


def _pairs(line: core.Lines) -> Tensor:
    """The entry of each pair, from the two lines as data."""
    return line.query.long()[..., :, None] - line.key.long()[..., None, :] + line.origin
