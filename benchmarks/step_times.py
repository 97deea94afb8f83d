"""What a training step takes with checkpoints, and over two processes, beside one process that keeps none.

    python benchmarks/step_times.py [--rounds 3] [--steps 40] [--out FILE.json]

The ways take turns, and each round's figures are divided by those of the first way. The model is a ViT of 2.7 million
parameters on digits. It wants two cores for itself, and takes about seven minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import relpos  # noqa: F401 - before what it trains with
from relpos.data import find_task
from relpos.train import ImageRecipe, train
from relpos.train.checkpointing import Checkpointing
from relpos.train.processes import Parallelism, is_main, world_size

OUT = Path(__file__).parent / "results" / "step-times.json"
FIRST = 5
"""Steps that are not timed."""


@dataclass(frozen=True)
class Way:
    """How a model is trained: processes, threads of each, what a process holds, steps between checkpoints."""

    processes: int
    threads: int
    strategy: str = "ddp"
    every: int | None = None


WAYS = {
    "1 process, 2 threads": Way(1, 2),
    "a checkpoint every 20 steps": Way(1, 2, every=20),
    "a checkpoint every step": Way(1, 2, every=1),
    "1 process, 1 thread": Way(1, 1),
    "2 processes, 1 thread each, ddp": Way(2, 1),
    "2 processes, 1 thread each, fsdp": Way(2, 1, strategy="fsdp"),
    "2 processes, 1 thread each, ddp, a checkpoint every 20 steps": Way(2, 1, every=20),
}


def work(asked: argparse.Namespace) -> None:
    """One process: train, and print the mean seconds of a step with what comes between."""
    way = WAYS[asked.work]
    torch.set_num_threads(way.threads)
    assert world_size() == way.processes, (world_size(), way)
    recipe = ImageRecipe(steps=asked.steps + FIRST + 1, batch_size=64, embed_dim=192, depth=6, num_heads=6)
    at: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        keeps = None
        if way.every is not None:
            keeps = Checkpointing(Path(folder), every=way.every, writes=is_main(), tell=lambda line: None)
        train(
            find_task("digits"),
            "relative_2d",
            recipe,
            seed=0,
            device=torch.device("cpu"),
            parallelism=Parallelism(way.strategy),
            checkpointing=keeps,
            validations=1,
            watch=lambda now: at.append(time.perf_counter()),
        )
    if is_main():
        print(f"seconds {(at[-2] - at[FIRST - 1]) / (len(at) - 1 - FIRST)}", flush=True)  # the last one validates


def _seconds(name: str, steps: int) -> float:
    """The seconds of a step in one way."""
    way = WAYS[name]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.processes)]
    command = [sys.executable, *(launcher if way.processes > 1 else []), str(Path(__file__).resolve())]
    environment = os.environ | {"OMP_NUM_THREADS": str(way.threads)}
    said = subprocess.run(
        [*command, "--work", name, "--steps", str(steps)], check=True, env=environment, capture_output=True, text=True
    )
    line = next(line for line in said.stdout.splitlines() if line.startswith("seconds "))
    return float(line.split()[1])


def main() -> None:
    """Time all ways in turn."""
    parser = argparse.ArgumentParser(description="the time of a training step with checkpoints, and over processes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked)
        return
    rounds: list[dict[str, float]] = []
    for number in range(asked.rounds):
        rounds.append({name: _seconds(name, asked.steps) for name in WAYS})
        print(f"round {number + 1} of {asked.rounds}: {rounds[-1]}", file=sys.stderr, flush=True)
    first = next(iter(WAYS))
    found: dict[str, Any] = {}
    for name in WAYS:
        ratios = [one[name] / one[first] for one in rounds]
        found[name] = {
            "ratio": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "milliseconds": 1000 * statistics.median(one[name] for one in rounds),
        }
        print(f"{name:62} {found[name]['ratio']:.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    settings = {"rounds": asked.rounds, "steps": asked.steps, "batch": 64}
    asked.out.write_text(json.dumps({"versions": versions, "settings": settings, "ways": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
