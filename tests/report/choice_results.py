"""Results of a comparison of kinds of attention whose figures were made up, to be known in advance."""

from dataclasses import asdict
from typing import Any

import numpy as np

from relpos.train import ImageRecipe

RECIPE = asdict(ImageRecipe(steps=400))

NAMES = ("full", "local", "linear")
PROBE = {
    "id": "test", "group": "test", "label": "test", "variant": None, "x": 0.0, "description": "The test images.",
    "image_size": [16, 16], "trials": 1,
}  # fmt: skip


def record(name: str, seed: int, share: float, images: int = 400) -> dict[str, Any]:
    """A run that classifies this share of the images right, nearly the same ones for every choice."""
    order = np.random.default_rng(7).permutation(images)
    correct = np.zeros(images, dtype=int)
    correct[order[: round(share * images) + seed]] = 1
    return {
        "id": f"{name}--recipe--seed{seed}", "choice": name, "position": "rotary_2d", "seed": seed,
        "variant": "recipe", "position_learning_rate_multiplier": 10.0,
        "parameters": {"total": 1000, "position": 0, "parts": {"head": 1000}},
        "curve": {"step": [], "loss": [], "rate": [], "validation_step": [], "validation": []},
        "threads": 1, "train_seconds": 1.0, "settings": {"recipe": RECIPE}, "metrics": [
            {"probe": "test", "growth": None, "accuracy": float(correct.mean()), "trials": 1,
             "correct": correct.tolist()}
        ],
    }  # fmt: skip


def cost(name: str, tokens: int, ms: float, mib: float, ratio: float, *, batch: int = 1) -> dict[str, Any]:
    """A step whose quartiles lie a tenth around its median."""
    step = {"median": ms, "low": 0.9 * ms, "high": 1.1 * ms, "repeats": 5}
    return {
        "choice": name, "tokens": tokens, "batch_size": batch, "depth": 1 if batch == 1 else 2, "threads": 1,
        "ratio": ratio, "backend": "sdpa", "state_per_parameter": 2.0, "step_ms": step, "peak_memory_mib": mib,
    }  # fmt: skip


def make(shares: tuple[float, ...] = (0.90, 0.60, 0.89), seeds: int = 3, **settings: Any) -> dict[str, Any]:
    """Full attention grows with the square of N, local with N; linear takes as long as full at the most tokens."""
    costs = [cost(name, 64, 10.0, 50.0, 1.0, batch=64) for name in NAMES]
    for tokens in (1024, 2048, 4096):
        by = tokens / 1024
        costs += [
            cost("full", tokens, 10 * by**2, 10 * by**2, 1.0),
            cost("local", tokens, 5 * by, 10 * by, 0.5 / by),
            cost("linear", tokens, 10 * by**2 * 1.05, 10 * by**1.5, 1.05),
        ]
    return {
        "schema_version": 2,
        "settings": {
            "task": "digits", "task_options": {}, "positions": ["rotary_2d"], "seeds": seeds, "quick": False,
            "device": "cpu", "precision": "float32", "threads": 1, "what": "attention", "choices": list(NAMES),
            "recipe": RECIPE, **settings,
        },
        "environment": {
            "relpos": "0", "torch": "2", "python": "3", "platform": "p", "processor": "c", "cores": 2, "device": "cpu"
        },
        "task": {
            "name": "digits", "kind": "images", "title": "Digits", "description": "Digits.", "classes": ["a", "b"],
            "channels": 1, "image_size": [16, 16], "patch_size": [2, 2],
            "sizes": {"train": 1, "validation": 1, "test": 400}, "probes": [PROBE],
        },
        "mechanisms": [
            {"name": name, "title": name.title(), "summary": "It attends.", "source": "arXiv:1706.03762", "growth": []}
            for name in NAMES
        ],
        "records": [
            record(name, seed, share) for seed in range(seeds) for name, share in zip(NAMES, shares, strict=True)
        ],
        "costs": costs,
    }  # fmt: skip
