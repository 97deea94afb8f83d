"""A description as a call of relpos, and as plain entries for the oracle, over the same tensors."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fuzz import plain
from fuzz.build_masks import MaskBuilder
from fuzz.build_mechanisms import MechanismBuilder
from fuzz.description import Described
from fuzz.plain_bounds import Precision
from fuzz.plain_pairs import kept_pairs
from relpos.core import Scale

HALF = (torch.bfloat16, torch.float16)


@dataclass
class Built:
    """A call, ready to be run.

    Attributes:
        arguments: of `relpos.attention`, but for the engine. leaves: the tensors with gradients by name.
        truth: the same call for the oracle. d_out, d_lse: gradients of the results, or None.
        seed: of PyTorch's generator. precision: of the arithmetic. dtype: of the output.
        tensors: all floating tensors by name.
    """

    arguments: dict[str, Any]
    leaves: dict[str, Tensor]
    plain: plain.Plain
    d_out: Tensor | None
    d_lse: Tensor | None
    seed: int
    precision: Precision
    dtype: torch.dtype
    tensors: dict[str, Tensor] = field(default_factory=dict)


class Builder(MechanismBuilder, MaskBuilder):
    """Makes one call."""

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
            kept = kept_pairs(word, (call.batch, call.heads, n, m), call.dropout)
        rounded = {"q", "k", "v"} if call.autocast else set()
        numbers = {
            name: (x.detach().to(torch.bfloat16) if name in rounded else x.detach()).double().contiguous()
            for name, x in self.named.items()
        }
        if call.poison:
            self._poison(numbers, names, allowed.expand(call.batch, call.heads, n, m))
        d_out = d_lse = None
        if call.upstream in ("out", "both"):
            dtype = torch.bfloat16 if call.autocast else self.dtype
            d_out = self.floats("d_out", (call.batch, call.heads, n, call.value_width), dtype=dtype)
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
        for _, entry in self.entries:  # tensors that are other ones
            entry.update({key: self.alias.get(x, x) for key, x in entry.items() if isinstance(x, str)})
            entry["parameters"] = tuple(
                self.alias.get(x, x) if isinstance(x, str) else x for x in entry.get("parameters", ())
            )
        told = plain.Plain(self.entries, allowed, scale, numbers, kept, **names)
        return Built(
            arguments, leaves, told, None if d_out is None else d_out.detach(),
            None if d_lse is None else d_lse.detach(), seed, self._precision(),
            torch.bfloat16 if call.autocast else self.dtype, self.named,
        )  # fmt: skip

    def _poison(self, numbers: dict[str, Tensor], names: dict[str, str], allowed: Tensor) -> None:
        """Let whatever may hold anything hold it: keys and values that no query sees, queries that see nothing and what
        stands for them, and dense biases at forbidden pairs. The oracle has 0 there."""
        grouped = allowed.any(dim=2).unflatten(1, (self.call.groups, -1)).any(dim=2)
        unseen = {names[x]: ~grouped[..., None] for x in ("k", "v")}
        if names["k"] == "q":  # one tensor, which is a query too
            unseen["q"] = unseen["q"] & ~allowed.any(dim=3)[..., None]
        else:
            unseen["q"] = ~allowed.any(dim=3)[..., None]
        for kind, entry in self.entries:
            if kind == "dense":
                bias = self.named[self.alias.get(entry["bias"], entry["bias"])]
                own = tuple(axis for axis in range(4) if bias.shape[axis] == 1)
                unseen[self.names[id(bias)]] = ~allowed.any(dim=own, keepdim=True) if own else ~allowed
            if entry.get("content") is not None and self.cuts is None:
                content = self.named[self.alias.get(entry["content"], entry["content"])]
                own = (3, *(axis for axis in range(2) if content.shape[axis] == 1))
                unseen[self.names[id(content)]] = ~allowed.any(dim=own, keepdim=True)
        for name, where in unseen.items():
            numbers[name] = torch.where(where, 0.0, numbers[name])
            with torch.no_grad():
                _fill(self.named[name], where, math.nan if self.call.poison == "nan" else math.inf)

    def _precision(self) -> Precision:
        call, (n, m) = self.call, self.call.counts
        wide = torch.promote_types(self.dtype, torch.float32)
        for x in self.named.values():  # the arithmetic of a term is in its own dtype where that is coarser
            wide = min(wide, torch.promote_types(x.dtype, torch.float32), key=lambda dtype: torch.finfo(dtype).bits)
        arithmetic = torch.finfo(wide).eps
        dtype = torch.bfloat16 if call.autocast else self.dtype
        halves = [torch.finfo(x.dtype) for x in self.named.values() if x.dtype in HALF]
        halves += [torch.finfo(dtype)] if dtype in HALF else []
        weights = max([arithmetic, *(half.eps for half in halves)])
        turned = any(kind in ("rotation", "by_pair", "polar", "query_bias", "query_scale") for kind, _ in self.entries)
        content = max(torch.finfo(dtype).eps, arithmetic) if turned else arithmetic
        tiny = 1e-290 if wide == torch.float64 else 1e-30
        if any(x.dtype == torch.float16 for x in self.named.values()):
            tiny = torch.finfo(torch.float16).tiny
        longest = max(m, call.width, call.batch * call.heads * n)
        if any(3 in layout.expanded for layout in call.layouts.values()):
            longest = max(longest, call.width**2, call.value_width**2)  # equal products round to one side
        return Precision(arithmetic, weights, content, tiny, longest)


def _fill(x: Tensor, where: Tensor, value: float) -> None:
    """Write where x lies, which may be the same place for several entries."""
    if 0 in x.stride():
        return
    x.masked_fill_(where, value)


def build(call: Described) -> Built:
    """The call that is described."""
    return Builder(call).build()
