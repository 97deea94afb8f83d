"""How the tensors of a random call lie in memory, which of them learn, and how small the engines' tiles are."""

from __future__ import annotations

from dataclasses import replace

from fuzz.chance import Chance
from fuzz.description import Described, Layout
from fuzz.tiles import STREAMING, TRITON

_DIMENSIONS = {
    "LineBias": {"values": 2},
    "QueryBias": {"u": 2},
    "LineVectors": {"vectors": 3, "bias": 2},
    "Sinks": {"logits": 1},
    "QueryScale": {"factor": 3},
    "Rotation": {"query": 4, "key": 4, "query_magnitude": 4, "key_magnitude": 4},
    "DenseBias": {"bias": 4},
    "IndexedBias": {"values": 2},
    "RowRule": {"w": 2},
    "AxisVectors": {"0": 3, "1": 3, "2": 3},
    "LowRank": {"query": 3, "key": 3},
    "Mechanism": {
        f"{term}.{name}": dims
        for term in range(2)
        for name, dims in (("values", 2), ("vectors", 3), ("u", 2), ("query", 4), ("bias", 2))
    },
}


def tensors(call: Described) -> dict[str, int]:
    """Tensors that may learn, and their numbers of dimensions, as far as they are known beforehand."""
    names = {"q": 4, "k": 4, "v": 4}
    for part in call.terms:
        for name, dims in _DIMENSIONS.get(part.kind, {}).items():
            wider = 2 * bool(part.options.get("of_queries")) + bool(part.options.get(f"{name}_wide"))
            names[f"{part.name}.{name}"] = dims + wider
    return names


class MemoryChoices(Chance):
    """Layouts, gradients and tiles."""

    def frozen(self, call: Described) -> tuple[str, ...]:
        if self.sometimes(0.5):
            return ()
        names = tensors(call)
        share = self.of(0.2, 0.5, 0.8, 1.0)
        return tuple(name for name in names if self.sometimes(share))

    def layouts(self, call: Described) -> dict[str, Layout]:
        found: dict[str, Layout] = {}
        if self.sometimes(0.25):
            return found
        names = tensors(call) | {"d_out": 4, "d_lse": 3}
        share = self.of(0.3, 0.6, 1.0)
        alike = self.layout(4) if self.sometimes(0.3) else None
        for name, dims in names.items():
            if self.sometimes(share):
                found[name] = alike if alike is not None and name in ("q", "k", "v") else self.layout(dims)
        others = {"m0.query_order", "m0.key_order", "m0.query_segments", "m0.key_segments", "m0.low", "m0.high"}
        others |= {f"{part.name}.index" for part in call.terms} | {f"{part.name}.query" for part in call.terms}
        for name in sorted(others):
            if self.sometimes(0.2):
                dims = self.of(1, 2) if name.startswith("m0") else 1
                found[name] = replace(self.layout(dims), expanded=())
        return found

    def layout(self, dims: int) -> Layout:
        """How a tensor may lie in memory."""
        ones, nought = (1,) * dims, (0,) * dims
        straight = tuple(range(dims))
        known = Layout(straight, nought, ones, nought)
        x = self.r.random()
        if dims >= 2 and x < 0.22:  # the last two dimensions exchanged
            return replace(known, order=(*straight[:-2], dims - 1, dims - 2))
        if dims == 4 and x < 0.4:  # heads behind tokens, alone or among those of q, k and v
            fused = self.sometimes(0.6)
            return replace(
                known, order=(0, 2, 1, 3), start=(0, self.of(0, 2, 4), 0, 0) if fused else nought, extra=(0, 3, 0, 0)
            )
        if x < 0.52:  # expanded
            place = self.r.randrange(dims)
            return replace(known, expanded=(0,) if self.sometimes(0.5) else (place,))
        if x < 0.62:
            order = list(straight)
            self.r.shuffle(order)
            return replace(known, order=tuple(order))
        place = self.r.randrange(dims)
        return Layout(
            straight,
            tuple(self.of(0, 1, 3) if dim == place or self.sometimes(0.2) else 0 for dim in straight),
            tuple(self.of(1, 2, 3) if dim == place else 1 for dim in straight),
            tuple(self.of(0, 1) if dim == place else 0 for dim in straight),
        )

    def tiles(self, call: Described) -> dict[str, int]:
        """Few tiles of large calls, which are slow enough."""
        most = max(call.counts)
        share = self.of(0.3, 0.7, 1.0)
        found = {}
        for name, values in (TRITON if self.few else STREAMING).items():
            if self.sometimes(share):
                value = self.r.choice(values)
                if name.endswith(("ROWS", "WIDTH", "AT_ONCE")):
                    value = max(value, most // 12)
                if name.endswith(("PAIRS", "PAIRS_AT_ONCE")):
                    value = max(value, call.counts[0] * call.counts[1] // 12)
                found[name] = value
        if "triton.spans.COARSE" in found:  # which tiles divide
            found["triton.launch.SHAPES"] = 16
        return found
