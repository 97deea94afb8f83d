"""Forward and step of the layer of `mechanisms.py` with a mechanism, beside the same layer with a peer of its kind.

    python benchmarks/beside_peers.py [--rounds 31] [--out FILE.json]

A rotation is beside `rotary_1d`, a table beside `relative_2d`, values that are turned beside the same rotation of
queries and keys alone. Both take turns; a figure is the median over rounds of one time over the other, of the clock
and of the processor. On a busy machine only the processor's says something, with OMP_NUM_THREADS=1. All figures go
into a file, with versions and hardware.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mechanisms import HEAD_DIM, HEADS

from relpos import Grid, Mask, RelativePositionBias, Rotation, Sequence, Site
from relpos.comparison.settings import environment
from relpos.core import Terms
from relpos.layers import MultiHeadAttention
from relpos.position import presets

OUT = Path(__file__).parent / "results" / "beside-peers.json"
TOKENS = 1024
Make = Callable[[], Terms | Rotation]
Pair = tuple[Make, Make, Mask | None]


def _preset(name: str) -> Make:
    sequence = Sequence(TOKENS)
    mechanism = presets()[name].make(Site(HEADS, HEAD_DIM, HEADS * HEAD_DIM, sequence, causal=True))
    return lambda: mechanism.terms(sequence)


def _rotation(values: bool) -> Make:
    bands = 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = (torch.arange(TOKENS)[:, None] * bands)[None, None]
    return lambda: Rotation(angles, angles, layout="half", values=values)


def _table(size: tuple[int, int] | tuple[int, int, int]) -> Make:
    bias = RelativePositionBias(HEADS, size)
    return lambda: bias.terms(Grid(*size))


def _pairs() -> dict[str, Pair]:
    peer, causal = _preset("rotary_1d"), Mask.causal()
    names = "rerope", "self_extend", "dual_chunk", "pope"
    pairs: dict[str, Pair] = {name: (_preset(name), peer, causal) for name in names}
    pairs["values turned"] = _rotation(True), _rotation(False), causal
    pairs["table of 4 x 16 x 16"] = _table((4, 16, 16)), _table((32, 32)), None
    pairs["table of 8 x 7 x 7"] = _table((8, 7, 7)), _table((14, 28)), None
    return pairs


def main() -> None:
    """Print and write the two ratios of each pair, of a forward pass and of a step."""
    parser = argparse.ArgumentParser(description="what mechanisms cost beside a peer of their kind")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.manual_seed(0)
    layer = MultiHeadAttention(HEADS * HEAD_DIM, HEADS)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, (own, peer, mask) in _pairs().items():
        count = own().items[0].lines.query.shape[0] if mask is None else TOKENS  # type: ignore[union-attr]
        x = torch.randn(1, count, HEADS * HEAD_DIM, requires_grad=True)

        def timed(make: Make, backward: bool, x: torch.Tensor = x, mask: Mask | None = mask) -> tuple[float, float]:
            begun = time.perf_counter(), time.process_time()
            y = layer(x, position=make(), mask=mask)
            if backward:
                y.backward(x.detach())
            return time.perf_counter() - begun[0], time.process_time() - begun[1]

        for what, backward in (("forward", False), ("step", True)):
            rounds = [(timed(own, backward), timed(peer, backward)) for _ in range(asked.rounds + 2)][2:]
            clock, processor = (statistics.median(one[at] / other[at] for one, other in rounds) for at in (0, 1))
            print(f"{name:22} {what:8} clock {clock:5.2f}   processor {processor:5.2f}", flush=True)
            found.setdefault(name, {})[what] = {"clock": clock, "processor": processor}
    here = dataclasses.asdict(environment("cpu")) | {"threads": torch.get_num_threads(), "rounds": asked.rounds}
    asked.out.write_text(json.dumps({"environment": here, "ratios": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
