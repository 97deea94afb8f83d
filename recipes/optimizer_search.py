"""How the rates and decays of Lion and Sophia were chosen for both recipes: on validation data alone.

    python recipes/optimizer_search.py       about a quarter of an hour on two cores; writes optimizer_search.json

Lion's authors (Chen et al. 2023, section 5) want a rate 3 to 10 times below AdamW's and a decay as many times above, so
that their product stays; Sophia's (Liu et al. 2023, section 3.1) one near AdamW's or below. Every setting here keeps
the product of the recipe's AdamW. Digits are trained in full with two seeds, text for half the steps with one, all
with rotary positions. Test data are never loaded into a model here.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from driver import means, search

from relpos.data import find_task
from relpos.train import Recipe, bits, predict, train

POSITIONS = {"digits": "rotary_2d", "text": "rotary_1d"}
SEEDS = {"digits": (100, 101), "text": (100,)}  # not those that `relpos compare` uses
BASES: dict[str, Recipe] = {
    "digits": Recipe.of(find_task("digits")),
    "text": replace(Recipe.of(find_task("text")), steps=240, warmup_steps=24),
}
NUMBERS = (
    "steps",
    "batch_size",
    "learning_rate",
    "warmup_steps",
    "weight_decay",
    "gradient_clip",
    "embed_dim",
    "depth",
)
"""Of a recipe, those that a change of would make another search."""
DIVISORS = {"adamw": (1,), "lion": (1, 1.5, 2, 3, 6, 10, 20), "sophia-g": (1, 2, 3, 4, 8), "sophia-h": (1, 2, 3, 4, 8)}
"""By how much AdamW's rate is divided, and its decay multiplied."""
CHANGES: dict[str, Any] = {
    f"{task}: {name}, rate / {by}": {
        "task": task,
        "optimizer": name,
        "learning_rate": base.learning_rate / by,
        "weight_decay": base.weight_decay * by,
    }
    for task, base in BASES.items()
    for name, divisors in DIVISORS.items()
    for by in divisors
}


def run(job: tuple[str, int]) -> dict[str, Any]:
    """Train one setting with one seed; accuracy on validation images, or bits per byte of validation text."""
    torch.set_num_threads(1)
    change, seed = job
    setting = dict(CHANGES[change])
    name, cpu = setting.pop("task"), torch.device("cpu")
    task, recipe = find_task(name), replace(BASES[name], **setting)
    model, _ = train(task, POSITIONS[name], recipe, seed=seed, device=cpu, validations=1)
    if name == "text":
        found = bits(model, task, task.probes[0], "validation", cpu).mean().item()
    else:
        images, labels = task.examples(task.probes[0], "validation")
        right = predict(model, images.flatten(0, 1), cpu) == labels.repeat_interleave(task.probes[0].trials)
        found = right.float().mean().item()
    return {"change": change, "seed": seed, "validation": round(found, 4)}


def scores(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Of digits, then of text, the settings with all their runs, best first."""
    found: dict[str, float] = {}
    for task, seeds in SEEDS.items():
        own = [one for one in runs if one["change"].startswith(task)]
        found |= means(own, "validation", every=len(seeds), higher=task == "digits")
    return found


def main() -> None:
    """Run what is left of the search."""
    search(
        Path(__file__).with_suffix(".json"),
        run,
        [(change, seed) for change, setting in CHANGES.items() for seed in SEEDS[setting["task"]]],
        fields=("change", "seed"),
        base={task: {name: asdict(base)[name] for name in NUMBERS} for task, base in BASES.items()},
        changes=CHANGES,
        score="validation accuracy of digits, higher is better; validation bits per byte of text, lower is better",
        scores=scores,
    )


if __name__ == "__main__":
    main()
