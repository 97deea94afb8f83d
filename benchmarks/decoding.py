"""What a token costs that `LanguageModel.generate` adds with a cache, beside the same model without a position.

    python benchmarks/decoding.py [--threads 1] [--rounds 10] [--only NAMES] [--out FILE.json]

12 layers of 8 heads of 64, batch 1, at a length of 512. Models take turns; in each round a model generates some tokens
after a prompt, and its figure is the median of their times over that of the model without a position in the same
round. It wants the cores for itself and takes about a minute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from relpos import LanguageModel

OUT = Path(__file__).parent / "results" / "decoding-cpu.json"
PROMPT, TOKENS = 504, 16
SIZES = {"embed_dim": 512, "depth": 12, "num_heads": 8}


class _Decoder:
    """A model; a call is the median of the seconds from one token to the next."""

    def __init__(self, position: str) -> None:
        torch.manual_seed(0)
        self.model = LanguageModel(256, context=PROMPT + TOKENS + 2, position=position, **SIZES)  # type: ignore[arg-type]
        self.prompt = torch.randint(0, 256, (1, PROMPT))
        self.begun: list[float] = []
        self.model.register_forward_pre_hook(lambda *_: self.begun.append(time.perf_counter()))

    def __call__(self) -> float:
        self.begun.clear()
        self.model.generate(self.prompt, TOKENS + 2, temperature=0)
        steps = self.begun[1:]  # the first reads the prompt
        return statistics.median(after - before for before, after in itertools.pairwise(steps))


def main() -> None:
    """Time all in turn."""
    parser = argparse.ArgumentParser(description="what a token costs with each position")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", default="t5,rotary_1d", help="names of positions, joined by commas")
    parser.add_argument("--out", type=Path, default=OUT)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    decoders = {name: _Decoder(name) for name in ["none", *asked.only.split(",")]}
    for decoder in decoders.values():
        decoder()
    rounds = [{name: decoder() for name, decoder in decoders.items()} for _ in range(asked.rounds)]
    found: dict[str, Any] = {}
    for name in decoders:
        ratios = [one[name] / one["none"] for one in rounds]
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(one[name] for one in rounds)
        found[name] = {"time": middle, "low": low, "high": high, "milliseconds": milliseconds}
        print(f"{name:12} {middle:6.3f} ({low:.3f} to {high:.3f})   {milliseconds:.2f} ms a token", flush=True)
    versions = {"torch": torch.__version__, "python": platform.python_version(), "threads": torch.get_num_threads()}
    settings = {**SIZES, "prompt": PROMPT, "tokens": TOKENS, "rounds": asked.rounds, "cores": os.cpu_count()}
    asked.out.write_text(json.dumps({"versions": versions, "settings": settings, "positions": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
