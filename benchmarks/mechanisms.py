"""What every mechanism costs in a layer of attention: time beside none, and parameters.

    python benchmarks/mechanisms.py [--rounds 5] [--only NAMES] [--out FILE.json]

One layer of multi-head attention with its projections, 8 heads of 64, batch 1, forward and backward, on a sequence of
1,024 tokens (causal) and a grid of 32 x 32, wherever the mechanism makes sense. All take turns with the same layer
without a position; a figure is the median over rounds of its time over that of none. It wants two cores for itself,
and takes two minutes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from relpos import Grid, Mask, Sequence
from relpos.comparison.settings import environment
from relpos.layers import MultiHeadAttention
from relpos.position import Mechanism, Site, presets
from relpos.position.base.states import terms_of
from relpos.position.base.wrapped import acts_in_attention, acts_on_tokens, parts_of

OUT = Path(__file__).parent / "results" / "mechanisms-cpu.json"
HEADS, HEAD_DIM = 8, 64
WHERE: dict[str, Sequence | Grid] = {"sequence of 1,024": Sequence(1024), "grid of 32 x 32": Grid(32, 32)}


class _Step:
    """One layer with a mechanism: a call is a forward and a backward pass, and its seconds."""

    def __init__(self, name: str, tokens: Sequence | Grid) -> None:
        self.tokens, self.causal = tokens, isinstance(tokens, Sequence)
        torch.manual_seed(0)
        width = HEADS * HEAD_DIM
        site = Site(HEADS, HEAD_DIM, width, tokens, causal=self.causal)
        self.position: Mechanism = presets()[name].make(site)
        self.layer = MultiHeadAttention(width, HEADS)
        self.in_attention = any(acts_in_attention(part) for part in parts_of(self.position))
        self.x = torch.randn(1, tokens.count, width, requires_grad=True)
        self.parameters = sum(one.numel() for one in self.position.parameters())

    def __call__(self) -> float:
        """Seconds of a forward and a backward pass."""
        begun = time.perf_counter()
        x = self.x
        for part in parts_of(self.position):
            if acts_on_tokens(part):
                x = part.embed(x, self.tokens)
        terms = terms_of(self.position, self.tokens, None, x) if self.in_attention else None
        y = self.layer(x, position=terms, mask=Mask.causal() if self.causal else None)
        y.backward(self.x.detach())
        return time.perf_counter() - begun


def main() -> None:
    """Time all in turn."""
    parser = argparse.ArgumentParser(description="what every mechanism costs in a layer of attention")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=None, help="names, joined by commas; the figures of others stay")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    wanted = set(presets()) if asked.only is None else set(asked.only.split(","))
    if unknown := wanted - set(presets()):
        parser.error(f"expected names of mechanisms; got {', '.join(sorted(unknown))}")
    found: dict[str, Any] = {}
    if asked.only is not None and asked.out.exists():  # what is there for others stays
        found = {name: one for name, one in json.loads(asked.out.read_text())["layers"].items() if name in presets()}
    for where, tokens in WHERE.items():
        axes = 1 if isinstance(tokens, Sequence) else 2
        for name in [one.name for one in presets().values() if axes in one.token_axes and one.name in wanted]:
            step, plain = _Step(name, tokens), _Step("none", tokens)
            for one in (step, plain):
                one(), one()
            ratios = [step() / plain() for _ in range(asked.rounds)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            figures = {"time": middle, "low": low, "high": high, "parameters": step.parameters}
            found.setdefault(name, {})[where] = figures
            print(f"{name:26} {where:18} {middle:6.2f} ({low:.2f} to {high:.2f})", file=sys.stderr, flush=True)
    here = dataclasses.asdict(environment("cpu")) | {"threads": torch.get_num_threads()}
    settings = {"rounds": asked.rounds, "heads": HEADS, "head_dim": HEAD_DIM}
    asked.out.write_text(json.dumps({"environment": here, "settings": settings, "layers": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
