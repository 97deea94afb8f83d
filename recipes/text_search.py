"""How the text recipe was chosen: one setting changed at a time, scored on validation text at the trained length.

    python recipes/text_search.py            about twenty minutes on two cores; writes recipes/text_search.json

Every setting is trained with four mechanisms (learned, t5, alibi, rotary_1d) and one seed, and sees as many bytes as
every other. The score is the mean of their bits per byte, 256 bytes at a time: a recipe must serve them all, and how a
mechanism extrapolates to longer inputs takes no part in the choice. Test text is never loaded into a model here.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from driver import means, search

from relpos.data import Text
from relpos.train import TextRecipe, bits, train

POSITIONS = ("learned", "t5", "alibi", "rotary_1d")
SEEDS = (100,)  # not those that `relpos compare` uses
BASE = TextRecipe(  # where the search began; the choice made is in `TextRecipe`
    steps=300,
    batch_size=8,
    learning_rate=3e-3,
    warmup_steps=30,
    position_learning_rate_multiplier=3.0,
    position_init_std=0.1,
    weight_decay=0.1,
    embed_dim=96,
    depth=3,
    num_heads=4,
    mlp_ratio=4.0,
    shared_position=True,
    mlp="swiglu",
)
FASTER = {"learning_rate": 6e-3}
MORE = {**FASTER, "batch_size": 4, "steps": 600, "warmup_steps": 60}
CHANGES: dict[str, dict[str, Any]] = {
    "as is": {},
    "learning rate 6e-3": FASTER,
    "learning rate 1e-2": {"learning_rate": 1e-2},
    "learning rate 6e-3, position rate x 10": {**FASTER, "position_learning_rate_multiplier": 10.0},
    "learning rate 6e-3, batch 4, 600 steps": MORE,
    "batch 4, 600 steps, position rate x 10": {**MORE, "position_learning_rate_multiplier": 10.0},
    "batch 2, 1200 steps": {**MORE, "batch_size": 2, "steps": 1200, "warmup_steps": 120},
    "batch 4, 600 steps, rate 3e-3, position x 10": {
        **MORE,
        "learning_rate": 3e-3,
        "position_learning_rate_multiplier": 10.0,
    },
    "batch 4, 600 steps, position x 10, init 0.5": {
        **MORE,
        "position_learning_rate_multiplier": 10.0,
        "position_init_std": 0.5,
    },
    "batch 4, 600 steps, width 64, depth 4": {**MORE, "embed_dim": 64, "depth": 4},
    "batch 4, 600 steps, width 64, depth 4, position x 10": {
        **MORE,
        "embed_dim": 64,
        "depth": 4,
        "position_learning_rate_multiplier": 10.0,
    },
    "batch 4, 600 steps, position x 10, a table a layer": {
        **MORE,
        "position_learning_rate_multiplier": 10.0,
        "shared_position": False,
    },
}


def run(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train one setting, mechanism and seed; bits per byte of the validation text."""
    torch.set_num_threads(1)
    change, position, seed = job
    task, cpu = Text(), torch.device("cpu")
    started = time.perf_counter()
    model, _ = train(task, position, replace(BASE, **CHANGES[change]), seed=seed, device=cpu, validations=1)
    seconds = round(time.perf_counter() - started, 1)
    found = bits(model, task, task.probes[0], "validation", cpu).mean().item()
    return {"change": change, "position": position, "seed": seed, "bits_per_byte": round(found, 4), "seconds": seconds}


def main() -> None:
    """Run every job that the file does not have yet, and write what was found."""
    every = len(POSITIONS) * len(SEEDS)
    search(
        Path(__file__).with_suffix(".json"),
        run,
        [(change, position, seed) for change in CHANGES for position in POSITIONS for seed in SEEDS],
        fields=("change", "position", "seed"),
        base=asdict(BASE),
        changes=CHANGES,
        score="mean bits per byte of the validation text at 256 bytes, over mechanisms and seeds; lower is better",
        scores=lambda runs: means(runs, "bits_per_byte", every=every, higher=False),
    )


if __name__ == "__main__":
    main()
