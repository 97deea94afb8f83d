"""Made-up comparisons on text with the shape of real ones."""

from dataclasses import asdict
from typing import Any

import numpy as np
from image_results import ENVIRONMENT

from relpos.train import TextRecipe

RECIPE = asdict(TextRecipe(steps=300))
LENGTHS = (256, 512, 1024, 2048)
BLOCKS = 14
Bits = dict[str | None, tuple[float, ...]]
"""Growth rule to the bits at each of its lengths; None for the trained length alone."""
BITS: dict[str, Bits] = {
    "none": {None: (2.9,), "as is": (2.95, 3.1, 3.4)},
    "learned": {None: (3.2,), "interpolated": (3.9, 4.6, 5.3)},
    "sinusoidal_1d": {None: (3.1,), "as is": (3.4, 3.9, 4.5)},
    "t5": {None: (2.42,), "as is": (2.43, 2.46, 2.51)},
    "alibi": {None: (2.56,), "as is": (2.55, 2.545, 2.54)},
    "rotary_1d": {None: (2.45,), "as is": (2.55, 2.8, 2.98), "ntk": (2.46, 2.5, 2.6)},
    "rotary_1d+t5": {None: (2.40,), "as is": (2.42, 2.5, 2.6)},
    "fixed": {None: (2.7,)},
}
LEARNED = {"learned": 24576, "t5": 128, "rotary_1d+t5": 128}


def make_text(
    names: tuple[str, ...] = ("none", "learned", "alibi", "rotary_1d"),
    *,
    seeds: int = 3,
    bits: dict[str, Bits] | None = None,
) -> dict[str, Any]:
    """A whole results.json of text. `bits` replaces the figures of the mechanisms it names."""
    random = np.random.default_rng(5)
    figures = {**BITS, **(bits or {})}
    hard = 0.15 * random.normal(size=BLOCKS)
    records = [make_record(name, seed, figures[name], hard, random) for seed in range(seeds) for name in names]
    return {
        "schema_version": 2,
        "settings": {
            "task": "text", "task_options": {"contents": "0123"}, "positions": list(names), "seeds": seeds,
            "quick": False, "device": "cpu", "precision": "float32", "threads": 1, "recipe": RECIPE,
        },
        "environment": ENVIRONMENT,
        "task": {
            "name": "text", "kind": "text", "title": "Python's documentation",
            "description": "Python's documentation as bytes: 300,000 to train on.",
            "sizes": {"train": 300000, "validation": 19000, "test": 30000}, "length": 256, "blocks": BLOCKS,
            "probes": [make_probe(length) for length in LENGTHS],
        },
        "mechanisms": [
            {
                "name": name, "title": name, "summary": "A mechanism made up for a test.", "source": "nobody",
                "growth": [rule for rule in figures[name] if rule is not None],
                "family": "none" if name == "none" else "bias",
            }
            for name in names
        ],
        "records": records,
        "costs": make_costs(names),
    }  # fmt: skip


def make_probe(length: int) -> dict[str, Any]:
    trained = length == LENGTHS[0]
    return {
        "id": "test" if trained else f"length/{length}", "group": "test" if trained else "length",
        "label": f"{length:,} bytes", "variant": None, "x": length, "length": length,
        "description": f"Test text, {length} bytes at a time.",
    }  # fmt: skip


def make_record(name: str, seed: int, figures: Bits, hard: np.ndarray, random: np.random.Generator) -> dict[str, Any]:
    own = 0.01 * random.normal()
    metrics: list[dict[str, Any]] = []
    for index, length in enumerate(LENGTHS):
        probe = make_probe(length)["id"]
        rules = [None] if index == 0 else [rule for rule in figures if rule is not None]
        for rule in rules:
            mean = figures[rule][max(0, index - 1)] if rule is not None else figures[None][0]
            values = mean + own + hard + 0.005 * random.normal(size=BLOCKS)
            by_place = np.linspace(mean + 0.3, mean - 0.1, 32)
            figures_of = {"bits_per_byte": float(values.mean()), "values": values.tolist()}
            metrics.append({"probe": probe, "growth": rule, **figures_of, "by_place": by_place.tolist()})
        if not rules:
            reason = "no rule by which it goes on"
            metrics.append({"probe": probe, "growth": None, "bits_per_byte": None, "reason": reason})
    steps = list(range(10, 301, 10))
    values = [(-np.arange(256) * 2.0 ** (-2 * head - 2)).tolist() for head in range(4)]
    bias = {"kind": "bias", "layer": "shared", "axes": 1, "along": "bytes", "offsets": [[0, 255]], "prefix": None}
    apart = np.abs(np.arange(64)[:, None] - np.arange(64))
    alike = {"kind": "embedding", "grid": [64], "every": 4, "similarity": np.cos(apart / 9).round(3).tolist()}
    learned = {"alibi": [{**bias, "values": values}], "learned": [alike]}
    own = LEARNED.get(name, 0)
    return {
        "id": f"{name}--recipe--seed{seed}", "position": name, "seed": seed, "position_learning_rate_multiplier": 1.0,
        "variant": "recipe", "parameters": {"total": 357000, "position": own, "parts": {"position": own}},
        "curve": {
            "step": steps, "loss": [5.5 * np.exp(-step / 90) + 1.7 for step in steps], "rate": [1e-3] * len(steps),
            "validation_step": steps[9::10], "validation": [3.5, 3.0, 2.7],
        },
        "validation": 2.7, "train_seconds": 17.0, "threads": 1, "peak_memory_mib": 210.0,
        "settings": {"recipe": RECIPE}, "metrics": metrics,
        "learned": learned.get({"t5": "alibi", "sinusoidal_1d": "learned"}.get(name, name), []),
        "sample": {"prompt": "The <b>import</b> ", "within": "statement is the ", "beyond": "&amp; the the the"},
    }  # fmt: skip


def make_costs(names: tuple[str, ...]) -> list[dict[str, Any]]:
    costs = []
    for tokens, milliseconds in ((256, 50.0), (1024, 70.0)):
        for place, name in enumerate(names):
            middle = milliseconds * (1 + 0.05 * place)
            step = {"median": middle, "low": 0.97 * middle, "high": 1.04 * middle, "repeats": 4}
            ratio = middle / milliseconds if "none" in names else None
            entry = {"position": name, "tokens": tokens, "batch_size": 4, "depth": 3, "backend": "sdpa", "threads": 2}
            costs.append({**entry, "step_ms": step, "ratio": ratio, "peak_memory_mib": 100.0 if tokens > 256 else None})
    return costs
