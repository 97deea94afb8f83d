"""How the digits recipe was chosen: one setting changed at a time, scored on validation images only.

    python recipes/digits_search.py            about half an hour on two cores; writes recipes/digits_search.json

Every setting is trained with three mechanisms (none, learned, relative_2d) and two seeds. The score is the mean over
the three mechanisms of validation accuracy at the trained places: a recipe must serve them all, and no mechanism's
robustness takes part in the choice. Test images are never loaded into a model here.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from driver import means, search

from relpos.data import find_task
from relpos.train import ImageRecipe, predict, train

POSITIONS = ("none", "learned", "relative_2d")
SEEDS = (100, 101)  # not the seeds that `relpos compare` uses
BASE = ImageRecipe(
    learning_rate=3e-3, steps=400, depth=3
)  # where the search began; the choice made is in `ImageRecipe`
CHANGES: dict[str, dict[str, Any]] = {
    "as is": {},
    "mean pooling": {"global_pool": "avg"},
    "class token": {"global_pool": "token", "class_token": True},
    "a table a layer": {"shared_position": False},
    "position rate x 1": {"position_learning_rate_multiplier": 1.0},
    "position rate x 3": {"position_learning_rate_multiplier": 3.0},
    "position init 0.02": {"position_init_std": 0.02},
    "position rate x 1, init 0.02": {"position_learning_rate_multiplier": 1.0, "position_init_std": 0.02},
    "learning rate 1e-3": {"learning_rate": 1e-3},
    "learning rate 6e-3": {"learning_rate": 6e-3},
    "learning rate 6e-3, 300 steps": {"learning_rate": 6e-3, "steps": 300},
    "learning rate 6e-3, batch 32": {"learning_rate": 6e-3, "batch_size": 32},
    "learning rate 4e-3, batch 32": {"learning_rate": 4e-3, "batch_size": 32},
    "learning rate 6e-3, 200 steps": {"learning_rate": 6e-3, "steps": 200, "warmup_steps": 30},
    "learning rate 6e-3, 2 heads": {"learning_rate": 6e-3, "num_heads": 2},
    "learning rate 6e-3, 3 heads": {"learning_rate": 6e-3, "num_heads": 3},
    "learning rate 6e-3, width 32, 2 heads": {"learning_rate": 6e-3, "embed_dim": 32, "num_heads": 2},
    "learning rate 1e-2, width 32, 2 heads": {"learning_rate": 1e-2, "embed_dim": 32, "num_heads": 2},
    "learning rate 6e-3, width 32, 4 heads": {"learning_rate": 6e-3, "embed_dim": 32},
    "learning rate 6e-3, depth 2": {"learning_rate": 6e-3, "depth": 2},
    "learning rate 1e-2, depth 2": {"learning_rate": 1e-2, "depth": 2},
    "learning rate 6e-3, depth 2, 350 steps": {"learning_rate": 6e-3, "depth": 2, "steps": 350},
    "learning rate 6e-3, depth 2, 320 steps": {"learning_rate": 6e-3, "depth": 2, "steps": 320, "warmup_steps": 30},
    "learning rate 6e-3, depth 2, batch 48": {"learning_rate": 6e-3, "depth": 2, "batch_size": 48},
    "learning rate 1e-2, 300 steps, 3 heads": {"learning_rate": 1e-2, "steps": 300, "num_heads": 3},
}


def run(job: tuple[str, str, int]) -> dict[str, Any]:
    """Train one setting, mechanism and seed; accuracy on every probe with validation images."""
    torch.set_num_threads(1)
    change, position, seed = job
    task = find_task("digits")
    model, _ = train(task, position, replace(BASE, **CHANGES[change]), seed=seed, device=torch.device("cpu"))
    accuracy = {}
    for probe in task.probes:
        if probe.image_size != task.image_size:
            continue
        images, labels = task.examples(probe, "validation")
        right = predict(model, images.flatten(0, 1), torch.device("cpu")) == labels.repeat_interleave(probe.trials)
        accuracy[probe.id] = round(right.float().mean().item(), 4)
    return {"change": change, "position": position, "seed": seed, "validation": accuracy}


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
        score="mean validation accuracy at the trained places over mechanisms and seeds",
        scores=lambda runs: means([{**one, **one["validation"]} for one in runs], "test", every=every, higher=True),
    )


if __name__ == "__main__":
    main()
