"""The tensors of a call, and where its tokens are: numbers by name and seed, laid out in memory as described."""

from __future__ import annotations

import math
import random
import zlib
from typing import Any

import torch
from torch import Tensor

from fuzz import plain_pairs
from fuzz.description import Described, Layout, Tokens
from relpos import Grid, Positions, Sequence
from relpos.core import Coordinates


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


class Numbers:
    """The tensors of one call.

    Attributes:
        shares: the part whose tensors a part takes. alias: tensors that are another one, by name.
        named: those that may learn, by name. names: the other way round, by identity. entries: what the oracle is told.
        coordinates: of queries and keys. cuts: what is kept of them, or None.
    """

    def __init__(self, call: Described) -> None:
        self.call = call
        self.dtype: torch.dtype = getattr(torch, call.dtype)
        self.named: dict[str, Tensor] = {}
        self.names: dict[int, str] = {}
        self.shares = {part.name: part.options.get("same") for part in call.terms}
        self.alias: dict[str, str] = {}
        self.entries: list[plain.Entry] = []
        self.coordinates = [self._coordinates(tokens, side) for side, tokens in zip("qk", call.sides, strict=True)]
        if call.keys is None:
            self.coordinates[1] = self.coordinates[0]
        self.cuts = None if call.cut is None else tuple(slice(*cut) for cut in call.cut)

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
        """A tensor that may learn; that of another part where this part shares its tensors."""
        own, _, rest = name.partition(".")
        known = self.named.get(f"{self.shares.get(own)}.{rest}")
        if known is not None and known.shape == shape and known.dtype == (dtype or self.dtype):
            self.alias[name] = f"{self.shares[own]}.{rest}"
            return known
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
                side = plain_pairs.Side(
                    side.places[..., axis : axis + 1], side.prefix, side.low[axis:][:1], side.high[axis:][:1]
                )
            own.append(side)
        index, length = plain_pairs.line_index(*own)
        return self._cut(index), length

    def _side(self, tokens: Tokens, given: Coordinates) -> plain_pairs.Side:
        if isinstance(given, Positions):
            return plain_pairs.Side(given.values, tokens.prefix, given.low, given.high)
        if tokens.kind == "grid" and given.axes == len(tokens.sizes) > 1:
            cells = torch.cartesian_prod(*(torch.arange(size) for size in tokens.sizes))
            return plain_pairs.Side(cells, tokens.prefix, (0,) * given.axes, tuple(size - 1 for size in tokens.sizes))
        count, start = math.prod(tokens.sizes), tokens.start if tokens.kind == "sequence" else 0
        places = torch.arange(start, start + count)[:, None]
        return plain_pairs.Side(places, tokens.prefix, (start,), (start + max(count, 1) - 1,))

    def _cut(self, x: Tensor) -> Tensor:
        return x if self.cuts is None else x[..., self.cuts[0], self.cuts[1]]
