"""The masks of a call, and the pairs that the oracle finds them to allow."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fuzz import plain_pairs
from fuzz.build_numbers import Numbers
from fuzz.description import Part
from relpos import Grid, Mask, patterns
from relpos.core import Blocks


class MaskBuilder(Numbers):
    """Masks by their fields, and patterns."""

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
            field = f"{side}_order"
            order, share = options.get(field), options.get(f"{side}_global")
            if order == "random":
                given[field] = self.whole(f"{name}.{field}", -3, max(n, m), shape(field, count), dtype)
            elif order is not None:  # where it begins
                line = (torch.arange(count) + order).to(getattr(torch, dtype)).expand(shape(field, count))
                given[field] = self.placed(f"{name}.{field}", line)
            if share is not None:
                drawn = self.whole(f"{name}.{side}_global", 0, 99, shape(f"{side}_global", count))
                given[f"{side}_global"] = drawn < share
        reach = options.get("interval")
        if reach is not None:
            centre = torch.arange(n) * max(m, 1) // max(n, 1)
            for bound, sign in (("low", -1), ("high", 1)):
                if options.get(bound, True):
                    away = self.whole(f"{name}.{bound}", -reach // 3, reach, shape("interval", n))
                    given[bound] = (centre + sign * away).to(getattr(torch, dtype))
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
                    end = self.whole(f"{name}.{side}_end", 0, count, (*own[:-1], 1))
                    made = torch.where(torch.arange(count) < end, 0, -1).view(own)
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
        return self._mask(given), plain_pairs.allowed_by(plainly, n, m)

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
        pattern = getattr(patterns, part.kind)
        if part.kind == "block_sparse":
            size, share, a_head = options["size"], options["share"], options["a_head"]
            shape = (self.call.heads if a_head else 1, -(-n // size), -(-m // size))
            layout = self.whole(f"{part.name}.layout", 0, 99, shape) < share
            own = plain_pairs.allowed_by({"layout": layout, "size": size}, n, m)
            return pattern(layout if a_head else layout[0], size), own
        if part.kind == "big_bird":
            mask = pattern(n, heads=self.call.heads, **options)
            assert mask.blocks is not None  # drawn by PyTorch's generator: read as data
            return mask, plain_pairs.allowed_by({"layout": mask.blocks.layout, "size": mask.blocks.size}, n, m)
        allowed = plain_pairs.PATTERNS[part.kind](n, m, **options)[None, None]
        if part.kind == "windows":
            return pattern(Grid(*options["grid"]), options["size"], options["shift"]), allowed
        return pattern(**options) if part.kind == "local" else pattern(n, **options), allowed
