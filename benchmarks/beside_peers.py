"""Forward and step of the layer of `mechanisms.py` with a mechanism, beside the same layer with a peer of its kind.

    python benchmarks/beside_peers.py [--rounds 31] [--out FILE.json]

A rotation is beside `rotary_1d`, a table beside `relative_2d`, values that are turned beside the same rotation of
queries and keys alone, and PoPE beside x-transformers' layer, too. Both take turns; a figure is the median over rounds
of one time over the other, of the clock and of the processor. On a busy machine only the processor's says something,
with OMP_NUM_THREADS=1. All figures go into a file, with versions and hardware.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mechanisms import HEAD_DIM, HEADS
from x_transformers.x_transformers import Attention, PolarEmbedding

from relpos import Grid, Mask, RelativePositionBias, Rotation, Sequence, Site
from relpos.comparison.settings import environment
from relpos.core import Terms
from relpos.layers import MultiHeadAttention
from relpos.position import presets

OUT = Path(__file__).parent / "results" / "beside-peers.json"
TOKENS = 1024
Make = Callable[[], Terms | Rotation]
Layer = Callable[[torch.Tensor], torch.Tensor]
ROTATION, TABLE = "rotary_1d", "relative_2d"


def _layer(make: Make, mask: Mask | None = None) -> Layer:
    attention = MultiHeadAttention(HEADS * HEAD_DIM, HEADS)
    return lambda x: attention(x, position=make(), mask=mask)


def _preset(name: str) -> Layer:
    sequence = Sequence(TOKENS)
    mechanism = presets()[name].make(Site(HEADS, HEAD_DIM, HEADS * HEAD_DIM, sequence, causal=True))
    return _layer(lambda: mechanism.terms(sequence), Mask.causal())


def _rotation(values: bool) -> Layer:
    bands = 10000.0 ** -(torch.arange(HEAD_DIM // 2) / (HEAD_DIM // 2))
    angles = (torch.arange(TOKENS)[:, None] * bands)[None, None]
    return _layer(lambda: Rotation(angles, angles, layout="half", values=values), Mask.causal())


def _table(size: tuple[int, int] | tuple[int, int, int]) -> Layer:
    bias = RelativePositionBias(HEADS, size)
    return _layer(lambda: bias.terms(Grid(*size)))


def _published_pope() -> Layer:
    attention = Attention(HEADS * HEAD_DIM, heads=HEADS, dim_head=HEAD_DIM, causal=True, flash=True)
    position = PolarEmbedding(HEAD_DIM, HEADS)
    return lambda x: attention(x, polar_pos_emb=position(torch.arange(x.shape[1])))


def _pairs() -> dict[str, tuple[Layer, Layer, str, int]]:
    """What is timed, its peer with its name, and how many tokens."""
    peer = _preset(ROTATION)
    names = "rerope", "self_extend", "dual_chunk", "pope"
    pairs = {name: (_preset(name), peer, ROTATION, TOKENS) for name in names}
    pairs["pope, published"] = _preset("pope"), _published_pope(), "x-transformers", TOKENS
    pairs["values turned"] = _rotation(True), _rotation(False), ROTATION, TOKENS
    pairs["table of 4 x 16 x 16"] = _table((4, 16, 16)), _table((32, 32)), TABLE, 1024
    pairs["table of 8 x 7 x 7"] = _table((8, 7, 7)), _table((14, 28)), TABLE, 392
    return pairs


def main() -> None:
    """Print and write the two ratios of each pair, of a forward pass and of a step."""
    parser = argparse.ArgumentParser(description="what mechanisms cost beside a peer of their kind")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.manual_seed(0)
    found: dict[str, dict[str, Any]] = {}
    for name, (own, peer, kind, tokens) in _pairs().items():
        found[name] = {"peer": kind}
        x = torch.randn(1, tokens, HEADS * HEAD_DIM, requires_grad=True)

        def timed(layer: Layer, backward: bool, x: torch.Tensor = x) -> tuple[float, float]:
            begun = time.perf_counter(), time.process_time()
            y = layer(x)
            if backward:
                y.backward(x.detach())
            return time.perf_counter() - begun[0], time.process_time() - begun[1]

        for what, backward in (("forward", False), ("step", True)):
            rounds = [(timed(own, backward), timed(peer, backward)) for _ in range(asked.rounds + 2)][2:]
            clock, processor = (statistics.median(one[at] / other[at] for one, other in rounds) for at in (0, 1))
            print(f"{name:22} {what:8} of {kind:16} clock {clock:5.2f}   processor {processor:5.2f}", flush=True)
            found[name][what] = {"clock": clock, "processor": processor}
    here = dataclasses.asdict(environment("cpu")) | {"threads": torch.get_num_threads(), "rounds": asked.rounds}
    asked.out.write_text(json.dumps({"environment": here, "ratios": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
