"""One, two and four processes train the same models: how far their weights are apart.

    python benchmarks/processes.py [--positions all] [--worlds 2,4] [--steps 5] [--out FILE.json]

Each world is torchrun over gloo on this machine. A row is a mechanism: the largest difference of a weight, over the
largest way that one went, from those of one process after a few steps of SGD and of AdamW, without dropout, in float32
and with products in bfloat16. Where all mechanisms are of texts, the processes also share each text. SGD shows a
sum that was taken for a mean; AdamW hides it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import relpos  # noqa: F401 - before what it trains with
from relpos.data import find_task
from relpos.position import find, presets
from relpos.train import ImageRecipe, TextRecipe, state, train
from relpos.train.processes import STRATEGIES, Parallelism, is_main, world_size

CASES = (("sgd", "float32"), ("sgd", "bf16-mixed"), ("adamw", "float32"))
SPREAD = "context"
"""All processes share each sequence; only where all positions are of texts, whose tokens divide."""
OUT = Path(__file__).parent / "results" / "processes.json"


def _optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=1.0)  # the loop sets the rate of every step


def _train(
    position: str, optimizer: str, precision: str, parallelism: Parallelism, steps: int
) -> tuple[dict[str, Tensor], float]:
    """The weights after some steps, and the largest way that one of them went."""
    flat = 2 not in find(position).token_axes
    kind = TextRecipe if flat else ImageRecipe
    recipe = replace(
        kind(),
        steps=steps,
        warmup_steps=1,
        batch_size=16,
        embed_dim=32,
        depth=2,
        num_heads=4,
        learning_rate=0.1 if optimizer == "sgd" else 6e-3,
        gradient_clip=1e6,  # a smaller one would hide a factor
    )
    made = state.make_optimizer
    if optimizer == "sgd":
        state.make_optimizer = _optimizer
    task = find_task("text" if flat else "digits")
    torch.manual_seed(0)
    start = recipe.build(task, position).state_dict()
    try:
        model, _ = train(
            task,
            position,
            recipe,
            seed=0,
            device=torch.device("cpu"),
            precision=precision,
            parallelism=parallelism,
            validations=1,
        )
    finally:
        state.make_optimizer = made
    weights = model.state_dict()
    way = max(float((x - start[name]).abs().max()) for name, x in weights.items())
    return weights, way


def work(asked: argparse.Namespace) -> None:
    """One process: train all, and write what came out."""
    torch.set_num_threads(1)
    spread = asked.strategy == SPREAD
    parallelism = Parallelism(context=asked.world) if spread else Parallelism(asked.strategy)
    out = Path(asked.work)
    ways: dict[str, float] = {}
    assert world_size() == asked.world, (world_size(), asked.world)
    for position in asked.positions.split(","):
        for optimizer, precision in CASES:
            name = f"{position} {optimizer} {precision}"
            weights, ways[name] = _train(position, optimizer, precision, parallelism, asked.steps)
            if is_main():
                save_file({key: x.clone().contiguous() for key, x in weights.items()}, out / f"{name}.safetensors")
                print(asked.strategy, asked.world, name, flush=True)
    if is_main():
        (out / "ways.json").write_text(json.dumps(ways))


def _started(folder: Path, world: int, strategy: str, asked: argparse.Namespace) -> dict[str, float]:
    """Have a world train, its weights into files of a folder; the largest way of a weight in each."""
    folder.mkdir()
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)] if world > 1 else []
    given = ["--work", str(folder), "--world", str(world), "--strategy", strategy, "--positions", asked.positions]
    command = [sys.executable, *launcher, str(Path(__file__).resolve()), *given, "--steps", str(asked.steps)]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    ways: dict[str, float] = json.loads((folder / "ways.json").read_text())
    return ways


def _difference(own: Path, other: Path) -> float:
    a, b = load_file(own), load_file(other)
    assert a.keys() == b.keys()
    return max(float((x - b[name]).abs().max()) for name, x in a.items())


def main() -> None:
    """Compare all worlds with one process."""
    parser = argparse.ArgumentParser(description="the same training by several processes")
    parser.add_argument("--positions", default="all")
    parser.add_argument("--worlds", default="2,4")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--work", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--strategy", default="ddp", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.work is not None:
        work(asked)
        return
    if asked.positions == "all":
        asked.positions = ",".join(presets())
    worlds = [int(one) for one in asked.worlds.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        one = Path(folder) / "1"
        ways = _started(one, 1, "ddp", asked)
        found: dict[str, dict[str, float]] = {name: {} for name in ways}
        texts = all(2 not in find(name).token_axes for name in asked.positions.split(","))
        for world in worlds:
            for strategy in (*STRATEGIES, *([SPREAD] if texts else [])):
                own = Path(folder) / f"{strategy} {world}"
                _started(own, world, strategy, asked)
                for name, way in ways.items():
                    file = f"{name}.safetensors"
                    found[name][own.name] = _difference(own / file, one / file) / way
    versions = {"torch": torch.__version__, "python": platform.python_version(), "cores": os.cpu_count()}
    asked.out.write_text(json.dumps({"versions": versions, "steps": asked.steps, "runs": found}, indent=1) + "\n")
    for name, cells in found.items():
        print(f"{name:40}", "  ".join(f"{world} {difference:.1e}" for world, difference in cells.items()))


if __name__ == "__main__":
    main()
